"""Measures how much quantisation changed a tensor and each of its blocks."""

from typing import Any

from ..advice import no_attribute
from .comparison import Comparison, compare
from .per_block import BlockReport, blocks
from .recipe_rows import RecipeError
from .scale_report import ScaleReport, ScaleWarning, scales
from .span import SpanReport, Vanished, scale_span
from .step_log import log_step
from .whole import ErrorReport, error

__all__ = ["BlockReport", "Comparison", "ErrorReport", "RecipeError", "ScaleReport", "ScaleWarning",
           "SpanReport", "Vanished", "blocks", "compare", "error", "log_step", "scale_span", "scales"]


def __getattr__(name: str) -> Any:
    raise no_attribute(f"module {__name__!r}", name, __all__)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
