"""Draws docs/pictures: python docs/draw_pictures.py

The SVGs are plain text, in colours for light and dark surroundings, and the PNG has a background of its own.
All numbers come from the library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import cupy_fp8 as fp8

FOLDER = Path(__file__).resolve().parent / "pictures"

_STYLE = """
  .page { fill: #fcfcfb } .ink { fill: #1b1b1a } .soft { fill: #5c5b57 }
  .cell { fill: #ffffff; stroke: #8a8983 } .code { fill: #d9e8f6; stroke: #2a6fb0 }
  .scale { fill: #fde3c8; stroke: #b35c00 } .frame { fill: none; stroke: #8a8983; stroke-dasharray: 4 3 }
  .even { fill: #2a6fb0 } .odd { fill: #9cc3e6 } .arrow { stroke: #5c5b57; stroke-width: 1.5; fill: none }
  text { font: 13px system-ui, sans-serif } .small { font-size: 11.5px } .mono { font-family: monospace }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1d1d1c } .ink { fill: #f2f1ec } .soft { fill: #b6b4ac }
    .cell { fill: #2a2a28; stroke: #8a8983 } .code { fill: #16324c; stroke: #6fb0ea }
    .scale { fill: #4a2c0c; stroke: #f0a04b } .odd { fill: #1f4c74 } .even { fill: #6fb0ea }
    .arrow { stroke: #b6b4ac }
  }
"""


class Drawing:
    """An SVG of a size, made of boxes, texts and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title, self.parts = width, height, title, list[str]()
        self.box(0, 0, width, height, "page", radius=8)

    def box(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> None:
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
                          f'rx="{radius:g}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "ink", anchor: str = "middle") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>')

    def arrow(self, x: float, y: float, length: float, turn: int = 0) -> None:
        """To the right, or turned clockwise by so many degrees."""
        end, turned = x + length, f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
        self.parts.append(f'<path class="arrow" d="M{x:g} {y:g}H{end:g}m-7 -4l7 4l-7 4"{turned}/>')

    def cells(self, x: float, y: float, words: list[str], kind: str, width: float = 58) -> None:
        for i, word in enumerate(words):
            self.box(x + i * width, y, width, 36, kind)
            self.text(x + (i + 0.5) * width, y + 23, word, "ink mono")

    def __str__(self) -> str:
        inside = "\n".join(self.parts)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" aria-label="{self.title}">\n'
                f"<title>{self.title}</title>\n<style>{_STYLE}</style>\n{inside}\n</svg>\n")


def _shown(values: Any) -> list[str]:
    return [f"{v:g}".replace("-", "−") for v in values]


def scale_convention() -> Drawing:
    """What becomes of three values: x · scale is rounded to FP8, and data · scale_inv gives them back."""
    x = np.array([[0.3, -1.7, 3.5]], np.float32)
    scale = 448 / float(np.abs(x).max())
    q = fp8.quantize_tensor(x, scale)
    inverse = f"1/{1 / float(q.scale_inv[0]):g}"
    drawing = Drawing(800, 190, "x times scale, rounded, is the data; data times scale_inv is the value")
    drawing.text(111, 42, "x, float32")
    drawing.cells(24, 56, _shown(x[0].tolist()), "cell")
    drawing.arrow(206, 74, 92)
    drawing.text(250, 64, "× scale", "ink mono")
    drawing.text(250, 94, "and rounded", "soft small")
    drawing.text(250, 110, f"{scale:g} = 448 / 3.5", "soft small")
    drawing.box(300, 14, 202, 164, "frame", radius=6)
    drawing.text(401, 42, "data, FP8")
    drawing.cells(314, 56, _shown(q.data.astype(np.float32)[0].tolist()), "code")
    drawing.box(331, 104, 140, 36, "scale")
    drawing.text(401, 127, f"scale_inv = {inverse}", "ink small mono")
    drawing.text(401, 165, "kept together", "soft small")
    drawing.arrow(506, 74, 92)
    drawing.text(551, 64, "× scale_inv", "ink small mono")
    drawing.text(551, 94, "in float32", "soft small")
    drawing.text(689, 42, "the values")
    drawing.cells(602, 56, _shown(q.dequantize()[0].tolist()), "cell")
    drawing.text(689, 112, "q.dequantize()", "soft small mono")
    return drawing


#: Title, recipe, and rows and columns of blocks in the picture, which stands for 256×512 values.
_RECIPES = (
    ("one scale", fp8.CurrentScaling(), 1, 1),
    ("one for each row", fp8.BlockScaling((1, None), scale_layout="compact"), 12, 1),
    ("blocks of 1×128", fp8.BlockScaling((1, 128), scale_layout="compact"), 12, 4),
    ("blocks of 128×128", fp8.BlockScaling((128, 128), scale_layout="compact"), 2, 4),
    ("MX: blocks of 1×32", fp8.MXScaling(), 12, 16),
)


def recipes() -> Drawing:
    """Which values share a scale, by recipe."""
    drawing = Drawing(800, 196, "Values of one shade share a scale: five recipes")
    for i, (title, recipe, rows, columns) in enumerate(_RECIPES):
        left, top, width, height = 20 + i * 154, 40, 144, 84
        drawing.text(left + width / 2, 28, title)
        for row, column in np.ndindex(rows, columns):
            drawing.box(left + column * width / columns, top + row * height / rows, width / columns,
                        height / rows, "even" if (row + column) % 2 else "odd")
        q = recipe.empty((256, 512), like=np).rowwise
        drawing.text(left + width / 2, 144, type(recipe).__name__, "ink small mono")
        kind = "E8M0" if q.scale_inv.dtype == fp8.float8_e8m0fnu else q.scale_inv.dtype.name
        drawing.text(left + width / 2, 162, f"{q.scale_inv.size:,} × {kind}", "soft small")
        drawing.text(left + width / 2, 179, f"{q.nbytes / q.data.size:.4f} bytes per value", "soft small")
    return drawing


#: What the layer of experts makes, column by column, and what leads from one column to the next.
_FORWARD = (("x", "cell"), ("x8", "code"), ("X8", "code"), ("h", "cell"), ("A8", "code"), ("o", "cell"),
            ("y", "cell"))
_FORWARD_CALLS = ("cast", "permute", "× up", "SwiGLU · p", "× down", "sum")
_BACKWARD = (("dx", "cell"), ("dX", "cell"), ("dh8", "code"), ("dA", "cell"), ("dY8", "code"),
             ("dy8", "code"), ("dy", "cell"))
_BACKWARD_CALLS = ("sum", "× upᵀ", "dSwiGLU", "× downᵀ", "permute", "cast")
_STEP, _LEFT, _WIDTH = 112, 40, 48


def experts() -> Drawing:
    """The dataflow of moe.Experts: forward above, backward below, weight gradients between them."""
    drawing = Drawing(800, 400, "The expert layer: forward, backward and weight gradients in FP8")
    for row, y in ((_FORWARD, 44), (_BACKWARD, 300)):
        for i, (name, kind) in enumerate(row):
            drawing.box(_LEFT + i * _STEP, y, _WIDTH, 36, kind, radius=3)
            drawing.text(_LEFT + i * _STEP + _WIDTH / 2, y + 23, name, "ink mono")
    for i, (there, back) in enumerate(zip(_FORWARD_CALLS, _BACKWARD_CALLS, strict=True)):
        left = _LEFT + _WIDTH + i * _STEP
        drawing.arrow(left + 3, 62, _STEP - _WIDTH - 6)
        drawing.text(left + 32, 54, there, "soft small")
        drawing.arrow(left + _STEP - _WIDTH - 3, 318, _STEP - _WIDTH - 6, turn=180)
        drawing.text(left + 32, 338, back, "soft small")
    for column, (above, below, gradient, call) in {4: ("A8ᵀ", "dY8ᵀ", "d_down", "SAT"),
                                                   2: ("X8ᵀ", "dh8ᵀ", "d_up", "same launch")}.items():
        _weight_gradient(drawing, _LEFT + column * _STEP, above, below, gradient, call)
    middle = _LEFT + 3 * _STEP + _WIDTH / 2
    drawing.arrow(middle, 83, 214, turn=90)
    drawing.text(middle + 8, 194, "h, kept", "soft small", "start")
    drawing.text(400, 24, "forward", "ink")
    drawing.text(400, 366, "backward; dSwiGLU also makes dprobs", "ink")
    drawing.text(400, 388, "blue: FP8 with scales; white: bfloat16; SAT: scaling_aware_transpose",
                 "soft small")
    return drawing


def _weight_gradient(drawing: Drawing, left: float, above: str, below: str, gradient: str, call: str) -> None:
    """A column of the picture: two operands that lie along the rows of an expert, and their product."""
    middle = left + _WIDTH / 2
    for y, name, kind in ((116, above, "code"), (172, gradient, "cell"), (228, below, "code")):
        wide = 62 if kind == "cell" else _WIDTH
        drawing.box(middle - wide / 2, y, wide, 36, kind, radius=3)
        drawing.text(middle, y + 23, name, "ink mono")
    drawing.arrow(middle, 83, 30, turn=90)
    drawing.text(middle + 6, 100, "SAT", "soft small", "start")
    drawing.arrow(middle, 154, 16, turn=90)
    drawing.arrow(middle, 226, 16, turn=270)
    drawing.arrow(middle, 297, 30, turn=270)
    drawing.text(middle + 6, 286, call, "soft small", "start")


def outliers() -> np.ndarray:
    """Values whose size changes from row to row, with three columns that are 20,000 times as large."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 512)) * 2.0 ** rng.uniform(-5, 0, (64, 1))
    x[:, [70, 71, 300]] *= 20_000
    return x.astype(np.float32)


def losses(path: Path) -> None:
    """The relative error of every value of one matrix under three recipes."""
    from matplotlib import pyplot as plt

    x = outliers()
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.75), layout="constrained", facecolor="#fcfcfb")
    for axis, (title, recipe, _, _) in zip(axes, (_RECIPES[0], _RECIPES[2], _RECIPES[4]), strict=True):
        values = recipe.quantize(x).dequantize()
        error = np.abs(values - x) / np.abs(x)
        image = axis.imshow(100 * error, cmap="Blues", vmin=0, vmax=100, aspect="auto",
                            interpolation="nearest")
        axis.set(xticks=[], yticks=[], title=f"{title}\n{np.mean(values == 0):.0%} of the values become 0")
        axis.title.set_fontsize(11)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.set_label("relative error, %")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def insight(path: Path) -> None:
    """The spread of the scales and the lost elements of docs/insight.md's matrix."""
    from matplotlib import pyplot as plt

    x = np.random.default_rng(0).standard_normal((256, 1024), np.float32)
    x[:, 100] *= 2.0**16
    q = fp8.quantize_mx(x)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained", facecolor="#fcfcfb",
                                         width_ratios=(1.15, 1))
    fp8.plot.scale_histogram(q, ax=left)
    fp8.plot.loss_map(fp8.diagnostics.blocks(x, q), ax=right)
    figure.savefig(path, dpi=110)
    plt.close(figure)


PICTURES = {"scale.svg": scale_convention, "recipes.svg": recipes, "experts.svg": experts}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(str(draw()), encoding="utf-8")
    losses(FOLDER / "losses.png")
    insight(FOLDER / "insight.png")
