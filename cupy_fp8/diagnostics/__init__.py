"""Measures how much quantisation changed a tensor and each of its blocks."""

from .per_block import BlockReport, blocks
from .span import SpanReport, Vanished, scale_span
from .whole import ErrorReport, error

__all__ = ["BlockReport", "ErrorReport", "SpanReport", "Vanished", "blocks", "error", "scale_span"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
