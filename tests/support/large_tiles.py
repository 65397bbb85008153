"""Checks of ops with the tiles for arrays of many megabytes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cupy_fp8 import testing
from cupy_fp8.calls import remembered
from cupy_fp8.cases import OPS, Case
from cupy_fp8.cli.selftest import check
from cupy_fp8.kernels import Launch, shapes


def check_those_that_ask(run: testing.Executor, cases: Iterable[Case],
                         monkeypatch: pytest.MonkeyPatch) -> set[shapes.Tile]:
    """Check the cases in which an op asks for a tile larger than SMALL, each with that tile. Return the
    tiles."""
    chosen = []

    def choose(x: object, large: shapes.Tile) -> shapes.Tile:
        if large != shapes.SMALL:
            chosen.append(large)
        return large

    monkeypatch.setattr(shapes, "choose_tile", choose)
    remembered.forget()
    for case in cases:
        op, before = OPS[case.op], len(chosen)
        with monkeypatch.context() as idle:                         # finds the cases that ask at all
            idle.setattr(Launch, "start", lambda *_: None)
            remembered.forget()                                     # a repeated call does not ask
            args, kwargs = run.array_arguments(*op.inputs(case))
            op.function(*args, **kwargs)
        if len(chosen) > before:
            check(op, case, run)
    return set(chosen)
