"""RMSNorm and LayerNorm with quantisation from a single read. Kernels: kernels_cu/quantize/norm.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args, overload

import numpy as np

from ... import reference
from ...advice import matrix_instead
from ...arrays import Array
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Several, one_array, several
from ...formats import INPUT_DTYPES, DType, bfloat16, choice, flag, float16, float32, lookup, number
from ...kernels import Launch
from ...options import checked_eps
from ...recipes import Recipe, check_scales
from ...results import Quantized
from ...typed_array import TypedArray
from . import fused, norm_launches
from .norm_launches import LAYER, ROUND_THROUGH, Values
from .quantized_result import QuantizedResult

Norm: TypeAlias = Literal["rms", "layer"]
NORMS: tuple[Norm, ...] = get_args(Norm)
_Normed: TypeAlias = (Quantized | tuple[Quantized, TypedArray] | tuple[Quantized, TypedArray, TypedArray]
                      | tuple[Quantized, TypedArray, TypedArray, TypedArray])
_Gradients: TypeAlias = (tuple[Quantized | TypedArray, TypedArray]
                         | tuple[Quantized | TypedArray, TypedArray, TypedArray])
_No: TypeAlias = Literal[False]
_Yes: TypeAlias = Literal[True]

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        eps: float
        weight_offset: float
        scale: Any
        amax: Array | None
        rowwise: bool
        columnwise: bool
        noop: Array | None
        out: Any

    class _NormOptions(_Options, total=False):
        residual: Array | None
        bias: Array | None
        kind: Norm
        round_through: DType | None

    class _BackwardOptions(_Options, total=False):
        rstd: Array | None
        residual_grad: Array | None
        dtype: DType | None


@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: _No = False,
                  return_normed: _No = False, return_rstd: _No = False, **options: Unpack[_NormOptions]
                  ) -> Quantized: ...
@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: _No = False,
                  return_normed: _No = False, return_rstd: _Yes, **options: Unpack[_NormOptions]
                  ) -> tuple[Quantized, TypedArray]: ...
@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: _No = False,
                  return_normed: _Yes, return_rstd: _No = False, **options: Unpack[_NormOptions]
                  ) -> tuple[Quantized, TypedArray]: ...
@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: _Yes,
                  return_normed: _No = False, return_rstd: _No = False, **options: Unpack[_NormOptions]
                  ) -> tuple[Quantized, TypedArray]: ...
@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: _No = False,
                  return_normed: _Yes, return_rstd: _Yes, **options: Unpack[_NormOptions]
                  ) -> tuple[Quantized, TypedArray, TypedArray]: ...
@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: _Yes,
                  return_normed: _No = False, return_rstd: _Yes, **options: Unpack[_NormOptions]
                  ) -> tuple[Quantized, TypedArray, TypedArray]: ...
@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: _Yes,
                  return_normed: _Yes, return_rstd: _No = False, **options: Unpack[_NormOptions]
                  ) -> tuple[Quantized, TypedArray, TypedArray]: ...
@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: _Yes,
                  return_normed: _Yes, return_rstd: _Yes, **options: Unpack[_NormOptions]
                  ) -> tuple[Quantized, TypedArray, TypedArray, TypedArray]: ...
@overload
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, return_residual: bool = False,
                  return_normed: bool = False, return_rstd: bool = False, **options: Unpack[_NormOptions]
                  ) -> _Normed: ...
def norm_quantize(x: Array, weight: Array, recipe: Recipe, *, residual: Array | None = None,
                  bias: Array | None = None, kind: Norm = "rms", eps: float = 1e-6,
                  weight_offset: float = 0.0, round_through: DType | None = None, scale: Any = None,
                  amax: Array | None = None, rowwise: bool = True, columnwise: bool = False,
                  return_residual: bool = False, return_normed: bool = False, return_rstd: bool = False,
                  noop: Array | None = None, out: Any = None) -> _Normed:
    """RMSNorm or LayerNorm of rows, quantised by a recipe, from one read of x.

        z = x [+ residual]
        y = z * rstd * (weight + weight_offset)                         rstd = 1 / sqrt(mean(z²) + eps)
        y = (z - mean(z)) * rstd * (weight + weight_offset) [+ bias]    kind 'layer', rstd from z - mean(z)

    in f32, each operation rounded, sums by the fixed tree. The recipe's rule takes this y. docs/numerics.md
    section 16 defines every byte.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, K]
    weight : array [K] of x's dtype, or float32
    recipe : DelayedScaling, CurrentScaling, BlockScaling with blocks of (1, 128), (1, 64) or (1, 32), or
        MXScaling with (1, 32)
    residual : array of x's dtype and shape, added first; or None
    bias : array of weight's dtype and shape, for kind 'layer'; or None
    kind : 'rms' or 'layer'
    eps : above or equal to 0, rounded to float32
    weight_offset : 1.0 for weights that are stored less one (zero-centred gamma)
    round_through : bfloat16 or float16: y is rounded to it before any amax or cast, and x + residual to x's
        dtype before the norm: the bytes of code that norms and quantises in two steps. None: f32 throughout
    scale : needed by DelayedScaling: one-element f32 array, or a number
    amax : only with a per-tensor recipe: one-element f32 array, raised to the largest |y| (NaN ignored); not
        zeroed first
    rowwise, columnwise : directions of y. Column-wise data are stored transposed, except those of MX
    return_residual : also return x + residual, in x's dtype: the next residual
    return_normed : also return y, in x's dtype
    return_rstd : also return rstd, f32 [M], for `norm_backward_quantize`
    noop : one-element f32 array on the device; nothing is written if it holds 1.0. Needs `out`
    out : an earlier result of the same shape and options; written in place and returned. With it the call
        allocates nothing and can be captured into a CUDA graph, once it has been used before

    Returns
    -------
    Quantized of shape [M, K]; with any return_* a tuple of it and what was asked for, in this order:
    residual, normed, rstd.

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, options and overlaps,
    DeviceError; all before anything is written.

    Source: arXiv 1910.07467 (RMSNorm), 1607.06450 (LayerNorm). Bytes moved per element: x [+ residual], 1 per
    direction, and those of the arrays that are asked for; current scaling reads x twice. K that is no
    multiple of 8, unaligned arrays, rows of more than 16384 elements (in both directions 32768), and
    BlockScaling with profile 'vllm' take one more read.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x, weight = np.array([[3, -4]], np.float32), np.ones(2, np.float32)
    >>> q, rstd = fp8.norm_quantize(x, weight, fp8.DelayedScaling(), scale=1.0, return_rstd=True)
    >>> q.data.astype(np.float32).tolist(), rstd.astype(float).round(4).tolist()        # 3 and -4, by 3.5355
    ([[0.875, -1.125]], [0.2828])
    """
    given = (x, None, weight, recipe, residual, bias, None, kind, eps, weight_offset, round_through, None,
             scale, amax, rowwise, columnwise, return_residual, return_normed, return_rstd, noop)
    return run(_FORWARD, given, out)


@overload
def norm_backward_quantize(grad: Array, x: Array, weight: Array, recipe: Recipe, *,
                           kind: Literal["rms"] = "rms", **options: Unpack[_BackwardOptions]
                           ) -> tuple[Quantized, TypedArray]: ...
@overload
def norm_backward_quantize(grad: Array, x: Array, weight: Array, recipe: Recipe, *, kind: Literal["layer"],
                           **options: Unpack[_BackwardOptions]
                           ) -> tuple[Quantized, TypedArray, TypedArray]: ...
@overload
def norm_backward_quantize(grad: Array, x: Array, weight: Array, recipe: None, *,
                           kind: Literal["rms"] = "rms", **options: Unpack[_BackwardOptions]
                           ) -> tuple[TypedArray, TypedArray]: ...
@overload
def norm_backward_quantize(grad: Array, x: Array, weight: Array, recipe: None, *, kind: Literal["layer"],
                           **options: Unpack[_BackwardOptions]
                           ) -> tuple[TypedArray, TypedArray, TypedArray]: ...
def norm_backward_quantize(grad: Array, x: Array, weight: Array, recipe: Recipe | None, *,
                           rstd: Array | None = None, residual_grad: Array | None = None,
                           kind: Norm = "rms", eps: float = 1e-6, weight_offset: float = 0.0,
                           dtype: DType | None = None, scale: Any = None, amax: Array | None = None,
                           rowwise: bool = True, columnwise: bool = False, noop: Array | None = None,
                           out: Any = None) -> _Gradients:
    """The gradients of RMSNorm or LayerNorm, that of x quantised by a recipe, from one read of grad and x.

        n = x * rstd, or (x - mean(x)) * rstd               gw = grad * (weight + weight_offset)
        dx = rstd * (gw - n * mean(gw * n)) [+ residual_grad]                           kind 'rms'
        dx = rstd * (gw - n * mean(gw * n) - mean(gw)) [+ residual_grad]                kind 'layer'
        dweight = sum over rows of grad * n                 dbias = sum over rows of grad       ('layer')

    in f32, each operation rounded, sums by the fixed tree: the same bytes on every GPU. docs/numerics.md
    section 16 defines every byte.

    Parameters
    ----------
    grad : array of x's dtype and shape, the gradient of y
    x : what was normed, [M, K]: x of `norm_quantize`, or the residual that it returned
    weight, kind, eps, weight_offset : as `norm_quantize` had them
    recipe : as for `norm_quantize`; or None: dx is returned as an array of `dtype`
    rstd : f32 [M] that `norm_quantize` returned: saves a sum. None: found from x
    residual_grad : array of x's dtype and shape, added to dx before it is quantised: the gradient that comes
        past the norm, in a block with a residual connection
    dtype : only without a recipe: x's dtype (None), or float32
    scale, amax, rowwise, columnwise, noop, out : as for `norm_quantize`, of dx

    Returns
    -------
    (dx: Quantized of shape [M, K], or an array; dweight, f32 [K]), and with kind 'layer' dbias, f32 [K].

    Raises
    ------
    TypeError, ValueError, DeviceError, as `norm_quantize`; all before anything is written.

    Source: arXiv 1910.07467, 1607.06450. Bytes moved per element: grad, x [and residual_grad], and those of
    dx; what takes more reads is as for `norm_quantize`, and rows have at most 8192 elements for one read
    row-wise. A second, small launch adds up dweight and dbias.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> grad, x = np.array([[1, 1]], np.float32), np.array([[3, 4]], np.float32)
    >>> weight = np.ones(2, np.float32)
    >>> dx, dweight = fp8.norm_backward_quantize(grad, x, weight, None)
    >>> dx.astype(float).round(4).tolist(), dweight.astype(float).round(4).tolist()
    ([[0.0453, -0.0339]], [0.8485, 1.1314])
    """
    given = (x, grad, weight, recipe, residual_grad, None, rstd, kind, eps, weight_offset, None, dtype, scale,
             amax, rowwise, columnwise, False, False, False, noop)
    return run(_BACKWARD, given, out)


class _Inputs(NamedTuple):
    """options: those of the reference, by name. extras: names, shapes and dtypes of what is returned beside
    the first result."""

    values: Values
    options: dict[str, Any]
    extras: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]


class _Result(Description):
    """Describes a Quantized or an array, alone or in a tuple with arrays."""

    def __init__(self, first: Description,
                 extras: Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> None:
        self.first, self._extras = first, extras
        more = (one_array(shape, dtype, f"out[{i}]") for i, (_, shape, dtype) in enumerate(extras, 1))
        self._all = Several(first, *more)
        super().__init__(*self._all.arrays)

    def build(self, arrays: Sequence[Array]) -> Any:
        return self._all.build(arrays) if self._extras else self.first.build(arrays)

    def for_out(self, out: Any) -> Description:
        if not self._extras:
            return _Result(self.first.for_out(out), ())
        return _Result(self.first.for_out(several(out, 1 + len(self._extras))[0]), self._extras)

    def arrays_of(self, out: Any) -> Sequence[Array]:
        return self._all.arrays_of(out) if self._extras else self.first.arrays_of(out)


class _Forward(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, grad: Any, weight: Any, recipe: Any, residual: Any, bias: Any,
                  rstd: Any, kind: Any, eps: Any, weight_offset: Any, round_through: Any, dtype: Any,
                  scale: Any, amax: Any, rowwise: Any, columnwise: Any, return_residual: Any,
                  return_normed: Any, return_rstd: Any, noop: Any) -> _Inputs:
        x_input = call.read("x", x, INPUT_DTYPES)
        shape, source = _matrix(x_input), x_input.dtype
        choice(kind, "kind", NORMS)
        to = self.array_dtype(recipe, dtype, source)
        output = None if recipe is None and self.backward else fused.output_of(
            shape, source, recipe, rowwise, columnwise)
        weights = call.read("weight", weight, tuple(dict.fromkeys((source, float32))), shape[1:],
                            "one for each column of x")
        like_x = {name: call.read(name, a, (source,), shape, "x's shape") if given else None
                  for name, a, given in (("grad", grad, self.backward),
                                         (self.residual, residual, residual is not None))}
        biases = None if bias is None else self.read_bias(call, bias, weights, kind)
        rstds = None if rstd is None else call.read("rstd", rstd, (float32,), shape[:1],
                                                    "one for each row of x")
        epsilon, offset = checked_eps(eps), number(weight_offset, "weight_offset")
        through = None if round_through is None else lookup(
            round_through, (bfloat16, float16), "round_through").dtype
        call.noop(noop)
        if output is None:
            _check_unscaled(scale, amax, rowwise, columnwise)
        else:
            check_scales(recipe, scale, amax)
        given_scale = (0, 0.0) if scale is None else call.scalar("scale", scale)
        amax_at = 0 if amax is None else call.one_f32("amax", amax, updated=True)
        wanted = _wanted(residual=return_residual, normed=return_normed, rstd=return_rstd)
        if wanted["residual"] and residual is None:
            raise ValueError("return_residual: there is no residual to add; x itself is what is normed")
        values = Values(
            x=x_input, grad=like_x["grad"], residual=like_x[self.residual], weight=weights, bias=biases,
            rstd=rstds, flags=LAYER * (kind == "layer") | ROUND_THROUGH[through], eps=epsilon, offset=offset,
            outputs={}, sums=(0, 0), output=output, dtype=to, scale=given_scale, amax_at=amax_at)
        options = {"kind": kind, "eps": eps, "weight_offset": weight_offset, "scale": scale, "amax": amax,
                   "rowwise": rowwise, "columnwise": columnwise}
        options |= self.more_options(values, through, wanted)
        return _Inputs(values, options, self.extras(values, wanted))

    backward, residual = False, "residual"

    def array_dtype(self, recipe: Any, dtype: Any, source: np.dtype[Any]) -> np.dtype[Any]:
        return source

    def read_bias(self, call: Call, bias: Any, weight: Input, kind: str) -> Input:
        if kind != "layer":
            raise ValueError("bias: RMSNorm has none; kind='layer' has")
        return call.read("bias", bias, (weight.dtype,), weight.shape, "weight's shape")

    def more_options(self, values: Values, through: Any, wanted: dict[str, bool]) -> dict[str, Any]:
        return {"residual": values.residual and values.residual.array,
                "bias": values.bias and values.bias.array, "round_through": through,
                **{f"return_{name}": given for name, given in wanted.items()}}

    def extras(self, values: Values, wanted: dict[str, bool]) -> tuple[Any, ...]:
        shape, dtype = values.x.shape, values.x.dtype
        known = (("residual", "summed", shape, dtype), ("normed", "normed", shape, dtype),
                 ("rstd", "rstd_out", shape[:1], float32))
        return tuple(extra for name, *extra in known if wanted[name])

    def result(self, inputs: _Inputs) -> Description:
        values = inputs.values
        first = (one_array(values.x.shape, values.dtype, "out[0]") if values.output is None
                 else values.output.result)
        return _Result(first, inputs.extras)

    def reference(self, inputs: _Inputs) -> Any:
        v = inputs.values
        assert v.output
        return reference.norm_quantize(v.x.array, v.weight.array, v.output.recipe, **inputs.options)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        assert isinstance(call.result, _Result)
        first = call.result.first
        count, values = len(first.arrays), inputs.values
        names = [name for name, _, _ in inputs.extras]
        more = dict(zip(names, written[count:], strict=True))
        sums = more.pop("dweight", 0), more.pop("dbias", 0)
        if isinstance(first, QuantizedResult):
            assert values.output
            destinations = values.output.destinations(first, written[:count])
        else:
            destinations = {"dx": written[0]}
        yield from norm_launches.launches(call, values._replace(outputs=more, sums=sums), destinations)


class _Backward(_Forward):
    backward, residual = True, "residual_grad"

    def array_dtype(self, recipe: Any, dtype: Any, source: np.dtype[Any]) -> np.dtype[Any]:
        if recipe is not None and dtype is not None:
            raise ValueError("dtype: only without a recipe, which has a dtype of its own")
        allowed = tuple(dict.fromkeys((source, float32)))
        return source if dtype is None else lookup(dtype, allowed, "dtype").dtype

    def more_options(self, values: Values, through: Any, wanted: dict[str, bool]) -> dict[str, Any]:
        return {"rstd": values.rstd and values.rstd.array,
                "residual_grad": values.residual and values.residual.array}

    def extras(self, values: Values, wanted: dict[str, bool]) -> tuple[Any, ...]:
        columns = values.x.shape[1:]
        return (("dweight", columns, float32), ("dbias", columns, float32))[:1 + bool(values.flags & LAYER)]

    def reference(self, inputs: _Inputs) -> Any:
        v = inputs.values
        assert v.grad
        recipe, dtype = (v.output.recipe, None) if v.output else (None, v.dtype)
        return reference.norm_backward_quantize(
            v.grad.array, v.x.array, v.weight.array, recipe, **inputs.options, dtype=dtype)


_FORWARD, _BACKWARD = _Forward(), _Backward()


def _check_unscaled(scale: Any, amax: Any, rowwise: Any, columnwise: Any) -> None:
    for name, given in (("scale", scale), ("amax", amax)):
        if given is not None:
            raise ValueError(f"{name}: only with a recipe; without one dx is not scaled")
    if not flag(rowwise, "rowwise") or flag(columnwise, "columnwise"):
        raise ValueError("rowwise, columnwise: only with a recipe; without one dx is an array of x's shape")


def _matrix(x: Input) -> tuple[int, int]:
    """The shape [M, K] of x."""
    if x.array.ndim != 2:
        raise ValueError(f"x: expected shape [M, K], got {x.shape}"
                         f"{matrix_instead(x.shape, 'x', batch=False)}")
    return x.shape[0], x.shape[1]


def _wanted(**given: Any) -> dict[str, bool]:
    """The flags return_*, by what they return."""
    return {name: flag(value, f"return_{name}") for name, value in given.items()}


variants = norm_launches.variants
