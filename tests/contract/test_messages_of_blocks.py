"""The wording of errors about data in blocks, their scales, and SwiGLU: one line for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from messages import Line, check, every_line, line, poisoned

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Quantized, Scaled
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e8m0fnu, float32

T, V = TypeError, ValueError
SWIZZLE, UNSWIZZLE, CONVERT = fp8.swizzle_scales, fp8.unswizzle_scales, fp8.convert_scales
REBASE, AWARE = fp8.rebase_scales, fp8.scaling_aware_transpose
BLOCK, MX = fp8.quantize_block, fp8.quantize_mx
SQUARE: Any = (128, 128)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def e8m0(*shape: int) -> np.ndarray:
    return np.full(shape, 127, np.uint8).view(float8_e8m0fnu)


def convert(error: type[Exception], message: str, scale_inv: Any = None, **options: Any) -> Line:
    right = {"source": "compact", "target": "gemm_ready", "shape": (9, 256), "block": (1, 128)}
    given = ones(9, 2) if scale_inv is None else scale_inv
    return line(error, message, CONVERT, given, **{**right, **options})


LAYOUTS: list[Line] = [
    # ---- swizzle_scales, unswizzle_scales ----
    line(T, "s: expected dtype float8_e8m0fnu, got uint8; bytes of scales are made one by .view(cupy_fp8.",
         SWIZZLE, ones(4, 4, dtype=np.uint8)),
    line(V, "s: expected shape [R, C] or [E, R, C], got (4,)", SWIZZLE, e8m0(4)),
    line(V, "shape: expected (R, C) or (E, R, C), got (4,)", UNSWIZZLE, e8m0(128, 4), shape=(4,)),
    line(V, "shape: expected extents of zero or more, got (-1, 4)", UNSWIZZLE, e8m0(128, 4), shape=(-1, 4)),
    line(T, "shape: expected integers, (R, C) or (E, R, C), got b'xy'", UNSWIZZLE, e8m0(128, 4), shape=b"xy"),
    line(T, "shape: expected integers, (R, C) or (E, R, C), got (1.0, 4)", UNSWIZZLE, e8m0(128, 4),
         shape=(1.0, 4)),
    line(V, "shape: expected extents of at most 2**63 - 1, got one of 100 bits", UNSWIZZLE, e8m0(128, 4),
         shape=(10**30, 1)),
    line(V, f"s: expected shape ({2**62}, 4), swizzled scales of shape ({2**62}, 1), got", UNSWIZZLE,
         e8m0(128, 4), shape=(2**62, 1)),
    line(V, "s: expected shape (256, 4), swizzled scales of shape (129, 4), got (128, 4)", UNSWIZZLE,
         e8m0(128, 4), shape=(129, 4), out=e8m0(129, 4)),
    line(V, "s: expected shape (256, 4), swizzled scales of shape (9, 4) in 2 groups along axis 0, got",
         UNSWIZZLE, e8m0(128, 4), shape=(9, 4), splits=[4, 5]),
    line(V, "axis: means something for groups only, which need splits=; got axis=1 without", SWIZZLE,
         e8m0(9, 4), axis=1),
    line(V, "axis: expected 0 (groups of lines) or 1 (groups along the blocks), got True", SWIZZLE,
         e8m0(9, 4), splits=[4, 5], axis=True),
    line(V, "axis: expected 0 (groups of lines) or 1 (groups along the blocks), got 2", SWIZZLE, e8m0(9, 4),
         splits=[4, 5], axis=2),
    line(V, "splits: groups are of scales [R, C], got shape (1, 9, 4); give each matrix its own call",
         SWIZZLE, e8m0(1, 9, 4), splits=[4, 5]),
    *[line(V, "splits: expected sizes that add up to at most the 9 lines there are, got 10", SWIZZLE,
           e8m0(9, 4), splits=sizes, out=e8m0(256, 4)) for sizes in ([4, 6], np.array([4, 6]))],
    line(V, "splits: expected sizes that add up to at most the 4 blocks of 32 elements there are, got 5",
         SWIZZLE, e8m0(9, 4), splits=[64, 65], axis=1),
    # ---- convert_scales ----
    convert(T, "scale_inv: expected dtype float8_e8m0fnu, float32 of compact scales, got float64",
            np.ones((9, 2))),
    convert(T, "scale_inv: expected dtype int32 of deepgemm_sm100 scales, got float32", ones(1, 12),
            source="deepgemm_sm100"),
    convert(V, "scale_inv: expected shape (9, 2), compact scales of blocks (1, 128) of shape (9, 256), got "
            "(2, 9)", ones(2, 9)),
    convert(V, "scale_inv: expected shape (2, 12), gemm_ready scales of", ones(2, 9), source="gemm_ready"),
    convert(V, "source: expected one of ('compact', ", source="rows"),
    convert(V, "target: expected one of ('compact', ", target=None),
    *[convert(V, "block: expected (1, B), (B, 1) or (B, B')", block=block)
      for block in ((1, 48), None, 128, (True, 128))],
    convert(V, "block: (1, 128) needs two or more dimensions, got shape (256,)", shape=(256,)),
    convert(V, f"shape: an array of shape ({2**62}, 256) needs", shape=(2**62, 256)),
    convert(V, "shape: expected extents of zero or more", shape=(-9, 256)),
    convert(T, "shape: expected integers, (…, M, K), got (9.5, 256)", shape=(9.5, 256)),
    convert(V, "target: 'swizzled' belongs to blocks along one line, got block (128, 128); take compact or",
            block=SQUARE, target="swizzled"),
    convert(V, "source: 'deepgemm_sm90' belongs to blocks along one line", block=SQUARE,
            source="deepgemm_sm90"),
    convert(T, "dtype: gemm_ready scales are float32, got float8_e8m0fnu", dtype=float8_e8m0fnu),
    convert(T, "dtype: compact scales are float8_e8m0fnu, float32, got float64", dtype="float64",
            target="compact"),
    convert(T, "dtype: expected one that scales have, got 'number'", dtype="number"),
    convert(T, "dtype: deepgemm_sm100 scales are int32, got float32", dtype=float32, target="deepgemm_sm100"),
    # ---- scales of tensors ----
    line(V, "history: expected shape [L, n] with L of 1 or more, got (0, 3)", fp8.update_delayed_scaling,
         ones(0, 3), ones(3), dtype=float8_e4m3fn),
    line(V, "amax: expected shape (3,), one for each column of history, got (4,)",
         fp8.update_delayed_scaling, ones(2, 3), ones(3), dtype=float8_e4m3fn, amax=ones(4)),
    line(T, "margin: expected an integer, got 0.5", fp8.compute_scale, ones(3), margin=0.5),
    *[line(error, message, fp8.DelayedScalingState, *args, like="numpy") for error, message, *args in (
        (T, "n: expected an integer, got 1.5", 1.5, DelayedScaling()),
        (V, "n: expected 0 or more tensors, got -1", -1, DelayedScaling()),
        (T, "recipe: expected a DelayedScaling, got str", 2, "max"),
        (T, "recipe: expected a DelayedScaling, got the class", 2, DelayedScaling))],
    line(V, "algo: expected one of ('max', 'most_recent'), got 'mean'", DelayedScaling, algo="mean"),
    line(V, "history_len: expected an integer of 1 or more, got 0", DelayedScaling, history_len=0),
    *[line(V, "eps: expected a finite float32 of 0 or more, got ", fp8.compute_scale, ones(3), eps=eps)
      for eps in (-1e-9, float("nan"), float("inf"), 1e39, 10**400)],
]

X = ones(4, 64)
PARTS, ROW = MX(ones(64, 256), columnwise=True), MX(ones(64, 256)).rowwise
COLUMN = PARTS.columnwise
CODES, ONES = ones(20, 130, dtype=float8_e4m3fn), ones(20, 2)
COUNT = np.array([5], np.int64)


def of_codes(scale_inv: np.ndarray, shape: tuple[int, ...] = (20, 130), transposed: bool = False,
             block: Any = None, layout: str | None = "compact") -> Scaled:
    return Scaled._of(CODES, scale_inv, shape, transposed, block, layout if block else None)


def rebase(error: type[Exception], message: str, q: Any = ROW, **options: Any) -> Line:
    return line(error, message, REBASE, q, **{"block": (1, 128), "changed": COUNT, **options})


CONVERSIONS: list[Line] = [
    # ---- scaling_aware_transpose ----
    line(V, "q: expected a row-wise part, got a Quantized without one", AWARE, Quantized(None, COLUMN)),
    *[line(V, "q: expected row-wise data [M, K] in blocks of (1, 128) or (1, 32), not stored transposed; got",
           AWARE, q)
      for q in (of_codes(ONES[:1, 0]), of_codes(ONES[:1].repeat(65, 1), block=(128, 1)),
                of_codes(ones(130, 1), (130, 20), True, (1, 128)))],
    line(V, "q: expected data not stored transposed with scales in one of ('gemm_ready', 'compact'), got",
         AWARE, of_codes(ones(2, 1), (130, 20), True, SQUARE)),
    line(V, "splits: blocks of (128, 128) may straddle two experts; transpose each by itself", AWARE,
         of_codes(ONES[:1], block=SQUARE), splits=[20]),
    line(V, "target: expected one of ('column', 'tile'), got 'row'", AWARE, of_codes(ONES, block=(1, 128)),
         target="row"),
    line(V, "scale_layout: expected one of ('gemm_ready', 'compact'), got 'swizzled'; .to_layout", AWARE,
         of_codes(ONES, block=(1, 128)), scale_layout="swizzled"),
    # ---- rebase_scales ----
    rebase(V, "q: expected blocks of (1, B) or (B, B'), along the rows of data not stored transposed; got",
           COLUMN),
    rebase(V, "q: expected blocks of (B, 1) or (B, B'), along the rows of data stored transposed; got",
           COLUMN and COLUMN.T, block=SQUARE),
    rebase(V, "block: expected (1, B) or (B, B'), along the rows of data not stored transposed; got (128, 1)",
           block=(128, 1)),
    rebase(V, "block: expected (1, B), (B, 1) or (B, B'), a power of two of 32", block=(1, 48)),
    rebase(V, "scale_layout: 'swizzled' belongs to blocks along one line", scale_layout="swizzled",
           block=SQUARE),
    rebase(T, "scale_dtype: swizzled scales are float8_e8m0fnu, got float32", scale_layout="swizzled",
           scale_dtype=float32),
    rebase(T, "scale_dtype: compact scales are float8_e8m0fnu, float32, got float16", scale_dtype=np.float16),
    rebase(T, "changed: expected dtype int64, got int32", changed=np.zeros(1, np.int32)),
    rebase(V, "changed: expected one element, got shape (2,)", changed=np.zeros(2, np.int64)),
    rebase(V, "out: expected shape (64, 256), block (1, 128), compact scales; got", out=ROW),
]


def forms(message: str, call: Any, out: Any, **options: Any) -> Line:
    return line(V, message, call, X, columnwise=True, out=poisoned(out), **options)


SAME = "out.columnwise.scale_inv: expected out.rowwise.scale_inv itself, since both directions are the same"
PER_TENSOR = "scale, amax: belong to per-tensor recipes"
ALONG = "scale_layout: 'deepgemm_sm90' belongs to blocks along one line; DeepGEMM takes scales of 128 x 128"

QUANTISERS: list[Line] = [
    line(V, "profile: expected one of ('te', 'deepgemm', 'tilekernels', 'vllm', 'sglang', 'torchao'), got",
         BLOCK, X, profile="TE"),
    line(V, "profile: expected one of ('te', 'torchao'), got 'ocp'", MX, X, profile="ocp"),
    *[line(V, "block: expected one of ((1, 128), (128, 1)", call, *args, block=block)
      for block in ((1, 16), [1, 100], (2, 128)) for call, *args in ((BLOCK, X), (BlockScaling,))],
    *[line(V, "block: expected one of ((1, 32), (32, 32)), got", call, *args, block=block)
      for block in ((32, 1), [1, 16]) for call, *args in ((MX, X), (MXScaling,))],
    line(V, "mode: expected one of ('rceil', 'floor', 'ceil', 'even'), got 'round'", MX, X, mode="round"),
    line(V, "scale_layout: expected one of ('gemm_ready', 'compact', 'deepgemm_sm90'), got 'swizzled'", BLOCK,
         X, scale_layout="swizzled"),
    line(V, "scale_layout: expected one of ('compact', 'swizzled'), got 'gemm_ready'", MX, X,
         scale_layout="gemm_ready"),
    *[line(V, ALONG, call, *args, block=SQUARE, scale_layout="deepgemm_sm90")
      for call, *args in ((BLOCK, X), (BlockScaling,))],
    line(T, "pow2_scale: expected True or False, got 'yes'", BLOCK, X,
         pow2_scale="yes"),
    *[line(V, "x: expected an array of two or three dimensions, got shape", call, ones(*shape).T)
      for shape in ((64,), (2, 2, 2, 2), (1, 1, 1, 2)) for call in (BLOCK, MX)],
    *[row for recipe in (BlockScaling(), MXScaling()) for row in (
        line(V, "rowwise, columnwise: expected at least one", recipe.quantize, X, rowwise=False),
        line(V, "rowwise, columnwise: expected at least one", recipe.empty, (4, 64), rowwise=False),
        line(V, "shape: expected two or three extents, got (64,); (1, 64) is that of a matrix of one row",
             recipe.empty, (64,)),
        line(V, PER_TENSOR, recipe.quantize, X, scale=1.0),
        line(V, PER_TENSOR, recipe.quantize, X, amax=ones(1)))],
    line(V, "buffers['rowwise'] scale_inv: expected a C-contiguous array of shape (4, 3), got shape (4, 2)",
         MXScaling().empty, (4, 65), buffers={"rowwise": (ones(4, 65, dtype=float8_e4m3fn), e8m0(4, 2))}),
    line(T, "buffers['rowwise'] scale_inv: expected dtype float8_e8m0fnu, got float32", MXScaling().empty,
         (4, 64), buffers={"rowwise": (ones(4, 64, dtype=float8_e4m3fn), ones(4, 2))}),
    forms("out.rowwise: expected block-scaled data of shape (4, 64) not stored transposed, block (1, 128)",
          BLOCK, BLOCK(X, block=(1, 64), columnwise=True)),
    forms("out.columnwise: expected block-scaled data of shape (4, 64) not stored transposed", BLOCK,
          BLOCK(X, columnwise=True), transposed=False),
    forms(SAME, BLOCK, Quantized(*(BLOCK(X, block=SQUARE).rowwise for _ in range(2))), block=SQUARE,
          transposed=False),
    forms("out.rowwise: expected MX data of shape (4, 64) not stored transposed, block (1, 32), scales swi",
          MX, MX(X, columnwise=True), scale_layout="swizzled"),
    forms("out.columnwise: expected MX data of shape (4, 64) stored transposed", MX, MX(X, columnwise=True),
          transposed=True),
]

GATED, GRAD, P, TWO = ones(8, 32), ones(8, 16), ones(8), ones(2, 32)
OF_MX, DELAYED = MXScaling(), DelayedScaling()
OUT, WIDE = (poisoned(OF_MX.empty(shape, like=GATED)) for shape in ((8, 16), (8, 32)))
SIZES = "splits: expected sizes "


def swiglu(error: type[Exception], message: str, recipe: Any = OF_MX, x: Any = GATED, **options: Any) -> Line:
    return line(error, message, fp8.swiglu_quantize, x, recipe, **options)


def backward(error: type[Exception], message: str, grad: Any = GRAD, **options: Any) -> Line:
    return line(error, message, fp8.swiglu_backward_quantize, grad, GATED, OF_MX, **options)


SWIGLU: list[Line] = [
    *[swiglu(V, "x: expected shape [M, 2 H], got", x=ones(*shape)) for shape in ((8, 3), (2, 8, 4))],
    *[swiglu(V, "rowwise, columnwise: expected at least one", recipe, rowwise=False, **options)
      for recipe, options in ((OF_MX, {}), (DELAYED, {"scale": 1.0}))],
    swiglu(V, "scale: delayed scaling needs the scale", DELAYED),
    swiglu(V, "scale: current scaling takes it from the values themselves", CurrentScaling(), scale=1.0),
    swiglu(V, PER_TENSOR, scale=1.0), swiglu(V, PER_TENSOR, BlockScaling(), amax=ones(1)),
    *[swiglu(V, "recipe: expected blocks of one of ((1, 128), (1, 64), (1, 32)), got", BlockScaling(block))
      for block in (SQUARE, (1, None))],
    swiglu(V, "recipe: expected MX blocks of (1, 32), got (32, 32); quantize_mx has the others",
           MXScaling(block=(32, 32))),
    swiglu(V, "probs: expected shape (8,), got (7,)", probs=ones(7)),
    swiglu(T, "bias: expected dtype float32, got bfloat16", bias=ones(32, dtype=bfloat16)),
    swiglu(V, "bias: of several experts needs splits=", bias=TWO),
    *[swiglu(V, f"bias: expected shape ({experts}, 32), got", bias=bias, splits=splits)
      for experts, bias, splits in ((2, ones(2, 16), [4, 4]), (1, TWO, [8]), (2, ones(2, 1, 32), [4, 4]))],
    swiglu(V, "splits: expected a bias [E, 2 H], one for each expert, got one for all rows", bias=ones(32),
           splits=[8]),
    swiglu(V, "splits: expected a bias [E, 2 H], one for each expert, got none", splits=[8]),
    swiglu(V, SIZES + "that add up to at most the 8 rows there are, got 9", bias=TWO, splits=[4, 5]),
    swiglu(V, SIZES + "of 0 or more, got -1 for group 1", bias=TWO, splits=np.array([4, -1])),
    *[swiglu(T, f"clamp: expected a number or None, got {clamp!r}", clamp=clamp) for clamp in ("7", True)],
    *[swiglu(V, "clamp: expected a number above 0 (in float32), got ", clamp=clamp)
      for clamp in (0.0, 1e-60, float("nan"))],
    swiglu(V, "form: expected one of ('swiglu', 'gpt_oss'), got 'geglu'", form="geglu"),
    swiglu(V, "out.rowwise: expected block-scaled data", BlockScaling(), out=OUT),
    swiglu(V, "out.rowwise: expected MX data of shape (8, 16) not stored transposed", out=WIDE),
    backward(T, "grad: expected dtype float32, got bfloat16", GRAD.astype(bfloat16)),
    backward(V, "grad: expected shape (8, 16), the rows of x and half its columns, got (8, 32)", GATED),
    backward(T, "out: expected a tuple of two (an earlier result), got Quantized", out=WIDE),
    backward(T, "out[0]: expected a Quantized (an earlier result, or recipe.empty(…)), got NoneType", probs=P,
             out=(None, P.copy())),
    backward(V, "out[1]: expected None, since there are no probs", out=(WIDE, P.copy())),
    backward(V, "out[1]: expected an array, since there are probs", probs=P, out=(WIDE, None)),
    backward(V, "out.rowwise: expected MX data of shape (8, 32)", out=(OUT, None)),
]


@every_line([*LAYOUTS, *CONVERSIONS, *QUANTISERS, *SWIGLU])
def test_message(error, message, call, args, kwargs):
    check(error, message, call, args, kwargs)
