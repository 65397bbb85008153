"""group_quantize by every recipe, against the recipe's own quantiser of each group. test_cases.py has the
kernels' bytes."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import numpy as np
import pytest
from group_arrays import (
    ALL,
    CURRENT,
    DIRECTIONS,
    PARTS,
    RECIPE,
    expect_groups,
    matrix,
    most_rows,
    padded,
    parts_of,
    poison,
    scales_for,
    scales_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from large_tiles import check_those_that_ask
from scale_arrays import guarded, guarded_like, raw
from tiers import needs_host, quick_if

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, MXScaling, cases, kernels, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls import arguments, row_segments
from cupy_fp8.cases import OPS
from cupy_fp8.cases.groups import sizes
from cupy_fp8.formats import bfloat16, float8_e5m2, float16, float32
from cupy_fp8.kernels import Launch, shapes
from cupy_fp8.ops.quantize import grouped_tensor

BOTH = DIRECTIONS[2]


@pytest.mark.parametrize(("recipe", "align", "columns"), quick_if(lambda how: how[1] == 1, [
    *product((RECIPE, CURRENT, fp8.CurrentScaling(eps=0.5, pow2_scale=True)), [1], [48, 37]),
    *((recipe, *how) for recipe, how in product(ALL.values(), ((16, 48), (128, 37))))]))
@pytest.mark.parametrize("splits",
                         quick_if(lambda splits: len(splits) not in (1, 50),
                                  [[50], [16, 0, 32], [0, 0, 0], [], [7, 13, 0, 1, 20], [0, 49, 0], [1] * 50,
                                   [0] * 300 + [50]]), ids=lambda s: f"{len(s)}of{sum(s)}")
def test_each_group_by_itself(recipe, splits, align, columns, run):
    """The result equals that of each group alone, whatever follows the groups. With `align` it equals
    pad_groups, then group_quantize."""
    x, scales = matrix(50 if align == 1 else 59, columns), scales_for(recipe, len(splits))
    x *= np.geomspace(1e-3, 1e3, len(x))[:, None].astype(bfloat16)
    bits(x)[sum(splits) :] = 0x4242  # they belong to no group, so nothing may depend on them
    rows, aligned = padded(x, splits, align)
    for directions in DIRECTIONS:
        first: dict[str, Any] = {}                              # the other calls are compared with it
        for held in (splits, np.array(splits, np.int32), np.array(splits, np.int64)):
            on_device = held if isinstance(held, list) else run.array(held)
            g = fp8.group_quantize(run.array(x), on_device, recipe, **directions, align=align,
                                   scales=scales_for(recipe, len(splits), run))
            assert g.shape == (most_rows(len(x), len(splits), align), columns)
            assert fp8.asnumpy(g.splits).tolist() == aligned.tolist()
            assert g.splits.dtype == (np.int64 if isinstance(held, list) else held.dtype)
            if not first:
                expect_groups(g, rows, aligned, recipe, scales, **directions)
                first = parts_of(g, PARTS[1:])                  # without the splits
            parts = parts_of(g, PARTS[1:])
            assert parts.keys() == first.keys()
            for name, part in parts.items():
                testing.assert_bytes_equal(part, first[name])
            if isinstance(recipe, fp8.CurrentScaling):
                empty = fp8.asnumpy(g.scale_inv)[np.array(splits, int) == 0]
                want = 0.5 / 256 if recipe.pow2_scale else 1
                assert (empty == want).all(), "of an amax of 0: eps, or no scale at all"


def test_members_of_padded_groups(run):
    x = matrix(9, 16)
    g = fp8.group_quantize(run.array(x), [4, 0, 5], RECIPE, columnwise=True, align=8,
                           scales=run.array(scales_of(3)))
    assert [member.rowwise.shape for member in g] == [(8, 16), (0, 16), (8, 16)]
    want: Any = reference.quantize_tensor(x[4:], scales_of(3)[2:]).rowwise
    testing.assert_bytes_equal(g[2].rowwise.data[:5], want.data)
    assert not raw(g[2].rowwise.data[5:]).any()
    assert g.dequantize().shape == g.shape == (24, 16)


WHOLE_VECTORS = [*(BlockScaling(block, scale_layout=layout) for block in ((1, None), (None, 1))
                   for layout in ("gemm_ready", "compact")),
                 BlockScaling((1, None), profile="vllm"),
                 BlockScaling((None, 1), float8_e5m2, eps=0.5, pow2_scale=False)]
FAMILIES: dict[str, list[Any]] = {
    "delayed": [RECIPE], "current": [CURRENT, fp8.CurrentScaling(float8_e5m2, pow2_scale=True)],
    "vectors": WHOLE_VECTORS,
    "blocks": [*(BlockScaling(block) for block in ((1, 128), (128, 1), (1, 32), (128, 128))),
               BlockScaling(profile="vllm"), BlockScaling(profile="deepgemm", scale_layout="deepgemm_sm90"),
               *(MXScaling(block=block, scale_layout=layout) for block in ((1, 32), (32, 32))
                 for layout in ("compact", "swizzled"))]}


@needs_host
@pytest.mark.parametrize("family", quick_if(lambda family: family in ("delayed", "current"), FAMILIES))
@settings(max_examples=80, deadline=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_call(family, data):
    """Groups of every length, at every address, padded or not."""
    draw, dtype = data.draw, np.dtype(data.draw(st.sampled_from([bfloat16, float16, float32])))
    splits, spare = draw(st.lists(st.integers(0, 150), max_size=12)), draw(st.integers(0, 40))
    columns = draw(st.integers(1, 140)) * draw(st.sampled_from([1, 1, 4, 8, 16]))
    recipe, directions = draw(st.sampled_from(FAMILIES[family])), draw(st.sampled_from(DIRECTIONS))
    align = draw(st.sampled_from([1, 1, 1, 2, 8, 16, 32, 64, 256]))
    if draw(st.booleans()):
        splits = [n // 16 * 16 for n in splits]
    scales = scales_for(recipe, len(splits))
    with testing.executor("host") as run:
        x, _ = guarded(run, (sum(splits) + spare, columns), dtype, draw(st.integers(0, 3)) * dtype.itemsize)
        bits(x)[...] = bits(cases.values(draw(st.sampled_from(["bits", "normal"])), x.shape, dtype,
                                         draw(st.integers(0, 99))))
        g = fp8.group_quantize(x, splits, recipe, **directions, align=align, scales=scales)
    expect_groups(g, *padded(x, splits, align), recipe, scales, **directions)


def workspaces_of_one_call(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give all calls the same words for the same use, as on a GPU; returns them as they come."""
    kept: dict[str, Any] = {}
    made = kernels.workspace

    def workspace(owner: Any, x: Any, use: str, words: int) -> Any:
        return kept.setdefault(use, made(owner, x, use, words))

    monkeypatch.setattr(arguments, "workspace", workspace)
    return kept


