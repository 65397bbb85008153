"""Summarises a checkpoint: each tensor's form, and totals by form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import asnumpy
from ..formats import float8_e8m0fnu, float32
from ..layouts import block_text
from ..results import Scaled
from .checkpoint import Checkpoint
from .pairing import Pairing
from .safetensors import DTYPES
from .scale_forms import share_text

__all__ = ["Line", "Loaded", "by_form", "size_text", "summarise"]


class Line(NamedTuple):
    """A tensor of a checkpoint.

    form    its dtype, and for FP8 data what shares a scale and the scales' dtype
    scales  the smallest and the largest finite scale; None without any
    nbytes  of the data, and of the scales
    odd     why it cannot be read, or what is unusual; '' for most
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: str
    scales: tuple[float, float] | None
    nbytes: int
    odd: str

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "shape": list(self.shape), "scales": self.scales and list(self.scales)}


class Loaded(dict[str, Any]):
    """The result of `load_safetensors`: a dict whose repr counts its tensors by form, with their bytes."""

    def __repr__(self) -> str:
        sizes = [(_form_of_value(value), int(value.nbytes)) for value in self.values()]
        head = f"{len(self)} tensors, {size_text(sum(n for _, n in sizes))}"
        return "\n".join([head, *by_form(sizes)])

    __str__ = __repr__


def summarise(checkpoint: Checkpoint, pairing: Pairing) -> list[Line]:
    """Return a line for each tensor, except scales that belong to another one. Only scales are read."""
    return [_line(checkpoint, pairing, name) for name in checkpoint.tensors if name not in pairing.scales]


def _line(checkpoint: Checkpoint, pairing: Pairing, name: str) -> Line:
    tensor = checkpoint.tensors[name]
    form, nbytes, scales, odd = tensor.dtype, tensor.nbytes, None, pairing.odd.get(name, "")
    if pair := pairing.pairs.get(name):
        of = checkpoint.tensors[pair.scale]
        swizzled = ", swizzled" if pair.form.swizzled else ""
        form += f", a scale for {share_text(pair.form.share)} ({of.dtype}{swizzled})"
        nbytes += of.nbytes
        scales, odd = _range(checkpoint.read(pair.scale))
    elif name in pairing.packed:
        form += ", packed" if pairing.packed[name] == name else ", of packed data"
    elif name in pairing.odd:
        form += ", unreadable"
    elif name in pairing.bare:
        form += ", codes without scales"
    if tensor.dtype not in DTYPES:
        odd = "a type that NumPy does not have"
    return Line(name, tensor.dtype, tensor.shape, form, scales, nbytes, odd)


def _range(scale: np.ndarray) -> tuple[tuple[float, float] | None, str]:
    """Return the smallest and the largest scale, and what is unusual: NaN, Inf, zeros and negative ones."""
    values = (scale.view(float8_e8m0fnu) if scale.dtype == np.uint8 else scale).astype(float32)
    finite = values[np.isfinite(values)]
    strange = [f"{count} scales are {what}" for what, count in (
        ("NaN or Inf", values.size - finite.size), ("0", int((finite == 0).sum())),
        ("negative", int((finite < 0).sum()))) if count]
    return (float(finite.min()), float(finite.max())) if finite.size else None, ", ".join(strange)


def _form_of_value(value: Any) -> str:
    if not isinstance(value, Scaled):
        return str(value.dtype)
    block = "one scale" if value.block is None else block_text(value.block)
    return f"{value.dtype}, {block} ({asnumpy(value.scale_inv[:0]).dtype})"


def by_form(sizes: Iterable[tuple[str, int]]) -> list[str]:
    """Return lines with the number and the bytes of the tensors of each form, the largest first."""
    totals: dict[str, list[int]] = {}
    for form, nbytes in sizes:
        totals.setdefault(form, []).append(nbytes)
    widest = max((len(str(len(n))) for n in totals.values()), default=0)
    return [f"  {len(n):{widest}} {form:50} {size_text(sum(n)):>10}"
            for form, n in sorted(totals.items(), key=lambda item: -sum(item[1]))]


def size_text(nbytes: int) -> str:
    """Format bytes for people.

    >>> size_text(999), size_text(1536), size_text(7_100_000_000)
    ('999 B', '1.5 kB', '7.1 GB')
    """
    size, units = float(nbytes), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while size >= 999.95 and unit != "GB":
        size, unit = size / 1000, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
