"""Measures how much quantisation changed a tensor and each of its blocks."""

from typing import TYPE_CHECKING

from ..advice import public_only
from .comparison import Comparison, compare
from .per_block import BlockReport, blocks
from .recipe_rows import RecipeError
from .scale_report import ScaleReport, ScaleWarning, scales
from .span import SpanReport, Vanished, scale_span
from .step_log import log_step
from .whole import ErrorReport, error

__all__ = ["BlockReport", "Comparison", "ErrorReport", "RecipeError", "ScaleReport", "ScaleWarning",
           "SpanReport", "Vanished", "blocks", "compare", "error", "log_step", "scale_span", "scales"]

if not TYPE_CHECKING:               # otherwise type checkers accept any name
    __getattr__, __dir__ = public_only(globals())
