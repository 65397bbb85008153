"""Checks of the layer's calls, all before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import backend
from ..advice import listed, shown, type_name
from ..arrays import Array, aligned_address, is_array, is_contiguous
from ..calls import group_sizes, memory, validate
from ..formats import INPUT_DTYPES, float32, names
from ..ops.convert.scaling_aware import check_powers_of_two
from ..options import block_pow2
from ..recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, check_recipe
from ..reference.scales.convert import rows_of_scales
from ..results import Quantized, Scaled
from .dataflow import DATAFLOWS, GROUP
from .step import Buffers, Saved, ranges_of
from .weights import kind

if TYPE_CHECKING:
    from .experts import Experts


def recipe(given: Any, dataflow: str) -> None:
    if isinstance(given, MXScaling):
        raise TypeError("recipe: expected a BlockScaling, CurrentScaling or DelayedScaling, got MXScaling; "
                        "there are no products of groups of MX blocks")
    check_recipe(given, (BlockScaling, CurrentScaling, DelayedScaling))
    if not isinstance(given, BlockScaling):
        return
    if given.block != (1, GROUP) or given.scale_layout not in ("gemm_ready", "compact"):
        raise ValueError(f"recipe: expected blocks of {(1, GROUP)} with gemm_ready or compact scales, got "
                         f"{given}")
    if dataflow == "casting_free" and not block_pow2(given.pow2_scale, given.profile):
        raise ValueError("recipe: the casting-free dataflow moves exponents, so scales are powers of two; "
                         f"expected pow2_scale=True, got {given}; or dataflow="
                         f"{listed([repr(each) for each in DATAFLOWS[1:]])}")


def tokens(experts: Experts, x: Any, name: str, shape: tuple[int | None, int], *,
           dispatched: bool = False) -> None:
    """Check tokens as `forward` takes them, or rows as they are dispatched."""
    flow, xp = experts._flow, experts._xp
    quantised = isinstance(x, (Scaled, Quantized))
    if quantised and not flow.dispatches_fp8:
        raise TypeError(f"{name}: expected an array, which {experts.dataflow!r} quantises in both "
                        f"directions once it is permuted, got a {type(x).__name__}")
    if dispatched and flow.dispatches_fp8 and not quantised:
        raise TypeError(f"{name}: expected rows in FP8 (a Scaled), got {type_name(x)}; quantise them with "
                        "the recipe before the dispatch")
    if quantised:
        row = x._row if isinstance(x, Quantized) else x
        block = (1, GROUP) if flow.blocks else None
        if row is None or row.transposed or row.block != block or row.splits is not None:
            raise ValueError(f"{name}: expected row-wise data with "
                             f"{'blocks ' + str(block) if block else 'one scale'}, got {x!r}")
        array, given = row.data, row.shape
    else:
        backend.require_module(x, xp, name)
        array, given = x, x.shape
        if x.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name}: expected {names(INPUT_DTYPES)}, got {x.dtype}")
    backend.require_module(array, xp, name)
    if len(given) != 2 or given[1] != shape[1] or shape[0] not in (None, given[0]):
        wanted = f"({'rows' if shape[0] is None else shape[0]}, {shape[1]})"
        raise ValueError(f"{name}: expected shape {wanted}, got {given}")


def alignment(experts: Experts, align: int, name: str) -> None:
    if experts._flow.blocks and align % GROUP and not experts._flow.transposes_rows:
        raise ValueError(f"{name}: expected align={GROUP}, since {experts.dataflow!r} makes blocks of "
                         f"columns across groups, got {align}")


def splits(experts: Experts, given: Any, rows: Any, align: int) -> Array:
    """Return the experts' numbers of rows, on the device of the rows; a list is copied there. Values of a
    device array are not checked."""
    if not is_array(given) and not isinstance(given, (list, tuple)):
        raise TypeError(f"splits: expected the sizes of {experts.num_experts} experts, an int32 or int64 "
                        f"array or a list, got {shown(given)}")
    if is_array(given) and given.ndim != 1:
        raise ValueError(f"splits: expected the sizes of {experts.num_experts} experts, got shape "
                         f"{given.shape}")
    groups = group_sizes.read(given, kind(rows), experts._xp, False)
    if groups.number != experts.num_experts:
        raise ValueError(f"splits: expected the sizes of {experts.num_experts} experts, got {groups.number}")
    if groups.host is not None:
        group_sizes.check_at_most(groups.host, rows.shape[0])
        if (wrong := groups.host[groups.host % align != 0]).size:
            raise ValueError(f"splits: expected multiples of align={align}, got {wrong[0]}; "
                             "align=1 takes any sizes")
    sizes: Array = groups.array
    return sizes


def powers_of_two(experts: Experts, x: Any, name: str, sizes: Any = None) -> None:
    """Check scales on the host, if columns of x will be made by moving exponents: those of the rows of
    groups. On the device kernels note wrong scales."""
    if isinstance(x, Quantized):
        x = x.rowwise
    if (experts.dataflow == "casting_free" and isinstance(x, Scaled) and x.block is not None
            and isinstance(x.scale_inv, np.ndarray)):
        rows = None if sizes is None else int(sizes.sum(dtype=np.int64))
        check_powers_of_two(rows_of_scales(x)[:rows], name)


def probs(experts: Experts, given: Any, name: str, *shapes: tuple[int, ...]) -> None:
    if given is None:
        return
    backend.require_module(given, experts._xp, name)
    if given.dtype != float32 or given.shape not in shapes:
        wanted = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name}: expected a float32 array of shape {wanted}, got {given.dtype} "
                         f"{given.shape}")


def dispatched(experts: Experts, x: Any) -> str:
    """Return the dtype in which tokens or rows are dispatched."""
    quantised = isinstance(x, (Scaled, Quantized))
    return str(experts.recipe.dtype if experts._flow.dispatches_fp8 and not quantised else kind(x).dtype)


def buffers(experts: Experts, out: Any, x: Any, **facts: Any) -> None:
    """facts: what the buffers were made for, beside the dtype of x."""
    if out is None:
        return
    if not isinstance(out, Buffers):
        raise TypeError(f"out: expected Buffers, as empty() makes them, got {type_name(out)}")
    if out._owner is not experts:
        raise ValueError("out: these buffers belong to another layer")
    _facts(out, **facts, x_dtype=dispatched(experts, x))


def _facts(out: Buffers, **facts: Any) -> None:
    for name, value in facts.items():
        if out._facts[name] != value:
            raise ValueError(f"out: made for {name}={out._facts[name]}, got {name}={value}")


def separate(out: Buffers | None, **inputs: Any) -> None:
    """Check that no input of a forward pass is among the arrays that it writes."""
    if out is not None:
        for name, given in inputs.items():
            for start, end, _, _ in ranges_of(given, name):
                out._all.check(start, end, name)


def saved(experts: Experts, given: Any, out: Any, *, of_rows: bool) -> Saved:
    if not isinstance(given, Saved):
        what = "None, since forward kept nothing (keep=None)" if given is None else type_name(given)
        raise TypeError(f"saved: expected what forward returned, got {what}")
    if given.experts is not experts:
        raise ValueError("saved: belongs to another layer")
    if given.weights != experts._updates:
        raise ValueError("saved: the weights have been updated since that forward pass")
    if given.keep != "bf16" and given.scales != experts._scale_updates:
        raise ValueError("saved: the state's scales have been updated since that forward pass, whose "
                         "activation is to be computed again; keep='bf16' keeps it")
    if of_rows == (given.routing is not None):
        right, got = ("backward", "forward") if of_rows else ("backward_rows", "forward_rows")
        raise ValueError(f"saved: comes from {got}, whose gradients {right} computes")
    if given.routing is not None and given.routing._written != given.routed:
        raise ValueError("saved: its routing has been written again since that forward pass")
    if given.buffers is not out:
        had = "no buffers" if given.buffers is None else "the buffers"
        raise ValueError(f"out: expected {had} that the forward pass had")
    if out is not None and out._step != given.step:
        raise ValueError("saved: a later forward pass has written its buffers")
    return given


def function(given: Any, name: str, of: str) -> None:
    if given is not None and not callable(given):
        raise TypeError(f"{name}: expected a function of the {of}, got {type_name(given)}")


def gradient(experts: Experts, grad: Any, name: str, held: Saved, accumulate: Any) -> None:
    """grad: already checked by `tokens`; held: the result of `saved`."""
    powers_of_two(experts, grad, name, None if held.routing else held.splits)
    if held.buffers is not None:
        _facts(held.buffers, accumulate=accumulate is not None, grad_dtype=dispatched(experts, grad))
        for start, end, _, _ in ranges_of(grad, name):
            held.buffers._of_backward.check(start, end, name)
    if accumulate is None:
        return
    sums = _accumulate(experts, accumulate)
    for start, end, _, of_sum in sums:
        experts._occupied.check(start, end, of_sum)
        if held.buffers is not None:
            held.buffers._all.check(start, end, of_sum)
    given = [*ranges_of(grad, name)]
    of_layer = (held.hidden, held.activation) if held.buffers is None else ()
    for each in (*of_layer, held.tokens, held.rows, held.probs, held.row_probs, held.splits):
        given += ranges_of(each, "saved")
    if held.routing is not None:
        given += ranges_of(tuple(held.routing._arrays().values()), "the routing")
    memory.check_separate([*sums, *given])


def _accumulate(experts: Experts, accumulate: Any) -> list[memory.Range]:
    """Check the arrays and return their memory. (An op would find a mistake in the second only after the
    first had been added to.)"""
    if not isinstance(accumulate, (tuple, list)) or len(accumulate) != 2:
        raise TypeError(f"accumulate: expected two arrays, for up and down, got {shown(accumulate)}")
    found = []
    for part, a, held in zip(("up", "down"), accumulate, experts._held, strict=True):
        name = f"accumulate ({part})"
        backend.require_module(a, experts._xp, name)
        if a.dtype != float32 or a.shape != held.shape or not is_contiguous(a):
            raise ValueError(f"{name}: expected a C-contiguous float32 array of shape {held.shape}, got "
                             f"{a.dtype} {a.shape}")
        validate.check_writeable(a, name)
        at = aligned_address(a, name)
        if experts._xp is not np:
            backend.same_device(a, held.rowwise.data, name)
        found.append(memory.Range(at, at + a.nbytes, True, name))
    return found
