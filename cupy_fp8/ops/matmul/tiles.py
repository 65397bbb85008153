"""Products by the package's own kernels: any shape, alignment and pair of scalings
(kernels_cu/matmul/tiles.cu, and wgmma.cu on Hopper)."""

from __future__ import annotations

from collections.abc import Iterator

from ...calls.call import Call
from ...formats import float8_e5m2
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import cdiv
from . import align_rows, operands, wgmma
from .operands import Operand, Product, ScaleView
from .problem import OperandView, Problem

_KERNEL = Kernel("matmul/tiles", "product_tiles", block=256)
_BLOCK, _COLUMNS = 128, 128
_ROWS, _FEW_ROWS = 128, 32
#: Most rows per group, on average, for the tile of few rows.
_FEW = 64


def _variant(rows: int, sizes_of_k: bool) -> Variant:
    """shared memory of a stage: 128 bytes and one scale per row of A and of B"""
    shared = (2 if sizes_of_k else 3) * (rows + _COLUMNS) * (_BLOCK + 4)
    return _KERNEL.variant(shared=shared, TILE_ROWS=rows, SIZES_OF_K=sizes_of_k)


#: The Hopper kernel loses 16 % if the copy engine cannot read scales: 0.29 fs per multiplication at 1100
#: TFLOP/s. A conversion takes 3 µs, plus 4 ps per scale: 8 bytes at 2 TB/s.
_FOR_A_CONVERSION, _FOR_A_SCALE = 1 << 33, 1 << 14
#: Thread blocks of a launch for the groups that another launch leaves over, usually none.
_BLOCKS_FOR_OTHERS = 256


def variants() -> list[Variant]:
    """Return every program that a product may launch."""
    own = _variant(_ROWS, False), _variant(_FEW_ROWS, False), _variant(_ROWS, True)
    return [*own, *wgmma.variants(), *align_rows.variants()]


def own_kernel_launches(call: Call, problem: Problem) -> Iterator[Launch]:
    """Yield the launches that compute products. The kernel is chosen here."""
    if 0 in (problem.n, problem.groups * problem.m if problem.sizes_of_k else problem.total):
        return
    share, most = wgmma.ALL_GROUPS, None
    if wgmma.takes(call, problem):
        if align_rows.worth_copies(problem):
            copies, problem = align_rows.with_copies(call, problem)
            yield from copies
        if align_rows.are_all_readable(problem):
            yield from wgmma.launches(call, problem, wgmma.ALL_GROUPS)
            return
        if problem.sizes_of_k and align_rows.is_aligned(problem.a) and align_rows.is_aligned(problem.b):
            yield from wgmma.launches(call, problem, wgmma.IN_16_BYTES)
            share, most = wgmma.OTHER_GROUPS, _BLOCKS_FOR_OTHERS
    few = not problem.sizes_of_k and problem.total <= _FEW * max(problem.groups, 1)
    rows = _FEW_ROWS if few else _ROWS
    blocks = wgmma.tiles_of(problem, rows, _COLUMNS)
    if blocks:
        grid = grid_size(blocks if most is None else min(blocks, most), (problem.total, problem.n))
        yield _variant(rows, problem.sizes_of_k).bind(call.x, grid, **problem.members() | {"share": share})


def dense_launches(call: Call, product: Product, out_at: int) -> Iterator[Launch]:
    """Yield the launches of `matmul_nt`: groups of equal size, one per matrix of a batch."""
    a, b = product.a, product.b
    worth = worth_of_copied_scales(a.scaling, b.scaling, a.batch * product.m * product.n * product.k)
    conversions, a_scales = scales_of(call, a, worth)
    more, b_scales = scales_of(call, b, worth)
    yield from (*conversions, *more)
    bias = product.bias
    yield from own_kernel_launches(call, Problem(
        a=view_of(a)._replace(group_bytes=a.rows * a.k).with_scales(a_scales),
        b=view_of(b)._replace(group_bytes=b.rows * b.k).with_scales(b_scales),
        sizes_of_k=False, groups=a.batch, splits={}, total=a.batch * product.m, m=0, n=product.n, k=product.k,
        out=out_at, to=product.to, out_start=product.n, bias=bias.at if bias else 0,
        bias_dtype=bias.dtype if bias else product.to, accumulate=product.accumulate is not None))


def worth_of_copied_scales(a: str, b: str, products: int, sizes_of_k: bool = False) -> int:
    """Return the multiplications of a product if the Hopper kernel's copy engine copies scales of these
    scalings, where it can read them; else 0."""
    copied = a == "vector" and (b == "vector" or (b == "block" and not sizes_of_k))
    return products if copied else 0


def scales_of(call: Call, operand: Operand, worth: int) -> tuple[list[Launch], ScaleView]:
    """Return the launches that convert an operand's scales, and their view. Scales of 1×128 that the copy
    engine cannot read directly become gemm_ready, if that takes less time than it saves. worth: see
    `worth_of_copied_scales`."""
    launches, scales = operands.scales_for(call, operand)
    number = operand.batch * operand.rows * cdiv(operand.k, _BLOCK)
    if (launches or operand.scaling != "vector" or worth < _FOR_A_CONVERSION + _FOR_A_SCALE * number
            or wgmma.copies_scales(view_of(operand).with_scales(scales), anywhere=False)
            or not wgmma.runs(call)):
        return launches, scales
    return operands.scales_for(call, operand, "gemm_ready", 16)


def view_of(operand: Operand) -> OperandView:
    """Return an operand's rows, all with one pitch, without scales."""
    return OperandView(operand.at, 0, pitch=operand.k, e5m2=int(operand.dtype == float8_e5m2))
