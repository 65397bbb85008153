"""What `Nccl` does on the host, with a communicator of the test's own."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
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


@pytest.mark.parametrize("end", ["abort", "close", "abandon"])
def test_nccl_that_graphs_hold_ends_later(end, monkeypatch):
    """NCCL waits for graphs; the program does not."""
    log: list[str] = []
    graphs_end, ended = Event(), Event()

    def ends(name: str) -> None:
        log.append(name)
        graphs_end.wait(30)
        ended.set()

    made: Any = transport(monkeypatch, [], done=True)
    made.world, made._own = SimpleNamespace(barrier=lambda: log.append("barrier")), True
    made.device = made._staging = made._rows = None
    made.memory = SimpleNamespace(free=lambda: log.append("free"))
    made._comm = SimpleNamespace(abort=lambda: ends("abort"), destroy=lambda: ends("destroy"))
    monkeypatch.setattr(nccl, "_ENDS_WITHIN", 0.05)
    with pytest.raises(RankError) if end == "abort" else nullcontext():
        getattr(made, end)(*["lost"] * (end == "abort"))
    assert log == {"abort": ["abort"], "close": ["barrier", "destroy", "free"], "abandon": ["abort"]}[end]
    assert made._comm is None
    assert not ended.is_set()
    graphs_end.set()
    assert ended.wait(30)


def test_waiting_is_for_exchanges_on_any_stream(monkeypatch):
    made = transport(monkeypatch, [], done=True)
    groups(made, 3)
    made._ends[1] = SimpleNamespace(done=False)
    with pytest.raises(RankError, match=r"did not end in 0\.01 s"):
        made.wait()
    made = transport(monkeypatch, [], done=True)
    groups(made, 3)
    made.wait()
    assert not made._ends
