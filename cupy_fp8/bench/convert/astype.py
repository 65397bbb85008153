"""Samples of astype and transpose."""

from __future__ import annotations

from typing import Any

from ... import reference
from ...arrays import bits
from ...testing import assert_bytes_equal
from ..data import part, sample


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
    """Compare sampled rows."""
    a, to = args
    picked = sample(a.shape[0])
    assert_bytes_equal(part(out, picked), reference.astype(part(a, picked), to))


def _compare_transpose(args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
    assert bool((bits(out) == bits(args[0]).T).all())


COMPARE = {"astype": _compare, "transpose": _compare_transpose}
