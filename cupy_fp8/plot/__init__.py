"""Pictures of number formats and quantisation errors, with matplotlib (extra `plot`).

Every function draws into `ax` (default: a new figure) and returns the Axes, takes NumPy and CuPy arrays
(copied to the host), and changes no global setting of matplotlib.
"""

from .magnitudes import error_by_magnitude, histogram
from .representable import finite_values as finite_values
from .representable import number_line
from .scale_maps import scale_heat_map

__all__ = ["error_by_magnitude", "histogram", "number_line", "scale_heat_map"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