@pytest.mark.parametrize(("directions", "align"), [*((d, 1) for d in DIRECTIONS), (BOTH, 32)], ids=str)
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_results_are_written_in_place(recipe, directions, align, run, monkeypatch):
    """Sizes change; what an earlier call left in the result, or in a workspace, is gone; nothing else is
    written."""
    workspaces_of_one_call(monkeypatch)
    splits, scales = run.array(np.array([100, 3, 97], np.int32)), scales_for(recipe, 3)
    options = {**directions, "align": align, "scales": scales_for(recipe, 3, run)}
    fresh = fp8.group_quantize(run.array(np.zeros((200, 136), bfloat16)), splits, recipe, **options)
    out, intact = guarded_like(run, fresh, kept=() if align > 1 else (fresh.splits,))
    for seed, host in enumerate(([100, 3, 97], [0, 150, 7], [1, 1, 1], [0, 0, 0], [200, 0, 0], [66, 67, 67])):
        x = matrix(200, 136, seed=seed) * np.float32(10.0**-seed).astype(bfloat16)
        bits(splits)[...] = run.array(np.array(host, np.int32))
        poison(parts_of(out, PARTS if align > 1 else PARTS[1:]).values())
        fp8.group_quantize(run.array(x), splits, recipe, **options, check=seed % 2 == 1, out=out)
        expect_groups(out, *padded(x, host, align), recipe, scales, **directions)
    assert intact()


