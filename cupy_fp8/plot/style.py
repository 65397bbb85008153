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


def figure(size: tuple[float, float], panels: int) -> Any:
    """The Axes of a new figure, one above the other over the same x."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError(MATPLOTLIB_HINT) from None
    return pyplot.subplots(panels, 1, figsize=size, sharex=True, squeeze=False, layout="constrained")[1][:, 0]


def ink(ax: Any) -> Any:
    """The colour of text, which is dark on light pictures and light on dark ones."""
    return ax.xaxis.label.get_color()
