"""What launches pass to their kernels."""

from __future__ import annotations

from typing import Any

import pytest

from cupy_fp8.kernels import Launch, Variant


def note_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Variant, tuple[Any, ...]]]:
    """Every launch from here on, which still happens: its variant and the members of its struct, as the
    kernel finds them."""
    seen: list[tuple[Variant, tuple[Any, ...]]] = []
    start = Launch.start

    def noted(launch: Launch, values: list[Any], kept: int) -> None:
        params = launch.variant.kernel.params
        seen.append((launch.variant, params.unpack(params.pack(*values))))
        start(launch, values, kept)

    monkeypatch.setattr(Launch, "start", noted)
    return seen
