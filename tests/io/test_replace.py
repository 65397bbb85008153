"""Atomic replacement of files: by one of several processes, never through a planted link, and not at all on
an error."""

import multiprocessing
import os
import stat
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8.io import replace
from cupy_fp8.io.replace import replacing, resuming


def test_replaces_and_keeps_permissions(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_permissions_that_files_have(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    with replacing(tmp_path / "a"):
        pass
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def write_half(path, error):
    with replacing(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt(), ValueError()], ids=repr)
def test_an_error_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(type(error)):
        write_half(path, error)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_links(tmp_path):
    """A link at the path is followed, and stays; the former fixed temporary name is ignored."""
    target, link, victim = tmp_path / "target", tmp_path / "link", tmp_path / "victim"
    for path in (target, victim):
        path.write_bytes(b"old")
    link.symlink_to(target)
    (tmp_path / "link.partial").symlink_to(victim)
    with replacing(link) as file:
        file.write(b"new")
    assert (target.read_bytes(), victim.read_bytes(), link.is_symlink()) == (b"new", b"old", True)


def test_folders(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"), replacing(tmp_path):
        pass
    with pytest.raises(FileNotFoundError, match="no such folder"), replacing(tmp_path / "none" / "a"):
        pass


def test_devices_and_pipes_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="no file that can be replaced"), replacing(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()


def test_abandoned_files_are_removed_and_living_ones_are_not(tmp_path):
    abandoned, other = tmp_path / ".a.00.partial", tmp_path / ".b.00.partial"
    abandoned.write_bytes(b"half")
    other.write_bytes(b"half")
    with resuming(tmp_path / "a") as living:
        living.write(b"slow")
        with resuming(tmp_path / "a") as file:
            file.write(b"whole")
        assert not abandoned.exists()
    assert (tmp_path / "a").read_bytes() == b"slow"
    assert sorted(tmp_path.iterdir()) == [other, tmp_path / "a"]


def test_a_new_file_that_is_taken_for_an_abandoned_one_is_made_again(tmp_path, monkeypatch):
    """Another process may look between the creation of a file and its lock."""
    taken: list[Any] = []

    def late(file):
        if not taken:
            taken.extend(tmp_path.glob(".*.partial"))
            taken[0].unlink()

    monkeypatch.setattr(replace, "_lock", late)
    with replacing(tmp_path / "a") as file:
        file.write(b"whole")
    assert taken
    assert (tmp_path / "a").read_bytes() == b"whole"


def save_many(path, number, count):
    for i in range(count):
        fp8.save(path, a=np.full(1000, 100 * number + i))


def test_processes_that_save_one_path(tmp_path):
    """Every load sees one whole save; no save fails, and nothing is left over."""
    path, saves = tmp_path / "a.npz", 15
    fp8.save(path, a=np.zeros(1000, int))
    context: Any = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    writers = [context.Process(target=save_many, args=(path, number, saves)) for number in range(1, 4)]
    for writer in writers:
        writer.start()
    loads = 0
    while any(writer.is_alive() for writer in writers):
        assert len(np.unique(fp8.load(path)["a"])) == 1
        loads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert loads
    assert list(tmp_path.iterdir()) == [path]
