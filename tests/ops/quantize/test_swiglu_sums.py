"""Gradients of probs: the sums of tiles are summed by the blocks that finish last, or by another launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launches import note_launches
from test_swiglu import BLOCKS, CURRENT, DELAYED, MX, normal
from test_swiglu_programs import GPT_OSS, VLLM, path_of
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8 import reference
from cupy_fp8.formats import bfloat16
from cupy_fp8.ops.quantize import fused, swiglu_launches
from cupy_fp8.testing import assert_bytes_equal

#: one of every path, with tails of rows and columns
CALLS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "any": (VLLM, 200, {}), "any, interleaved": (VLLM, 200, {"interleaved": True}),
    "any, tiles of da and db": (DELAYED, 201, {"scale": 0.5}), "rows": (BLOCKS, 384, {}),
    "tiles": (MX, 256, {"columnwise": True}), "tiles in registers": (CURRENT, 256, {}),
    "options": (MX, 200, GPT_OSS), "options, one block across": (MX, 72, GPT_OSS)}


@where_kernels_run
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize(("recipe", "half", "options"), CALLS.values(), ids=CALLS)
def test_both_ways_add_up_the_same(run, monkeypatch, recipe, half, options, tiles):
    """The results of a call are another's memory, so sums of an earlier call must not be taken for new ones.
    tiles: of a block."""
    if tiles > 1:
        monkeypatch.setattr(fused, "_ENOUGH_BLOCKS", 1)
    launched, rows, out = note_launches(monkeypatch), 300, None
    for seed, few in ((1, 256), (4, 256), (7, 0), (10, 256)):
        monkeypatch.setattr(swiglu_launches, "_FEW_TILES", few)
        x, grad = normal((rows, 2 * half), bfloat16, seed), normal((rows, half), bfloat16, seed + 1)
        given = {"probs": normal((rows,), seed=seed + 2), **options}
        launched.clear()
        out = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), recipe, out=out,
                                           **{**given, "probs": run.array(given["probs"])})
        assert_bytes_equal(out, reference.swiglu_backward_quantize(grad, x, recipe, **given))
        adding = [one for one in launched if path_of(one.variant) is None]
        assert len(adding) == (few == 0)
        assert len(launched) - len(adding) == 1 + (recipe is CURRENT)


@pytest.mark.parametrize(("rows", "half", "interleaved", "launches"), [
    (128, 8192, False, 1), (128, 8193, False, 2), (128, 4096, True, 1), (128, 4097, True, 2),
    (1024, 2048, False, 1), (1025, 2048, False, 2), (512, 2048, True, 1), (513, 2048, True, 2),
    (9999, 128, False, 1), (9999, 64, True, 1), (5, 0, False, 1), (0, 256, False, 0)])
def test_how_many_launches_there_are(monkeypatch, rows, half, interleaved, launches):
    """One tile across needs no sums of others, and without columns one launch writes zeros."""
    launched: list[Any] = []
    monkeypatch.setattr("cupy_fp8.kernels.Launch.start", lambda launch, *_: launched.append(launch))
    with fp8.testing.executor("host"):
        fp8.swiglu_backward_quantize(np.zeros((rows, half), bfloat16), np.zeros((rows, 2 * half), bfloat16),
                                     MX, probs=np.zeros(rows, np.float32), interleaved=interleaved)
    assert len(launched) == launches


def test_a_call_that_is_skipped_leaves_the_counts_zero(run):
    """A later call with the same result finds them zero."""
    x, grad, p = normal((140, 512), bfloat16), normal((140, 256), bfloat16, 1), normal((140,), seed=2)
    given = run.array(grad), run.array(x), MX
    out = fp8.swiglu_backward_quantize(*given, probs=run.array(p))
    dprobs, want = out[1], reference.swiglu_backward_quantize(grad, x, MX, probs=p)[1]
    assert dprobs is not None
    for skipped in (1, 0, 1, 0):
        noop = run.array(np.full(1, skipped, np.float32))
        dprobs[...] = 7
        fp8.swiglu_backward_quantize(*given, probs=run.array(p), noop=noop, out=out)
        assert_bytes_equal(run.numpy(dprobs), np.full(140, 7, np.float32) if skipped else want)
