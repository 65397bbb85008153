"""The far calls of every op, by name, and the kernels that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import far_gates
import far_norms
import numpy as np
import product_kernels
import pytest
from far_arrays import BLOCKS, END, FAR, Far, windows

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.arrays import address, bits
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e8m0fnu, float16
from cupy_fp8.kernels import grid_size
from cupy_fp8.layouts import cdiv, round_up
from cupy_fp8.ops.matmul import align_rows
from cupy_fp8.ops.matmul.problem import OperandView, Problem
from cupy_fp8.ops.moe import route
from cupy_fp8.ops.quantize import bias_gradient
from cupy_fp8.reference import numerics
from cupy_fp8.results import Scaled

_TALL, _WIDE, _BATCH = (FAR, 128), (128, FAR), ((1 << 18) + 4, 128, 128)
_SHAPES: tuple[tuple[Any, ...], ...] = (("tall", _TALL, 0, END), ("wide", _WIDE, 1, END),
                                        ("batch", _BATCH, 0, 4))
_DIRECTIONS = (("rowwise", {"rowwise": True, "columnwise": False}),
               ("columnwise", {"rowwise": False, "columnwise": True}),
               ("both", {"rowwise": True, "columnwise": True}))


def _beside(x: Any, a: Any) -> Any:
    """Return a small argument of a call, on x's device."""
    return a if isinstance(x, np.ndarray) else testing.Executor("cuda").array(a)


def _elementwise() -> Iterator[tuple[str, Far]]:
    for name, *place in _SHAPES[:2]:
        yield f"astype-{name}", Far(lambda m, x: m.astype(x, float8_e4m3fn), np.dtype(bfloat16), *place)
    yield "compute_amax", Far(lambda m, x: m.compute_amax(x), np.dtype(bfloat16), _TALL, one_amax=True)
    yield "compute_scale", Far(lambda m, x: m.compute_scale(x), np.dtype(np.float32), *_SHAPES[0][1:])
    for name, *place in _SHAPES:
        yield f"transpose-{name}", Far(lambda m, x: m.transpose(x), np.dtype(float8_e4m3fn), *place)


def _quantizers() -> Iterator[tuple[str, Far]]:
    def tensor(m: Any, x: np.ndarray, **options: Any) -> Any:
        return m.quantize_tensor(x, _beside(x, np.full(1, 0.5, np.float32)), **options)

    ops: dict[str, Callable[..., Any]] = {
        "quantize_tensor": tensor, "quantize_mx": lambda m, x, **options: m.quantize_mx(x, **options),
        "quantize_mx-swizzled": lambda m, x, **options: m.quantize_mx(x, scale_layout="swizzled", **options),
        "quantize_block": lambda m, x, **options: m.quantize_block(x, **options),
        "quantize_block-compact": lambda m, x, **options: m.quantize_block(x, scale_layout="compact",
            **options),
        "quantize_block-square": lambda m, x, **options: m.quantize_block(x, block=(128, 128),
            scale_layout="compact", **options)}
    for (op, call), (direction, options), (name, *place) in product(ops.items(), _DIRECTIONS, _SHAPES):
        if op != "quantize_mx-swizzled" or direction == "both":
            yield f"{op}-{direction}-{name}", Far(partial(_with, call, options), np.dtype(bfloat16), *place)
    yield "quantize_block-lines", Far(lambda m, x: m.quantize_block(x, block=(1, None)), np.dtype(bfloat16),
                                      *_SHAPES[0][1:])
    for direction, options in _DIRECTIONS[:2]:      # 2**32 scales of 32 elements: indices of scales
        far_scales = partial(_with, lambda m, x, **options: m.quantize_block(x, **options), {
            "block": (1, 32), "scale_layout": "compact", **options})
        place = ((1 << 30) + END, 128), 0
        yield f"scales-{direction}", Far(far_scales, np.dtype(bfloat16),
                                         *(place if options["rowwise"] else ((128, place[0][0]), 1)))


def _with(call: Callable[..., Any], options: dict[str, Any], m: Any, x: np.ndarray) -> Any:
    return call(m, x, **options)


