"""The layer: one call forward, one call backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, overload

from .. import backend
from ..advice import Absent, renamed, without_rest
from ..arrays import Array
from ..calls.group_sizes import check_align
from ..calls.memory import Occupied
from ..formats import INPUT_DTYPES, DType, bfloat16, choice, flag, lookup
from ..gate import Gate
from ..ops.convert.dequantize import dequantize
from ..ops.matmul.grouped import grouped_matmul_nt
from ..ops.moe.permute import permute_backward, unpermute
from ..ops.quantize.swiglu import FORMS, Form, clamp_limit, swiglu_backward_quantize, swiglu_quantize
from ..recipes import BlockScaling, DelayedScaling, Recipe, quantize
from ..results import Quantized, Scaled
from ..routing import Routing
from ..state import DelayedScalingState
from ..typed_array import TypedArray
from . import buffers, checks, typed, weights
from .biases import Biases
from .dataflow import DATAFLOWS, FLOWS, GROUP, KEEPS, Dataflow, Keep
from .routed import Routed
from .step import Buffers, Calls, Saved, Unique, ranges_of
from .typed import Gradients

_HIDDEN = BlockScaling((1, GROUP), pow2_scale=True, scale_layout="compact")    # h is widened exactly
#: What has a scale and an amax history under delayed scaling, in this order.
TENSORS = ("x", "activation", "grad", "hidden_grad", "up", "down")


class Experts(Unique, Generic[Gradients]):
    """The experts of a mixture of experts, with FP8 from the dispatch to the weight gradients.

        h = x · upᵀ        a, b = the halves of h        y = Σ_k (act(a, b) · p_k) · downᵀ

    for each token and its k experts, p_k before the second product; biases add up_bias to h, and p_k ·
    down_bias to a token's term. Forward and backward quantise four times (x, the activation, the gradients of
    y and of h) and dequantise nothing: each value is rounded to FP8 once, before its dispatch or in the
    launch that computes it; along the other axis `scaling_aware_transpose` moves exponents alone.

    Parameters
    ----------
    up, down : the weights [E, 2 F, H] and [E, H, F]: bfloat16, float16 or float32 arrays, which are quantised
        in both directions from one read; or a `Scaled` of an FP8 checkpoint (blocks of 128 x 128, or one
        scale), which is taken as it is: without a copy, so it must not change
    recipe : BlockScaling with blocks of (1, 128), whose weights have blocks of 128 x 128; or CurrentScaling
        or DelayedScaling. There are no products of groups of MX blocks
    form, clamp, interleaved : of the activation, as for `swiglu_quantize`
    bias : (up_bias [E, 2 F], down_bias [E, H]), bfloat16, float16 or float32 arrays, either of which may be
        None. The layer copies them; that of `up`, in the order of h's columns, becomes dtype
    dtype : of h, of results and of gradients: bfloat16, float16 or float32
    dataflow : 'casting_free'. To compare with: 'both_directions' dispatches values as they are and quantises
        rows and columns from them, as TransformerEngine does; 'requantize' dispatches FP8, and dequantises
        and quantises again for columns, which rounds twice

    Attributes
    ----------
    num_experts, inner, hidden, up, down : E, F and H; the quantised weights
    state : of DelayedScaling, the DelayedScalingState of x, the activation, the gradients of y and of h, up
        and down; ``state.update()`` ends a step. Else None

    ``route(…, align=128)`` is the fast way to train, ``align=16`` where nothing is kept for gradients (but
    with blocks 'both_directions' and 'requantize' take 128 alone). Nothing waits for the GPU; with `empty`
    nothing is allocated, and a whole step can be captured into a CUDA graph and replayed with other routings.
    The same arguments give the same bytes on every run. NumPy arrays are computed by the references.

    Source: FP8-Flow-MoE (arXiv 2511.02302); DeepSeek-V3 (arXiv 2412.19437); docs/numerics.md section 11.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> experts = fp8.moe.Experts(np.ones((2, 256, 128), np.float32), np.ones((2, 128, 128), np.float32))
    >>> routing = fp8.route(np.array([[0], [1], [1]]), num_experts=2, align=128)
    >>> y, saved = experts.forward(np.ones((3, 128), np.float32), routing, np.ones((3, 1), np.float32))
    >>> y.shape, saved
    ((3, 128), Saved(keep='bf16': rows, hidden, activation, 199,680 bytes))
    """

    _instead = "make another layer, of the same weights: Experts(layer.up, layer.down, layer.recipe, …)"
    dtype_out = Absent("dtype")

    @overload
    def __init__(self: Experts[typed.FourGradients], up: Array, down: Array, recipe: Recipe | None = None, *,
                 bias: None = None, **options: typed.Unpack[typed.Options]) -> None: ...
    @overload
    def __init__(self: Experts[typed.FiveGradients], up: Array, down: Array, recipe: Recipe | None = None, *,
                 bias: tuple[Array | None, Array | None], **options: typed.Unpack[typed.Options]) -> None: ...
    @without_rest
    def __init__(self, up: Array | Scaled | Quantized, down: Array | Scaled | Quantized,
                 recipe: Recipe | None = None, *, form: Form = "swiglu", clamp: float | None = None,
                 interleaved: bool = False, bias: tuple[Array | None, Array | None] | None = None,
                 dtype: DType = bfloat16, dataflow: Dataflow = "casting_free", **former: NoReturn) -> None:
        if former:
            raise renamed("Experts", former, dtype_out="dtype")
        self.recipe = BlockScaling() if recipe is None else recipe
        self.dataflow = choice(dataflow, "dataflow", DATAFLOWS)
        checks.recipe(self.recipe, dataflow)
        clamp_limit(clamp)
        self._activation: dict[str, Any] = {
            "form": choice(form, "form", FORMS), "clamp": clamp,
            "interleaved": flag(interleaved, "interleaved")}
        self.dtype = lookup(dtype, INPUT_DTYPES, "dtype").dtype
        self.num_experts, self.inner, self.hidden = experts, inner, hidden = weights.sizes(up, down)
        array = weights.kind(up)
        self._xp = backend.module_of(array, "up")
        backend.require_module(weights.kind(down), self._xp, "down")
        self._biases = Biases(bias, ((experts, 2 * inner), (experts, hidden)), self.dtype, self._xp)
        self.state: DelayedScalingState | None = None
        if isinstance(self.recipe, DelayedScaling):
            self.state = DelayedScalingState(len(TENSORS), self.recipe, like=array)
        self._scales = {name: self._scale_of(i) for i, name in enumerate(TENSORS)}
        self._weights = weights.recipe_of(self.recipe)
        self._flow = FLOWS[dataflow](self.recipe, self._scales)
        self._own = [not isinstance(given, (Scaled, Quantized)) for given in (up, down)]
        self._held = [weights.take(given, self._weights, **self._scales[name])
                      for given, name in ((up, "up"), (down, "down"))]
        self._updates = 0
        self._find_weights()

    def _find_weights(self) -> None:
        """Note the memory of the weights, to which weight gradients must not be added."""
        self._occupied = Occupied(found for name, held in (
            ("up", self.up), ("down", self.down), ("bias", (self._biases.up, self._biases.down)))
            for found in ranges_of(held, f"the layer's {name}"))

    def _scale_of(self, i: int) -> dict[str, Any]:
        if self.state is None:
            return {}
        return {"scale": self.state.scale[i:i + 1], "amax": self.state.amax_history[0, i:i + 1]}

    @property
    def _scale_updates(self) -> int:
        return 0 if self.state is None else self.state._updates

    @property
    def up(self) -> Quantized:
        """The quantised weights of the first product, in both directions."""
        return self._held[0]

    @property
    def down(self) -> Quantized:
        """The quantised weights of the second product, in both directions."""
        return self._held[1]

    def __repr__(self) -> str:
        biases = f", {self._biases}" if self._biases else ""
        return (f"Experts({self.num_experts} experts, hidden {self.hidden}, inner {self.inner}, "
                f"{self.recipe}, {self.dataflow}, {self._xp.__name__}{biases})")

    # ---- weights ----
    def update(self, up: Array | Scaled | Quantized, down: Array | Scaled | Quantized,
               bias: tuple[Array | None, Array | None] | None = None) -> None:
        """Take new weights of the same shapes, after a step of the optimizer, and new biases: None keeps one.

        Arrays are quantised in place, which can be captured into a CUDA graph: all in one launch for blocks;
        with one scale each weight has its own launches, one for DelayedScaling and one or two for
        CurrentScaling. A Scaled is used as it is, without a copy, as in the constructor. Where an array
        replaces a Scaled, new memory is allocated, once. A forward pass saved before can no longer be used
        for a backward pass. TypeError, ValueError before anything is written.
        """
        given = [up, down]
        for new, held, name in zip(given, self._held, ("up", "down"), strict=True):
            if (shape := weights.check(new, name)) != held.shape:
                raise ValueError(f"{name}: expected shape {held.shape}, as before, got {shape}")
            backend.require_module(weights.kind(new), self._xp, name)
        self._biases.check(bias)
        self._updates += 1
        before = self._held
        self._held = weights.updated(before, self._own, given, self._weights,
                                     [self._scales[name] for name in ("up", "down")])
        self._own = [not isinstance(new, (Scaled, Quantized)) for new in given]
        self._biases.update(bias)
        if any(new is not old for new, old in zip(self._held, before, strict=True)):
            self._find_weights()

    # ---- memory ----
    def empty(self, tokens: int | None = None, topk: int | None = None, *, rows: int | None = None,
              align: int | None = None, probs: bool = True, keep: Keep | None = "bf16",
              accumulate: bool = False, x_dtype: DType | None = None, grad_dtype: DType | None = None
              ) -> Buffers:
        """Allocate every array that a step writes, to pass as `out` to `forward` and `backward`, which then
        allocate nothing. Every launch is made once, over no tokens, so a step can be captured right away.

        tokens, topk, rows, align : those of the step's routing; align None: as the layer routes a Gate. rows
            and align without tokens and topk: for `forward_rows` and `backward_rows` alone, with any align
            that they take, None: 128 (buffers made with tokens serve these too, for as many rows)
        probs : whether the forward pass gets probs
        keep : as `forward` gets it. None: no backward pass
        accumulate : whether the weight gradients are added to arrays of the caller
        x_dtype, grad_dtype : of x and of the gradient of y, where it matters: for a Scaled, whose FP8 type
            may differ from the recipe's (None: the recipe's), and for arrays with 'both_directions' (None:
            dtype)

        A step that differs in any of these is refused. TypeError, ValueError, before anything is allocated.
        """
        return buffers.make(self, {"tokens": tokens, "topk": topk, "rows": rows}, align, x_dtype, grad_dtype,
                            keep, probs=probs, accumulate=accumulate)

    # ---- forward ----
    @overload
    def forward(self, x: Array | Scaled | Quantized, routing: Routing | Gate, probs: Array | None = None, *,
                keep: Keep = "bf16", out: Buffers | None = None) -> tuple[TypedArray, Saved]: ...
    @overload
    def forward(self, x: Array | Scaled | Quantized, routing: Routing | Gate, probs: Array | None = None, *,
                keep: Keep | None, out: Buffers | None = None) -> tuple[TypedArray, Saved | None]: ...
    def forward(self, x: Array | Scaled | Quantized, routing: Routing | Gate, probs: Array | None = None, *,
                keep: Keep | None = "bf16", out: Buffers | None = None
                ) -> tuple[TypedArray, Saved | None]:
        """Compute the outputs of all tokens, and save what `backward` needs.

        Parameters
        ----------
        x : array [T, H]; or (not with 'both_directions') a Scaled [T, H] that the recipe has quantised
            before, for instance on another GPU. 'casting_free' needs power-of-two scales (except for
            keep=None): others are refused on the host, and noted on a device (`device_errors`)
        routing : the result of `route` for T tokens, best with align=128, or with keep=None 16 if the
            dataflow takes it; or a Gate, whose indices are routed so, and whose weights are the probs
        probs : f32 array [T, topk], the weights of a token's experts (for a mask also [T, E]). None: 1
        keep : what is saved. 'bf16': the rows, h and the activation. 'fp8': the tokens and h in blocks of
            1×128; the activation is computed from this h in the forward pass too, with one more rounding.
            'input': the tokens alone; rows, h and the activation are recomputed, with the same bytes as with
            'bf16'. None: nothing, there is no backward pass
        out : buffers of `empty`, whose arrays are written; a step that they hold is lost. x and probs must
            not overlap them

        Returns
        -------
        (y [T, H] of dtype, Saved or None). Raises TypeError, ValueError, DeviceError, before anything is
        written.
        """
        routed = Routed.of(self, routing, probs, keep)
        checks.tokens(self, x, "x", (routed.given.tokens, self.hidden))
        if keep is not None:
            choice(keep, "keep", KEEPS)
            checks.powers_of_two(self, x, "x")
        checks.buffers(self, out, x, **routed.facts, keep=keep)
        checks.separate(out, x=x, **routed.read)
        call = Calls(out, begins=True)
        routes, probs = routed.routing(call), routed.probs
        kept = keep not in (None, "bf16")
        tokens, rows, row_probs = self._flow.send(call, "x", x, routes, probs, keep=kept)
        result, saved = self._forward_rows(call, rows, routes.aligned_splits, row_probs, keep, routes.align,
                                           out)
        y: TypedArray = call("y", unpermute, result, routes)
        if saved is None:
            return y, None
        fields = vars(saved) | {"routing": routes, "routed": routes._written, "probs": probs}
        if kept:
            fields |= {"tokens": tokens, "rows": None, "row_probs": None}
        return y, Saved(**fields)

    @overload
    def forward_rows(self, rows: Array | Scaled, splits: Array, row_probs: Array | None = None, *,
                     keep: Keep = "bf16", align: int = GROUP, out: Buffers | None = None
                     ) -> tuple[TypedArray, Saved]: ...
    @overload
    def forward_rows(self, rows: Array | Scaled, splits: Array, row_probs: Array | None = None, *,
                     keep: Keep | None, align: int = GROUP, out: Buffers | None = None
                     ) -> tuple[TypedArray, Saved | None]: ...
    def forward_rows(self, rows: Array | Scaled, splits: Array, row_probs: Array | None = None, *,
                     keep: Keep | None = "bf16", align: int = GROUP, out: Buffers | None = None
                     ) -> tuple[TypedArray, Saved | None]:
        """Run `forward` on rows that are already permuted, for instance by a dispatch between GPUs.

        rows : as the dataflow dispatches them: a Scaled [R, H], or an array [R, H] with 'both_directions'
        splits : int32 or int64 array [E], the number of rows of each expert, in order. Or a list, which is
            copied to the GPU of CuPy rows
        row_probs : f32 array [R]. None: 1
        align : a power of two that divides all sizes; where it does not (values of a device array are not
            checked) an expert's weight gradients are 0, and `device_errors` tells
        keep, out : as for `forward`; 'fp8' and 'input' keep the rows instead of the tokens. Buffers are those
            of `empty` with rows=R

        rows, splits and row_probs are not copied: they must not change before `backward_rows`. Returns
        (outputs [R, H], Saved or None).
        """
        if keep is not None:
            choice(keep, "keep", KEEPS)
        align = check_align(align)
        checks.alignment(self, align, "align")
        checks.tokens(self, rows, "rows", (None, self.hidden), dispatched=True)
        splits = checks.splits(self, splits, rows, align)
        checks.probs(self, row_probs, "row_probs", (rows.shape[0],))
        if keep is not None:
            checks.powers_of_two(self, rows, "rows", splits)
        checks.buffers(self, out, rows, rows=rows.shape[0], align=align, probs=row_probs is not None,
                       keep=keep)
        checks.separate(out, rows=rows, splits=splits, row_probs=row_probs)
        return self._forward_rows(Calls(out, begins=True), rows, splits, row_probs, keep, align, out)

    def _forward_rows(self, call: Calls, rows: Any, splits: Array, row_probs: Array | None, keep: Keep | None,
                      align: int, buffers: Buffers | None) -> tuple[TypedArray, Saved | None]:
        entered = self._flow.enter(call, "x", rows)
        hidden = call("h", grouped_matmul_nt, entered, self.up, splits, dtype=self.dtype)
        kept: Any = hidden
        if keep == "fp8":
            kept = call("h quantised", quantize, hidden, _HIDDEN)
            hidden = call("h dequantised", dequantize, kept, dtype=self.dtype)
        activation = self._activate(call, hidden, splits, row_probs)
        result = call("rows out", grouped_matmul_nt, activation, self.down, splits, dtype=self.dtype,
                      **self._biases.of_down(row_probs))
        if keep is None:
            return result, None
        return result, Saved(
            self, self._updates, self._scale_updates, keep, splits, align, row_probs,
            rows=entered if keep == "bf16" else rows,
            hidden=None if keep == "input" else kept, activation=activation if keep == "bf16" else None,
            buffers=buffers, step=0 if buffers is None else buffers._step)

    def _activate(self, call: Calls, hidden: Array, splits: Array, row_probs: Array | None) -> Quantized:
        return call("activation", swiglu_quantize, hidden, self.recipe, probs=row_probs,
                    columnwise=self._flow.both, **self._activation, **self._biases.of_up(splits),
                    **self._scales["activation"])

    # ---- backward ----
    def backward(self, grad: Array | Scaled | Quantized, saved: Saved | None, *,
                 accumulate: tuple[Array, Array] | None = None, out: Buffers | None = None) -> Gradients:
        """Compute the gradients of x, of probs and of both weights.

        Parameters
        ----------
        grad : array [T, H], the gradient of y; or a Scaled, as `forward` takes x
        saved : what `forward` returned with it
        accumulate : float32 arrays [E, 2 F, H] and [E, H, F], C-contiguous, to which the weight gradients are
            added, and which are returned. They must not overlap any array of the step
        out : the buffers that `forward` had. Of their arrays grad may only be y, overwritten by the caller

        Returns
        -------
        (dx [T, H], dprobs f32 [T, topk] by slot or None without probs, d_up [E, 2 F, H], d_down [E, H, F]),
        of dtype. With biases a fifth one: (d_up_bias f32 [E, 2 F], d_down_bias f32 [E, H]), None for a
        missing bias, sums of gradients in FP8 (`group_sums`). Raises TypeError, ValueError, DeviceError,
        before anything is written.
        """
        saved = checks.saved(self, saved, out, of_rows=False)
        routing = saved.routing
        assert routing is not None
        checks.tokens(self, grad, "grad", (routing.tokens, self.hidden))
        checks.gradient(self, grad, "grad", saved, accumulate)
        call = Calls(out)
        rows, _ = self._flow.send_both(call, "grad", grad, routing)
        if saved.rows is None:
            again, row_probs = self._flow.send_both(call, "x", saved.tokens, routing, saved.probs)
            saved = Saved(**vars(saved) | {"rows": again, "row_probs": row_probs})
        dx_rows, dp, *others = self._backward_rows(call, rows, saved, accumulate, None)
        made: Any = call("dx", permute_backward, dx_rows, routing, probs_grad=dp)
        return (made, None, *others) if dp is None else (*made, *others)        # type: ignore[return-value]

    def backward_rows(self, grad_rows: Array | Scaled, saved: Saved | None, *,
                      accumulate: tuple[Array, Array] | None = None, out: Buffers | None = None,
                      on_rows: Callable[[TypedArray, TypedArray | None], object] | None = None) -> Gradients:
        """Run `backward` on rows, as `forward_rows` had them: (gradients of the rows [R, H], of row_probs f32
        [R] or None, d_up, d_down; with biases their gradients). on_rows: called with the first two before the
        others are enqueued, for another stream to send them meanwhile. Until then keep both (and `out`)."""
        checks.function(on_rows, "on_rows", "gradients of the rows and of row_probs")
        saved = checks.saved(self, saved, out, of_rows=True)
        assert saved.rows is not None
        checks.tokens(self, grad_rows, "grad_rows", (saved.rows.shape[0], self.hidden), dispatched=True)
        checks.gradient(self, grad_rows, "grad_rows", saved, accumulate)
        return self._backward_rows(Calls(out), grad_rows, saved, accumulate, on_rows)

    def _backward_rows(self, call: Calls, grad_rows: Any, saved: Saved, accumulate: Any, on_rows: Any) -> Any:
        flow, splits = self._flow, saved.splits
        rows, hidden, activation = saved.rows, saved.hidden, saved.activation
        if saved.keep != "bf16":
            rows = flow.enter(call, "x", rows)
        if saved.keep == "fp8":
            hidden = call("h dequantised", dequantize, hidden, dtype=self.dtype)
        elif saved.keep == "input":
            hidden = call("h", grouped_matmul_nt, rows, self.up, splits, dtype=self.dtype)
        if activation is None:
            activation = self._activate(call, hidden, splits, saved.row_probs)
        grads = flow.enter(call, "grad", grad_rows)
        d_activation = call("activation grad", grouped_matmul_nt, grads, self.down.T, splits,
                            dtype=self.dtype)
        both = flow.both or saved.align % GROUP == 0 or not flow.blocks
        d_hidden, dp = call("hidden grad", swiglu_backward_quantize, d_activation, hidden, self.recipe,
                            probs=saved.row_probs, columnwise=both, **self._activation,
                            **self._biases.of_up(splits), **self._scales["hidden_grad"])
        self._biases.add_to_probs(dp, grads, splits)
        dx = call("rows grad", grouped_matmul_nt, d_hidden, self.up.T, splits, dtype=self.dtype)
        if on_rows is not None:
            on_rows(dx, dp)
        d_down = self._weight_grad(call, "down grad", flow.columns(call, "grad", grads, splits),
                                   flow.columns(call, "activation", activation, splits), splits,
                                   saved.align, accumulate and accumulate[1])
        columns = d_hidden.T if both else flow.columns(call, "hidden_grad", d_hidden, splits)
        d_up = self._weight_grad(call, "up grad", columns, flow.columns(call, "x", rows, splits), splits,
                                 saved.align, accumulate and accumulate[0])
        if not self._biases:
            return dx, dp, d_up, d_down
        return dx, dp, d_up, d_down, self._biases.gradients(call, d_hidden, grads, splits, saved.row_probs)

    def _weight_grad(self, call: Calls, name: str, a: Any, b: Any, splits: Any, align: int, into: Any) -> Any:
        if into is not None:
            return grouped_matmul_nt(a, b, splits, group="k", align=align, accumulate=into)
        return call(name, grouped_matmul_nt, a, b, splits, group="k", align=align, dtype=self.dtype)
