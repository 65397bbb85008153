"""Checks of `cupy_fp8.distributed` between ranks (selftest --ranks N): every step of an expert layer's
exchanges, against the same steps on NumPy arrays. `launch` starts this module on a GPU for each rank; on the
CPU all ranks are threads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from .. import cases, testing
from ..arrays import Array, asarray, asnumpy, bits
from ..backend import cupy
from ..distributed import ExpertParallel, RankRouting, World, init, local
from ..distributed.nccl import nccl_problem
from ..formats import bfloat16, float16, float32
from ..kernels import device_errors
from ..recipes import BlockScaling, MXScaling, Recipe
from ..results import Scaled
from .launch import run as launched

_BLOCKS = BlockScaling()


class Case(NamedTuple):
    """tokens: of each rank, in each step; ranks beyond the list have the first one's. dropped: the share of
    dropped slots; to: the one expert that all tokens take first."""

    name: str
    tokens: tuple[tuple[int, ...], ...] = ((9, 4, 0, 7),)
    topk: int = 4
    local: int = 3
    hidden: int = 256
    recipe: Recipe | None = _BLOCKS
    dtype: Any = bfloat16
    exact: bool = False
    align: int = 128
    rows: int | None = None
    dropped: float = 0.1
    to: int | None = None
    probs: bool = True
    wide: bool = False
    num_sms: int | None = None

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("blocks"),
    Case("blocks, exact", exact=True),
    Case("blocks, compact", recipe=BlockScaling(scale_layout="compact"), align=16),
    Case("MX", recipe=MXScaling(), hidden=192, topk=2),
    Case("bfloat16", recipe=None, wide=True),
    Case("float32, exact", recipe=None, dtype=float32, exact=True, hidden=100, align=1),
    Case("float16, odd width", recipe=None, dtype=float16, hidden=33, align=8),
    Case("blocks, odd width", hidden=200, topk=1, probs=False),
    Case("blocks, odd width, exact", hidden=203, exact=True, dtype=float32),
    Case("fewer tokens each time", tokens=((9, 9, 9, 9), (3, 9, 0, 1), (0, 0, 2, 0), (0, 0, 0, 0), (9, 1, 9,
                                                                                                    1))),
    Case("fewer tokens each time, exact", exact=True,
         tokens=((9, 9, 9, 9), (3, 9, 0, 1), (0, 0, 2, 0), (0, 0, 0, 0), (9, 1, 9, 1))),
    Case("all to one rank", to=2, topk=1, dropped=0.0),
    Case("nobody has a slot", dropped=1.0),
    Case("rows within a bound", rows=640, local=2, align=64, tokens=((40, 40, 40, 40),)),
    Case("many slots", topk=40, local=12, hidden=128, tokens=((3, 2, 1, 3),)),
    Case("wide rows", hidden=7168, topk=8, local=4, tokens=((5, 6, 0, 3),)),
    Case("wide rows, exact", hidden=7168, topk=8, local=4, tokens=((5, 6, 0, 3),), exact=True),
    Case("wide rows, few multiprocessors", hidden=7168, topk=8, local=4, tokens=((5, 6, 0, 3),), num_sms=3),
    Case("few multiprocessors, exact", exact=True, num_sms=1),
)


class Given(NamedTuple):
    """A rank's inputs in a step."""

    ids: np.ndarray
    x: np.ndarray
    probs: np.ndarray | None
    y_rows: np.ndarray
    grad: np.ndarray
    dx_rows: np.ndarray
    row_dprobs: np.ndarray | None


def given(case: Case, ranks: int, rank: int, rows: int, step: int, seed: int = 0) -> Given:
    rng = np.random.default_rng((seed, rank, step))
    counts = case.tokens[step % len(case.tokens)]
    count, experts = counts[rank % len(counts)], ranks * case.local

    def values(*shape: int, dtype: Any = case.dtype) -> np.ndarray:
        made: np.ndarray = rng.standard_normal(shape, np.float32).astype(dtype)
        return made

    ids = rng.random((count, max(experts, case.topk))).argsort(1)[:, :case.topk] % experts
    if case.to is not None:
        ids[:] = case.to % experts
    ids[rng.random(ids.shape) < case.dropped] = -1
    return Given(ids.astype(np.int64 if case.wide else np.int32), values(count, case.hidden),
                 values(count, case.topk, dtype=np.float32) if case.probs else None,
                 values(rows, case.hidden), values(count, case.hidden), values(rows, case.hidden),
                 values(rows, dtype=np.float32) if case.probs else None)


def parallel(world: World, case: Case, like: Any, transport: Any = "auto", **options: Any) -> ExpertParallel:
    tokens = max(max(counts) for counts in case.tokens)
    return ExpertParallel(
        world, num_experts=world.size * case.local, max_tokens=max(1, tokens), hidden=case.hidden,
        topk=case.topk,
        align=case.align, rows=case.rows, recipe=case.recipe, dtype=case.dtype,
        reduce="exact" if case.exact else "rank", transport=transport, num_sms=case.num_sms, like=like,
        **options)


