"""Pictures of number formats and quantisation errors, with matplotlib (extra `plot`).

Every function draws into `ax` (default: a new figure) and returns the Axes, takes NumPy and CuPy arrays
(copied to the host), and changes no global setting of matplotlib.
"""

from .magnitudes import error_by_magnitude, histogram
from .ranges import block_ranges, format_ranges, rounding
from .representable import finite_values as finite_values
from .representable import number_line
from .scale_maps import scale_heat_map
from .storage import routes, scale_layout
from .sweeps import curves, reports
from .tables import bars, cells, table
from .training import amax_history

__all__ = ["amax_history", "bars", "block_ranges", "cells", "curves", "error_by_magnitude", "format_ranges",
           "histogram", "number_line", "reports", "rounding", "routes", "scale_heat_map", "scale_layout",
           "table"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