@needs_host
@pytest.mark.parametrize(("recipe", "directions", "entries"), [
    (RECIPE, BOTH, ["group_cast_transpose"]),
    (CURRENT, BOTH, ["group_find_segments", "group_cast_current"]),
    (BlockScaling(), BOTH, ["group_quantize_block"]),
    (MXScaling(), BOTH, ["group_quantize_mx"]),
    (BlockScaling((1, None)), DIRECTIONS[0], ["group_quantize_rows"]),
    *((BlockScaling(block), directions,
       ["group_find_segments", "group_quantize_whole_vectors", "group_quantize_whole_vectors"])
      for block, directions in (((1, None), BOTH), ((None, 1), DIRECTIONS[0]), ((None, 1), DIRECTIONS[1]))),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("with_offsets", [False, True])
def test_launches(recipe, directions, entries, with_offsets, monkeypatch):
    """A call makes this many launches, whether offsets are given or not, and whether groups are padded or
    not."""
    launched: list[str] = []
    monkeypatch.setattr(Launch, "start", lambda launch, *_: launched.append(launch.variant.kernel.entry))
    monkeypatch.setattr(row_segments, "_MANY", 1000)
    options = {**directions, "scales": scales_for(recipe, 2)}
    options.update({"offsets": np.array([0, 1280, 3840])} if with_offsets else {"align": 16})
    with testing.executor("host"):
        fp8.group_quantize(matrix(64, 128), [10, 20], recipe, **options)
    assert launched == entries


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_given_offsets_are_used(recipe, run):
    x, splits, offsets = matrix(60, 16), [20, 0, 40], run.array(np.array([0, 320, 320, 960]))
    g = fp8.group_quantize(run.array(x), splits, recipe, columnwise=True, scales=scales_for(recipe, 3, run),
                           offsets=offsets)
    offsets[...] = 0                                            # the result has copies
    expect_groups(g, x, splits, recipe, scales_for(recipe, 3), columnwise=True)


@pytest.mark.parametrize("align", [1, 64])
@pytest.mark.parametrize("recipe", [RECIPE, CURRENT], ids=["delayed", "current"])
def test_amaxes_are_raised(recipe, align, run):
    """They are raised to the largest magnitude of each group; rows of zeros raise none."""
    x, start, splits = matrix(60, 33), np.array([1e30, 5, -2, 0], np.float32), [20, 0, 30, 10]
    amaxes, want, ends = run.array(start), start.copy(), np.cumsum([0, *splits])
    g = fp8.group_quantize(run.array(x), splits, recipe, align=align, scales=scales_for(recipe, 4, run),
                           amaxes=amaxes)
    expect_groups(g, *padded(x, splits, align), recipe, scales_for(recipe, 4))
    for i in range(4):
        reference.quantize_tensor(x[ends[i] : ends[i + 1]], None, amax=want[i : i + 1])
    testing.assert_bytes_equal(amaxes, want)


def test_one_result_for_several_recipes(run):
    """What is remembered of one is not taken for another."""
    host, splits, scales = matrix(30, 16), run.array(np.array([10, 20])), run.array(scales_of(2))
    x = run.array(host)
    out = fp8.group_quantize(x, splits, RECIPE, scales=scales)
    for recipe in (CURRENT, fp8.CurrentScaling(eps=50.0), RECIPE) * 2:
        fp8.group_quantize(x, splits, recipe, scales=scales if recipe is RECIPE else None, out=out)
        expect_groups(out, host, [10, 20], recipe, scales_for(recipe, 2))


@pytest.mark.full
@needs_host
@pytest.mark.parametrize(("rows", "step"), [(0, 3), (1 << 40, 1)], ids=["wide", "narrow"])
def test_tiles_of_large_arrays(monkeypatch, rows, step):
    """Tiles that only arrays of many megabytes get, for groups of at least this many rows. test_cases.py has
    calls without tiles."""
    monkeypatch.setattr(shapes, "fills_wide", lambda columns: True)
    monkeypatch.setattr(grouped_tensor, "_TALL", rows)
    with testing.executor("host") as run:           # not all cases run: blocks of 1024 threads are slow here
        chosen = check_those_that_ask(run, islice(OPS["group_quantize"].cases(), 0, None, step), monkeypatch)
    assert chosen == {shapes.BOTH, shapes.BOTH_NARROW}  # arrays without groups always have wide tiles


@pytest.mark.full
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_graphs_of_large_arrays(recipe, device, monkeypatch):
    """Two results in one graph have separate workspaces. Tiles are those of large arrays, whose segments
    another launch finds."""
    monkeypatch.setattr(shapes, "choose_tile", lambda x, large, *_: large)
    monkeypatch.setattr(row_segments, "_MANY", 0)
    x, splits = device.array(matrix(500, 48)), device.array(sizes(490, 20))
    options = {"columnwise": True, "scales": scales_for(recipe, 20, device.run)}
    outs = [fp8.group_quantize(x, splits, recipe, **options) for _ in range(2)]
    for out in outs:                                            # the first calls make their workspaces
        fp8.group_quantize(x, splits, recipe, **options, out=out)
    device.cupy.cuda.get_current_stream().synchronize()
    with device.cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        for out in outs:
            fp8.group_quantize(x, splits, recipe, **options, out=out)
        with pytest.raises(ValueError, match=r"^Grouped: members are found"):
            _ = outs[0][0]
        graph = stream.end_capture()
        for seed in range(3):
            host, data = sizes(490, 20, seed=seed), matrix(500, 48, seed=seed)
            for mine, new in ((splits, host), (x, data)):
                bits(mine)[...] = bits(device.array(new))
            for out in outs:
                poison(parts_of(out, PARTS[1:]).values())
            graph.launch(stream)
            stream.synchronize()
            for out in outs:
                expect_groups(out, data, host, recipe, scales_for(recipe, 20), columnwise=True)
    assert fp8.device_errors() == ()


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(pow2_scale=True),
                                    BlockScaling((None, 1), scale_layout="compact")], ids=str)
def test_amaxes_of_more_than_two_to_the_31_elements(recipe):
    """These are amaxes of whole groups; tests/contract/test_large.py has the data, and amaxes of rows and
    blocks."""
    rows, columns, splits = 33_000, 65_536, [5, 32_768, 0, 200]
    x = fp8.full((rows, columns), 1.0, bfloat16, like="cupy")
    bits(x)[-30, 7] = int(np.array(3.0, bfloat16).view(np.uint16))
    scale_inv = fp8.asnumpy(fp8.group_quantize(x, splits, recipe).scale_inv).reshape(4, -1)
    assert scale_inv[:, 7 % scale_inv.shape[1]].tolist() == [1 / 256, 1 / 256, 1.0, 1 / 128]
    others = np.delete(scale_inv, 7 % scale_inv.shape[1], axis=1)
    assert (others == np.array([[1 / 256], [1 / 256], [1.0], [1 / 256]])).all()
