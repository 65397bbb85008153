"""Copies of operands whose rows do not begin at multiples of 16 bytes, for kernels that read them by tensor
copies (kernels_cu/matmul/align_rows.cu)."""

from __future__ import annotations

from ...arrays import address
from ...calls.call import Call
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import cdiv, round_up
from .problem import OperandView, Problem

_KERNEL = Kernel("matmul/align_rows", "align_rows", block=256)
_ROWS_OF_BLOCK = 8
_UNIT = 16
#: From so many multiplications per byte of the operands on, the kernel for any alignment loses more time than
#: copies take (docs/lab-notes). It also does if K is long and there are few rows, since its few tiles wait
#: for their loads.
_WORTH = 128
_LONG, _FEW_ROWS = 512, 16384


def variants() -> list[Variant]:
    """Returns every program that a product may launch for its operands."""
    return [_KERNEL.variant()]


def is_aligned(view: OperandView) -> bool:
    """Returns whether tensor copies can read all rows; with sizes of K, those of some groups."""
    return view.data % _UNIT == 0 and view.pitch % _UNIT == 0


def worth_copies(problem: Problem) -> bool:
    """Returns whether copies of both operands take less time than they save. (Groups of "k" have rows of
    different lengths, and are not copied.)"""
    p = problem
    rows = p.total + p.groups * p.n
    worth = p.total * p.n >= _WORTH * rows or (p.k >= _LONG and rows <= _FEW_ROWS)
    return worth and p.k > 0 and not p.sizes_of_k


def with_copies(call: Call, problem: Problem) -> tuple[list[Launch], Problem]:
    """Returns the launches that copy the operands that need it, and the problem with these copies."""
    a_launches, a = _copy(call, "a", problem.a, problem.total, problem.k)
    b_launches, b = _copy(call, "b", problem.b, problem.groups * problem.n, problem.k)
    return a_launches + b_launches, problem._replace(a=a, b=b)


def _copy(call: Call, name: str, view: OperandView, rows: int, k: int) -> tuple[list[Launch], OperandView]:
    if is_aligned(view):
        return [], view
    pitch = round_up(k, _UNIT)
    to = address(call.scratch(f"rows of {name}", cdiv(rows * pitch, 4)))
    launch = _KERNEL.variant().bind(
        call.x, grid_size(cdiv(rows, _ROWS_OF_BLOCK), (rows, k)), to=to, rows=rows, row_bytes=k,
        chunks=pitch // _UNIT, **{"from": view.data})
    return [launch], view._replace(data=to, pitch=pitch, group_bytes=view.group_bytes // k * pitch,
                                   start_bytes=view.start_bytes // k * pitch)
