"""Activations and quantisation from a single read. Kernels: kernels_cu/quantize/activation.cu; for gated ones
swiglu.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, overload

import numpy as np

from ... import reference
from ...advice import matrix_instead
from ...arrays import Array
from ...calls import row_segments
from ...calls.call import Call, Input, Op, run
from ...formats import INPUT_DTYPES, bfloat16, choice, flag, float8_e4m3fn
from ...kernels import Launch, Variant
from ...recipes import Recipe, check_scales
from ...results import Quantized
from ...typed_array import TypedArray
from . import fused, swiglu, swiglu_launches
from .fused import ANY, PLAIN
from .quantized_result import QuantizedResult

UnaryActivation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu2"]
GatedActivation: TypeAlias = Literal["swiglu", "geglu", "geglu_tanh", "reglu"]
Activation: TypeAlias = UnaryActivation | GatedActivation
UNARY: tuple[UnaryActivation, ...] = get_args(UnaryActivation)
GATED: tuple[GatedActivation, ...] = get_args(GatedActivation)
ACTIVATIONS: tuple[Activation, ...] = (*UNARY, *GATED)


def activation_quantize(x: Array, recipe: Recipe, *, kind: Activation = "silu", scale: Any = None,
                        amax: Array | None = None, probs: Array | None = None, bias: Array | None = None,
                        splits: Any = None, rowwise: bool = True, columnwise: bool = False,
                        clamp: float | None = None, interleaved: bool = False, noop: Array | None = None,
                        out: Quantized | None = None) -> Quantized:
    """An activation of x, quantised by a recipe, from one read of x.

        y = x * sigma(x)                                        kind 'silu', sigma(x) = 1 / (1 + exp(-x))
        y = x * Phi(x)                                          kind 'gelu', Phi(x) = (1 + erf(x / √2)) / 2
        y = x * (1 + tanh(u)) / 2                               kind 'gelu_tanh', u = √(2/π) (x + 0.044715 x³)
        y = max(x, 0)²                                          kind 'relu2'
        y = (act(a) * b) * p                                    gated kinds, x = [a | b]

    in f32, each operation rounded. act is silu for 'swiglu', gelu for 'geglu', gelu_tanh for 'geglu_tanh',
    max(a, 0) for 'reglu'. The recipe's rule takes this y, which is not rounded to x's dtype first.
    docs/numerics.md section 13 defines every byte.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, K]; for gated kinds [M, 2 H], a row holds the H elements of a,
        then those of b
    recipe : DelayedScaling, CurrentScaling, BlockScaling with blocks of (1, 128), (1, 64) or (1, 32), or
        MXScaling with (1, 32)
    kind : 'silu', 'gelu', 'gelu_tanh', 'relu2', or gated 'swiglu', 'geglu', 'geglu_tanh', 'reglu'
    scale : needed by DelayedScaling: one-element f32 array, or a number
    amax : only with a per-tensor recipe: one-element f32 array, raised to the largest |y| (NaN ignored); not
        zeroed first
    probs, bias, splits, clamp, interleaved : only for gated kinds, as of `swiglu_quantize`: weights p [M],
        biases [2 H] or [E, 2 H] with the experts' rows, a number c that bounds a above and |b|, and rows of
        x that are a0, b0, a1, b1, …
    rowwise, columnwise : directions of y. Column-wise data are stored transposed, except those of MX
    noop : one-element f32 array on the device; nothing is written if it holds 1.0. Needs `out`
    out : an earlier result of the same shape and options (or ``recipe.empty((M, K), …)``); written in place
        and returned. With it the call allocates nothing and can be captured into a CUDA graph, with splits
        once it has been used before

    Returns
    -------
    Quantized of shape [M, K]; of gated kinds [M, H].

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, options and overlaps,
    DeviceError; all before anything is written.

    Source: arXiv 1702.03118 (SiLU), 1606.08415 (GELU), 2109.08668 (squared ReLU), 2002.05202 (gated forms).
    Bytes moved per element: x (of gated kinds 2 of x) + 1 per direction; current scaling reads x twice.
    Fastest from bfloat16 to e4m3; of the gated kinds 'geglu', 'geglu_tanh' and 'reglu' without bias, clamp
    and interleaved.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.activation_quantize(np.array([[-1, 0, 2]], np.float32), fp8.DelayedScaling(), scale=1.0)
    >>> q.data.astype(np.float32).tolist()                                      # -1 * 0.2689, 2 * 0.8808
    [[-0.28125, 0.0, 1.75]]
    >>> x = np.array([[-1, 2, 3, 4]], np.float32)                               # a = -1, 2; b = 3, 4
    >>> q = fp8.activation_quantize(x, fp8.DelayedScaling(), kind="geglu", scale=1.0)
    >>> q.data.astype(np.float32).tolist()                              # -0.1587 * 3, 1.9545 * 4
    [[-0.46875, 8.0]]
    """
    if _is_gated(kind):
        gated = (x, None, recipe, scale, amax, probs, bias, splits, rowwise, columnwise, clamp, "swiglu",
                 interleaved, noop, kind)
        of_both: Quantized = run(swiglu.FORWARD, gated, out)
        return of_both
    given = (x, None, recipe, kind, scale, amax, probs, bias, splits, rowwise, columnwise, clamp, interleaved,
             noop)
    result: Quantized = run(_FORWARD, given, out)
    return result


@overload
def activation_backward_quantize(grad: Array, x: Array, recipe: Recipe, *, kind: UnaryActivation = "silu",
                                 scale: Any = None, amax: Array | None = None, probs: None = None,
                                 bias: None = None, splits: None = None, rowwise: bool = True,
                                 columnwise: bool = False, clamp: None = None, interleaved: bool = False,
                                 noop: Array | None = None, out: Quantized | None = None) -> Quantized: ...
@overload
def activation_backward_quantize(grad: Array, x: Array, recipe: Recipe, *, kind: GatedActivation,
                                 scale: Any = None, amax: Array | None = None, probs: Array | None = None,
                                 bias: Array | None = None, splits: Any = None, rowwise: bool = True,
                                 columnwise: bool = False, clamp: float | None = None,
                                 interleaved: bool = False, noop: Array | None = None,
                                 out: tuple[Quantized, Array | None] | None = None
                                 ) -> tuple[Quantized, TypedArray | None]: ...
def activation_backward_quantize(grad: Array, x: Array, recipe: Recipe, *, kind: Activation = "silu",
                                 scale: Any = None, amax: Array | None = None, probs: Array | None = None,
                                 bias: Array | None = None, splits: Any = None, rowwise: bool = True,
                                 columnwise: bool = False, clamp: float | None = None,
                                 interleaved: bool = False, noop: Array | None = None,
                                 out: Any = None) -> Quantized | tuple[Quantized, TypedArray | None]:
    """The gradient of an activation, quantised by a recipe, from one read of grad and x.

        dx = grad * (sigma * (1 + x * (1 - sigma)))                             kind 'silu'
        dx = grad * (Phi + x * phi)                                             kind 'gelu', phi = Phi'
        dx = grad * (s + x * (s * (1 - s)) * 2 u'), s = (1 + tanh(u)) / 2       kind 'gelu_tanh'
        dx = grad * (2 * max(x, 0))                                             kind 'relu2'
        da = ((g * p) * b) * act'(a);  db = (g * p) * act(a)                    gated kinds, g = grad
        dp = sum over H of (g * act(a)) * b

    in f32, each operation rounded, with the functions of `activation_quantize`. max(a, 0) has the derivative
    0 at 0. da is 0 if `clamp` changed a, and db is 0 if it changed b. dp is summed by a fixed tree.
    docs/numerics.md section 13 defines every byte.

    Parameters
    ----------
    grad : array of x's dtype and of y's shape, the gradient of y
    x, kind, probs, bias, splits, clamp, interleaved : as `activation_quantize` had them
    recipe, scale, amax, rowwise, columnwise, noop, out : as for `activation_quantize`, of the gradient of x;
        of gated kinds out is such a pair as is returned

    Returns
    -------
    Quantized of x's shape; of gated kinds (Quantized of shape [M, 2 H], f32 [M] the gradient of probs, or
    None without probs).

    Raises
    ------
    TypeError, ValueError, DeviceError, as `activation_quantize`; all before anything is written.

    Source: as of `activation_quantize`. Bytes moved per element: grad + x + 1 per direction; of gated kinds,
    per element of grad, grad + 2 of x + 2 per direction.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> grad, x = np.array([[2.0, 1.0]], np.float32), np.array([[0.0, 20.0]], np.float32)
    >>> q = fp8.activation_backward_quantize(grad, x, fp8.DelayedScaling(), scale=1.0)
    >>> q.data.astype(np.float32).tolist()                                      # 2 * 0.5, 1
    [[1.0, 1.0]]
    >>> q, dprobs = fp8.activation_backward_quantize(grad[:, :1], x, fp8.DelayedScaling(), kind="geglu",
    ...                                              scale=1.0, probs=np.ones(1, np.float32))
    >>> q.data.astype(np.float32).tolist(), dprobs.tolist()                     # (2 * 20) * 0.5, 2 * 0; 0
    ([[20.0, 0.0]], [0.0])
    """
    if _is_gated(kind):
        gated = (x, grad, recipe, scale, amax, probs, bias, splits, rowwise, columnwise, clamp, "swiglu",
                 interleaved, noop, kind)
        of_both: tuple[Quantized, TypedArray | None] = run(swiglu.BACKWARD, gated, out)
        return of_both
    given = (x, grad, recipe, kind, scale, amax, probs, bias, splits, rowwise, columnwise, clamp, interleaved,
             noop)
    result: Quantized = run(_BACKWARD, given, out)
    return result


def _is_gated(kind: Any) -> bool:
    return isinstance(kind, str) and kind in GATED


class _Inputs(NamedTuple):
    """grad: of y; with it a call computes the gradient of x. scale: (address, 0) or (0, value)."""

    x: Input
    grad: Input | None
    kind: str
    scale: tuple[int, float]
    amax_at: int
    output: fused.Output
    options: dict[str, Any]


class _Forward(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, grad: Any, recipe: Any, kind: Any, scale: Any, amax: Any,
                  probs: Any, bias: Any, splits: Any, rowwise: Any, columnwise: Any, clamp: Any,
                  interleaved: Any, noop: Any) -> _Inputs:
        x_input = call.read("x", x, INPUT_DTYPES)
        if x_input.array.ndim != 2:
            raise ValueError(f"x: expected shape [M, K], got {x_input.shape}"
                             f"{matrix_instead(x_input.shape, 'x', batch=False)}")
        rows, columns = x_input.shape
        choice(kind, "kind", ACTIVATIONS)
        _refuse(kind, {"probs": probs, "bias": bias, "splits": splits, "clamp": clamp}, interleaved)
        output = fused.output_of((rows, columns), x_input.dtype, recipe, rowwise, columnwise)
        grad_input = self.read_grad(call, x_input, grad)
        call.noop(noop)
        check_scales(recipe, scale, amax)
        given_scale = (0, 0.0) if scale is None else call.scalar("scale", scale)
        amax_at = 0 if amax is None else call.one_f32("amax", amax, updated=True)
        options = {"kind": kind, "scale": scale, "amax": amax, "rowwise": rowwise, "columnwise": columnwise}
        return _Inputs(x_input, grad_input, kind, given_scale, amax_at, output, options)

    def read_grad(self, call: Call, x: Input, grad: Any) -> Input | None:
        return None

    def result(self, inputs: _Inputs) -> QuantizedResult:
        return inputs.output.result

    def reference(self, inputs: _Inputs) -> Any:
        return reference.activation_quantize(inputs.x.array, inputs.output.recipe, **inputs.options)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        assert isinstance(call.result, QuantizedResult)
        x, output, grad_at = inputs.x, inputs.output, inputs.grad.at if inputs.grad else 0
        destinations = output.destinations(call.result, written)
        (rows, columns), wide = x.shape, fused.is_wide(output, destinations, x.shape[1], x.at | grad_at)
        members = {"x": x.at, "grad": grad_at, "noop": call.noop_at, "rows": rows, "columns": columns,
                   "flags": fused.WIDE_FLAG * wide}
        paths = (PLAIN, ANY) if wide and not output.divides else (ANY,)
        values = fused.Values(x.array, inputs.grad is not None, columns, members, paths, output,
                              inputs.amax_at, inputs.scale)
        yield from fused.launches(call, _SOURCES[inputs.kind], values, destinations)


class _Backward(_Forward):
    def read_grad(self, call: Call, x: Input, grad: Any) -> Input:
        return call.read("grad", grad, (x.dtype,), x.shape, "x's shape")

    def reference(self, inputs: _Inputs) -> Any:
        assert inputs.grad
        return reference.activation_backward_quantize(inputs.grad.array, inputs.x.array,
                                                      inputs.output.recipe, **inputs.options)


_FORWARD, _BACKWARD = _Forward(), _Backward()


def _refuse(kind: str, given: dict[str, Any], interleaved: Any) -> None:
    """Raise ValueError for arguments of gated kinds only."""
    flag(interleaved, "interleaved")
    for name in [name for name, value in given.items() if value is not None] + ["interleaved"] * interleaved:
        raise ValueError(f"{name}: kind {kind!r} has no second factor and no such option; the gated kinds "
                         f"{GATED} have")


def _has_path(program: fused.Program, dtype: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """SiLU: fast programs for bf16, and for everything to e4m3."""
    return program.path == ANY or (program.path == PLAIN and (dtype == bfloat16 or to == float8_e4m3fn))


def _has_quick_path(program: fused.Program, dtype: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """Other kinds: fast programs for bf16 to e4m3, and for gradients in e5m2."""
    return program.path == ANY or (program.path == PLAIN and dtype == bfloat16
                                   and (to == float8_e4m3fn or program.backward))


_SOURCES: dict[str, fused.Source] = {
    kind: fused.Source("activation", 1, _has_path if kind == "silu" else _has_quick_path, kind)
    for kind in UNARY}


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch. All kinds have the same programs for path any."""
    yield from row_segments.rows_variants()
    sources = *_SOURCES.values(), *swiglu_launches.SOURCES.values()
    yield from dict.fromkeys(variant for source in sources for variant in source.variants())
