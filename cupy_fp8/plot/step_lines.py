"""Plots of a `diagnostics.log_step` log over the steps of a training run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..advice import shown, type_name
from .sweeps import stacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["steps"]

#: counts that are drawn as a share of elements or of blocks
_SHARES = {**dict.fromkeys(("saturated", "underflowed", "nan", "nonfinite", "negative_zeros"), "elements"),
           **dict.fromkeys(("blocks_saturated", "blocks_underflowed", "blocks_nan", "blocks_negative_zeros",
                            "scale_zero", "scale_negative", "scale_infinite", "scale_nan"), "scales")}
_NAMES = {"sqnr_db": "SQNR (dB)", "nan": "NaN", "negative_zeros": "−0", "blocks_nan": "blocks\nwith NaN",
          "blocks_negative_zeros": "blocks\nwith −0", "blocks_saturated": "saturated\nblocks",
          "blocks_underflowed": "underflowed\nblocks", "scale_log2_mean": "mean of\nlog2 scale_inv",
          "scale_log2_std": "deviation of\nlog2 scale_inv", "max_relative_error": "largest\nrelative error"}


def steps(log: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
          quantities: Sequence[str] = ("sqnr_db", "blocks_saturated", "blocks_underflowed",
                                       "scale_log2_mean"), *,
          tensors: Sequence[str] | None = None, title: str = "",
          ax: Sequence[Axes] | None = None) -> list[Axes]:
    """Draw a log of a training run: a panel for each quantity, one above the other, and in it a line for each
    tensor.

    log : a file that `diagnostics.log_step` wrote, or its objects.
    quantities : keys of its lines that are numbers. Counts of elements are drawn as a share of all elements,
        and counts of blocks and scales as a share of all scales, in %. null leaves a gap.
    tensors : which to draw; default: all.
    ax : as many Axes as there are quantities. Returns them as a list.
    Of several lines of one step and tensor the last one counts. Raises TypeError, ValueError (keys and
    tensors that the log does not have), OSError, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> log = [{"step": s, "tensor": "w", "sqnr_db": 31.5 - s, "elements": 50, "saturated": s}
    ...        for s in range(3)]
    >>> top, bottom = fp8.plot.steps(log, ("sqnr_db", "saturated"))
    >>> bottom.get_ylabel(), bottom.lines[0].get_ydata().tolist()
    ('saturated (%)', [0.0, 2.0, 4.0])
    """
    try:
        records = _read(log) if isinstance(log, (str, os.PathLike)) else list(log)
    except TypeError:
        raise TypeError("log: expected a file name or a list of log_step's records, got "
                        f"{type_name(log)}") from None
    for record in records:
        if not isinstance(record, Mapping) or not {"tensor", "step"} <= record.keys():
            raise TypeError(f"log: expected records that log_step returned or wrote, got {shown(record)}")
    by_tensor: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        by_tensor.setdefault(record["tensor"], {})[record["step"]] = record
    chosen = list(by_tensor) if tensors is None else list(tensors)
    for name, known, given in (("tensors", set(by_tensor), chosen),
                               ("quantities", {key for record in records for key in record}, quantities)):
        if unknown := [key for key in given if key not in known]:
            raise ValueError(f"{name}: the log has no {', '.join(map(repr, unknown))}; it has "
                             f"{sorted(known)}")
    at = sorted({step for name in chosen for step in by_tensor[name]})
    lines = {_label(key): {name: [_value(by_tensor[name].get(step), key) for step in at] for name in chosen}
             for key in quantities}
    panels = stacked(at, lines, xlabel="step", title=title, ax=ax)
    for panel, key in zip(panels, quantities, strict=True):
        if key in _SHARES:
            panel.set_ylim(bottom=-0.03 * panel.get_ylim()[1])          # no share is negative
    return panels


def _read(path: str | os.PathLike[str]) -> list[Mapping[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _value(record: Mapping[str, Any] | None, key: str) -> float:
    value = None if record is None else record.get(key)
    if value is None:
        return np.nan
    if not isinstance(value, (int, float)):
        raise TypeError(f"quantities: expected keys of numbers, {key!r} has {value!r}")
    share = _SHARES.get(key)
    return float(value) if record is None or share is None else 100 * value / max(record[share], 1)


def _label(key: str) -> str:
    name = _NAMES.get(key, key.replace("_", " "))
    return f"{name} (%)" if key in _SHARES else name
