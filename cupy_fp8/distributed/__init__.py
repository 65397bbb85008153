"""Experts over several GPUs: one process per GPU, or several ranks in one process.

>>> import cupy_fp8 as fp8
>>> with fp8.distributed.init() as world:                   # alone, unless torchrun or another has started it
...     world
World(rank 0 of 1)
"""

from typing import TYPE_CHECKING

from ..advice import public_only
from .errors import RankError
from .expert_parallel import ExpertParallel
from .nccl import from_nccl
from .routing import RankRouting
from .world import Local, World, from_mpi, init, local

__all__ = ["ExpertParallel", "Local", "RankError", "RankRouting", "World", "from_mpi", "from_nccl", "init",
           "local"]

if not TYPE_CHECKING:               # otherwise type checkers accept any name
    __getattr__, __dir__ = public_only(globals())
