"""Gated activations and quantisation from a single read: SwiGLU for users, arguments and results for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from ... import reference
from ...advice import matrix_instead, shown
from ...arrays import Array, is_array
from ...calls import group_sizes
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Pair, one_array
from ...calls.group_sizes import Groups
from ...formats import INPUT_DTYPES, choice, flag, float32
from ...kernels import Launch
from ...recipes import Recipe, check_scales
from ...results import Quantized
from ...typed_array import TypedArray
from .fused import output_of
from .quantized_result import QuantizedResult
from .swiglu_launches import Inputs, launches
from .swiglu_launches import variants as variants

Form: TypeAlias = Literal["swiglu", "gpt_oss"]
FORMS: tuple[Form, ...] = get_args(Form)


def swiglu_quantize(x: Array, recipe: Recipe, *, scale: Any = None, amax: Array | None = None,
                    probs: Array | None = None, bias: Array | None = None, splits: Any = None,
                    rowwise: bool = True, columnwise: bool = False, clamp: float | None = None,
                    form: Form = "swiglu", interleaved: bool = False, noop: Array | None = None,
                    out: Quantized | None = None) -> Quantized:
    """SwiGLU of both halves of x, quantised by a recipe, from one read of x.

        y = ((a * sigma(a)) * b) * p                               form 'swiglu', sigma(a) = 1 / (1 + exp(-a))
        y = ((a * sigma(1.702 * a)) * (b + 1)) * p                  form 'gpt_oss'

    in f32, each operation rounded. The recipe's rule takes this y, which is not rounded to x's dtype first.
    docs/numerics.md section 9 defines every byte, and every bit of exp.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, 2 H]; a row holds the H elements of a, then those of b
    recipe : DelayedScaling, CurrentScaling, BlockScaling with blocks of (1, 128), (1, 64) or (1, 32), or
        MXScaling with (1, 32)
    scale : needed by DelayedScaling: one-element f32 array, or a number
    amax : only with a per-tensor recipe: one-element f32 array, raised to the largest |y| (NaN ignored); not
        zeroed first
    probs : f32 array [M], the weight p of each row
    bias : array [2 H] of x's dtype, in the order of x's columns; added to every row first. Or [E, 2 H], one
        for each expert, with `splits`
    splits : how many rows each of E experts has; the experts follow one another. An int32 or int64 array [E]
        of x's kind, or a list. Rows after the last expert (memory allocated for the worst case) get no bias.
        A small launch finds each block's rows first
    rowwise, columnwise : directions of y, [M, H]. Column-wise data are stored transposed, except those of MX
    clamp : a number c above 0: a is at most c, b at most c and at least -c (after the bias; NaN stays)
    form : 'swiglu' or 'gpt_oss'
    interleaved : a row of x is a0, b0, a1, b1, …; so is bias
    noop : one-element f32 array on the device; nothing is written if it holds 1.0. Needs `out`
    out : an earlier result of the same shape and options (or ``recipe.empty((M, H), …)``); written in place
        and returned. With it the call allocates nothing and can be captured into a CUDA graph, with splits
        once it has been used before

    Returns
    -------
    Quantized of shape [M, H].

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, options and overlaps,
    DeviceError; all before anything is written. Wrong splits on the device raise nothing, but `device_errors`
    reports them: a negative size counts as 0, and an expert that passes the last row ends there.

    Source: arXiv 2002.05202 (SwiGLU); gpt-oss; TransformerEngine; FP8-Flow-MoE. Bytes moved per element of y:
    2 of x + 1 per direction; current scaling reads x twice.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.swiglu_quantize(np.array([[0, 2, 3, 5]], np.float32), fp8.DelayedScaling(), scale=1.0)
    >>> q.data.astype(np.float32).tolist()                          # 0 * 0.5 * 3, 2 * 0.8808 * 5
    [[0.0, 9.0]]
    >>> x, bias = np.ones((3, 2), np.float32), np.float32([[0, 2], [4, 5]])
    >>> q = fp8.swiglu_quantize(x, fp8.DelayedScaling(), scale=1.0, bias=bias, splits=[1, 1])
    >>> q.data.astype(np.float32).tolist()
    [[2.25], [30.0], [0.75]]
    """
    given = (x, None, recipe, scale, amax, probs, bias, splits, rowwise, columnwise, clamp, form, interleaved,
             noop, "swiglu")
    result: Quantized = run(FORWARD, given, out)
    return result


def swiglu_backward_quantize(grad: Array, x: Array, recipe: Recipe, *, scale: Any = None,
                             amax: Array | None = None, probs: Array | None = None, bias: Array | None = None,
                             splits: Any = None, rowwise: bool = True, columnwise: bool = False,
                             clamp: float | None = None, form: Form = "swiglu", interleaved: bool = False,
                             noop: Array | None = None, out: tuple[Quantized, Array | None] | None = None
                             ) -> tuple[Quantized, TypedArray | None]:
    """The gradients of SwiGLU, quantised by a recipe, from one read of grad and x.

        da = ((g * p) * b) * (sigma * (1 + a * (1 - sigma)))
        db = (g * p) * (a * sigma)
        dp = sum over H of (g * (a * sigma)) * b

    in f32, each operation rounded, with the sigma of `swiglu_quantize`. dp is summed by a fixed tree, so its
    bytes depend only on the arguments. For 'gpt_oss' sigma is that of 1.702 * a, 1.702 * a replaces the a
    before (1 - sigma), and b + 1 replaces b. da is 0 if `clamp` changed a, and db is 0 if it changed b.
    docs/numerics.md section 9 defines every byte.

    Parameters
    ----------
    grad : array [M, H] of x's dtype, the gradient of y
    x, probs, bias, splits, clamp, form, interleaved : as `swiglu_quantize` had them
    recipe, scale, amax, rowwise, columnwise, noop : as for `swiglu_quantize`, of the gradient [da | db] of x
        (interleaved: da0, db0, …)
    out : an earlier result of the same shape and options; written in place and returned. With it the call
        allocates nothing and can be captured into a CUDA graph, once it has been used before

    Returns
    -------
    (Quantized of shape [M, 2 H], f32 [M] the gradient of probs, or None without probs).

    Raises
    ------
    TypeError, ValueError, DeviceError, as `swiglu_quantize`; all before anything is written.

    Source: TransformerEngine; FP8-Flow-MoE. Bytes moved per element of grad: grad + 2 of x + 2 per direction.
    The gradient of probs takes another launch for more than 128 tiles of 128 rows and 128 columns of grad
    (interleaved: 64 columns), or more than 64 of them side by side.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> grad, x = np.array([[1.0]], np.float32), np.array([[0.0, 2.0]], np.float32)
    >>> probs = np.ones(1, np.float32)
    >>> q, dprobs = fp8.swiglu_backward_quantize(grad, x, fp8.DelayedScaling(), scale=1.0, probs=probs)
    >>> q.data.astype(np.float32).tolist(), dprobs.tolist()         # 2 * 0.5, 0 * 0.5; 0
    ([[1.0, 0.0]], [0.0])
    """
    given = (x, grad, recipe, scale, amax, probs, bias, splits, rowwise, columnwise, clamp, form, interleaved,
             noop, "swiglu")
    result: tuple[Quantized, Array | None] = run(BACKWARD, given, out)
    return result


# ---- arguments and results ----
class _Forward(Op[Inputs]):
    """Computes y, quantised."""

    def arguments(self, call: Call, x: Any, grad: Any, recipe: Any, scale: Any, amax: Any, probs: Any,
                  bias: Any, splits: Any, rowwise: Any, columnwise: Any, clamp: Any, form: Any,
                  interleaved: Any, noop: Any, kind: Any) -> Inputs:
        x_input = call.read("x", x, INPUT_DTYPES)
        if x_input.array.ndim != 2 or x_input.shape[1] % 2:
            instead = "" if x_input.array.ndim == 2 else matrix_instead(x_input.shape, "x", batch=False)
            raise ValueError(f"x: expected shape [M, 2 H], got {x_input.shape}{instead}")
        output = output_of(self.result_shape(*x_input.shape), x_input.dtype, recipe, rowwise, columnwise)
        grad_input = self.read_grad(call, x_input, grad)
        weights = None if probs is None else call.read("probs", probs, (float32,), x_input.shape[:1])
        groups, biases = _read_bias(call, x_input, bias, splits)
        call.noop(noop)
        limit = clamp_limit(clamp)
        flag(interleaved, "interleaved")
        choice(form, "form", FORMS)
        check_scales(recipe, scale, amax)
        given_scale = (0, 0.0) if scale is None else call.scalar("scale", scale)
        amax_at = 0 if amax is None else call.one_f32("amax", amax, updated=True)
        options = {"scale": scale, "amax": amax, "probs": weights and weights.array,
                   "bias": biases and biases.array, "splits": groups and groups.host, "rowwise": rowwise,
                   "columnwise": columnwise, "clamp": clamp, "interleaved": interleaved}
        return Inputs(x=x_input, grad=grad_input, probs=weights, bias=biases, groups=groups,
                      scale=given_scale, amax_at=amax_at, limit=limit, kind=kind, gpt_oss=form == "gpt_oss",
                      interleaved=bool(interleaved), output=output, options=options)

    def result_shape(self, rows: int, width: int) -> tuple[int, int]:
        return rows, width // 2

    def read_grad(self, call: Call, x: Input, grad: Any) -> Input | None:
        return None

    def result(self, inputs: Inputs) -> Description:
        return inputs.output.result

    def reference(self, inputs: Inputs) -> Any:
        x, recipe = inputs.x.array, inputs.output.recipe
        if inputs.kind != "swiglu":
            return reference.activation_quantize(x, recipe, kind=inputs.kind, **inputs.options)
        return reference.swiglu_quantize(x, recipe, form=_form(inputs), **inputs.options)

    def launches(self, call: Call, inputs: Inputs, *written: int) -> Iterator[Launch]:
        assert isinstance(call.result, QuantizedResult)
        return launches(call, inputs, call.result, written, 0)


class _Backward(_Forward):
    """Computes the gradient of x, quantised, and that of probs."""

    def result_shape(self, rows: int, width: int) -> tuple[int, int]:
        return rows, width

    def read_grad(self, call: Call, x: Input, grad: Any) -> Input:
        return call.read("grad", grad, (x.dtype,), (x.shape[0], x.shape[1] // 2),
                         "the rows of x and half its columns")

    def result(self, inputs: Inputs) -> Description:
        return _Gradients(inputs.output.result, inputs.probs and inputs.probs.shape)

    def reference(self, inputs: Inputs) -> Any:
        assert inputs.grad
        given = inputs.grad.array, inputs.x.array, inputs.output.recipe
        if inputs.kind != "swiglu":
            return reference.activation_backward_quantize(*given, kind=inputs.kind, **inputs.options)
        return reference.swiglu_backward_quantize(*given, form=_form(inputs), **inputs.options)

    def launches(self, call: Call, inputs: Inputs, *written: int) -> Iterator[Launch]:
        assert isinstance(call.result, _Gradients)
        quantised = call.result.first
        dprobs_at = written[-1] if len(written) > len(quantised.arrays) else 0
        return launches(call, inputs, quantised, written[:len(quantised.arrays)], dprobs_at)


class _Gradients(Pair):
    """Description of the gradient of x, quantised, and that of probs, or None."""

    def __init__(self, first: QuantizedResult, probs_shape: tuple[int, ...] | None) -> None:
        dprobs = _Nothing() if probs_shape is None else one_array(probs_shape, float32, "out[1]")
        super().__init__(first, dprobs)
        self.first, self._probs_shape = first, probs_shape

    def for_out(self, out: Any) -> Description:
        if isinstance(out, tuple) and len(out) == 2:            # anything else is refused by `arrays_of`
            if not isinstance(out[0], Quantized):
                raise TypeError("out[0]: expected a Quantized (an earlier result, or recipe.empty(…)), got "
                                f"{type(out[0]).__name__}")
            return _Gradients(self.first.for_out(out[0]), self._probs_shape)
        return self

    def arrays_of(self, out: Any) -> Sequence[Array]:
        arrays = super().arrays_of(out)
        if self._probs_shape is not None and out[1] is None:
            raise ValueError("out[1]: expected an array, since there are probs")
        return arrays


class _Nothing(Description):
    """Description of None: the gradient of probs of a call without probs."""

    def build(self, arrays: Sequence[Array]) -> None:
        return None

    def arrays_of(self, out: Any) -> Sequence[Array]:
        if out is not None:
            raise ValueError("out[1]: expected None, since there are no probs")
        return ()


#: The ops of every gated kind.
FORWARD, BACKWARD = _Forward(), _Backward()


def _form(inputs: Inputs) -> str:
    return "gpt_oss" if inputs.gpt_oss else "swiglu"


def _read_bias(call: Call, x: Input, bias: Any, splits: Any) -> tuple[Groups | None, Input | None]:
    """Read (the rows of experts if these have their own biases, the biases)."""
    several = is_array(bias) and bias.ndim > 1
    if splits is None:
        if several:
            raise ValueError("bias: of several experts needs splits=, the rows of each; one bias for all "
                             "rows has one dimension")
        return None, None if bias is None else call.read("bias", bias, (x.dtype,), x.shape[1:])
    if bias is None or (is_array(bias) and not several):
        raise ValueError("splits: expected a bias [E, 2 H], one for each expert, got "
                         f"{'none' if bias is None else 'one for all rows'}")
    groups = call.splits("splits", splits)
    if groups.host is not None:
        group_sizes.check_at_most(groups.host, x.shape[0])
    return groups, call.read("bias", bias, (x.dtype,), (len(groups.array), *x.shape[1:]))


def clamp_limit(clamp: Any) -> float:
    """Return the largest value of a, in f32. TypeError or ValueError for an invalid clamp."""
    if clamp is None:
        return np.inf
    if not isinstance(clamp, (int, float, np.floating, np.integer)) or isinstance(clamp, bool):
        raise TypeError(f"clamp: expected a number or None, got {shown(clamp)}")
    try:
        with np.errstate(over="ignore", under="ignore"):
            limit = float(np.float32(clamp))
    except OverflowError:
        raise ValueError(f"clamp: an integer of {int(clamp).bit_length()} bits, beyond every float") from None
    if not limit > 0:
        raise ValueError(f"clamp: expected a number above 0 (in float32), got {shown(clamp)}")
    return limit
