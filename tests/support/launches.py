"""What a launch passes to its kernel, however it was made."""

from __future__ import annotations

from typing import Any

import pytest

from cupy_fp8.kernels import Launch, Variant


def values_of(variant: Variant, x: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The members of the parameter struct, in order, of a call of `Variant.launch`."""
    return variant.kernel.params.unpack(x.packed) if isinstance(x, Launch) else values


def note_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Variant, tuple[Any, ...]]]:
    """Every launch from here on, which still happens: its variant and the members of its struct."""
    seen: list[tuple[Variant, tuple[Any, ...]]] = []
    launch = Variant.launch

    def noted(self: Variant, x: Any, grid: int, *values: Any, **options: Any) -> None:
        seen.append((self, values_of(self, x, values)))
        launch(self, x, grid, *values, **options)

    monkeypatch.setattr(Variant, "launch", noted)
    return seen
