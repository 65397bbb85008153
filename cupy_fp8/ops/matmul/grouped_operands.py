"""Operands of grouped products: rows of groups ("m"), weights of groups, and columns of groups ("k")."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...advice import listed, shown
from ...calls import group_sizes
from ...calls.call import Call, Input
from ...calls.group_sizes import Groups
from ...formats import FP8_DTYPES, float8_e5m2, float32
from ...grouped import Grouped
from ...kernels import Launch
from ...layouts import cdiv, grouped_scale_shape, round_up
from ...results import Quantized, Scaled
from ...scaled_parts import check_block_scales, check_data_shape, may_be_equal
from . import operands, tiles
from .operands import Operand
from .problem import OperandView

_INT64 = np.dtype(np.int64)
#: log2 of the rows per scale, by kind of scaling
_ROW_SHIFTS = {"tensor": 0, "row": 0, "vector": 0, "block": 7}


class GroupedOperand(NamedTuple):
    """An operand of a grouped product.

    given             what the caller gave: the argument of the reference
    rows              rows of a group's matrix; of "m" those of all groups together, divided by splits
    k                 values along K; of "k" those of all groups together
    scaling           'tensor', 'row', 'vector' or 'block', as for an `Operand`
    view              places of the data, and of scales in any layout that a kernel reads directly
    held              arrays that the view has addresses of: they may be copies
    unconverted       the operand of a dense product if its scales are still to be converted
    whole_blocks      scales belong to whole blocks of 128 of all columns, whatever groups they are in
    own_sizes         the sizes that data or scales are laid out by
    """

    given: Any
    rows: int
    k: int
    scaling: str
    view: OperandView
    held: tuple[Input, ...] = ()
    unconverted: Operand | None = None
    whole_blocks: bool = False
    own_sizes: Groups | None = None

    def view_for(self, call: Call, groups: Groups, worth: int) -> tuple[list[Launch], OperandView]:
        """Return the launches that convert scales, and the view for the kernel. groups: the call's sizes,
        which the kernel compares with the operand's own, if any. worth: see
        `tiles.worth_of_copied_scales`."""
        own, view = self.own_sizes, self.view
        if own is not None and own is not groups:
            view = view._replace(own_sizes=own.at, own_wide=own.wide)
        if self.unconverted is None:
            return [], view
        conversions, scales = tiles.scales_of(call, self.unconverted, worth)
        view = view.with_scales(scales)
        if self.whole_blocks:
            view = view._replace(scale_blocks=scales.block)
        return conversions, view


# ---- "m" ----
def read_rows(call: Call, given: Any, check: Any) -> GroupedOperand:
    """Read a of "m": rows of all groups, one group after the other."""
    if isinstance(given, Grouped):
        return _grouped_rows(call, given, check)
    s = given._row if isinstance(given, Quantized) else given
    if isinstance(s, Scaled) and s.splits is not None:
        return _rows_with_flat_scales(call, given, s, check)
    operand = _matrix(call, "a", given, 2, "[all rows, K]")
    if operand.scaling == "block":
        raise ValueError("a: expected one scale, a scale for each row or blocks 1×128, since groups begin at "
                         "any row, got blocks 128×128; group_quantize makes such blocks for each group")
    view = tiles.view_of(operand)._replace(start_bytes=operand.k)
    return GroupedOperand(given=given, rows=operand.rows, k=operand.k, scaling=operand.scaling, view=view,
                          unconverted=operand)


def row_starts(operand: GroupedOperand, view: OperandView) -> OperandView:
    """Let scales of rows that are numbered through all groups begin where the group's rows do."""
    return view if operand.unconverted is None else view._replace(scale_start=view.scale_row)


def read_weights(call: Call, given: Any) -> GroupedOperand:
    """Read b of "m": [experts, N, K]."""
    if isinstance(given, Grouped):
        raise TypeError("b: expected a Scaled or Quantized [experts, N, K], got a Grouped")
    operand = _matrix(call, "b", given, 3, "[experts, N, K]")
    view = tiles.view_of(operand)._replace(group_bytes=operand.rows * operand.k)
    return GroupedOperand(given=given, rows=operand.rows, k=operand.k, scaling=operand.scaling, view=view,
                          unconverted=operand)


