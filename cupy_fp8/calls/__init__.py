"""The way from a call to a launch that all ops share. `call.run` takes it; read that first.

An op declares its arguments (`arguments.Call`, which validates them by `validate` and `group_sizes`), the
arrays that it writes (`descriptions`; `tensor_lists` for lists) and its launches (`kernels.Launch`, after
those of `row_segments` where rows are in groups). Arrays that are written overlap no others (`memory`).

A call that comes again skips all this: `keys` says what it is known by, and `remembered` has its launches,
which `relocation` moves to the memory of the new call. Launches over lists read `tables` in device memory.
Other memos hold nothing about memory: what was found about types and lists (`keys`), and what ops compute
from shapes and options (`functools.lru_cache`). `WeightCache` remembers results of weights, not calls.
"""
