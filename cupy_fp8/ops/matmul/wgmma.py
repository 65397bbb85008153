"""Products on Hopper by wgmma (kernels_cu/matmul/wgmma.cu)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as combinations
from typing import Any

import numpy as np

from ...arrays import address
from ...calls.call import Call
from ...formats import float8_e4m3fn, float8_e5m2
from ...kernels import HOPPER, Kernel, Launch, Variant, compute_capability, multiprocessors, tensor_map
from ...kernels.cubin import nvrtc_version
from ...kernels.tensor_map import TensorMap
from ...layouts import cdiv, round_up
from .problem import OperandView, Problem

_NVRTC = 12, 3                      # the first one that knows tensormap.replace (PTX 8.3)
_ROWS, _COLUMNS, _BLOCK = 192, 128, 128
_CLUSTER = 2                        # thread blocks that share tiles of A
_PART_ROWS = 64
_KERNEL = Kernel("matmul/wgmma", "wgmma_products", block=512, cluster=_CLUSTER, arch="sm_90a")
_MAPS, _MAP_BYTES = 4, 128          # tensor maps of groups per thread block; bytes of one
_ROWS_OUT = 16                      # rows of a box of D, as groups may end anywhere
_CLUSTERS_ON_CPU = 2
#: Columns of a group, on average, below which results are added in shared memory: memory is the limit. With
#: many, a fourth stage is worth more.
_ADDED_IN_BLOCKS = 2048
#: Columns of a group, on average, below which tiles are too short to take them as needed: of results that are
#: stored, and of those that are added, whose tiles take longer
_IN_TURNS, _IN_TURNS_ADDING = 512, 256
_FEWER_ON_CPU = 20                  # times as few columns, so that tests are quick
#: Tiles are counted in 32 bits, a grid at a time.
_LARGEST = 2**31 - 2**16
#: shared memory per block; checked against sizeof(Shared)
SHARED, _SHARED_ADDING = 218880, 226560
_FP8 = (float8_e4m3fn, float8_e5m2)
#: Values of the struct's `share`: all groups, those that tensor copies can read, the others.
ALL_GROUPS, IN_16_BYTES, OTHER_GROUPS = range(3)


def _variant(a: np.dtype[Any], b: np.dtype[Any], scaling: str, sizes_of_k: bool, adds: bool = False
             ) -> Variant:
    return _KERNEL.variant(shared=_SHARED_ADDING if adds else SHARED, IN_A=a, IN_B=b, SCALING=scaling,
                           SIZES_OF_K=sizes_of_k, ADDS=adds)


def variants() -> list[Variant]:
    """Return every program that a product may launch."""
    scalings = "kRows", "kBlocks", "kVectors"
    return [_variant(a, b, scaling, sizes_of_k, adds)
            for a, b, scaling, (sizes_of_k, adds) in combinations(
                _FP8, _FP8, scalings, ((False, False), (True, False), (True, True)))
            if not (scaling == "kBlocks" and sizes_of_k)]


def runs(call: Call) -> bool:
    """Return whether this kernel runs on the call's device."""
    return call.xp is np or (compute_capability(call.x.data.device_id) == HOPPER
                             and nvrtc_version() >= _NVRTC)


def takes(call: Call, problem: Problem) -> bool:
    """Return whether this kernel computes a problem if its operands are aligned (align_rows.py): on Hopper,
    and for tests on the CPU."""
    if not runs(call):
        return False
    p = problem
    sizes = [p.total, p.m, p.n, p.k, p.groups * p.n, p.groups * p.m if p.sizes_of_k else 0,
             tiles_of(p, _ROWS, _COLUMNS)]
    return max(sizes) <= _LARGEST


def launches(call: Call, problem: Problem, share: int) -> Iterator[Launch]:
    p, scaling = problem, _scaling(problem)
    clusters = min(_CLUSTERS_ON_CPU if call.xp is np else multiprocessors(call.x.data.device_id) // _CLUSTER,
                   tiles_of(p, _ROWS, _CLUSTER * _COLUMNS))
    blocks = clusters * _CLUSTER
    members = p.members() | {"share": share}
    copies = (scaling != "kRows" and copies_scales(p.a, anywhere=True)
              and (scaling == "kBlocks" or copies_scales(p.b, anywhere=False)))
    a, b = (_FP8[view.e5m2] for view in (p.a, p.b))
    out_map = _out_map(call, p, _PART_ROWS if p.sizes_of_k else _ROWS_OUT)
    out_part_map = None if p.sizes_of_k else _out_map(call, p, _PART_ROWS)
    adds = out_map is not None and _adds_in_blocks(call, p)
    yield _variant(a, b, scaling, p.sizes_of_k, adds).bind(
        call.x, blocks, product=members, out_map={"bytes": out_map or b""},
        out_part_map={"bytes": out_part_map or b""}, copies_scales=int(copies),
        copies_out=int(out_map is not None), taken=_taken(call, p), **_operand_maps(call, p, blocks))