def _matrix(call: Call, name: str, given: Any, dimensions: int, what: str) -> Operand:
    operand = operands.read(call, name, given)
    if len(operand.s.shape) != dimensions:
        raise ValueError(f"{name}: expected {what}, got shape {operand.s.shape}")
    if operand.scaling == "mx":
        raise ValueError(f"{name}: expected one scale, a scale for each row, or blocks of 128, got MX blocks "
                         f"1×32; {name}.to_block((1, 128), scale_layout='gemm_ready') converts them")
    return operand


def _rows_with_flat_scales(call: Call, given: Any, s: Scaled, check: Any) -> GroupedOperand:
    """Read the row-wise part that `scaling_aware_transpose` returns for experts."""
    if s.block != (1, 128) or s.scale_layout != "gemm_ready" or s.transposed:
        raise ValueError("a: expected row-wise data of groups in blocks (1, 128) with gemm_ready scales, got "
                         f"{s!r}")
    data, scales, own = _laid_out(call, "a", s, check)
    rows, k = s.shape
    view = OperandView(data.at, scales.at, start_bytes=k, pitch=k, scale_padded=cdiv(k, 128), scale_row=1,
                       scale_block=-1, e5m2=int(data.dtype == float8_e5m2))
    return GroupedOperand(given=given, rows=rows, k=k, scaling="vector", view=view, held=(data, scales),
                          own_sizes=own)


def _laid_out(call: Call, name: str, s: Scaled, check: Any) -> tuple[Input, Input, Groups]:
    """Read the data, the scales and the sizes of a part that `scaling_aware_transpose` returns for experts.
    """
    data = call.read(f"{name}.data", s.data, FP8_DTYPES)
    scales = call.read(f"{name}.scale_inv", s.scale_inv, (float32,))
    own = call.splits(f"{name}.splits", s.splits, check)
    check_data_shape(s, name)
    check_block_scales(s, name)
    return data, scales, own


def counted(groups: int) -> str:
    return f"{groups} group" if groups == 1 else f"{groups} groups"


# ---- Grouped ----
def _grouped_rows(call: Call, g: Grouped, check: Any) -> GroupedOperand:
    scaling = _grouped_scaling("a", g, "rowwise", {None: "tensor", (1, None): "row", (1, 128): "vector",
                                                   (128, 128): "block"})
    data = _grouped_data(call, "a", g, "rowwise")
    k = g.shape[1]
    blocks, padded = cdiv(k, 128), g.scale_layout != "compact"
    strides: dict[str, int] = {
        "tensor": {"scale_group": 1},
        "row": {"scale_padded" if padded else "scale_start": 1, "scale_row": 1},
        "vector": ({"scale_padded": blocks, "scale_row": 1, "scale_block": -1} if padded
                   else {"scale_start": blocks, "scale_row": blocks, "scale_block": 1}),
        "block": dict.fromkeys(("scale_blocks", "scale_row"), round_up(blocks, 4) if padded else blocks)
                 | {"scale_block": 1},
    }[scaling]
    view = OperandView(data.at, 0, pitch=k, start_bytes=k, **strides)
    found = _grouped_operand(call, "a", g, data, scaling, view, check)
    if scaling != "vector" or padded:
        return found
    # compact scales of rows are those of one matrix, whatever the groups
    rows = Scaled._of(g.rowwise, g.scale_inv, g.shape, False, (1, 128), "compact")
    return found._replace(unconverted=Operand(rows, data, 1, found.rows, k, scaling, found.held[1], "a"))


def _grouped_columns(call: Call, name: str, g: Grouped, check: Any) -> GroupedOperand:
    scaling = _grouped_scaling(name, g, "columnwise", {None: "tensor", (1, None): "row", (1, 128): "vector"})
    data = _grouped_data(call, name, g, "columnwise")
    if not g.transposed:
        raise ValueError(f"{name}: expected column-wise data stored transposed, got data stored as is"
                         f"{_makes('columnwise')}")
    rows = g.shape[1]
    line = rows if g.scale_layout == "compact" else round_up(rows, 4)
    strides: dict[str, int] = {
        "tensor": {"scale_group": 1},
        "row": {"scale_group": line, "scale_row": 1},
        "vector": {"scale_blocks": line, "scale_row": 1, "scale_block": line}}[scaling]
    view = OperandView(data.at, 0, start_bytes=rows, **strides)
    return _grouped_operand(call, name, g, data, scaling, view, check, columnwise=True)


