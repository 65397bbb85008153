"""Atomic replacement of files: a reader sees the old bytes or the new ones, never a mixture."""

from __future__ import annotations

import glob
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["PathLike", "check_replaceable", "replacing", "resuming", "sync_folder"]

PathLike = str | os.PathLike[str]

_EXCLUSIVE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def check_replaceable(path: PathLike) -> Path:
    """Return the file that `replacing` would replace or make. OSError if its folder does not exist, or if it
    exists and is not a file (a folder or a device)."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{target}: is a folder")
    if target.exists() and not target.is_file():
        raise FileExistsError(f"{target}: is no file that can be replaced")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such folder")
    return target


@contextmanager
def replacing(path: PathLike, prefix: str = "", check: Callable[[], None] = lambda: None
              ) -> Iterator[BinaryIO]:
    """Open a new file, which replaces `path` when the block ends without an error, and is deleted otherwise.

    The new file has a unique name in the same folder, so that concurrent writers of one path do not collide,
    and links planted by others are not followed. Its bytes are on disk before it gets its name. The
    permissions of an existing file are kept; if `path` is a link, its target is replaced. prefix: of the new
    file's name. check: raises if the new file must not replace the old one after all.
    """
    target = check_replaceable(path)
    partial, file = _created(target, prefix)
    try:
        with file:
            if target.exists():
                os.chmod(partial, stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        check()
        os.replace(partial, target)
        sync_folder(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def resuming(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """Do the same as `replacing`, after deleting the temporary files of killed writers of this path. Those of
    living writers are locked, and stay."""
    prefix = f"{path.name[:80]}."
    for abandoned in path.parent.glob(f".{glob.escape(prefix)}*.partial"):
        with suppress(FileNotFoundError), open(abandoned, "r+b") as file:   # its writer may just have ended
            if _lock(file):
                abandoned.unlink(missing_ok=True)
    with replacing(path, prefix, check) as file:
        yield file


def _created(target: Path, prefix: str) -> tuple[Path, BinaryIO]:
    """Create a locked file beside the target; return its path and the file."""
    while True:
        partial = target.with_name(f".{prefix}{secrets.token_hex(8)}.partial")
        file = os.fdopen(os.open(partial, _EXCLUSIVE, 0o666), "w+b")
        _lock(file)
        if partial.exists():            # nobody deleted it as abandoned before it was locked
            return partial, file
        file.close()


def _lock(file: Any) -> bool:
    """Lock the file for as long as it is open; whether that succeeded."""
    if os.name != "posix":  # files being written cannot be told from abandoned ones
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:                             # another process holds it, or the file system has no locks
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can do that."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