def step(ep: ExpertParallel, g: Given, case: Case, out: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call all methods, once each. Quantised data is passed in, since a graph cannot quantise."""
    had = out or {}
    x, grad = quantised(g.x, case), quantised(g.grad, case)
    routing = ep.route(g.ids, out=had.get("routing"))
    return {"routing": routing, "rows": ep.dispatch(x, routing, g.probs, out=had.get("rows")),
            "y": ep.combine(g.y_rows, routing, out=had.get("y")),
            "grad_rows": ep.combine_backward(grad, routing, out=had.get("grad_rows")),
            "gradients": ep.dispatch_backward(g.dx_rows, g.row_dprobs, routing, out=had.get("gradients"))}


def quantised(x: Array | Scaled, case: Case) -> Any:
    return x if case.recipe is None or isinstance(x, Scaled) else case.recipe.quantize(x).rowwise


def arrays(made: Any) -> Iterator[Array]:
    """Yield all arrays of a step's results."""
    if isinstance(made, (dict, tuple)):
        for part in made.values() if isinstance(made, dict) else made:
            yield from arrays(part)
    elif isinstance(made, RankRouting):
        for part in made.__getstate__().values():
            if hasattr(part, "_arrays"):
                yield from part._arrays().values()
            elif part is not None:
                yield part
    elif isinstance(made, Scaled):
        yield from (made.data, made.scale_inv)
    elif made is not None:
        yield made


def difference(actual: dict[str, Any], desired: dict[str, Any]) -> list[str]:
    """Return the first difference, if any byte differs."""
    for name in desired:
        found, wanted = list(arrays(actual[name])), list(arrays(desired[name]))
        assert len(found) == len(wanted), name
        for a, b in zip(found, wanted, strict=True):
            try:
                testing.assert_bytes_equal(asnumpy(a), b)
            except AssertionError as error:
                return [f"{name}: {error}"]
    return []


def check(world: World, case: Case, like: Any, transport: Any = "auto", repeats: int = 2,
          others: testing.ExecutorName | None = None) -> None:
    """Raise AssertionError unless every step gives the bytes of NumPy arrays: new, into poisoned results, and
    (on a GPU) from five replays of a graph. others: what runs all kernels but the exchanges; None: what runs
    these."""
    gpu = like is not np
    with testing.executor("reference"), parallel(world, case, np) as ep:
        data, wanted = [], []
        for index in range(len(case.tokens) * repeats):
            data.append(given(case, world.size, world.rank, ep.rows, index))
            wanted.append(step(ep, data[-1], case))
    with (parallel(world, case, like, transport) as ep,
          nullcontext() if others is None else testing.executor(others)):
        last: dict[int, dict[str, Any]] = {}
        problems: list[str] = []                # an error before the end would leave ranks out of step
        for g, desired in zip(data, wanted, strict=True):
            count = len(g.x)
            for each in arrays(last.get(count, ())):
                cases.poison(each)
            last[count] = step(ep, moved(g, like, case), case, last.get(count))
            problems += difference(last[count], desired)
        if gpu and not (case.exact and ep.transport == "nccl"):
            problems += _of_graph(world, ep, case, last[len(data[0].x)], data[0])
        ep.check()
    assert not problems, problems[0]
    assert not device_errors(), device_errors()


def moved(g: Given, like: Any, case: Case) -> Any:
    if like is np:
        return g
    made = Given(*[None if a is None else asarray(a, like=like) for a in g])  # type: ignore[arg-type]
    return made._replace(x=quantised(made.x, case), grad=quantised(made.grad, case))


def _of_graph(world: World, ep: ExpertParallel, case: Case, out: dict[str, Any], first: Given) -> list[str]:
    """Return the differences in five replays."""
    problems: list[str] = []
    cp = cupy()
    held: Any = moved(first, cp, case)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        step(ep, held, case, out)
        graph = stream.end_capture()
    with testing.executor("reference"), parallel(world, case, np) as reference:
        for seed in range(1, 6):
            g = given(case, world.size, world.rank, ep.rows, 0, seed)
            desired = step(reference, g, case)
            with stream:
                for to, a in zip(arrays(tuple(held)), arrays(tuple(moved(g, cp, case))), strict=True):
                    bits(to)[...] = bits(a)
                for each in arrays(out):
                    cases.poison(each)
                graph.launch()
            stream.synchronize()
            problems += difference(out, desired)
    return problems


# ---- the command ----
def run(ranks: int, executor: testing.ExecutorName) -> int:
    """Check all cases between this many ranks. Returns the exit code."""
    if executor == "cuda":
        count = cupy().cuda.runtime.getDeviceCount()
        return launched([sys.executable, "-m", __name__], ranks, share_gpus=ranks > count)
    with testing.executor(executor):
        return max(local(ranks).run(lambda world: _check_all(world, np, ("auto",))))


def _check_all(world: World, like: Any, transports: tuple[Any, ...]) -> int:
    failed = 0
    for transport in transports:
        for case in CASES:
            start = time.perf_counter()
            problem = ""
            try:
                check(world, case, like, transport)
            except AssertionError as error:
                problem = f"rank {world.rank}: {error}"
            problems = [text.decode() for text in world.gather(problem.encode())]
            failed += any(problems)
            if world.rank == 0:
                verdict, seconds = "FAIL" if any(problems) else "PASS", time.perf_counter() - start
                print(f"{verdict} {transport:5} {case!s:32} {seconds:6.1f} s",
                      *filter(None, problems), sep="\n     " if any(problems) else "", flush=True)
    if world.rank == 0:
        print(f"{failed} cases failed" if failed else
              f"{world.size} ranks: all bytes equal those of NumPy arrays", flush=True)
    return 1 if failed else 0


def main() -> int:
    if os.environ.get("CUPY_FP8_SHARE_GPUS") == "1":
        # NCCL needs a GPU for each rank of a host; so each rank gets a host of its own
        os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    transports = ("p2p",) if nccl_problem() else ("p2p", "nccl")
    with init(timeout=120) as world:
        return _check_all(world, cupy(), transports)


if __name__ == "__main__":
    sys.exit(main())