def _grouped_data(call: Call, name: str, g: Grouped, direction: str) -> Input:
    data = getattr(g, direction)
    if data is None or g._plain:
        what = "plain values" if g._plain else f"no {direction} data"
        raise ValueError(f"{name}: expected a Grouped with quantised {direction} data, got {what}; "
                         f"group_quantize makes such with {direction}=True")
    found = call.read(f"{name}.{direction}", data, FP8_DTYPES)
    if found.shape != (prod(g.shape),):
        raise ValueError(f"{name}.{direction}: expected {prod(g.shape)} values of shape {g.shape}, flat, "
                         f"got shape {found.shape}")
    return found


def _grouped_scaling(name: str, g: Grouped, direction: str, known: dict[Any, str]) -> str:
    """known: kinds of scaling of row-wise blocks; column-wise data have their transpose."""
    scaling = known.get(g.block) if g.block is None or isinstance(g.block, tuple) else None
    if scaling is None or g.scale_layout == "swizzled":
        blocks = listed([str(block) for block in known if block is not None])
        raise ValueError(f"{name}: expected one scale for each group, or block {blocks} with compact or "
                         f"gemm_ready scales, got block {g.block} with {g.scale_layout} scales"
                         f"{_makes(direction)}")
    return scaling


def _makes(direction: str) -> str:
    """Return the end of a message: a call that makes an operand."""
    return f"; group_quantize(x, splits, BlockScaling((1, 128)), {direction}=True) makes an operand"


def _grouped_operand(call: Call, name: str, g: Grouped, data: Input, scaling: str, view: OperandView,
                     check: Any, *, columnwise: bool = False) -> GroupedOperand:
    """Return the operand of a Grouped whose data are read; reads its sizes and scales here."""
    sizes = call.splits(f"{name}.splits", g.splits, check)
    assert sizes.number is not None
    part = "scale_inv"
    shape: tuple[int, ...] = (sizes.number,)
    if g.block is not None:
        part = "columnwise_scale_inv" if columnwise else "scale_inv"
        block = (g.block[1], g.block[0]) if columnwise else g.block
        shape = grouped_scale_shape(g.shape, sizes.number, block, str(g.scale_layout), columnwise)
    scales = call.read(f"{name}.{part}", getattr(g, part), (float32,), shape,
                       f"the scales of {counted(sizes.number)}")
    offsets = call.read(f"{name}.offsets", g.offsets, (_INT64,), (sizes.number + 1,), "one more than splits")
    if sizes.host is not None:
        group_sizes.compare_offsets(offsets.array, sizes.host, g.shape[1], f"{name}.offsets")
    view = view._replace(scale=scales.at, e5m2=int(data.dtype == float8_e5m2),
                         scale_shift=_ROW_SHIFTS[scaling], own_offsets=offsets.at)
    rows, k = g.shape[::-1] if columnwise else g.shape
    return GroupedOperand(given=g, rows=rows, k=k, scaling=scaling, view=view,
                          held=(data, scales, offsets), own_sizes=sizes)


# ---- "k" ----
def read_columns(call: Call, name: str, given: Any, check: Any) -> GroupedOperand:
    """Read an operand of "k": columns of all groups, one group after the other."""
    if isinstance(given, Grouped):
        return _grouped_columns(call, name, given, check)
    s = given._column if isinstance(given, Quantized) else given
    if isinstance(s, Scaled) and s.transposed and (s.splits is not None or getattr(s.data, "ndim", 2) == 1):
        return _flat_columns(call, name, given, s, check)
    operand = _matrix(call, name, given, 2, "[rows, all columns], or flat column-wise data of groups")
    view = tiles.view_of(operand)._replace(start_bytes=1)
    return GroupedOperand(given=given, rows=operand.rows, k=operand.k, scaling=operand.scaling, view=view,
                          unconverted=operand, whole_blocks=operand.scaling in ("vector", "block"))


