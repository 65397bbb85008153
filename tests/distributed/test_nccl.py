"""What `Nccl` does on the host, with a communicator of the test's own."""

from __future__ import annotations

from collections import deque
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
