"""Description of a Quantized, which every quantiser returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays import Array
from ...calls.descriptions import Description, Written
from ...directions import Direction, Directions, dbias_shape, tensor_directions
from ...formats import float32
from ...results import Quantized, Scaled

#: Addresses of data and scale_inv, by direction.
Addresses = Mapping[str | None, tuple[int, int]]


class QuantizedResult(Description):
    """Description of a Quantized with these directions, and with a bias gradient if `dbias`. kind: kind of
    data, in messages."""

    def __init__(self, directions: Directions, kind: str, dbias: bool = False) -> None:
        self.directions, self.kind, self.dbias = directions, kind, dbias
        written = [Written(f"out.{name}.{what}", shape, dtype)
                   for name, what, shape, dtype in directions.arrays()]
        if dbias:
            written.append(Written("out.dbias", dbias_shape(directions.first.shape), float32))
        super().__init__(*written)

    def build(self, arrays: Sequence[Array]) -> Quantized:
        row, column = self.directions.parts(arrays)
        return Quantized._of(row, column, arrays[-1] if self.dbias else None)

    def addresses(self, written: Sequence[int]) -> Addresses:
        return {name: (written[data], written[scale_inv])
                for name, (data, scale_inv) in self.directions.positions.items()}

    def for_out(self, out: Any) -> QuantizedResult:
        """Accept a given result of per-tensor scaling with a scale_inv per direction."""
        if not isinstance(out, Quantized):
            raise TypeError("out: expected a Quantized (an earlier result, or recipe.empty(…)), got "
                            f"{type(out).__name__}")
        row, column, shared = out._row, out._column, self.directions.shared
        if row is None or column is None or row.scale_inv is column.scale_inv or self.directions.first.block:
            return self
        directions = Directions(self.directions, tuple(what for what in shared if what != "scale_inv"))
        return QuantizedResult(directions, self.kind, self.dbias)

    def arrays_of(self, out: Quantized) -> list[Array]:
        if self.dbias != (out.dbias is not None):
            raise ValueError(f"out: {'no' if self.dbias else 'has a'} dbias, but "
                             f"dbias={self.dbias} was asked for")
        for name, part in (("rowwise", out._row), ("columnwise", out._column)):
            self._check_part(name, part, self.directions.get(name))
        found = []
        for name, part in out.parts.items():
            for what, a in (("scale_inv", part.scale_inv), ("data", part.data)):
                if not self.directions.is_shared(name, what):
                    found.append(a)
                elif a is not getattr(out.rowwise, what):
                    raise ValueError(f"out.{name}.{what}: expected out.rowwise.{what} itself, since both "
                                     "directions are the same here")
        return found if out.dbias is None else [*found, out.dbias]

    def _check_part(self, name: str, part: Scaled | None, wanted: Direction | None) -> None:
        if (part is None) != (wanted is None):
            raise ValueError(f"out: {'no' if part is None else 'has a'} {name} part, but "
                             f"{name}={wanted is not None} was asked for")
        if part is None or wanted is None or wanted.attributes == (
                part.shape, part.transposed, part.block, part.scale_layout):
            return
        message = (f"out.{name}: expected {self.kind} data of shape {wanted.shape} "
                   f"{'' if wanted.transposed else 'not '}stored transposed")
        if wanted.block is not None:
            message += f", block {wanted.block}, scales {wanted.scale_layout}"
        raise ValueError(f"{message}, got {part!r}")


# ---- per-tensor scaling ----
def per_tensor_result(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                      transposed: bool = True, dbias: bool = False) -> QuantizedResult:
    """Describes a Quantized with one scale for the tensor."""
    directions = tensor_directions(shape, dtype, rowwise, columnwise, transposed)
    return QuantizedResult(directions, "per-tensor", dbias)


def per_tensor_destinations(result: QuantizedResult, written: Sequence[int]) -> dict[str, int]:
    """Return the addresses of such a result's arrays by the names of the kernels' members. scale_inv_copy is
    0 except for a given result with a scale_inv per direction."""
    members = {"scale_inv_copy": 0}
    for name, (data, scale_inv) in result.addresses(written).items():
        members["data_t" if result.directions[str(name)].transposed else "data"] = data
        if members.setdefault("scale_inv", scale_inv) != scale_inv:
            members["scale_inv_copy"] = scale_inv
    if result.dbias:
        members["dbias"] = written[-1]
    return members
