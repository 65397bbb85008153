"""Finding, compiling and launching the kernels of kernels_cu/, on a GPU or (in tests) on the CPU.

A `Kernel` names an entry point. `Kernel.variant` chooses its types and options, and `Variant.bind` makes a
`Launch` from members of its parameter struct, which `structs` reads from the CUDA source. `Launch.run` loads
the variant at its first launch, and calls the `driver`. `sources` makes the programs, `cubin` compiles those
for one architecture only; `shapes` cuts arrays into grids. Besides its arguments a launch may have a
`workspace` (kept by `owned` with the result), the word of `errors` and a `tensor_map`. `device` has the facts
of a GPU, and chooses what runs NumPy arrays.
"""

from . import sources, tensor_map
from .device import (
    HOPPER,
    capturing,
    compute_capability,
    executor_is_forced,
    executor_of,
    forced_executor,
    grid_size,
    multiprocessors,
    shared_memory_per_block,
)
from .errors import device_errors, error_word
from .kernel import Kernel, Launch, Variant, announce, recording
from .owned import OwnedMemory, owner_of
from .workspace import room, workspace

__all__ = ["HOPPER", "Kernel", "Launch", "OwnedMemory", "Variant", "announce", "capturing",
           "compute_capability", "device_errors", "error_word", "executor_is_forced", "executor_of",
           "forced_executor", "grid_size", "multiprocessors", "owner_of", "recording", "room",
           "shared_memory_per_block", "sources", "tensor_map", "workspace"]
