"""Plots of number formats and quantisation errors, with matplotlib (extra `plot`).

Every function draws into `ax` (default: a new figure) and returns the Axes, takes NumPy and CuPy arrays, and
changes no global setting of matplotlib: text takes the colours of the current style, light or dark. Large
arrays are sampled, so that 10^9 elements take less than a second; the title says so.
"""

from typing import TYPE_CHECKING

from ..advice import public_only
from .block_losses import loss_histogram, loss_map, scale_histogram
from .magnitudes import error_by_magnitude, histogram
from .ranges import block_ranges, format_ranges, rounding
from .recipes import comparison
from .representable import finite_values as finite_values
from .representable import number_line
from .scale_maps import scale_heat_map
from .step_lines import steps
from .storage import routes, scale_layout
from .sweeps import curves, reports
from .tables import bars, cells, table
from .training import amax_history

__all__ = ["amax_history", "bars", "block_ranges", "cells", "comparison", "curves", "error_by_magnitude",
           "format_ranges", "histogram", "loss_histogram", "loss_map", "number_line", "reports",
           "rounding", "routes", "scale_heat_map", "scale_histogram", "scale_layout", "steps",
           "table"]

if not TYPE_CHECKING:               # otherwise type checkers accept any name
    __getattr__, __dir__ = public_only(globals())
