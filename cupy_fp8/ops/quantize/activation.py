"""Activations and quantisation from a single read. Kernels: kernels_cu/quantize/activation.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ... import reference
from ...arrays import Array
from ...calls.call import Call, Input, Op, run
from ...formats import INPUT_DTYPES, bfloat16, choice, float8_e4m3fn
from ...kernels import Launch, Variant
from ...recipes import Recipe, check_scales
from ...results import Quantized
from . import fused
from .fused import ANY, PLAIN
from .quantized_result import QuantizedResult

Activation: TypeAlias = Literal["silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def activation_quantize(x: Array, recipe: Recipe, *, kind: Activation = "silu", scale: Any = None,
                        amax: Array | None = None, rowwise: bool = True, columnwise: bool = False,
                        noop: Array | None = None, out: Quantized | None = None) -> Quantized:
    """An activation of x, quantised by a recipe, from one read of x.

        y = x * sigma(x)                                        kind 'silu', sigma(x) = 1 / (1 + exp(-x))

    in f32, each operation rounded. The recipe's rule takes this y, which is not rounded to x's dtype first.
    docs/numerics.md section 13 defines every byte. `swiglu_quantize` has the gated form.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, K]
    recipe : DelayedScaling, CurrentScaling, BlockScaling with blocks of (1, 128), (1, 64) or (1, 32), or
        MXScaling with (1, 32)
    kind : 'silu'
    scale : needed by DelayedScaling: one-element f32 array, or a number
    amax : only with a per-tensor recipe: one-element f32 array, raised to the largest |y| (NaN ignored); not
        zeroed first
    rowwise, columnwise : directions of y. Column-wise data are stored transposed, except those of MX
    noop : one-element f32 array on the device; nothing is written if it holds 1.0. Needs `out`
    out : an earlier result of the same shape and options (or ``recipe.empty((M, K), …)``); written in place
        and returned. With it the call allocates nothing and can be captured into a CUDA graph

    Returns
    -------
    Quantized of shape [M, K].

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, options and overlaps,
    DeviceError; all before anything is written.

    Source: arXiv 1702.03118 (SiLU). Bytes moved per element: x + 1 per direction; current scaling reads x
    twice.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.activation_quantize(np.array([[-1, 0, 2]], np.float32), fp8.DelayedScaling(), scale=1.0)
    >>> q.data.astype(np.float32).tolist()                                      # -1 * 0.2689, 2 * 0.8808
    [[-0.28125, 0.0, 1.75]]
    """
    result: Quantized = run(_FORWARD, (x, None, recipe, kind, scale, amax, rowwise, columnwise, noop), out)
    return result


def activation_backward_quantize(grad: Array, x: Array, recipe: Recipe, *, kind: Activation = "silu",
                                 scale: Any = None, amax: Array | None = None, rowwise: bool = True,
                                 columnwise: bool = False, noop: Array | None = None,
                                 out: Quantized | None = None) -> Quantized:
    """The gradient of an activation, quantised by a recipe, from one read of grad and x.

        dx = grad * (sigma * (1 + x * (1 - sigma)))                             kind 'silu'

    in f32, each operation rounded, with the sigma of `activation_quantize`. docs/numerics.md section 13
    defines every byte.

    Parameters
    ----------
    grad : array of x's dtype and shape, the gradient of y
    x, kind : as `activation_quantize` had them
    recipe, scale, amax, rowwise, columnwise, noop, out : as for `activation_quantize`, of the gradient of x

    Returns
    -------
    Quantized of shape [M, K].

    Raises
    ------
    TypeError, ValueError, DeviceError, as `activation_quantize`; all before anything is written.

    Source: arXiv 1702.03118. Bytes moved per element: grad + x + 1 per direction.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> grad, x = np.array([[2.0, 1.0]], np.float32), np.array([[0.0, 20.0]], np.float32)
    >>> q = fp8.activation_backward_quantize(grad, x, fp8.DelayedScaling(), scale=1.0)
    >>> q.data.astype(np.float32).tolist()                                      # 2 * 0.5, 1
    [[1.0, 1.0]]
    """
    result: Quantized = run(_BACKWARD, (x, grad, recipe, kind, scale, amax, rowwise, columnwise, noop), out)
    return result


class _Inputs(NamedTuple):
    """grad: of y; a call with it computes that of x. scale: (address, 0) or (0, value)."""

    x: Input
    grad: Input | None
    kind: str
    scale: tuple[int, float]
    amax_at: int
    output: fused.Output
    options: dict[str, Any]


class _Forward(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, grad: Any, recipe: Any, kind: Any, scale: Any, amax: Any,
                  rowwise: Any, columnwise: Any, noop: Any) -> _Inputs:
        x_input = call.read("x", x, INPUT_DTYPES)
        if x_input.array.ndim != 2:
            raise ValueError(f"x: expected shape [M, K], got {x_input.shape}")
        rows, columns = x_input.shape
        choice(kind, "kind", ACTIVATIONS)
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


def _has_path(program: fused.Program, dtype: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """bf16, and everything to e4m3, has fast programs."""
    return program.path == ANY or (program.path == PLAIN and (dtype == bfloat16 or to == float8_e4m3fn))


#: The define ACT is a struct of kernels_cu/include/source: SomeName of the kind some_name.
_SOURCES: dict[str, fused.Source] = {
    kind: fused.Source("activation", 1, _has_path, ACT="".join(map(str.capitalize, kind.split("_"))))
    for kind in ACTIVATIONS}


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch."""
    for source in _SOURCES.values():
        yield from source.variants()
