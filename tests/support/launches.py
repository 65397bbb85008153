"""Records launches, and the values passed to kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from cupy_fp8.kernels import Launch, Variant


class Noted(NamedTuple):
    """A launch. values: the members of its struct, as the kernel reads them."""

    variant: Variant
    grid: int
    values: tuple[Any, ...]


def note_launches(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """Record every launch from here on; launches still happen."""
    seen: list[Noted] = []
    start = Launch.start

    def noted(launch: Launch, values: list[Any], kept: int) -> None:
        params = launch.variant.kernel.params
        seen.append(Noted(launch.variant, launch.grid, params.unpack(params.pack(*values))))
        start(launch, values, kept)

    monkeypatch.setattr(Launch, "start", noted)
    return seen
