"""Finding, compiling and launching the kernels of kernels_cu/, on a GPU or (in tests) on the CPU."""

from .kernel import Kernel, Variant, announce, capturing, executor_of, forced_executor, multiprocessors
from .workspace import workspace

__all__ = ["Kernel", "Variant", "announce", "capturing", "executor_of", "forced_executor", "multiprocessors", "workspace"]
