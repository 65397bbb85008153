"""What a launch passes to its kernel, however it was made."""

from __future__ import annotations

from typing import Any

from cupy_fp8.kernels import Launch, Variant


def values_of(variant: Variant, x: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The members of the parameter struct, in order, of a call of `Variant.launch`."""
    return variant.kernel.params.unpack(x.packed) if isinstance(x, Launch) else values
