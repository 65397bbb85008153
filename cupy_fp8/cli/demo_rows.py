"""What the demo measures of a tensor, and the texts of its tables."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .. import backend
from ..arrays import Array, contiguous, empty_like
from ..diagnostics import Comparison, RecipeError
from ..diagnostics.comparison import RECIPES, Quantize, each
from ..diagnostics.recipe_rows import COLUMNS, LEGEND, recipe_name
from ..diagnostics.text import Column, decibels, json_number
from ..diagnostics.verdict import Kind
from ..results import Quantized

_TIME = Column("time", 8, rank=2)
_COPY = Column("copy", 5, rank=2)
_LEGEND_OF_TIME = {
    "numpy": {"time": "one call of the NumPy reference on this CPU; it says nothing about GPUs."},
    "cupy": {"time": "one call that writes an existing result; caches hold none of x.",
             "copy": "the time of a device copy of the same bytes, as a share of it."},
}


@dataclass(frozen=True)
class Time:
    """The time of a call. copy_share: a device copy of the same traffic takes this share of it (on a GPU
    only)."""

    microseconds: float
    copy_share: float | None = None

    def cells(self) -> tuple[str, ...]:
        shown = () if self.copy_share is None else (f"{self.copy_share:.0%}",)
        return (duration(self.microseconds), *shown)


@dataclass(frozen=True)
class Compared:
    """A tensor by its name, what it was in its file, and each recipe's result and time."""

    name: str
    what: str
    comparison: Comparison
    times: tuple[Time, ...]

    @property
    def title(self) -> tuple[str, ...]:
        return title(self.name, self.comparison.shape, self.what)

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of the rows that differ."""
        for row, taken in zip(self.comparison, self.times, strict=True):
            if row.name not in self.comparison.same:
                yield (*row.cells(), *taken.cells())

    def as_json(self) -> Iterator[dict[str, Any]]:
        for row, taken in zip(self.comparison, self.times, strict=True):
            figures = {name: json_number(value) for name, value in vars(row.error).items()}
            yield {"tensor": self.name, "kind": self.comparison.kind, "shape": list(self.comparison.shape),
                   "dtype": self.what, "recipe": row.name, "same_as": self.comparison.same.get(row.name),
                   "local_sqnr_db": json_number(row.local_sqnr_db), **figures,
                   "bytes_per_element": row.bytes_per_element, **asdict(taken)}


def compare(name: str, what: str, x: Array, kind: Kind | None, show: Callable[[Sequence[str]], None],
            working: Callable[[str], None]) -> Compared:
    """Compare all recipes. kind: what x is; None: as its name says. show: called with the cells of each row
    that differs from those before it, as soon as it is known. working: called with the name of what is
    computed next."""
    clock, rows, times = _Clock(), list[RecipeError](), list[Time]()
    coming = each(x, run=clock)
    for recipe in RECIPES:
        working(recipe_name(recipe))
        row = next(coming)
        if all(row.figures != other.figures for other in rows):
            show((*row.cells(), *clock.time.cells()))
        rows.append(row)
        times.append(clock.time)
    found = Comparison(tuple(x.shape), x.dtype.name, tuple(rows), kind or kind_in(name))
    return Compared(name, what, found, tuple(times))


class _Clock:
    """Times the calls that `each` makes: on the CPU by the clock, on a GPU like the benchmark."""

    def __init__(self) -> None:
        self.time = Time(math.nan)

    def __call__(self, quantize: Quantize, x: Array) -> Quantized:
        start = time.perf_counter()
        q = quantize(x)
        self.time = Time((time.perf_counter() - start) * 1e6)
        if backend.module_of(x) is not np:
            self.time = on_gpu(quantize, x, q)
        return q


def on_gpu(quantize: Quantize, x: Array, q: Quantized) -> Time:
    from ..bench.measure import measure

    def make() -> tuple[Callable[[], Any], Callable[[], None]]:
        mine = _copy(x)
        out = quantize(mine)
        return lambda: quantize(mine, out=out), lambda: None        # the table shows what was computed

    measured = measure(make, x.nbytes + q.nbytes)
    return Time(measured.us, measured.share)


def _copy(x: Array) -> Array:
    """Return x.copy(), for which CuPy would compile a kernel."""
    source, made = contiguous(x), empty_like(x)
    made.data.copy_from_device_async(source.data, source.nbytes)
    return made


def title(name: str, shape: Sequence[int], what: str) -> tuple[str, ...]:
    return name, "×".join(map(str, shape)), what


def columns(like: str) -> list[Column]:
    """Return the columns of a tensor's table. like: 'numpy' or 'cupy'."""
    return [*COLUMNS, _TIME, *([_COPY] if like == "cupy" else [])]


