"""The experts of a layer, spread over ranks: tokens are sent to the ranks of their experts, and results
back."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args, overload

import numpy as np

from .. import backend
from ..advice import shown, type_name
from ..arrays import Array, empty
from ..formats import INPUT_DTYPES, DType, bfloat16, choice, integer, lookup
from ..kernels import executor_of, sources
from ..layouts import padded_rows
from ..ops.moe.permute import permute, permute_backward, unpermute
from ..ops.moe.route import route
from ..recipes import BlockScaling, Recipe
from ..results import Quantized, Scaled
from ..routing import MOST_EXPERTS, MOST_SLOTS, Routing, as_align
from ..typed_array import TypedArray
from . import slots, tokens
from .direct import Direct
from .errors import RankError
from .exchange import Part
from .layout import INT32, Facts
from .nccl import Nccl
from .routing import RankRouting, Route
from .slots import Split
from .transport import Messages, Transport
from .world import Local, World

_BLOCKS = BlockScaling()
_MOST_SECONDS = 1_000_000
Reduce: TypeAlias = Literal["rank", "exact"]
TransportName: TypeAlias = Literal["auto", "nccl", "p2p"]


class ExpertParallel:
    """Sends tokens to the ranks of their experts, and results back: rank r of R has experts r · E / R to (r +
    1) · E / R - 1. Tokens are quantised *before* they are sent; each is sent once to each rank that has one
    of its experts, and is permuted to the rows of these experts there.

        rows, row_probs = ep.dispatch(x, routing, probs)          # routing = ep.route(topk_ids)
        y_rows, saved = experts.forward_rows(rows, routing.splits, row_probs)
        y = ep.combine(y_rows, routing)

    and backward

        grad_rows = ep.combine_backward(grad, routing)
        dx_rows, row_dprobs, d_up, d_down = experts.backward_rows(grad_rows, saved)
        dx, dprobs = ep.dispatch_backward(dx_rows, row_dprobs, routing)

    Every method is collective: all ranks call the same ones in the same order, also a rank without tokens,
    and a rank makes all calls on one stream, or on streams that wait for each other. Counts stay on the
    device, and nothing waits for it (except with NCCL, see `transport`); with `out` the calls can be captured
    into a CUDA graph, once they have been made before. A rank's rows have the bytes that a single rank with
    all tokens (in the order of the ranks) and these experts would have.

    Parameters
    ----------
    world : from `init`, `from_nccl`, `from_mpi` or `local`; remains the caller's
    num_experts, topk : the experts of all ranks together, a multiple of their number; the experts of a token
    max_tokens, hidden : the most tokens that a rank sends at once (windows are sized for it); values of each
        token
    align : the rows of an expert begin at multiples of it, as for `route`
    rows : the bound of a rank's rows. None: enough for any routing. Routes to rows beyond it are dropped, and
        noted (`device_errors`)
    recipe : how tokens are quantised: BlockScaling with blocks (1, n), MXScaling, or DelayedScaling (whose
        scale must be the same on all ranks): the experts' recipe. None: they are sent unquantised, in `dtype`
    dtype : of results and of gradients, bfloat16, float16 or float32: the experts' dtype
    reduce : 'rank': a rank sums a token's rows in f32, rounds once to dtype and sends the sum; these sums are
        summed in the same way. 'exact': every row comes back, which gives the bytes of one rank, and moves
        more of them (2.2 times as many with 4 ranks, 1.5 with 8, at 8 experts a token)
    transport : 'p2p': kernels write into the memory of other GPUs of the host (CUDA IPC). 'nccl':
        cupy.cuda.nccl sends, to any host; a step first waits for the counts, but in a CUDA graph sends all of
        max_tokens instead (not possible with 'exact'). 'auto': p2p if every rank reaches every other. NumPy
        arrays have their own transport, through the world
    num_sms : the most multiprocessors that the kernel of an exchange takes, so that products run beside it on
        another stream. None: all, which is faster where nothing else runs
    timeout : seconds to wait for a rank
    like : the kind of arrays, as for `empty`; default `cupy_fp8.xp`

    Attributes
    ----------
    world, rank, size, experts : the world, this rank, the number of ranks, and the experts of a rank
    rows, max_tokens : the bounds of a rank's rows, as `Experts.empty` takes it, and of its tokens
    transport : the name of the transport: 'p2p', 'nccl', or 'messages' for NumPy arrays
    nbytes : of this rank's windows, and of NCCL's staging memory

    Raises TypeError, ValueError (also where ranks do not agree), DeviceError (no way to the others),
    RankError.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> def layer(world):
    ...     with fp8.distributed.ExpertParallel(world, num_experts=4, max_tokens=2, hidden=128, topk=1,
    ...                                         like=np) as ep:
    ...         routing = ep.route(np.array([[3], [world.rank]]))
    ...         rows, _ = ep.dispatch(np.ones((2, 128), np.float32), routing)
    ...         return routing.splits.tolist(), rows.shape
    >>> fp8.distributed.local(2).run(layer)
    [([128, 128], (256, 128)), ([0, 128], (256, 128))]
    """

    def __init__(self, world: World, *, num_experts: int, max_tokens: int, hidden: int, topk: int,
                 align: int = 128, rows: int | None = None, recipe: Recipe | None = _BLOCKS,
                 dtype: DType = bfloat16, reduce: Reduce = "rank", transport: TransportName = "auto",
                 num_sms: int | None = None, timeout: float = 30.0, like: Any = None) -> None:
        self._transport: Transport | None = None
        self._failed: RankError | None = None
        given: Any = world
        if not isinstance(given, World):
            instead = "; its run() gives each rank one" if isinstance(given, Local) else ""
            raise TypeError(f"world: expected a World, as init() makes it, got {type_name(given)}{instead}")
        choice(transport, "transport", get_args(TransportName))
        self.world, self.rank, self.size, self._xp = world, world.rank, world.size, backend.like_module(like)
        number, region, width, slots_of_token = (
            _positive(value, name) for value, name in (
                (num_experts, "num_experts"), (max_tokens, "max_tokens"), (hidden, "hidden"), (topk, "topk")))
        if number % self.size:
            raise ValueError(f"num_experts: expected a multiple of the {self.size} ranks, got {number}")
        if max(number, slots_of_token, self.size) > MOST_EXPERTS:
            raise ValueError(f"num_experts, topk: expected at most {MOST_EXPERTS}, got {number} and "
                             f"{slots_of_token} (and {self.size} ranks)")
        if not 0 < timeout <= _MOST_SECONDS:
            raise ValueError(f"timeout: expected up to {_MOST_SECONDS} seconds, got {shown(timeout)}")
        if self.size * region * slots_of_token > MOST_SLOTS:
            raise ValueError(f"max_tokens: {self.size} ranks with {region} tokens of {slots_of_token} slots "
                             "are more slots than int32 counts (2**31 - 1)")
        sms = None if num_sms is None else _positive(num_sms, "num_sms")
        align, self.experts = as_align(align), number // self.size
        self._split = Split(self.size, self.rank, self.experts, region)
        if rows is None:
            rows = padded_rows(self.size * region * slots_of_token, self.experts, align)
        self._facts = Facts(number, region, width, slots_of_token, align, _positive(rows, "rows"), recipe,
                            lookup(dtype, INPUT_DTYPES, "dtype").dtype,
                            choice(reduce, "reduce", get_args(Reduce)) == "exact")
        tokens.check_options(self._facts)
        self.rows, self.max_tokens = self._facts.rows, region
        world.agree({**self._facts._asdict(), "transport": transport, "arrays": self._xp.__name__,
                     "kernels": sources.digest()})
        self._transport = self._connect(transport, sms, timeout)

    def _connect(self, name: TransportName, num_sms: int | None, timeout: float) -> Transport:
        given = self.world, self._facts, self._split
        if self._xp is np:
            return Direct(*given, None, num_sms, timeout) if executor_of(np) == "host" else Messages(*given)
        device = backend.cupy().cuda.runtime.getDevice()
        if name == "nccl":
            return Nccl(*given, device, num_sms, timeout)
        try:
            return Direct(*given, device, num_sms, timeout)
        except backend.DeviceError as error:
            if name == "p2p":
                raise
            reason = str(error)
        try:
            return Nccl(*given, device, num_sms, timeout)
        except backend.DeviceError as error:
            raise backend.DeviceError(f"{reason}; {error}") from None

    @property
    def transport(self) -> str:
        return self._usable().name

    @property
    def nbytes(self) -> int:
        return self._usable().nbytes

    def __repr__(self) -> str:
        kind = "closed" if self._transport is None else self._transport.name
        return (f"ExpertParallel(rank {self.rank} of {self.size}, {self._facts.num_experts} experts, "
                f"{self._facts.max_tokens} tokens x {self._facts.hidden}, {kind})")

    # ---- the way out ----
    def route(self, topk_ids: Array, *, out: RankRouting | None = None) -> RankRouting:
        """Tell the other ranks which tokens they get, and find the rows of those that come here.

        topk_ids : int32 or int64 array [T, topk], the experts (numbered over all ranks) of each of this
            rank's tokens, T from 0 to max_tokens; -1: none
        out : an earlier result for as many tokens, overwritten and returned; needed while a CUDA graph is
            captured

        Returns a RankRouting. Raises TypeError, ValueError, RankError. An index of no expert counts as -1:
        refused in NumPy arrays, noted on the device (`device_errors`).
        """
        transport, facts = self._usable(), self._facts
        tokens.check_ids(topk_ids, facts, self._xp)
        if out is not None and (not isinstance(out, RankRouting) or out.tokens != len(topk_ids)):
            raise ValueError(f"out: expected a RankRouting of {len(topk_ids)} tokens, got {shown(out)}")
        if out is not None:
            self._check_routing(out, "out")
        number, window_rows = facts.num_experts, self.size * facts.max_tokens
        had: Any = out
        experts, ranks = slots.rank_slots(topk_ids, self._split, had and (had.experts, had.ranks))
        sent = route(ranks, num_experts=self.size, rows=window_rows, out=had and had.sent)
        own = None
        if facts.exact:
            own = route(experts, num_experts=number, rows=experts.size, out=had and had.own)
        counts = empty((self.size,), INT32, like=experts) if out is None else had.counts
        came, back, known = self._told(transport.route, Route(experts, sent, own), counts)
        arrived, row_map = slots.arrived_slots(came, counts, back, experts, sent, self._split, had and (
            had.arrived if back is None else (had.arrived, had.back), had.returned.row_map))
        if back is not None:
            arrived, back = arrived
        received = route(arrived, num_experts=self.experts, rows=facts.rows, align=facts.align,
                         out=had and had.received)
        if out is not None:
            out.__dict__["_known"] = known
            return out
        returned = Routing._of_fields(**{**vars(sent), "row_map": row_map})
        made = RankRouting(experts, ranks, sent, counts, arrived, received, returned, own, back)
        made.__dict__.update(_of=self._facts, _known=known)
        return made

    @overload
    def dispatch(self, x: Scaled | Quantized, routing: RankRouting, probs: Array | None = None, *,
                 out: tuple[Scaled, Array | None] | None = None) -> tuple[Scaled, TypedArray | None]: ...
    @overload
    def dispatch(self, x: Array, routing: RankRouting, probs: Array | None = None, *,
                 out: tuple[Array | Scaled, Array | None] | None = None
                 ) -> tuple[TypedArray | Scaled, TypedArray | None]: ...
    def dispatch(self, x: Array | Scaled | Quantized, routing: RankRouting, probs: Array | None = None, *,
                 out: tuple[Array | Scaled, Array | None] | None = None
                 ) -> tuple[TypedArray | Scaled, TypedArray | None]:
        """Send tokens to their experts.

        x : [T, hidden]: an array, which the recipe quantises first, or one already quantised by it, row-wise;
            without a recipe an array of dtype
        routing : of these tokens
        probs : f32 array [T, topk]
        out : an earlier result, overwritten and returned; needed while a CUDA graph is captured (x is
            quantised before then)

        Returns (rows, row_probs): rows [rows, hidden] of this rank's experts, as `permute` makes them, zeros
        in rows without a token; f32 [rows], or None without probs. Raises TypeError, ValueError, RankError.
        """
        return self._dispatch(x, routing, probs, out, "x")

    def combine(self, rows: Array, routing: RankRouting, *, out: TypedArray | None = None) -> TypedArray:
        """Sum the rows of each token, over its experts of all ranks.

        rows : array [rows, hidden] of dtype, the experts' outputs for dispatched rows, with probs applied
        out : an earlier result, overwritten and returned; needed while a CUDA graph is captured

        Returns [T, hidden] of dtype: with 'rank', f32 sums of each rank's rows, from the last to the first,
        rounded to dtype, and f32 sums of these, from the last rank to the first, rounded again; with 'exact',
        sums of all rows, as `unpermute` makes them on one rank. Raises TypeError, ValueError, RankError.
        """
        came, _ = self._come_back(rows, None, routing, "rows")
        return unpermute(came, self._back(routing), out=out)

    # ---- the way back ----
    @overload
    def combine_backward(self, grad: Scaled | Quantized, routing: RankRouting, *,
                         out: Scaled | None = None) -> Scaled: ...
    @overload
    def combine_backward(self, grad: Array, routing: RankRouting, *,
                         out: Array | Scaled | None = None) -> TypedArray | Scaled: ...
    def combine_backward(self, grad: Array | Scaled | Quantized, routing: RankRouting, *,
                         out: Array | Scaled | None = None) -> TypedArray | Scaled:
        """Return the gradient of `combine`'s rows, [rows, hidden], from that of its result [T, hidden], which
        is dispatched like x: an array that the recipe quantises, or one already quantised by it."""
        rows, _ = self._dispatch(grad, routing, None, None if out is None else (out, None), "grad")
        return rows

    def dispatch_backward(self, dx_rows: Array, row_dprobs: Array | None, routing: RankRouting, *,
                          out: tuple[Array, Array | None] | None = None
                          ) -> tuple[TypedArray, TypedArray | None]:
        """Return the gradients of `dispatch`'s x and probs, from those of its rows, [rows, hidden] of dtype,
        and of row_probs, f32 [rows] or None.

        Returns (dx [T, hidden] of dtype, summed as `combine` does; dprobs f32 [T, topk] or None). out,
        errors: as for `combine`.
        """
        came, probs = self._come_back(dx_rows, row_dprobs, routing, "dx_rows")
        back = self._back(routing)
        dx_out, probs_out = (None, None) if out is None else out
        if row_dprobs is None:
            return unpermute(came, back, out=dx_out), None
        if self._facts.exact:
            made: tuple[TypedArray, TypedArray] = permute_backward(came, back, probs_grad=probs, out=out)
            return made
        dx = unpermute(came, back, out=dx_out)
        return dx, slots.returned_probs(probs, routing.experts, routing.returned.row_map, self._split,
                                        probs_out)

    def _dispatch(self, x: Any, routing: RankRouting, probs: Any, out: Any, name: str) -> tuple[Any, Any]:
        transport, facts = self._usable(), self._facts
        self._check_routing(routing)
        tokens.check_probs(probs, routing.tokens, facts, self._xp)
        given = tokens.read(x, routing.tokens, facts, self._xp, name)
        of_probs = None if probs is None else Part.rows(probs)
        data, scales, came_probs = self._told(transport.dispatch, routing, given.data, given.scales, of_probs)
        came, out = given.came(data, scales), self._rows_of(out)
        if probs is None:
            return given.rows(permute(came, routing.received, out=out and out[0])), None
        rows, row_probs = permute(came, routing.received, probs=came_probs, out=out)
        return given.rows(rows), row_probs

    def _rows_of(self, out: Any) -> Any:
        """Return what `permute` wrote in an earlier result."""
        if out is None:
            return None
        rows, row_probs = out
        return (rows.data if isinstance(rows, Scaled) and rows.block is None else rows), row_probs

    def _come_back(self, rows: Any, row_probs: Any, routing: RankRouting, name: str) -> Any:
        transport = self._usable()
        self._check_routing(routing)
        tokens.check_rows(rows, row_probs, routing.rows, self._facts, self._xp, name)
        came, probs = self._told(transport.combine, routing, rows, row_probs)
        if self._facts.exact:                   # the window has room for max_tokens
            count = routing.experts.size
            return came[:count], probs[:count]
        return came, probs

    def _back(self, routing: RankRouting) -> Routing:
        """Return the routing of tokens to the rows that come back."""
        return routing.returned if routing.own is None else routing.own

    def _check_routing(self, routing: Any, name: str = "routing") -> None:
        if not isinstance(routing, RankRouting):
            raise TypeError(f"routing: expected what route() gives, got {type_name(routing)}")
        if routing._of is self._facts:
            return
        backend.require_module(routing.experts, self._xp, "routing")
        facts, split = self._facts, self._split
        if (routing.sent.num_experts != split.ranks or routing.received.num_experts != split.local
                or routing.received.tokens != split.ranks * split.region or routing.rows != facts.rows
                or routing.sent.topk != facts.topk or (routing.own is not None) != facts.exact):
            raise ValueError(f"{name}: belongs to another ExpertParallel: {routing!r}")

    # ---- failures, and the end ----
    def _usable(self) -> Transport:
        if self._failed is not None:
            raise RankError(f"unusable since a rank did not come: {self._failed}", self._failed.ranks)
        if self._transport is None:
            raise ValueError("this ExpertParallel is closed")
        self._told(self._transport.check)
        return self._transport

    def _told(self, call: Any, *args: Any) -> Any:
        """Call, remembering a RankError."""
        try:
            return call(*args)
        except RankError as error:
            self._failed = error
            raise

    def check(self) -> None:
        """Wait for this rank's GPU, and raise RankError, naming the rank, if one did not come to an exchange
        within the timeout; every later call raises it too."""
        transport = self._usable()
        self._told(transport.wait)
        self._told(transport.check)

    def close(self) -> None:
        """Free the windows, once every rank has called it; graphs must not be replayed after it. Later calls
        do nothing. (A `with` left by an error does not wait for the others: it aborts its NCCL, if any, and
        keeps the windows until the process ends.)"""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abandon()

    def __del__(self) -> None:
        if getattr(self, "_transport", None) is not None:
            warnings.warn(f"{self!r} was not closed: its windows stay until the process ends",
                          ResourceWarning, stacklevel=2, source=self)
            self._abandon()


def _positive(value: Any, name: str) -> int:
    number = integer(value, name)
    if number < 1:
        raise ValueError(f"{name}: expected 1 or more, got {shown(number)}")
    return number
