"""The rows of `bench dispatch`: the time of experts over ranks to send tokens, to permute them to rows, and
to bring results back, by each transport, in FP8 and in bfloat16.

Bytes are those of the busiest rank, sent or received; times those of the slowest one (`bench.ranks`). Rows
are checked: samples of what came equal what was sent, and the results of each repetition, of a graph and of
the other transport have the same bytes. NCCL's graphs send whole regions, since the host does not know the
counts; their GB/s still count the needed bytes only.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...arrays import Array, asarray, asnumpy, bits, bytes_equal
from ...cases.base import poison
from ...distributed import ExpertParallel, RankRouting
from ...distributed.exchange import Part
from ...distributed.expert_parallel import Reduce, TransportName
from ...distributed.nccl import nccl_problem
from ...formats import bfloat16
from ...kernels import device_errors
from ...moe.step import arrays_of
from ...ops.convert.astype import astype
from ...results import Scaled
from ..measure import Call
from ..ranks import Ranks
from .dispatch_given import (
    Destinations,
    Sizes,
    Way,
    balanced,
    bound,
    drawn,
    parallel,
    parts_of,
    token_bytes,
    tokens_of,
    uniform,
)
from .layer import captured
from .layer_rows import Row, release

TRANSPORTS: tuple[TransportName, ...] = ("p2p", "nccl")
_SAMPLED = 64                       # rows of each pair of ranks
_EXACT_HAS_NO_GRAPH = "no graph: NCCL sends numbers of rows that the host must know"


def missing(ranks: Ranks) -> dict[TransportName, str]:
    """Return the transports that are not available, and why; the same on all ranks."""
    found: dict[TransportName, str] = {}
    for name in TRANSPORTS:
        problem = ranks.problem(nccl_problem() if name == "nccl" else None)
        if problem is None:
            problem = ranks.problem(_connection_problem(ranks, name))
        if problem is not None:
            found[name] = problem
    return found


def _connection_problem(ranks: Ranks, name: TransportName) -> str | None:
    try:
        parallel(ranks, Sizes(hidden=128, topk=1), Way(name, True), 1, ranks.world.size).close()
    except Exception as error:          # the driver and NCCL have error types of their own
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


# ---- times and checks ----
def same_bytes(ranks: Ranks, results: Call) -> Callable[[Call], bool]:
    """Return a check whether a step writes the present bytes again, on all ranks. results(): its arrays."""
    first = [bits(a).copy() for a in arrays_of(results())]

    def check(step: Call) -> bool:
        for a in arrays_of(results()):
            poison(a)
        step()
        return ranks.all(bytes_equal([bits(a) for a in arrays_of(results())], first))

    return check


def graph_of(ranks: Ranks, step: Call) -> tuple[Call | None, str | None]:
    """Return (a launch of the step's graph, why a rank has none)."""
    launch, why = None, None
    try:
        launch = captured(step, ranks.stream)
    except Exception as error:          # the step itself is timed all the same
        why = f"no graph: {type(error).__name__}: {str(error)[:200]}"
    why = ranks.problem(why)
    return (launch, None) if why is None else (None, why)


def timed(ranks: Ranks, step: Call, check: Callable[[Call], bool], *, nbytes: int | None = None,
          queued: bool = True, no_graph: str | None = None) -> Row:
    """Time a step eagerly and from a graph. nbytes: of the busiest rank. no_graph: why there can be none."""
    checks, problems = {"again": check(step)}, []
    time = ranks.time(step, queued=queued)
    row: Row = {"us": round(time.us, 2), "spread_percent": round(time.spread, 2),
                "host_us": round(time.host_us, 1)}
    if ranks.stream is not None and no_graph is None:
        launch, why = graph_of(ranks, step)
        problems += [why] if why else []
        if launch is not None:
            checks["graph"] = check(launch)
            graph = ranks.time(launch, queued=queued)
            row |= {"graph_us": round(graph.us, 2), "graph_host_us": round(graph.host_us, 1)}
    if no_graph is not None:
        row["note"] = no_graph
    if nbytes is not None:
        row["bytes"] = nbytes
        row |= {f"{name}gb_per_s": round(nbytes / row[f"{name}us"] / 1e3, 1)
                for name in ("", "graph_") if f"{name}us" in row and nbytes}
    return row | {"checks": checks} | ({"problem": "; ".join(problems)} if problems else {})


def finished(ranks: Ranks, row: Row, first: Row | None) -> Row:
    """Return a row with its problems, and its times relative to its group's first row: of the eager step, and
    of the graph (without one, of the eager step) relative to the first row's graph."""
    wrong = [row["problem"]] if "problem" in row else []
    wrong += [f"other bytes: {name}" for name, right in row.get("checks", {}).items() if not right]
    noted = ranks.problem("; ".join(device_errors(clear=True)) or None)
    wrong += [] if noted is None else [noted]
    if first is not None and "us" in row:
        row |= {"to_first": round(row["us"] / first["us"], 3)}
        if "graph_us" in first:
            row |= {"to_first_graph": round(row.get("graph_us", row["us"]) / first["graph_us"], 3)}
    return row | ({"problem": "; ".join(wrong)} if wrong else {})


def group(ranks: Ranks, section: str, size: dict[str, int],
          ways: Sequence[tuple[str, Callable[[], Row]]], first: Row | None = None) -> Iterator[Row]:
    """Yield rows that are compared with `first`, or with the first of them."""
    for variant, measured in ways:
        row = finished(ranks, {"op": "dispatch", "section": section, "variant": variant,
                               "ranks": ranks.world.size, **size} | measured(), first)
        first = first or row
        release()
        yield row


# ---- the exchange alone ----
def exchange_rows(ranks: Ranks, sizes: Sizes, transports: Sequence[TransportName]) -> Iterator[Row]:
    """Yield the rows of tokens that go to one rank each: data, scales and probs."""
    for count in sizes.sent:
        yield from group(ranks, "exchange", {"rows": count}, [
            (str(way), partial(_exchange, ranks, sizes, way, count))
            for way in (Way(name, fp8) for name in transports for fp8 in (True, False))])


def _exchange(ranks: Ranks, sizes: Sizes, way: Way, count: int) -> Row:
    to = balanced(ranks, count, sizes.topk)
    with parallel(ranks, sizes, way, count, ranks.world.size * sizes.topk) as ep:
        x, probs = tokens_of(ranks, count, sizes, way.fp8)
        return _exchange_timed(ranks, ep, ep.route(to.own), to, parts_of(x, probs))


def _exchange_timed(ranks: Ranks, ep: ExpertParallel, routing: RankRouting, to: Destinations, parts: Any
                    ) -> Row:
    assert ep._transport is not None
    step = partial(ep._transport.dispatch, routing, *parts)
    return timed(ranks, step, partial(_arrives, ranks, ep.max_tokens, routing, parts, step),
                 nbytes=to.busiest() * token_bytes(parts))


def _arrives(ranks: Ranks, region: int, routing: RankRouting, parts: Sequence[Part | None], exchange: Call,
             step: Call) -> bool:
    """Whether a step delivers what the others send, by samples. exchange: returns where it arrives."""
    came = [Part.rows(a) for a in exchange() if a is not None]
    _meet(ranks)
    for part in came:
        poison(part.array)
    _meet(ranks)
    made = step()
    _meet(ranks)
    if ranks.stream is None:                # NumPy arrays are new ones each time
        came = [Part.rows(a) for a in made if a is not None]
    sent, counts = routing.sent, asnumpy(routing.counts)
    offsets, splits, sources = (asnumpy(a) for a in (sent.offsets, sent.splits, sent.sources))
    own = [_checksum(ranks, parts, sources[offsets[rank] + _places(splits[rank])] // sent.topk)
           for rank in range(ranks.world.size)]
    packed = struct.Struct(f"!{len(own)}I")
    wanted = [packed.unpack(each)[ranks.world.rank] for each in ranks.world.gather(packed.pack(*own))]
    found = [_checksum(ranks, came, region * rank + _places(counts[rank])) for rank in range(len(own))]
    return ranks.all(found == wanted)


def _meet(ranks: Ranks) -> None:
    ranks.clock.wait()
    ranks.world.gather()


def _places(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, max(0, int(count) - 1), min(int(count), _SAMPLED)).astype(np.int64))


def _checksum(ranks: Ranks, parts: Sequence[Part | None], rows: np.ndarray) -> int:
    found = 0
    for part in parts:
        if part is not None:
            a, at = bits(part.array), asarray(rows.astype(np.int64), like=ranks.xp)
            taken = a[at] if part.item_step == a.dtype.itemsize else a[:, at].T
            found = zlib.crc32(np.ascontiguousarray(asnumpy(taken)).tobytes(), found)
    return found


# ---- the whole dispatch ----
class Whole:
    """Route and dispatch, with `out=`."""

    def __init__(self, ep: ExpertParallel, chosen: Array, x: Any, probs: Array) -> None:
        self._ep, self._given = ep, (chosen, x, probs)
        self.routing = ep.route(chosen)
        self.rows = ep.dispatch(x, self.routing, probs)

    def __call__(self) -> None:
        chosen, x, probs = self._given
        self._ep.route(chosen, out=self.routing)
        self._ep.dispatch(x, self.routing, probs, out=self.rows)


def dispatch_rows(ranks: Ranks, sizes: Sizes, transports: Sequence[TransportName]) -> Iterator[Row]:
    """Yield the rows from ids and quantised tokens to the rows of experts, beside the exchange alone."""
    ways = [way for way in (Way("p2p", True), Way("nccl", True), Way("nccl", False))
            if way.transport in transports]
    to = uniform(ranks, sizes.tokens, sizes.experts, sizes.topk)
    first: list[Array] = []
    yield from group(ranks, "dispatch", {"tokens": sizes.tokens}, [
        (str(way), partial(_dispatch, ranks, sizes, way, to, first)) for way in ways])


def _dispatch(ranks: Ranks, sizes: Sizes, way: Way, to: Destinations, first: list[Array]) -> Row:
    rows = bound(ranks, sizes.tokens, sizes.experts, sizes.topk, 128)
    with parallel(ranks, sizes, way, sizes.tokens, sizes.experts, rows=rows) as ep:
        return _dispatch_timed(ranks, ep, to, *tokens_of(ranks, sizes.tokens, sizes, way.fp8), first)


def _dispatch_timed(ranks: Ranks, ep: ExpertParallel, to: Destinations, x: Any, probs: Array,
                    first: list[Array]) -> Row:
    whole, parts = Whole(ep, to.own, x, probs), parts_of(x, probs)
    nbytes = to.busiest() * token_bytes(parts)
    row = timed(ranks, whole, same_bytes(ranks, lambda: whole.rows),
                nbytes=nbytes + to.busiest() * whole.routing.experts.shape[1] * 4)
    if isinstance(x, Scaled):
        row["checks"] |= beside(ranks, whole.rows, first)
    exchange = _exchange_timed(ranks, ep, whole.routing, to, parts)
    row["checks"] |= {f"exchange {name}": right for name, right in exchange["checks"].items()}
    for name in ("us", "graph_us"):
        if name in row and name in exchange:
            row |= {f"exchange_{name}": exchange[name],
                    f"to_exchange{name[:-3]}": round(row[name] / exchange[name], 3)}
    return row


def beside(ranks: Ranks, results: Any, first: list[Array]) -> dict[str, bool]:
    """Whether an earlier row has the same bytes, which are noted for the next one."""
    own = [bits(a).copy() for a in arrays_of(results)]
    if first:
        return {"beside": ranks.all(bytes_equal(own, first))}
    first[:] = own
    return {}


# ---- the way back ----
def combine_rows(ranks: Ranks, sizes: Sizes, transports: Sequence[TransportName]) -> Iterator[Row]:
    """Yield the rows of sending experts' rows in bfloat16 back to tokens."""
    to = uniform(ranks, sizes.tokens, sizes.experts, sizes.topk)
    ways: list[tuple[str, Callable[[], Row]]] = []
    for reduce in ("rank", "exact"):
        first: list[Array] = []
        ways += [(f"{name} {reduce}", partial(_combine, ranks, sizes, name, reduce, to, first))
                 for name in transports]
    yield from group(ranks, "combine", {"tokens": sizes.tokens}, ways)


def _combine(ranks: Ranks, sizes: Sizes, name: TransportName, reduce: Reduce, to: Destinations,
             first: list[Array]) -> Row:
    rows = bound(ranks, sizes.tokens, sizes.experts, sizes.topk, 128)
    way = Way(name, False)
    with parallel(ranks, sizes, way, sizes.tokens, sizes.experts, rows=rows, reduce=reduce) as ep:
        return _combine_timed(ranks, ep, to, astype(drawn(ranks, rows, sizes.hidden), bfloat16), first)


def _combine_timed(ranks: Ranks, ep: ExpertParallel, to: Destinations, y_rows: Array, first: list[Array]
                   ) -> Row:
    routing, exact = ep.route(to.own), ep._facts.exact
    y = ep.combine(y_rows, routing)
    row = timed(ranks, partial(ep.combine, y_rows, routing, out=y), same_bytes(ranks, lambda: y),
                nbytes=to.busiest(slots=exact) * y.shape[1] * y.dtype.itemsize,
                no_graph=_EXACT_HAS_NO_GRAPH if exact and ep.transport == "nccl" else None)
    row["checks"] |= beside(ranks, y, first)
    return row