def legend(like: str, left_out: Sequence[str]) -> dict[str, str]:
    """Return explanations of the shown columns."""
    return {title: text for title, text in (LEGEND | _LEGEND_OF_TIME[like]).items() if title not in left_out}


# ---- a table for each kind of tensor ----
SUMMARY_COLUMNS = [COLUMNS[0], Column("SQNR dB", 14), Column("local dB", 14), COLUMNS[3]._replace(rank=1),
                   *COLUMNS[4:], _TIME]
_WORDS: dict[Kind, tuple[str, ...]] = {"activations": ("activation", "hidden_state"),
                                       "weights": ("weight", "kernel", "proj")}


def kind_in(tensor: str) -> Kind | None:
    """Return what a tensor is according to its name.

    >>> kind_in("model.layers.0.mlp.down_proj.weight"), kind_in("activation"), kind_in("x")
    ('weights', 'activations', None)
    """
    name = tensor.lower()
    return next((kind for kind, words in _WORDS.items() if any(word in name for word in words)), None)


def kind_of(tensor: str) -> str:
    """Return a tensor's name without its numbers, so that the same matrix of every layer has one name.

    >>> kind_of("encoder.layer.11.attention.self.key.weight")
    'encoder.layer.*.attention.self.key.weight'
    """
    return re.sub(r"(?<![^._:/ -])\d+(?![^._:/ -])", "*", tensor)


def summaries(compared: Sequence[Compared]) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield (title, rows of cells) of each kind of tensor."""
    kinds: dict[str, list[Compared]] = {}
    for one in compared:
        kinds.setdefault(kind_of(one.name), []).append(one)
    for kind, members in kinds.items():
        elements = sum(one.comparison.elements for one in members)
        same = set.intersection(*(set(one.comparison.same) for one in members))
        rows = [_pooled(*zip(*of_recipe, strict=True)) for of_recipe in zip(
            *(zip(one.comparison, one.times, strict=True) for one in members), strict=True)]
        many = "tensors" if members[1:] else "tensor"
        yield ((kind, f"{len(members)} {many}", f"{elements:,} elements"),
               [cells for cells in rows if cells[0] not in same])


def _pooled(rows: Sequence[RecipeError], times: Sequence[Time]) -> tuple[str, ...]:
    """Return the cells of one recipe's rows in several tensors."""
    errors = [row.error for row in rows]
    total = {field: sum(getattr(e, field) for e in errors)
             for field in ("elements", "saturated", "underflowed", "normal")}
    squares = sum((e.normal_error or 0) ** 2 * (e.normal or 0) for e in errors)
    error = replace(errors[0], **total, normal_error=math.sqrt(squares / max(total["normal"], 1)),
                    max_normal_error=max(e.max_normal_error or 0 for e in errors))
    held = sum(row.bytes_per_element * row.error.elements for row in rows) / total["elements"]
    name, _, _, *others = replace(rows[0], error=error, bytes_per_element=held).cells()
    spans = (_span([e.sqnr_db for e in errors]), _span([row.local_sqnr_db for row in rows]))
    return (name, *spans, *others, duration(sum(taken.microseconds for taken in times)))


def _span(values: Sequence[float]) -> str:
    low, high = decibels(min(values)), decibels(max(values))
    return low if low == high else f"{low} … {high}"


def duration(microseconds: float) -> str:
    """
    >>> duration(7.31), duration(1234.5), duration(2.5e6)
    ('7.3 µs', '1.2 ms', '2.5 s')
    """
    for limit, unit in ((1e3, "µs"), (1e6, "ms")):
        if microseconds < limit:
            return f"{microseconds / limit * 1e3:.1f} {unit}"
    return f"{microseconds / 1e6:.1f} s"
