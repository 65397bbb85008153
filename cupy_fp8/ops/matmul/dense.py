"""Dense products of FP8 matrices. Back ends: cuBLASLt (cublaslt.py) if the library takes the call, else the
kernel of tiles.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array
from ...backend import DeviceError
from ...calls.call import Call, Op, run
from ...calls.descriptions import Description, one_array
from ...formats import INPUT_DTYPES, DType, bfloat16, flag, float32, lookup
from ...kernels import Launch
from ...results import Quantized, Scaled
from ...typed_array import TypedArray
from . import cublaslt, operands, tiles
from .operands import Product


def matmul_nt(a: Scaled | Quantized, b: Scaled | Quantized, *, dtype: DType = bfloat16,
              bias: Array | None = None, fast_accum: bool = False, autotune: bool = False,
              accumulate: Array | None = None, out: Array | None = None) -> TypedArray:
    """The product of two FP8 matrices, the second one transposed, with their scales and rounded once.

        out[m, n] = Σ_k (a[m, k] · b[n, k]) + bias[n] + accumulate[m, n]

    of the dequantised values. With NumPy operands it is computed in float64, exact but for sums. GPUs add in
    float32, within the bound of docs/numerics.md section 10; the same call gives the same bytes again (arrays
    at multiples of 256 bytes and others may differ in rounding).

    Parameters
    ----------
    a, b : Scaled [M, K] and [N, K], or [B, M, K] and [B, N, K], whose values along K are adjacent in memory
        (not stored transposed), or Quantized, whose row-wise parts are taken. float8_e4m3fn or float8_e5m2.
        Scales: one for the tensor (f32), one for each row (block (1, None)), blocks 1×128 or 128×128, in any
        combination, f32 or E8M0, in any layout ('gemm_ready' is read as it is, others take a launch more). MX
        (1×32, E8M0) times MX. Column-wise data stored transposed are an operand of a product over the rows:
        ``matmul_nt(grad.T, x.T)`` of Quantized is the gradient of the weights
    dtype : of a new result: bfloat16, float16 or float32
    bias : bfloat16, float16 or float32 [N], added before rounding
    fast_accum : add within the tensor cores instead of float32 registers, for one scale or a scale for each
        row: up to 11 % faster, and outside the bound: 3 % too small at K = 4096 for values of one sign
    autotune : time the library's candidates the first time that such a product is called (not while a CUDA
        graph is captured), and keep the fastest. Candidates can round differently
    accumulate : float32 array of the result's shape, to which the product is added in place, and which is
        returned; `dtype` is without effect, and no other `out` is taken
    out : array of the result's shape and dtype, written and returned. With it the call can be captured into a
        CUDA graph, once it has been used before. Scales that are converted and rows that are copied stay in
        memory as long as it

    Returns
    -------
    Array [M, N] or [B, M, N], C-contiguous.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. DeviceError for MX below compute
    capability 10.0; ``Scaled.to_block`` makes operands for Hopper: of activations ``(1, 128)``, of weights
    ``(128, 128)``, with ``scale_layout="gemm_ready"``.

    On a GPU cuBLASLt computes it (``pip install 'cupy_fp8[gemm]'``, with CUDA 12 ``'cupy_fp8[gemm12]'``, or
    the library of a CUDA toolkit): compute capability 8.9 or later for one scale, 9.0 alone and the library's
    version 12.9 or later for rows and blocks. The library wants K in multiples of 16, N of 8, M of 4 beside
    1×128 blocks of a, and data, scales and result at multiples of 16 bytes, a bias of the result's dtype
    (bfloat16 beside float32); it takes neither e5m2 × e5m2 nor 128×128 × 128×128, and of unlike scalings only
    1×128 with 128×128. What it does not take, a kernel of this package computes: on Hopper at about the same
    speed, for which rows that do not begin at multiples of 16 bytes are copied first; on other GPUs (8.0 or
    later), and with NVRTC older than 12.3, several times as slowly. This package's kernels were run on Hopper
    alone, and MX never ran on a GPU.

    Source: docs/numerics.md, section 10; NVIDIA cuBLAS documentation (cublasLtMatmul).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x, w = np.float32([[1, 2, 3, 4]]), np.float32([[1, 1, 1, 1], [0.5, 0, 0, -2]])
    >>> fp8.matmul_nt(fp8.quantize_tensor(x, 1.0), fp8.quantize_tensor(w, 1.0), dtype=np.float32).tolist()
    [[10.0, -7.5]]
    """
    if accumulate is not None:
        if out is not None and out is not accumulate:
            raise ValueError("out: expected None beside accumulate, which is the result")
        out = accumulate
    return run(_MATMUL_NT, (a, b, dtype, bias, fast_accum, autotune, accumulate), out)


class _MatmulNT(Op[Product]):
    def arguments(self, call: Call, a: Any, b: Any, dtype: Any, bias: Any, fast_accum: Any, autotune: Any,
                  accumulate: Any) -> Product:
        to = lookup(dtype, INPUT_DTYPES, "dtype").dtype
        fast, tuned = flag(fast_accum, "fast_accum"), flag(autotune, "autotune")
        left, right = operands.read(call, "a", a), operands.read(call, "b", b)
        operands.check_pair(left, right)
        if fast and not {left.scaling, right.scaling} <= {"tensor", "row"}:
            raise ValueError("fast_accum: expected False for operands in blocks, whose scales are applied "
                             "every 128 values, got True")
        added = None if bias is None else call.read("bias", bias, INPUT_DTYPES, (right.rows,),
                                                    "a value for each row of b")
        return Product(a=left, b=right, to=to if accumulate is None else float32, bias=added, fast_accum=fast,
                       autotune=tuned, accumulate=accumulate)

    def result(self, inputs: Product) -> Description:
        return one_array(inputs.shape, inputs.to, "out" if inputs.accumulate is None else "accumulate")

    def reference(self, inputs: Product) -> np.ndarray:
        bias = inputs.bias and inputs.bias.array
        return reference.matmul_nt(inputs.a.s, inputs.b.s, dtype=inputs.to, bias=bias,
                                   accumulate=inputs.accumulate)

    def launches(self, call: Call, inputs: Product, *written: int) -> Iterator[Launch]:
        if inputs.m * inputs.n * inputs.a.batch == 0:
            return
        refusal = ("the CPU has no cuBLASLt" if call.xp is np else cublaslt.refusal(inputs, written[0]))
        found = cublaslt.launches(call, inputs, written[0]) if refusal is None else None
        if found is None and inputs.a.scaling == "mx":
            raise DeviceError("a, b: products of MX blocks need cuBLASLt on a GPU of compute capability "
                              f"10.0 or later ({refusal or 'it has no algorithm'}); to_block((1, 128), "
                              "scale_layout='gemm_ready') of both, or rebase_scales, makes operands that "
                              "other GPUs take")
        yield from tiles.dense_launches(call, inputs, written[0]) if found is None else found


_MATMUL_NT = _MatmulNT()
