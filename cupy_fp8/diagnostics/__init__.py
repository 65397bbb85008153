"""Measures how much quantisation changed a tensor and each of its blocks."""

from .comparison import Comparison, compare
from .per_block import BlockReport, blocks
from .recipe_rows import RecipeError
from .span import SpanReport, Vanished, scale_span
from .whole import ErrorReport, error

__all__ = ["BlockReport", "Comparison", "ErrorReport", "RecipeError", "SpanReport", "Vanished", "blocks",
           "compare", "error", "scale_span"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
