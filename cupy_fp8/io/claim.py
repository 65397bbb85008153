"""One conversion at a time in a place: those with the same settings work side by side, any other is
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
except ImportError:             # not a POSIX system: what is there already is all that is checked
    _fcntl = None
_TRIES, _SECONDS = 100, 0.01    # for the moment in which another process makes or removes the claim
_NAME = "convert.partial"


@contextmanager
def claimed(place: Path, what: str) -> Iterator[Callable[[], None]]:
    """Work in a folder, or on one file, as long as the block lasts.

    what : a fingerprint of all that decides what is written.
    Gives a function to call before a file gets its name: ValueError if the claim is lost.
    A hidden file beside the results holds the fingerprint, shared by processes that have the same, and goes
    with the last of them; one that a killed process left behind is taken over. ValueError if another
    conversion is at work.
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
            # Nobody else is at work.
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _taken(path: Path, what: str, fcntl: ModuleType) -> int:
    """The claim, open, with a lock that processes with the same fingerprint share. Who writes it is alone."""
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
    """Whether the process holds this lock now, instead of one that it had."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:             # a file system without locks: the claim's text is all that is checked
        return True
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to this file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