def _dequantized(how: str, options: dict[str, Any], m: Any, x: np.ndarray) -> Any:
    if how == "tensor":
        scale_inv = _beside(x, np.full(1, 0.5, np.float32))
        return m.dequantize(Scaled(x.view(float8_e4m3fn), scale_inv, x.shape), dtype=float16)
    q = m.quantize_mx(x, **options) if how == "mx" else m.quantize_block(x, scale_layout="compact", **options)
    return m.dequantize(q, dtype=bfloat16)


def _dequantized_mx(layout: str, turned: bool, m: Any, x: np.ndarray) -> Any:
    s = m.quantize_mx(x, scale_layout=layout).rowwise
    return m.dequantize(s.T if turned else s, dtype=bfloat16)


def _readers() -> Iterator[tuple[str, Far]]:
    for name, *place in _SHAPES:
        yield f"dequantize-tensor-{name}", Far(partial(_dequantized, "tensor", {}), np.dtype(float8_e4m3fn),
            *place)
        for how, (direction, options) in product(("mx", "block"), _DIRECTIONS[:2]):
            yield f"dequantize-{how}-{direction}-{name}", Far(partial(_dequantized, how, options),
                np.dtype(bfloat16), *place)
    for name, *place in _SHAPES[:2]:
        for how in ("mx", "block"):
            yield f"scaling_aware_transpose-{how}-{name}", Far(partial(_retransposed, how),
                np.dtype(bfloat16), *place)
    yield "scaling_aware_transpose-gemm_ready", Far(partial(_retransposed, "gemm_ready"), np.dtype(bfloat16),
                                                    *_SHAPES[0][1:])
    for layout, turned in (("swizzled", False), ("swizzled", True), ("compact", True)):
        name = f"{layout}-{'turned' if turned else 'rowwise'}"
        yield f"dequantize-mx-{name}", Far(partial(_dequantized_mx, layout, turned), np.dtype(bfloat16),
                                           *_SHAPES[0][1:])
    for target in ("column", "tile"):
        yield f"scaling_aware_transpose-experts-{target}", Far(partial(_retransposed_rows, target),
            np.dtype(bfloat16), *_SHAPES[0][1:])
    for (how, block), (name, *place) in product((("row", (1, 128)), ("square", (128, 128))), _SHAPES):
        yield f"rebase_scales-{how}-{name}", Far(partial(_rebased, block), np.dtype(float8_e4m3fn), *place)


