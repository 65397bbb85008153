"""One conversion at a time in a place: processes with the same settings work together, any other is
refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

__all__ = ["claimed"]

_fcntl: ModuleType | None
try:
    import fcntl as _fcntl
except ImportError:             # not a POSIX system: only existing files are checked
    _fcntl = None
_TRIES, _SECONDS = 100, 0.01    # retries while another process makes or removes the claim
_NAME = "convert.partial"


@contextmanager
def claimed(place: Path, what: str) -> Iterator[Callable[[], None]]:
    """Hold the claim to a folder, or to one file, while the block runs.

    what : a fingerprint of all that decides what is written.
    Yields a function to call before a file gets its name: ValueError if the claim is lost.
    A hidden file beside the results holds the fingerprint. Processes with the same fingerprint share it, and
    the last one removes it; a killed process's file is taken over. ValueError if another conversion is at
    work.
    """
    path = place / f".{_NAME}" if place.is_dir() else place.with_name(f".{place.name[:80]}.{_NAME}")
    if _fcntl is None:
        yield lambda: None
        return
    descriptor = _taken(path, what, _fcntl)

    def check() -> None:
        if not _is_at(path, descriptor) or _content(descriptor) != what:
            raise ValueError(f"{path}: another conversion has taken this place")

    try:
        yield check
    finally:
        if _locked(descriptor, _fcntl.LOCK_EX, _fcntl) and _is_at(path, descriptor):
            # no other process is at work
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _taken(path: Path, what: str, fcntl: ModuleType) -> int:
    """Open the claim with a lock that processes with the same fingerprint share. It is written under an
    exclusive lock."""
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _locked(descriptor, fcntl.LOCK_EX, fcntl) and _is_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, what.encode(), 0)
            if _locked(descriptor, fcntl.LOCK_SH, fcntl) and _is_at(path, descriptor):
                found = _content(descriptor)
                if found == what:
                    kept, descriptor = descriptor, -1
                    return kept
                if found:
                    raise ValueError(f"{path.parent}: another conversion is at work here; let it end, or "
                                     "choose another place")
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        time.sleep(_SECONDS)
    raise ValueError(f"{path}: another conversion holds this file")


def _content(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace")


def _locked(descriptor: int, kind: int, fcntl: ModuleType) -> bool:
    """Whether the process now holds this lock, in place of an earlier one."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:             # a file system without locks: only the claim's text is checked
        return True
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to this file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
