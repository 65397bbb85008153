"""Finding, compiling and launching the kernels of kernels_cu/, on a GPU or (in tests) on the CPU."""

from . import tensor_map
from .device import (
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

__all__ = [
    "Kernel",
    "Launch",
    "OwnedMemory",
    "Variant",
    "announce",
    "capturing",
    "compute_capability",
    "device_errors",
    "error_word",
    "executor_is_forced",
    "executor_of",
    "forced_executor",
    "grid_size",
    "multiprocessors",
    "owner_of",
    "recording",
    "room",
    "shared_memory_per_block",
    "tensor_map",
    "workspace",
]
