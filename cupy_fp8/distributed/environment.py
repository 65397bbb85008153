"""This process's rank in its job, from the environment variables that launchers set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import NamedTuple

_PORT = 29_513                      # default port
#: Names of rank, number of ranks and rank within the host, by launcher.
_STARTERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"),
             ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
             ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
#: Variables that identify a job: processes of another one are refused.
_JOBS = ("CUPY_FP8_TOKEN", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
         "SLURM_JOB_ID", "SLURM_STEP_ID")


class Place(NamedTuple):
    """rank of size processes, local_rank of those on its host; the address where rank 0 listens, and the
    job's token (32 bytes)."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    token: bytes


def place(environ: Mapping[str, str] = os.environ) -> Place:
    """Read RANK, WORLD_SIZE and LOCAL_RANK (torchrun, `python -m cupy_fp8 launch`), or Open MPI's or Slurm's
    variables; MASTER_ADDR and MASTER_PORT. Without any of them this process is alone.

    Raises ValueError for some of them without the others, and for invalid numbers.

    >>> place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"})[:5]
    (1, 4, 1, 'node7', 29500)
    >>> place({})[:3]
    (0, 1, 0)
    """
    token = _token(environ)
    for names in _STARTERS:
        if not any(name in environ for name in names[:2]):
            continue
        rank, size = (_number(environ, name) for name in names[:2])
        local = _number(environ, names[2]) if names[2] in environ else rank
        if not 0 <= rank < size:
            raise ValueError(f"{names[0]}={rank}: expected 0 to {size - 1}, as {names[1]}={size} says")
        return Place(rank, size, local, _address(environ, size), _port(environ), token)
    return Place(0, 1, 0, "127.0.0.1", _PORT, token)


def _number(environ: Mapping[str, str], name: str) -> int:
    given = environ.get(name)
    if given is None:
        raise ValueError(f"{name}: not set, though others of its kind are")
    try:
        return int(given)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {given!r}") from None


def _address(environ: Mapping[str, str], size: int) -> str:
    given = environ.get("MASTER_ADDR")
    local = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE")
    if given is None and local is not None and int(local) == size:
        return "127.0.0.1"
    if given is None and size > 1:
        raise ValueError("MASTER_ADDR: not set; it is the host of rank 0")
    return given or "127.0.0.1"


def _port(environ: Mapping[str, str]) -> int:
    if "CUPY_FP8_PORT" in environ:
        return _number(environ, "CUPY_FP8_PORT")
    if "MASTER_PORT" not in environ:
        return _PORT
    # MASTER_PORT is taken by torchrun's own store
    return _number(environ, "MASTER_PORT") + ("TORCHELASTIC_RUN_ID" in environ)


def _token(environ: Mapping[str, str]) -> bytes:
    return hashlib.sha256("\0".join(environ.get(name, "") for name in _JOBS).encode()).digest()
