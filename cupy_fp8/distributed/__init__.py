"""Experts over several GPUs: a process for each, or several ranks in one process.

>>> import cupy_fp8 as fp8
>>> with fp8.distributed.init() as world:                   # alone, unless torchrun or another has started it
...     world
_Processes(rank 0 of 1)
"""

from .errors import RankError
from .world import World, from_mpi, init, local

__all__ = ["RankError", "World", "from_mpi", "init", "local"]
