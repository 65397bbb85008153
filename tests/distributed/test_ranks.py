"""Exchanges of several ranks: the bytes of NumPy arrays on every executor, and those of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import expert_layers
import numpy as np
import pytest
from background import Background
from rank_loops import NAMED, check_on_cpu, of_ranks
from tiers import needs_host, quick_if

import cupy_fp8 as fp8
from cupy_fp8 import hostexec, testing
from cupy_fp8.cli.selftest_ranks import given, parallel, step
from cupy_fp8.distributed import ExpertParallel

QUICK = "blocks, exact", "fewer tokens each time", "blocks, odd width"
SUPPORT = Path(__file__).resolve().parents[1] / "support"
#: cases under a sanitizer; ThreadSanitizer has enough threads only for the exchanges
SANITIZED = {"asan": ("blocks", "float32, exact", "float16, odd width", "blocks, odd width, exact", "MX",
                      "fewer tokens each time", "fewer tokens each time, exact", "many slots"),
             "tsan": ("blocks", "float32, exact", "blocks, odd width", "fewer tokens each time")}


# ---- one rank's bytes ----
@pytest.mark.parametrize("reduce", ["exact", "rank"])
@pytest.mark.parametrize("ranks", quick_if(lambda ranks: ranks == 4, [1, 2, 4, 8]))
def test_a_layer_over_ranks_is_one_rank(ranks, reduce):
    whole = expert_layers.layer(tokens=50, topk=3, experts=8, hidden=128, inner=128)
    cuts = np.linspace(0, 50, ranks + 1).astype(int)
    cuts[1:2] = 0                                   # the first rank has no tokens
    cuts[-1] = 50
    routing = whole.routing()
    one = fp8.moe.Experts(whole.up, whole.down)
    y, saved = one.forward(whole.x, routing, whole.probs)
    wanted: tuple[Any, ...] = (y, *one.backward(whole.grad, saved))

    def rank_of(world: Any) -> tuple[Any, ...]:
        here, local = slice(*cuts[world.rank:world.rank + 2]), 8 // ranks
        of_rank = slice(world.rank * local, (world.rank + 1) * local)
        experts = fp8.moe.Experts(whole.up[of_rank], whole.down[of_rank])
        with ExpertParallel(world, num_experts=8, max_tokens=50, hidden=128, topk=3, reduce=reduce,
                            like=np) as ep:
            to = ep.route(whole.chosen[here])
            rows, row_probs = ep.dispatch(whole.x[here], to, whole.probs[here])
            y_rows, kept = experts.forward_rows(rows, to.splits, row_probs)
            y = ep.combine(y_rows, to)
            dx_rows, dp, *grads = experts.backward_rows(ep.combine_backward(whole.grad[here], to), kept)
            return (y, *ep.dispatch_backward(dx_rows, dp, to), *grads)

    made = of_ranks(ranks, rank_of)
    found = [np.concatenate([each[i] for each in made]) for i in range(5)]
    for i, name in enumerate(("y", "dx", "dprobs", "d_up", "d_down")):
        if reduce == "exact" or name in ("dprobs", "d_up", "d_down"):
            testing.assert_bytes_equal(found[i], wanted[i])
        else:
            a, b = found[i].astype(np.float32), wanted[i].astype(np.float32)
            assert np.linalg.norm(a - b) < 4e-3 * np.linalg.norm(b), name


@pytest.mark.parametrize("given_rank", [0, 3])
def test_sums_by_rank_are_those_of_a_loop(given_rank):
    """Rounded by rank, last row first, and then last rank first."""
    case, ranks = NAMED["blocks"], 4

    def sums(world: Any) -> Any:
        with parallel(world, case, np) as ep:
            g = given(case, ranks, world.rank, ep.rows, 0)
            made = step(ep, g, case)
            found = world.gather(made["routing"].received.row_map.tobytes())
            rows = world.gather(g.y_rows.tobytes())
        return g, made, found, rows

    g, made, maps, rows = of_ranks(ranks, sums)[given_rank]
    region = max(max(counts) for counts in case.tokens)
    width, wanted = case.hidden, np.zeros_like(made["y"])
    at = dict.fromkeys(range(ranks), 0)
    for token, experts in enumerate(g.ids):
        total = np.full(width, -0.0, np.float32)
        to = sorted({int(e) // case.local for e in experts if e >= 0}, reverse=True)
        for rank in to:
            own = np.frombuffer(maps[rank], np.int32).reshape(-1, case.topk)
            y = np.frombuffer(rows[rank], np.uint16).view(case.dtype).reshape(-1, width)
            part = np.full(width, -0.0, np.float32)
            for row in sorted((r for r in own[given_rank * region + at[rank]] if r >= 0), reverse=True):
                part += y[row].astype(np.float32)
            total += part.astype(case.dtype).astype(np.float32)
        for rank in to:
            at[rank] += 1
        wanted[token] = total.astype(case.dtype) if to else 0
    testing.assert_bytes_equal(made["y"], wanted)


# ---- kernels ----
@needs_host
@pytest.mark.parametrize("name", quick_if(lambda name: name in QUICK, NAMED))
def test_kernels_equal_numpy(name):
    check_on_cpu(NAMED[name], 4)


@needs_host
@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_other_numbers_of_ranks(ranks):
    for name in ("blocks", "fewer tokens each time, exact", "wide rows"):
        check_on_cpu(NAMED[name], ranks)


@needs_host
@pytest.mark.full
def test_a_hundred_reuses():
    check_on_cpu(NAMED["fewer tokens each time"]._replace(hidden=64, recipe=None), 3, repeats=20)


def main(mode: str) -> None:
    """Run the child under a sanitizer."""
    others: testing.ExecutorName | None = "reference" if mode == "tsan" else None
    for order, seed in (("random", 0), ("desc", 0)):
        os.environ |= {"CUPY_FP8_HOST_ORDER": order, "CUPY_FP8_HOST_SEED": str(seed)}
        for name in SANITIZED[mode]:
            check_on_cpu(NAMED[name], 4, others, repeats=1)


def child(mode: str, background: Background) -> subprocess.CompletedProcess[str]:
    package = str(Path(fp8.__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (package, str(SUPPORT), os.environ.get("PYTHONPATH")) if p)
    env = os.environ | {"CUPY_FP8_HOST_MODE": mode, "PYTHONPATH": path} | hostexec.sanitizer_env(mode)
    return background.run(hostexec.sanitizer_command(mode, [sys.executable, __file__, mode]), env,
                          timeout=1200)


def background_jobs(items: list[Any], background: Background) -> Iterator[tuple[str, Callable[[], Any]]]:
    for item in items:
        if hasattr(item, "callspec") and "mode" in item.callspec.params:
            mode = item.callspec.params["mode"]
            yield mode, partial(child, mode, background)


@needs_host
@pytest.mark.parametrize("mode", SANITIZED)
def test_no_sanitizer_finds_anything(mode, background_result):
    done = background_result(mode)
    assert done.returncode == 0, done.stderr[:6000]


if __name__ == "__main__":
    main(*sys.argv[1:])
