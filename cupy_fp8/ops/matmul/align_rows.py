"""Copies of operands whose rows do not begin at multiples of 16 bytes, for kernels that use tensor copies
(TMA) (kernels_cu/matmul/align_rows.cu)."""

from __future__ import annotations

import numpy as np

from ...arrays import address
from ...calls.call import Call
from ...kernels import Kernel, Launch, Variant, grid_size, multiprocessors
from ...layouts import cdiv, round_up
from .problem import OperandView, Problem

_ROWS = Kernel("matmul/align_rows", "align_rows", block=256)
_GROUPS = Kernel("matmul/align_rows", "align_groups", block=256)
_ROWS_OF_BLOCK = 8
_BLOCKS_OF_PROCESSOR, _BLOCKS_ON_CPU = 4, 2            # of align_groups
_BLOCK_BYTES = 8 * 128 * 16                            # that it copies at a time
_UNIT = 16
#: Multiplications per byte of the operands from which on the kernel for any alignment loses more time than
#: copies take (docs/lab-notes); fewer if K is long and there are few rows, since its few tiles wait for their
#: loads.
_WORTH, _WORTH_OF_K = 128, 32
_LONG, _FEW_ROWS = 512, 16384


def variants() -> list[Variant]:
    """Return every program that a product may launch for its operands."""
    return [_ROWS.variant(), _GROUPS.variant()]


def is_aligned(view: OperandView) -> bool:
    """Return whether tensor copies can read all rows; with sizes of K, those of some groups."""
    return view.data % _UNIT == 0 and view.pitch % _UNIT == 0


def are_all_readable(problem: Problem) -> bool:
    """Return whether tensor copies can read the rows of all groups, or copies of them."""
    views = problem.a, problem.b
    if not problem.sizes_of_k:
        return all(map(is_aligned, views))
    return all(view.copies or not _needs_copies(problem, view) for view in views)


def worth_copies(problem: Problem) -> bool:
    """Return whether copies of both operands take less time than they save."""
    p = problem
    if p.sizes_of_k:
        rows, products, k = p.groups * (p.m + p.n), p.groups * p.m * p.n, p.total // max(p.groups, 1)
        return p.total > 0 and (products >= _WORTH_OF_K * rows or (k >= _LONG and rows <= _FEW_ROWS))
    rows = p.total + p.groups * p.n
    return p.k > 0 and (p.total * p.n >= _WORTH * rows or (p.k >= _LONG and rows <= _FEW_ROWS))


def with_copies(call: Call, problem: Problem) -> tuple[list[Launch], Problem]:
    """Return the launches that copy the operands that need it, and the problem with these copies."""
    if problem.sizes_of_k:
        return _with_copies_of_groups(call, problem)
    a_launches, a = _copy(call, "a", problem.a, problem.total, problem.k)
    b_launches, b = _copy(call, "b", problem.b, problem.groups * problem.n, problem.k)
    return a_launches + b_launches, problem._replace(a=a, b=b)


def _copy(call: Call, name: str, view: OperandView, rows: int, k: int) -> tuple[list[Launch], OperandView]:
    if is_aligned(view):
        return [], view
    pitch = round_up(k, _UNIT)
    to = address(call.scratch(f"rows of {name}", cdiv(rows * pitch, 4)))
    launch = _ROWS.variant().bind(
        call.x, grid_size(cdiv(rows, _ROWS_OF_BLOCK), (rows, k)), to=to, rows=rows, row_bytes=k,
        chunks=pitch // _UNIT, **{"from": view.data})
    return [launch], view._replace(data=to, pitch=pitch, group_bytes=view.group_bytes // k * pitch,
                                   start_bytes=view.start_bytes // k * pitch)


# ---- groups of "k" ----
def _with_copies_of_groups(call: Call, problem: Problem) -> tuple[list[Launch], Problem]:
    """Copy the groups of both operands by one launch; the device finds which of them need it."""
    p, memory = problem, {}
    for name, view, rows in (("a", p.a, p.m), ("b", p.b, p.n)):
        if _needs_copies(p, view):
            # up to 15 bytes more per group: `copy_of` of the struct Operand
            memory[name] = rows * round_up(p.total + (_UNIT - 1) * p.groups, _UNIT)
    if not memory:
        return [], p
    p = p._replace(**{name: getattr(p, name)._replace(
        copies=address(call.scratch(f"rows of {name}", nbytes // 4))) for name, nbytes in memory.items()})
    most = (_BLOCKS_ON_CPU if call.xp is np
            else _BLOCKS_OF_PROCESSOR * multiprocessors(call.x.data.device_id))
    blocks = min(cdiv(sum(memory.values()), _BLOCK_BYTES), most)
    return [_GROUPS.variant().bind(call.x, blocks, **p.members())], p


def _needs_copies(problem: Problem, view: OperandView) -> bool:
    """Return whether the rows of a group may begin at addresses that are no multiples of 16 bytes."""
    p = problem
    if not is_aligned(view):
        return True
    if p.align % _UNIT == 0 or (p.whole_blocks and view.pitch):
        return False
    if p.sizes is None:
        return True
    sizes = np.asarray(p.sizes, np.int64)
    starts = (np.cumsum(sizes) - sizes) * view.start_bytes
    pitches = view.pitch or sizes
    return bool(np.any(((starts | pitches) % _UNIT != 0) & (sizes > 0)))
