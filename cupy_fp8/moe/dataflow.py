"""How FP8 values reach the products: what is quantised, and how columns for the weight gradients are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from ..arrays import Array
from ..ops.convert.astype import transpose
from ..ops.convert.dequantize import dequantize
from ..ops.convert.scaling_aware import scaling_aware_transpose
from ..ops.moe.permute import permute
from ..ops.moe.quantize_permute import quantize_permute
from ..recipes import BlockScaling, Recipe, quantize
from ..results import Quantized, Scaled
from ..routing import Routing
from .step import Calls

Dataflow: TypeAlias = Literal["casting_free", "both_directions", "requantize"]
DATAFLOWS: tuple[Dataflow, ...] = get_args(Dataflow)
Keep: TypeAlias = Literal["bf16", "fp8", "input"]
KEEPS: tuple[Keep, ...] = get_args(Keep)
#: Length of blocks along the rows of a group; groups begin at multiples of it, so no block crosses groups.
GROUP = 128
#: Alignment where nothing is kept for gradients: no whole blocks are needed, only the rows that a product
#: writes at once.
GROUP_OF_RESULTS = 16


class CastingFree:
    """Tokens are quantised once, before the dispatch; where columns are needed only exponents move."""

    #: Tokens are in FP8 when dispatched.
    dispatches_fp8 = True
    #: The activation is quantised in both directions.
    both = False
    #: Columns are transposed rows.
    transposes_rows = True

    def __init__(self, recipe: Recipe, scales: Mapping[str, dict[str, Any]]) -> None:
        self.recipe, self.scales = recipe, scales
        self.blocks = isinstance(recipe, BlockScaling)

    def align(self, keep: Keep | None) -> int:
        """Return the alignment of groups of rows where the layer routes."""
        columns_cross_groups = self.blocks and not self.transposes_rows
        return GROUP if keep is not None or columns_cross_groups else GROUP_OF_RESULTS

    def tokens(self, call: Calls, name: str, x: Any) -> Any:
        """Return what is dispatched. A Scaled is quantised already."""
        if isinstance(x, (Scaled, Quantized)):
            return x if isinstance(x, Scaled) else x.rowwise
        return call(f"{name} tokens", quantize, x, self.recipe, **self.scales[name]).rowwise

    def send(self, call: Calls, name: str, x: Any, routing: Routing, probs: Array | None = None, *,
             keep: bool = False) -> Any:
        """Return (tokens as dispatched, their rows, the rows' probs). keep: tokens are needed; otherwise they
        are None if values are quantised while being permuted."""
        if keep or not self.blocks or isinstance(x, (Scaled, Quantized)):
            tokens = self.tokens(call, name, x)
            return tokens, *self.dispatch(call, name, tokens, routing, probs)
        moved = call(f"{name} permuted", quantize_permute, x, routing, self.recipe, probs=probs)
        return None, *(moved if probs is not None else (moved, None))

    def send_both(self, call: Calls, name: str, x: Any, routing: Routing, probs: Array | None = None) -> Any:
        """Return (rows, their probs), where columns of the rows are needed too: one launch makes both from
        FP8 tokens."""
        if not self.blocks or not isinstance(x, (Scaled, Quantized)) or not self.transposes_rows:
            return self.send(call, name, x, routing, probs)[1:]
        return call.both(name, self.tokens(call, name, x), routing, probs)

    def dispatch(self, call: Calls, name: str, tokens: Any, routing: Routing, probs: Array | None) -> Any:
        """Return (rows, their probs)."""
        moves_codes = isinstance(tokens, Scaled) and tokens.block is None
        given = tokens.data if moves_codes else tokens
        moved = call(f"{name} permuted", permute, given, routing, probs=probs)
        rows, row_probs = moved if probs is not None else (moved, None)
        if moves_codes:
            rows = Scaled._of(rows, tokens.scale_inv, rows.shape)
        return rows, row_probs

    def enter(self, call: Calls, name: str, rows: Any) -> Any:
        """Return the rows as products take them."""
        return rows

    def columns(self, call: Calls, name: str, q: Any, splits: Array) -> Any:
        """Return an operand of the product over the rows of each group."""
        if isinstance(q, Quantized) and q._column is not None:
            return q
        rows = q.rowwise if isinstance(q, Quantized) else q
        if self.blocks:
            return call.columns(f"{name} columns", scaling_aware_transpose, rows, splits)
        data = call(f"{name} columns", transpose, rows.data)
        return Scaled._of(data, rows.scale_inv, data.shape)


class BothDirections(CastingFree):
    """Values are dispatched unquantised, and quantised in both directions where they are used."""

    dispatches_fp8, both, transposes_rows = False, True, False

    def send(self, call: Calls, name: str, x: Any, routing: Routing, probs: Array | None = None, *,
             keep: bool = False) -> Any:
        return x, *self.dispatch(call, name, x, routing, probs)

    def enter(self, call: Calls, name: str, rows: Any) -> Any:
        return call(f"{name} rows", quantize, rows, self.recipe, columnwise=True, **self.scales[name])

    def columns(self, call: Calls, name: str, q: Any, splits: Array) -> Any:
        return q.T


class Requantize(CastingFree):
    """Tokens are quantised before the dispatch; columns are made by dequantising and quantising again."""

    transposes_rows = False

    def columns(self, call: Calls, name: str, q: Any, splits: Array) -> Any:
        rows = q.rowwise if isinstance(q, Quantized) else q
        values = call(f"{name} values", dequantize, rows, dtype="bfloat16")
        scale = {key: value for key, value in self.scales[name].items() if key == "scale"}
        return call(f"{name} columns", quantize, values, self.recipe, rowwise=False, columnwise=True,
                    **scale).T


FLOWS: dict[str, type[CastingFree]] = {
    "casting_free": CastingFree, "both_directions": BothDirections, "requantize": Requantize}