def _flat_columns(call: Call, name: str, given: Any, s: Scaled, check: Any) -> GroupedOperand:
    """Read the column-wise part that `scaling_aware_transpose` returns for experts."""
    if s.block != (128, 1) or s.scale_layout not in ("compact", "gemm_ready"):
        raise ValueError(f"{name}: expected flat column-wise data in blocks (128, 1) with compact or "
                         f"gemm_ready scales, got block {s.block} with {s.scale_layout} scales; "
                         "rebase_scales makes blocks (1, 128) of MX before scaling_aware_transpose")
    data, scales, own = _laid_out(call, name, s, check)
    columns, rows = s.shape
    line = rows if s.scale_layout == "compact" else round_up(rows, 4)
    view = OperandView(data.at, scales.at, start_bytes=rows, scale_blocks=line, scale_row=1,
                       scale_block=line, e5m2=int(data.dtype == float8_e5m2))
    return GroupedOperand(given=given, rows=rows, k=columns, scaling="vector", view=view, held=(data, scales),
                          own_sizes=own)


def columns_instead(a: GroupedOperand, b: GroupedOperand, least: int = 0) -> str:
    """Return the end of a message about operands of "k" without enough columns: the operands, quantised in
    both directions, whose transposes have as many columns as the other one, and at least `least`; '' if there
    are none."""
    for text, flipped, columns, others in (("b.T has", (b,), b.rows, a.k), ("a.T has", (a,), a.rows, b.k),
                                           ("a.T and b.T have", (a, b), a.rows, b.rows)):
        if columns == others >= least and all(map(_has_transpose, flipped)):
            return f"; {text} {columns} columns"
    return ""


def _has_transpose(operand: GroupedOperand) -> bool:
    """Return whether .T of what was given is an operand too."""
    q = operand.given
    return (operand.unconverted is not None and isinstance(q, Quantized) and q._column is not None
            and q._column.transposed)


# ---- sizes ----
def read_sizes(call: Call, a: GroupedOperand, b: GroupedOperand, splits: Any, check: Any,
               group: str) -> Groups:
    """Read the sizes of groups of "m" or "k": `splits`, or those that an operand is laid out by, which must
    be equal."""
    found = {f"{name}.splits": operand.own_sizes for name, operand in (("a", a), ("b", b))
             if operand.own_sizes is not None}
    if splits is not None:
        found["splits"] = call.splits("splits", splits, check)
    elif not found:
        raise TypeError("splits: expected the sizes of groups, an int32 or int64 array or a list, got None")
    for groups in found.values():
        if groups.host is not None and group == "m":
            group_sizes.check_at_most(groups.host, a.rows)
        elif groups.host is not None:
            instead = columns_instead(a, b, least=sum(groups.host.tolist()))
            group_sizes.check_at_most(groups.host, a.k, "columns", instead)
    (owner, first), *others = found.items()
    for name, groups in others:
        assert first.number is not None
        if first.number != groups.number:
            raise ValueError(f"{name}: expected {counted(first.number)}, as {owner[0]} has, got "
                             f"{groups.number}")
        if not may_be_equal(first.host, groups.host):
            raise ValueError(f"{name}: expected the sizes that {owner[0]} is laid out by, "
                             f"{shown(first.host.tolist())}, got {shown(groups.host.tolist())}")
    return found.get("splits", first)


def check_whole_blocks(groups: Groups) -> None:
    """Raise ValueError unless groups whose sizes are known begin at multiples of 128."""
    if groups.host is None:
        return
    starts = np.concatenate([[0], np.cumsum(groups.host)[:-1]]) if len(groups.host) else groups.host
    wrong = np.flatnonzero((starts % 128 != 0) & (np.asarray(groups.host) > 0))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(f"splits: expected groups that begin at multiples of 128, as the scales of all "
                         f"columns do, got group {first} at column {int(starts[first])}; group_quantize and "
                         "scaling_aware_transpose make column-wise data of groups of any size")


def check_multiples(groups: Groups, align: int) -> None:
    """Raise ValueError unless known sizes are multiples of `align`."""
    if groups.host is None or align == 1:
        return
    wrong = np.flatnonzero(np.asarray(groups.host) % align)
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(f"splits: expected multiples of align={align}, got {int(groups.host[first])} for "
                         f"group {first}")