def _rebased(block: Any, m: Any, x: np.ndarray) -> Any:
    """Of MX data, with scales that repeat every 256 columns."""
    exponents = (120 + np.arange(x.shape[-1] // 32) % 8).astype(np.uint8).view(float8_e8m0fnu)
    scale_inv = _beside(x, np.tile(exponents, (*x.shape[:-1], 1)))
    return m.rebase_scales(Scaled(x, scale_inv, x.shape, False, (1, 32), "compact"), block=block)


def _retransposed(how: str, m: Any, x: np.ndarray) -> Any:
    layout = "gemm_ready" if how == "gemm_ready" else "compact"
    q = m.quantize_mx(x) if how == "mx" else m.quantize_block(x, scale_layout=layout, pow2_scale=True)
    return m.scaling_aware_transpose(q.rowwise)


def _retransposed_rows(target: str, m: Any, x: np.ndarray) -> Any:
    """The rows of one expert, so that the flat result is a matrix again."""
    rows, columns = x.shape
    q = m.quantize_block(x, scale_layout="compact", pow2_scale=True).rowwise
    done = m.scaling_aware_transpose(q, splits=_beside(x, np.array([rows])), target=target,
                                     scale_layout="compact").columnwise
    return done.data.reshape(columns, rows), done.scale_inv


def _swiglu() -> Iterator[tuple[str, Far]]:
    recipes = {"tensor": fp8.DelayedScaling(), "mx": fp8.MXScaling(), "block": fp8.BlockScaling()}
    for (how, recipe), (direction, options) in product(recipes.items(), _DIRECTIONS[::2]):
        scale = {"scale": 0.5} if how == "tensor" else {}
        for name, shape, axis, more in (("tall", (FAR, 256), 0, {}), ("wide", (128, 2 * FAR), 1,
            {"interleaved": True})):
            given = {"recipe": recipe, **scale, **options, **more}
            call = partial(_with, lambda m, x, recipe, **o: m.swiglu_quantize(x, recipe, **o), given)
            yield f"swiglu_quantize-{how}-{direction}-{name}", Far(call, np.dtype(bfloat16), shape, axis, END)
    yield "swiglu_quantize-experts", Far(_of_one_expert, np.dtype(bfloat16), (FAR, 256))
    for how, recipe in recipes.items():
        call = partial(_backward, recipe, {"scale": 0.5} if how == "tensor" else {})
        yield f"swiglu_backward_quantize-{how}", Far(call, np.dtype(bfloat16), *_SHAPES[0][1:])


def _activations() -> Iterator[tuple[str, Far]]:
    recipes = {"tensor": fp8.DelayedScaling(), "mx": fp8.MXScaling(), "block": fp8.BlockScaling()}
    ops: dict[str, Callable[..., Any]] = {
        "activation_quantize": lambda m, x, recipe, **o: m.activation_quantize(x, recipe, **o),
        "activation_backward_quantize":
            lambda m, x, recipe, **o: m.activation_backward_quantize(x, x, recipe, **o)}
    for (op, call), (how, recipe), (name, *place) in product(ops.items(), recipes.items(), _SHAPES[:2]):
        options = {"recipe": recipe, "columnwise": True, **({"scale": 0.5} if how == "tensor" else {})}
        yield f"{op}-{how}-{name}", Far(partial(_with, call, options), np.dtype(bfloat16), *place)


def _of_one_expert(m: Any, x: Any) -> Any:
    bias = _beside(x, np.ones((1, x.shape[1]), bfloat16))
    return m.swiglu_quantize(x, fp8.MXScaling(), bias=bias, splits=_beside(x, np.array([len(x)])))


def _backward(recipe: Any, scale: dict[str, float], m: Any, x: Any) -> Any:
    """x is the gradient and also the input, of which only the windows are filled."""
    columns = x.shape[1]
    both = fp8.empty((len(x), 2 * columns), x.dtype, like=x)
    for at in windows(x.shape, 0, END):
        bits(both)[at, :columns] = bits(both)[at, columns:] = bits(x)[at]
    return m.swiglu_backward_quantize(x, both, recipe, rowwise=True, columnwise=True, **scale)[0]


def _routed(op: str, m: Any, x: np.ndarray) -> Any:
    """Every token has one row, its own."""
    r = _beside(x, reference.route(np.zeros((len(x), 1), np.int32), num_experts=1))
    if op in ("permute", "permute_backward"):
        return getattr(m, op)(x, r)
    if op == "quantize_permute":
        return m.quantize_permute(x, r, fp8.BlockScaling()).data
    if op == "permute_transpose":
        made = m.permute_transpose(m.quantize_block(x, scale_layout="compact", pow2_scale=True).rowwise, r)
        return made.rowwise.data, made.columnwise.data.reshape(x.shape[::-1])
    probs = _beside(x, np.full((len(x), 1), 0.5, np.float32))
    return m.unpermute(x, r, probs=probs) if op == "unpermute" else m.unpermute_backward(x, x, r,
        probs=probs)[0]


def _rows() -> Iterator[tuple[str, Far]]:
    for op, dtype in (("permute", float8_e4m3fn), ("permute_backward", bfloat16), ("unpermute", bfloat16),
                      ("unpermute_backward", bfloat16), ("quantize_permute", bfloat16)):
        yield op, Far(partial(_routed, op), np.dtype(dtype), ((1 << 16) + 4, 1 << 16), 0, 4, 128)
    # Tiles are counted down the rows of a strip.
    yield "permute_transpose", Far(partial(_routed, "permute_transpose"), np.dtype(bfloat16), _TALL)
    for op in ("pad_groups", "unpad_groups", "sort_chunks"):
        yield op, Far(partial(_padded, op), np.dtype(float8_e4m3fn), ((1 << 16) + 4, 1 << 16), 0, 4, 128)
    recipe: Any
    for how, recipe in (("mx", fp8.MXScaling()), ("tensor", fp8.DelayedScaling()),
                        ("rows", fp8.BlockScaling((1, None), scale_layout="compact"))):
        yield f"group_quantize-{how}", Far(partial(_grouped, recipe), np.dtype(bfloat16), *_SHAPES[0][1:])
    current = fp8.CurrentScaling()                  # long rows need few blocks for the amax: one per 64 KB
    for name, groups in (("current", 1), ("current-of_many", 1024)):
        call = partial(_grouped, current, groups=groups, columnwise=True)
        yield f"group_quantize-{name}", Far(call, np.dtype(bfloat16), ((1 << 23) + END, 512), one_amax=True)
    yield "multi_quantize-current", Far(partial(_listed, current), np.dtype(bfloat16), _TALL, one_amax=True)
    for block in ((1, None), (None, 1)):            # amaxes of whole groups, or of their rows and columns
        call = partial(_grouped, fp8.BlockScaling(block, scale_layout="compact"), columnwise=True)
        yield f"group_quantize-whole-{'rows' if block[0] else 'columns'}", Far(
            call, np.dtype(bfloat16), _TALL, alike=True)
    for (how, recipe), (name, *place) in product(
            (("mx", fp8.MXScaling()), ("block", fp8.BlockScaling()), ("tensor", fp8.DelayedScaling())),
            _SHAPES[::2]):
        if how == "tensor" and name == "batch":
            continue                                # lists of tensors with one scale are of matrices
        yield f"multi_quantize-{how}-{name}", Far(partial(_listed, recipe), np.dtype(bfloat16), *place)


def _padded(op: str, m: Any, x: np.ndarray) -> Any:
    sizes = _beside(x, np.array([len(x)]))
    return m.sort_chunks(x, sizes, _beside(x, np.array([0]))) if op == "sort_chunks" else getattr(m, op)(
        x, sizes, align=4)


def _grouped(recipe: Any, m: Any, x: np.ndarray, groups: int = 1, **options: Any) -> Any:
    """The last group has all rows."""
    scales = _beside(x, np.full(1, 0.5, np.float32)) if isinstance(recipe, fp8.DelayedScaling) else None
    sizes = _beside(x, np.array([0] * (groups - 1) + [len(x)]))
    return m.group_quantize(x, sizes, recipe, scales=scales, **options)[-1]


def _listed(recipe: Any, m: Any, x: np.ndarray) -> Any:
    """After a small array."""
    xs = [_beside(x, np.ones((3, *x.shape[1:]), x.dtype)), x]
    given = {"scales": [0.5, 0.5]} if isinstance(recipe, fp8.DelayedScaling) else {}
    return m.multi_quantize(xs, recipe, columnwise=True, **given)


def _scales() -> Iterator[tuple[str, Far]]:
    """Scales of 2**32 blocks: a row per 128 columns of blocks."""
    e8m0, place = np.dtype(float8_e8m0fnu), ((FAR, 128), 0)
    yield "swizzle_scales", Far(lambda m, s: m.swizzle_scales(s), e8m0, *place)
    yield "unswizzle_scales", Far(lambda m, s: m.unswizzle_scales(s, shape=s.shape), e8m0, *place)
    for target in ("gemm_ready", "deepgemm_sm90", "deepgemm_sm100", "swizzled"):
        yield f"convert_scales-{target}", Far(partial(_converted, target), e8m0, *place)


def _converted(target: str, m: Any, s: Any) -> Any:
    shape = len(s), 32 * s.shape[1]
    return m.convert_scales(s, source="compact", target=target, shape=shape, block=(1, 32))


def _others() -> Iterator[tuple[str, Far]]:
    yield "update_delayed_scaling", Far(_updated, np.dtype(np.float32), (16, (1 << 28) + END), 1)
    for kernel in product_kernels.KERNELS:          # Hopper's grid of clusters runs whole
        yield f"grouped_matmul_nt-{kernel}", Far(partial(_weighted, kernel), np.dtype(float8_e4m3fn),
                                                 ((1 << 11) + 4, 128, 1 << 14), 0, 1,
                                                 1 << 10 if kernel == product_kernels.HOPPER else BLOCKS)
    yield "grouped_matmul_nt-align_rows", Far(_aligned, np.dtype(float8_e4m3fn), (FAR, 136))
    yield "group_sums", Far(_summed_rows, np.dtype(float8_e4m3fn), *_SHAPES[1][1:])
    yield "grouped_matmul_nt-align_groups", Far(_aligned_groups, np.dtype(float8_e4m3fn), (FAR, 136))
    yield "quantize_tensor-sum_rows", Far(_summed, np.dtype(np.float32), _TALL)
    yield "route-count", Far(_experts, np.dtype(float8_e4m3fn), ((1 << 22) + 64, 1024), 0, 64, 2)


def _updated(m: Any, history: Any) -> Any:
    """Histories of very many tensors. The scales count as one row."""
    scale = fp8.zeros(history.shape[1], np.float32, like=history)
    history, scale = m.update_delayed_scaling(history, scale, dtype=float8_e4m3fn)
    return history, scale.reshape(1, -1)


def _weighted(kernel: str, m: Any, b: Any) -> Any:
    """Rows with a single 1 select elements of the weights of each window's group. The other groups are
    empty."""
    groups, n, k = b.shape
    chosen = sorted({window.stop - 1 for window in windows(b.shape, 0, 1)})
    sizes = np.zeros(groups, np.int64)
    sizes[chosen] = 16
    picks = np.tile(np.eye(128, k, dtype=np.float32)[::8], (len(chosen), 1)).astype(float8_e4m3fn)
    one, executor = np.ones(1, np.float32), testing.Executor("host" if isinstance(b, np.ndarray) else "cuda")
    a, weights = _beside(b, Scaled(picks, one, picks.shape)), Scaled(b, _beside(b, one), b.shape)
    with pytest.MonkeyPatch.context() as patch:
        product_kernels.use(kernel, executor, patch)
        products = m.grouped_matmul_nt(a, weights, _beside(b, sizes), dtype=np.float32)
    found = fp8.zeros((groups, 16, n), np.float32, like=b)
    found[chosen] = products.reshape(-1, 16, n)
    return found


def _summed_rows(m: Any, x: Any) -> Any:
    """With one group."""
    one = _beside(x, np.full(1, 0.5, np.float32))
    return m.group_sums(Scaled(x, one, x.shape), _beside(x, np.array([len(x)])))


def _aligned(m: Any, x: Any) -> Any:
    """Only the copies of rows: a product that is worth copies has too many tiles for the CPU."""
    rows, k = x.shape
    if m is reference:
        return np.pad(bits(x), ((0, 0), (0, -k % 16))).view(x.dtype)
    out = fp8.empty((rows, round_up(k, 16)), x.dtype, like=x)
    grid = grid_size(cdiv(rows, align_rows._ROWS_OF_BLOCK), x.shape)
    align_rows._ROWS.variant().bind(x, grid, to=address(out), rows=rows, row_bytes=k,
                                   chunks=out.shape[1] // 16, **{"from": address(x)}).run()
    return out


def _aligned_groups(m: Any, x: Any) -> Any:
    """Only the copies of a group of "k", whose rows are eight chunks of 16 bytes."""
    (rows, k), size = x.shape, 128
    if m is reference:
        return x[:, :size]
    out, sizes = fp8.empty((rows, size), x.dtype, like=x), _beside(x, np.array([size]))
    a = OperandView(address(x), 0, start_bytes=1, pitch=k, copies=address(out))
    product = Problem(a, OperandView(0, 0), True, 1, {"sizes": address(sizes), "groups": 1, "wide": 1}, k,
                      rows, 0, 0, 0, np.dtype(np.float32))
    grid = grid_size(cdiv(out.nbytes, align_rows._BLOCK_BYTES), x.shape)
    align_rows._GROUPS.variant().bind(x, grid, **product.members()).run()
    return out


def _summed(m: Any, sums: Any) -> Any:
    """Only the second kernel of bias gradients; the first one has a sum per 128 elements of x."""
    (rows, columns), each = sums.shape, bias_gradient._WARPS * bias_gradient._ROWS[0]
    if m is reference:
        return numerics.tree_sum(sums.reshape(-1, each, columns), 1)
    out = fp8.empty((rows // each, columns), np.float32, like=sums)
    grid = grid_size(columns // bias_gradient._COLUMNS_AT_ONCE * len(out), sums.shape)
    bias_gradient._SUM_ROWS.variant(ROWS=bias_gradient._ROWS[0]).bind(
        sums, grid, src=address(sums), dst=address(out), rows=rows, columns=columns).run()
    return out


def _experts(m: Any, mask: Any) -> Any:
    """Only the first kernel of `route`, with 16 tokens per warp: `route` itself has at most 128 blocks."""
    (tokens, number), warp_tokens = mask.shape, 16
    if m is reference:
        return np.where(bits(mask) != 0, np.arange(number, dtype=np.int32), np.int32(-1))
    blocks = cdiv(tokens, route._WARPS * warp_tokens)
    experts = fp8.empty(mask.shape, np.int32, like=mask)
    counts = fp8.empty((number, round_up(blocks, 4)), np.int32, like=mask)
    route._COUNT.variant().bind(
        mask, blocks, assignment=address(mask), experts=address(experts), counts=address(counts),
        tokens=tokens, topk=number, num_experts=number, warp_tokens=warp_tokens, pitch=counts.shape[1],
        mask=2).run()
    return experts


#: Kernels that go along rows of memory, one after the other, do not reach the ends of several rows in these
#: few blocks. A grid for many groups ends with blocks that have no rows, and one for scales of tokens with
#: blocks that look for unused rows. On a GPU all blocks run.
_UNREACHED = {"group_quantize-current-of_many", "permute_transpose", *far_norms.UNREACHED} | {
    f"{name}-wide" for name in (
    "astype", "quantize_tensor-rowwise", "quantize_mx-rowwise", "quantize_mx-both",
    "quantize_block-rowwise",
    "quantize_block-compact-rowwise", "dequantize-tensor", "dequantize-mx-rowwise",
    "dequantize-mx-columnwise",
    "dequantize-block-rowwise", "rebase_scales-row", "scaling_aware_transpose-mx",
    "scaling_aware_transpose-block")}
#: The ends of swizzled scales are not those of the matrix.
_OTHER_ENDS = {f"quantize_mx-swizzled-both-{name}" for name in ("tall", "wide")}
ON_DEVICE: dict[str, Far] = {
    name: far for calls in (_elementwise, _quantizers, _readers, _swiglu, _activations, _rows, _scales,
                            _others, far_gates.calls, far_norms.calls)
    for name, far in calls() if name not in _OTHER_ENDS}
CALLS = {name: far for name, far in ON_DEVICE.items() if name not in _UNREACHED}

_AT_ONCE = "all its blocks run at the same time and go through all tiles, so the CPU cannot leave any out"
#: Kernels that no far call launches on the CPU, and why.
WITHOUT_CALL = {
    "cast_current": "reads no more than the multiprocessors hold",
    "group_cast_current": f"{_AT_ONCE}; a GPU launches it for group_quantize-current-of_many",
    "multi_cast_current": f"{_AT_ONCE}; a GPU would need a list of twice 2**31 elements",
    "norm_column_sums": "follows norm_statistics; a GPU launches it for norm_backward_quantize-any",
    "norm_statistics": "goes through rows 2**16 apart; a GPU launches it for norm_quantize-any",
    "route_rank": "has int32 rows, of which `route` refuses 2**31",
    "splits_to_offsets": "adds up all sizes before a window: test_offsets_of_many_groups"}
