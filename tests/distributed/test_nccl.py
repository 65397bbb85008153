"""What `Nccl` does on the host, with a communicator of the test's own."""

from __future__ import annotations

from collections import deque
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_fp8.distributed import RankError, nccl


class Failure(Exception):
    pass


def transport(monkeypatch: pytest.MonkeyPatch, log: list[str], *, done: bool, capturing: bool = False
              ) -> nccl.Nccl:
    """A transport whose groups have ended on the GPU, or never do."""
    made = nccl.Nccl.__new__(nccl.Nccl)
    made._ends, made._timeout = deque(), 0.01
    made.lib = SimpleNamespace(NcclError=Failure, groupStart=lambda: log.append("group"),
                               groupEnd=lambda: None)
    made._comm = SimpleNamespace(check_async_error=lambda: None, abort=lambda: log.append("abort"))
    monkeypatch.setattr(nccl, "_recorded", lambda: SimpleNamespace(done=done))
    monkeypatch.setattr(nccl.Nccl, "_capturing", lambda _: capturing)
    return made


def groups(made: Any, number: int) -> None:
    for _ in range(number):
        with nccl._Group(made):
            pass


def test_no_more_groups_are_launched_than_a_queue_holds(monkeypatch):
    log: list[str] = []
    made = transport(monkeypatch, log, done=False)
    groups(made, nccl._MOST_AHEAD)
    with pytest.raises(RankError, match=r"did not end in 0\.01 s; a rank has ended or is late"):
        groups(made, 1)
    assert log == ["group"] * nccl._MOST_AHEAD + ["abort"]
    with pytest.raises(RankError, match="NCCL was aborted"):
        groups(made, 1)


@pytest.mark.parametrize(("done", "capturing"), [(True, False), (False, True)])
def test_groups_that_end_and_groups_of_a_graph_are_any_number(done, capturing, monkeypatch):
    log: list[str] = []
    made = transport(monkeypatch, log, done=done, capturing=capturing)
    groups(made, 3 * nccl._MOST_AHEAD)
    assert log == ["group"] * 3 * nccl._MOST_AHEAD
    assert len(made._ends) == (0 if capturing else nccl._MOST_AHEAD)


class Communicator:
    """Laid out as CuPy's: a word that both kinds of objects have, and one that is null in an empty one."""

    __slots__ = ("_handle", "_table")

    def __new__(cls, *_: Any) -> Any:
        made: Any = super().__new__(cls)
        made._table = None
        return made

    def __init__(self, handle: object) -> None:
        self._handle = handle


@pytest.mark.parametrize("function", ["ncclCommAbort", "ncclCommDestroy"])
def test_a_communicator_that_graphs_hold_ends_later(function, monkeypatch):
    """NCCL waits for graphs; the program does not."""
    graphs_end, ended, log = Event(), Event(), list[int]()

    def end(handle: Any) -> None:
        log.append(handle.value)
        graphs_end.wait(30)
        ended.set()

    target = object()
    communicator = Communicator(target)
    lib = SimpleNamespace(NcclCommunicator=Communicator)
    monkeypatch.setattr(nccl, "_library", lambda: SimpleNamespace(**{function: end}))
    monkeypatch.setattr(nccl, "_ENDS_WITHIN", 0.05)
    nccl._end(lib, communicator, function)
    assert log == [id(target)]
    assert nccl._handle(lib, communicator) is None                  # nothing that CuPy would end again
    assert not ended.is_set()
    graphs_end.set()
    assert ended.wait(30)


@pytest.mark.parametrize("kind", [type(None), SimpleNamespace, Communicator])
def test_a_communicator_of_another_kind_ends_by_its_own_methods(kind, monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(nccl, "_library", lambda: None)
    comm = SimpleNamespace(abort=lambda: log.append("abort"), destroy=lambda: log.append("destroy"))
    for function in ("ncclCommAbort", "ncclCommDestroy"):
        nccl._end(SimpleNamespace(NcclCommunicator=kind), comm, function)
    assert log == ["abort", "destroy"]