def _adds_in_blocks(call: Call, p: Problem) -> bool:
    """Return whether what products are added to is loaded to shared memory."""
    return p.accumulate and _has_fewer(call, p, _ADDED_IN_BLOCKS)


def _taken(call: Call, p: Problem) -> int:
    """Return the address of the counters by which clusters take tiles; 0: they take turns."""
    turns = _has_fewer(call, p, _IN_TURNS_ADDING if p.accumulate else _IN_TURNS)
    return 0 if turns else call.workspace("tiles of products", 2)


def _has_fewer(call: Call, p: Problem, columns: int) -> bool:
    """Return whether groups are of columns, and have fewer than so many on average."""
    return p.sizes_of_k and p.total * (_FEWER_ON_CPU if call.xp is np else 1) < columns * p.groups


def tiles_of(problem: Problem, rows: int, columns: int) -> int:
    """Return the most tiles that groups of any sizes can have."""
    across, total, groups = cdiv(problem.n, columns), problem.total, problem.groups
    if problem.sizes_of_k:
        return groups * cdiv(problem.m, rows) * across
    if not problem.splits:
        return groups * cdiv(total // max(groups, 1), rows) * across
    # each group, and the rows of no group, may have a partial tile
    return (total // rows + min(groups, total) + 1) * across


def _scaling(p: Problem) -> str:
    """Return where scales lie: along K for both operands or for one, or not at all."""
    if p.a.scale_block == 0 and p.b.scale_block == 0:
        return "kRows"
    return "kBlocks" if p.b.scale_shift == 7 and not p.sizes_of_k else "kVectors"


def copies_scales(view: OperandView, *, anywhere: bool) -> bool:
    """Return whether the copy engine can copy an operand's scales: those of neighbouring rows are adjacent,
    and all lines of scales begin at multiples of 16 bytes. anywhere: groups may begin within a line."""
    in_16_bytes = (view.scale // 4, view.scale_group, view.scale_blocks, max(view.scale_block, 0),
                   0 if anywhere and view.scale_start == 1 else view.scale_start)
    return (view.scale_row == 1 and view.scale_shift == 0 and view.scale_block != 0
            and all(each % 4 == 0 for each in in_16_bytes))


def _operand_maps(call: Call, p: Problem, blocks: int) -> dict[str, Any]:
    """Return the struct's tensor maps of A and B, and the memory in which the kernel writes those of groups.
    """

    def boxes(view: OperandView, columns: int, rows: int, pitch: int, box_rows: int) -> dict[str, TensorMap]:
        # Of "k" the kernel sets the address; the data's own may be invalid for a map.
        return {"bytes": tensor_map.encode(call.x, view.copies or view.data, columns, rows, pitch, box_rows)}

    if not p.sizes_of_k:
        return {"a_map": boxes(p.a, p.k, p.total, p.a.pitch, _ROWS // _CLUSTER),
                "a_part_map": boxes(p.a, p.k, p.total, p.a.pitch, _PART_ROWS),
                "b_map": boxes(p.b, p.k, p.groups * p.n, p.b.pitch, _COLUMNS), "maps": 0}
    words = blocks * _MAPS * 2 * _MAP_BYTES // 4
    at = address(call.workspace_array("maps of groups", words + _MAP_BYTES // 4))
    return {"a_map": boxes(p.a, _BLOCK, p.m, _BLOCK, _ROWS // _CLUSTER), "a_part_map": {"bytes": b""},
            "b_map": boxes(p.b, _BLOCK, p.n, _BLOCK, _COLUMNS), "maps": round_up(at, _MAP_BYTES)}


def _out_map(call: Call, p: Problem, box_rows: int) -> TensorMap | None:
    """Return the tensor map of D; None if its rows do not begin at multiples of 16 bytes, and other stores
    write it."""
    pitch = p.n * p.to.itemsize
    if p.out % 16 or pitch % 16:
        return None
    matrices, rows = (p.groups, p.m) if p.sizes_of_k else (1, p.total)
    return tensor_map.encode(call.x, p.out, p.n, rows, pitch, box_rows, matrices, p.to.itemsize)
