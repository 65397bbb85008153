"""What all pictures share: colours, and the Axes that they draw into."""

from __future__ import annotations

from typing import Any

MATPLOTLIB_HINT = "plotting needs matplotlib: pip install 'cupy_fp8[plot]' (or: pip install matplotlib)"

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"


def axes(ax: Any, size: tuple[float, float]) -> Any:
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise ImportError(MATPLOTLIB_HINT) from None
        ax = pyplot.subplots(figsize=size, layout="constrained")[1]
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax
