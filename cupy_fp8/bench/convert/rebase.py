"""Samples of rebase_scales: the first and the last rows of the largest blocks."""

from __future__ import annotations

from typing import Any

from ... import reference
from ...formats import float32
from ...results import Scaled
from ...testing import assert_bytes_equal
from ..data import part


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Scaled) -> None:
    (q,), block = args, options["block"]
    got, compact = out.to_layout("compact"), q.to_layout("compact")
    across = q.block[0]
    for some in (slice(0, _ROWS), slice(q.shape[0] - _ROWS, q.shape[0])):
        scales = part(compact.scale_inv, slice(some.start // across, some.stop // across))
        few = Scaled(part(q.data, some), scales, (_ROWS, q.shape[1]), False, q.block, "compact")
        want = reference.rebase_scales(few, block=block, scale_dtype=float32)
        assert_bytes_equal(part(got.data, some), want.data)
        first = some.start // block[0]
        assert_bytes_equal(part(got.scale_inv, slice(first, first + len(want.scale_inv))), want.scale_inv)


_ROWS = 256
COMPARE = {"rebase_scales": _compare}
