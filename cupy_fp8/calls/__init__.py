"""From a call to a launch: what all ops share. Read `call.run` first.

An op declares its arguments (`arguments.Call`, validated by `validate` and `group_sizes`), the arrays that it
writes (`descriptions`; `tensor_lists` for lists) and its launches (`kernels.Launch`, after those of
`row_segments` where rows are in groups). Arrays that are written must not overlap others (`memory`).

A repeated call skips all this: `keys` computes its cache key, `remembered` keeps its launches, and
`relocation` moves them to the memory of the new call. Launches over lists read `tables` in device memory.
Other memos hold nothing about memory: what was found about types and lists (`keys`), and what ops compute
from shapes and options (`functools.lru_cache`). `WeightCache` remembers results of weights, not calls.
"""
