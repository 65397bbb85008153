"""Tensor lists: the bytes of the single ops, whatever else is in the list; tables and calls that come again;
what is refused of lists as such. The table of cases is in cases/quantize/tensor_list.py."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from list_results import LAUNCHES, arrays, one, poison

import cupy_fp8 as fp8
from cupy_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    Quantized,
    backend,
    cases,
    testing,
)
from cupy_fp8.calls import memory, remembered, tables, tensor_lists
from cupy_fp8.calls.results import Written, places
from cupy_fp8.calls.tables import Records, Table
from cupy_fp8.cases.quantize.tensor_list import GROUPS
from cupy_fp8.formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float16, float32
from cupy_fp8.kernels import tiles
from cupy_fp8.ops.quantize import single_read, tensor_list, tensor_list_blocks

needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None,
                                reason=str(testing.executor_problem("host")))
DELAYED = DelayedScaling()
#: One of each kind.
KINDS: tuple[Any, ...] = (DELAYED, CurrentScaling(), BlockScaling(), MXScaling())
#: Every layout, block and mode, and what divides.
BLOCK_RECIPES: tuple[Any, ...] = (
    *(BlockScaling(scale_layout=layout) for layout in ("gemm_ready", "compact", "deepgemm_sm90")),
    *(BlockScaling((128, 128), scale_layout=layout) for layout in ("gemm_ready", "compact")),
    *(BlockScaling(block) for block in ((1, 64), (1, 32), (128, 1), (32, 1), (1, None))),
    *(BlockScaling(dtype=float8_e5m2, profile=profile)
      for profile in ("deepgemm", "tilekernels", "vllm", "sglang", "torchao")),
    *(MXScaling(scale_layout=layout, block=block)
      for layout, block in product(("compact", "swizzled"), ((1, 32), (32, 32)))),
    *(MXScaling(float8_e5m2, mode=mode, profile="torchao") for mode in ("floor", "ceil", "even")))
DIRECTIONS = ((True, False), (False, True), (True, True))


def kind(recipe: Any) -> str:
    return type(recipe).__name__


def matrices(group: str, dtype: Any = bfloat16, seed: int = 0) -> list[np.ndarray]:
    return [cases.values("normal", shape, dtype, seed + i) for i, shape in enumerate(GROUPS[group])]


def multi(xs: Any, recipe: Any, **options: Any) -> Any:
    return fp8.multi_quantize(xs, recipe, **({"columnwise": True} | options))


def outputs_for(xs: list[Any], recipe: Any = DELAYED, **directions: bool) -> list[Quantized]:
    outputs = [recipe.empty(x.shape, like=x, **({"columnwise": True} | directions)) for x in xs]
    poison(outputs)
    return outputs


def scales_of(recipe: Any, xs: list[Any]) -> dict[str, Any]:
    return {"scales": [0.5 + i for i in range(len(xs))]} if isinstance(recipe, DelayedScaling) else {}


def expected(recipe: Any, xs: list[Any], scale: float | None = None, **directions: bool) -> list[Quantized]:
    """Each array by itself, with the scales of `scales_of` where the recipe needs any."""
    given = [{"scale": 0.5 + i if scale is None else scale} if isinstance(recipe, DelayedScaling) else {}
             for i in range(len(xs))]
    return [recipe.quantize(x, **({"columnwise": True} | directions), **own)
            for x, own in zip(xs, given, strict=True)]


def assert_all_same(run: testing.Executor, results: list[Quantized], desired: list[Quantized]) -> None:
    testing.assert_bytes_equal(results, list(map(run.numpy, desired)))


# ---- bytes ----
def test_by_hand(run):
    a, b = run.array(np.array([[1, 2], [3, 4]], np.float32)), run.array(np.array([[0.5, 300]], np.float32))
    amaxes = run.array(np.array([9, 0], np.float32))
    first, second = fp8.multi_cast_transpose([a, b], run.array(np.array([1, 2], np.float32)), amaxes=amaxes)
    assert first.columnwise is not None
    assert fp8.asnumpy(first.columnwise.data).astype(np.float32).tolist() == [[1, 3], [2, 4]]
    assert fp8.asnumpy(second.dequantize()).tolist() == [[0.5, 224]]
    assert (fp8.asnumpy(second.scale_inv).tolist(), fp8.asnumpy(amaxes).tolist()) == ([0.5], [9, 300])
    assert first.scale_inv is first.columnwise.scale_inv
    assert type(fp8.multi_cast_transpose([a, b], [1.0, 2.0])) is list


@pytest.mark.parametrize("group", ["mixed", "whole", "eight", "empty"])
def test_every_form_of_scales_and_amaxes(group, run):
    """One array, also every second element of it, or backwards; one-element arrays; numbers."""
    xs = [run.array(x) for x in matrices(group)]
    n = len(xs)
    host = np.linspace(0.1, 9, n).astype(np.float32)
    spread = run.array(np.repeat(host, 2))
    forms = (run.array(host), spread[::2], run.array(host[::-1].copy())[::-1],
             [run.array(one(s)) for s in host], tuple(map(float, host)), list(host))
    desired = [fp8.cast_transpose(x, float(s)) for x, s in zip(xs, host, strict=True)]
    for scales in forms:
        amaxes = run.array(np.full(2 * n, 0.25, np.float32))
        assert_all_same(run, fp8.multi_cast_transpose(xs, scales, amaxes=amaxes[::2]), desired)
        found = [max(0.25, float(np.abs(fp8.asnumpy(x).astype(np.float32)).max(initial=0))) for x in xs]
        assert fp8.asnumpy(amaxes).tolist() == [value for a in found for value in (a, 0.25)]


@pytest.mark.full
@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("recipe", BLOCK_RECIPES, ids=str)
def test_lists_in_blocks(recipe, directions, run, launched):
    """One launch for matrices and batches of any shapes; with rows that suit wide accesses, or not."""
    options: dict[str, Any] = dict(zip(("rowwise", "columnwise"), directions, strict=True))
    for shapes in (((130, 150), (0, 8), (3, 5, 9), (37, 8), (2, 130, 72)),
                   ((2, 144, 136), (16, 264), (3, 7, 4), (0, 8))):
        host = [cases.values("normal", shape, bfloat16, i) for i, shape in enumerate(shapes)]
        xs = [run.array(x) for x in host]
        desired = [recipe.quantize(x, **options) for x in host]
        outputs = outputs_for(xs, recipe, **options)
        launched.clear()
        assert multi(xs, recipe, outputs=outputs, **options) is outputs
        if run.name != "reference" and None not in recipe.block:
            assert launched == LAUNCHES[type(recipe)]
        assert_all_same(run, outputs, desired)
        assert_all_same(run, multi(xs, recipe, **options), desired)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [BlockScaling(), BlockScaling((128, 128)), MXScaling()], ids=str)
def test_dtypes_and_memory_of_lists_in_blocks(recipe, run, launched):
    """A launch for each dtype, and for each array whose last two axes are swapped; other views are copied."""
    host = [cases.values("normal", shape, dtype, i) for i, (shape, dtype) in enumerate(
        (((130, 264), bfloat16), ((40, 36), float32), ((16, 8), float16), ((33, 40), float32)))]
    flat = host[0].reshape(-1)
    views = host[0].T.copy(), np.repeat(host[1], 2, axis=1), np.concatenate([flat[:1], flat])
    xs = [run.array(x) for x in (*host, *views)]
    xs[4:] = [xs[4].T, xs[5][:, ::2], xs[6][1:].reshape(130, 264)]
    desired = [recipe.quantize(x, columnwise=True) for x in (*host, host[0], host[1], host[0])]
    outputs = outputs_for(xs, recipe)
    single = "quantize_mx_tile" if isinstance(recipe, MXScaling) else "quantize_block_tile"
    for listed in (xs, xs, [*xs[:5], xs[6]]):
        wanted = [0, 1, 2, 3, 4, 6] if len(listed) < 7 else range(7)
        for _ in range(2):
            launched.clear()
            multi(listed, recipe, outputs=[outputs[i] for i in wanted])
            assert launched == ([] if run.name == "reference" else [*LAUNCHES[type(recipe)] * 3, single])
            assert_all_same(run, [outputs[i] for i in wanted], [desired[i] for i in wanted])
            poison(outputs)


@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_no_arrays_and_no_elements(recipe, run, launched):
    for xs in ([], (), [run.array(np.zeros(shape, np.float32)) for shape in ((0, 5), (5, 0), (0, 0))]):
        given = scales_of(recipe, list(xs))
        results = multi(xs, recipe, **given)
        assert [q.shape for q in results] == [x.shape for x in xs]
        assert multi(xs, recipe, outputs=results, noop=run.array(one(0)), **given) is results
    assert run.name == "reference" or bool(launched) == (recipe in KINDS[:2])   # there are scales to write


@pytest.mark.full
def test_a_thousand(run, launched):
    host = [cases.values("normal", (i % 7 * 5, i % 11 * 3), float32, i) for i in range(1000)]
    xs = [run.array(x) for x in host]
    for recipe in KINDS:
        launched.clear()
        results = multi(xs, recipe, **scales_of(recipe, xs))
        assert launched == ([] if run.name == "reference" else LAUNCHES[type(recipe)])
        assert_all_same(run, results[::37], expected(recipe, host)[::37])


@pytest.mark.full
@needs_host
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=6),
       st.sampled_from(INPUT_DTYPES), st.sampled_from(FP8_DTYPES),
       st.lists(testing.scales(), min_size=6, max_size=6), st.sampled_from(DIRECTIONS))
def test_any_list(shapes, source, to, scales, directions):
    xs = [cases.values("bits", shape, source, i) for i, shape in enumerate(shapes)]
    options: dict[str, Any] = dict(zip(("rowwise", "columnwise"), directions, strict=True))
    recipes: tuple[Any, ...] = (
        DelayedScaling(to), CurrentScaling(to), BlockScaling(dtype=to), BlockScaling((128, 128), to),
        MXScaling(to), MXScaling(to, scale_layout="swizzled"))
    for recipe in recipes:
        options["scales"] = scales[:len(xs)] if isinstance(recipe, DelayedScaling) else None
        with testing.executor("host"):
            results = multi(xs, recipe, **options)
        testing.assert_bytes_equal(results, multi(xs, recipe, **options))


@pytest.mark.parametrize("source", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("executor", [pytest.param("host", marks=needs_host),
                                      pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tiles_of_large_lists(executor, wide, source, monkeypatch):
    """The tiles that only lists of many megabytes get, of current scaling those that are read twice."""
    chosen = []
    monkeypatch.setattr(single_read, "choose", lambda *_: None)

    def choose(x, large, size=None):
        chosen.append(size)
        return large

    monkeypatch.setattr(tiles, "choose", choose)
    monkeypatch.setattr(tiles, "fills_wide", lambda columns: wide)
    shapes = ((272, 520), (256, 256), (0, 8), (16, 264))
    xs = [cases.values("bits", shape, source, i) for i, shape in enumerate(shapes)]
    with testing.executor(executor) as run:
        for recipe, (rowwise, columnwise) in product(KINDS[:2], DIRECTIONS):
            options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, **scales_of(recipe, xs)}
            results = fp8.multi_quantize([run.array(x) for x in xs], recipe, **options)
            with testing.executor("reference"):
                testing.assert_bytes_equal(results, multi(xs, recipe, **options))
    assert chosen == [sum(x.size for x in xs)] * 6


def test_wide_tiles_do_not_hang_over_rows():
    assert tiles.fills_wide([5120] * 3 + [7168])
    assert not tiles.fills_wide([1408])                             # 11 narrow tiles, or 6 wide ones
    assert not tiles.fills_wide([5120, 1408, 1408])
    assert tiles.fills_wide([51200, 1408, 0])


@pytest.mark.gpu
def test_lists_of_many_megabytes(launched):
    """The real choice of tiles, and more than 2**31 elements in one list."""
    cp = backend.cupy()
    x = cp.random.default_rng(0).standard_normal((8192, 8192), dtype=cp.float32).astype(cp.float16)
    scales = cp.linspace(0.1, 2, 33, dtype=cp.float32)
    results = fp8.multi_cast_transpose([x] * 33, scales)
    assert launched == ["multi_cast_transpose"]
    for i in (0, 17, 32):
        assert fp8.bytes_equal(results[i], fp8.cast_transpose(x, scales[i:i + 1]))


# ---- calls that come again ----
@needs_host
@pytest.mark.parametrize("group", ["alike", "eight", "one", "whole"])
@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_calls_that_allocate_come_again(recipe, group, monkeypatch):
    """Such a call is not looked at twice, and its launches get the addresses of its own arrays."""
    for module in (memory, remembered):
        monkeypatch.setattr(module, "ALIGNMENT", 16)        # all NumPy arrays are aligned so
    op = tensor_list._QUANTIZE if recipe in KINDS[:2] else tensor_list_blocks.QUANTIZE
    looked_at, launches = [], type(op).launches

    def noted(*given: Any) -> Any:
        looked_at.append(given)
        return launches(*given)

    monkeypatch.setattr(type(op), "launches", noted)
    with testing.executor("host") as run:
        for seed in range(4):
            xs = [x for x in matrices(group, seed=seed) if x.size]
            scales = np.linspace(seed + 1, 9, len(xs)).astype(np.float32)
            given = {"scales": scales} if recipe is DELAYED else {}
            results = multi(xs, recipe, **given)
            with testing.executor("reference"):
                assert_all_same(run, results, multi(xs, recipe, **given))
        assert len(looked_at) == 1


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """Every table that is made."""
    made: list[Table] = []
    init = Table.__init__

    def noted(self: Table, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Table, "__init__", noted)
    return made


@needs_host
@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_calls_that_come_again_make_no_table(recipe, uploads, launched):
    """The same arrays, and views of the same memory; other arrays are noticed, also where an identity comes
    again."""
    with testing.executor("host") as run:
        xs = matrices("mixed")
        given = {"scales": np.ones(len(xs), np.float32)} if recipe is DELAYED else {}
        outputs, others = outputs_for(xs, recipe), outputs_for(xs, recipe)

        def call(xs: list[Any], outputs: list[Quantized]) -> None:
            multi(xs, recipe, outputs=outputs, **given)
            with testing.executor("reference"):
                assert_all_same(run, outputs, expected(recipe, xs, 1.0))

        for i in range(3):
            call(xs if i != 1 else [x[:] for x in xs], outputs)
        assert (len(uploads), launched) == (1, LAUNCHES[type(recipe)] * 3)
        call(xs, [outputs[0], *others[1:]])                 # only the first result has another table
        assert len(uploads) == 2
        xs[3] *= bfloat16.type(0.5)
        call(xs, outputs)
        assert len(uploads) == 2
        for i in range(8):
            xs[0] = cases.values("normal", xs[0].shape, bfloat16, 100 + i)      # the array before is gone
            call(xs, outputs)
        assert sum(each.memory is not None for each in uploads) <= tables._MOST
        del outputs, others
        gc.collect()
        assert all(each.memory is None for each in uploads), "a table outlived its result"


def test_tables_that_a_graph_captured_stay():
    x, owner = np.zeros(1, np.float32), np.zeros(1, np.float32)
    first = tables.table(owner, x, Records.of(bytes(16)))
    first.captured = True
    made = [tables.table(owner, x, Records.of(i.to_bytes(16, "little"))) for i in range(1, 8)]
    assert tables.table(owner, x, Records.of(bytes(16))) is first
    assert [each.use() for each in made] == [False] * 3 + [True] * tables._MOST
    del owner
    assert not first.use()


def test_large_results_have_memory_of_their_own():
    """An array keeps its whole allocation alive: large ones share none."""
    small, large = Written("a", (3,), np.dtype(np.float32)), Written("b", (9 << 20,), np.dtype(np.uint8))
    assert places([small, small, large, large, small]) == ([(0, 0), (0, 256), (0, 512), (1, 0), (2, 0)],
                                                           [512 + (9 << 20), 9 << 20, 256])
    assert places([]) == ([], [0])


class _Pointer:
    """As CuPy's, for what is said of its arrays without looking at memory."""

    device_id = 0

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


_Array = type("ndarray", (), {"__module__": "cupy", "_c_contiguous": True, "dtype": np.dtype(np.float32)})


def _array(ptr: int, shape: tuple[int, ...]) -> Any:
    made: Any = _Array()
    made.data, made.shape = _Pointer(ptr), shape
    return made


def test_a_list_of_gpu_arrays_is_described_once_while_they_live(monkeypatch):
    described: list[int] = []
    real = memory._of_parts
    monkeypatch.setattr(memory, "_KINDS", dict(memory._KINDS))

    def noted(parts: Any, *rest: Any) -> bool:
        described.append(len(parts))
        return real(parts, *rest)

    monkeypatch.setattr(memory, "_of_parts", noted)
    xs = [_array(512 * i, (2, 3)) for i in range(3)]

    def describe(xs: list[Any]) -> Any:
        return memory.describe("op", (xs,), None)

    first = describe(xs)
    assert describe(list(xs)) == first
    assert described == [3]
    assert describe([_array(512 * i, (2, 3)) for i in range(3)]) == first       # views of the same memory
    assert describe([*xs[:2], _array(4096, (2, 3))]) != first
    assert described == [3] * 3
    xs[1].shape = (3, 2)
    assert describe(xs) != first                            # a shape that is assigned is noticed
    xs[1].shape = (2, 3)
    assert describe(xs) == first
    key = memory.identities(xs)
    assert key in memory._lists
    del xs[0]
    gc.collect()
    assert key not in memory._lists
    assert memory.describe("op", ([0.0, 1.0],), None) != memory.describe("op", ([-0.0, 1.0],), None)


@needs_host
@pytest.mark.parametrize("recipe", [DELAYED, MXScaling()], ids=kind)
def test_a_shape_that_is_assigned_is_noticed(recipe):
    with testing.executor("host"):
        x = cases.values("normal", (16, 24), bfloat16)
        outputs = outputs_for([x], recipe)
        multi([x], recipe, outputs=outputs, **scales_of(recipe, [x]))
        x.shape = (24, 16)
        with pytest.raises(ValueError, match=r"outputs\[0\]\.rowwise: "):
            multi([x], recipe, outputs=outputs, **scales_of(recipe, [x]))


@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_a_table_is_there_for_every_replay(recipe, device):
    """Whatever was called after the capture, and with the values that scales have then."""
    cp = device.cupy
    xs = [device.array(x) for x in matrices("mixed")]
    outputs, scales = outputs_for(xs, recipe), device.array(np.ones(len(xs), np.float32))
    given = {"scales": scales} if recipe is DELAYED else {}
    multi(xs, recipe, outputs=outputs, **given)
    cp.cuda.get_current_stream().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        multi(xs, recipe, outputs=outputs, **given)
        graph = stream.end_capture()
        for _ in range(tables._MOST + 2):
            multi([device.array(fp8.asnumpy(x)) for x in xs], recipe, outputs=outputs, **given)
        scales.fill(3)
        poison(outputs)
        graph.launch(stream)
        stream.synchronize()
    want = expected(recipe, list(map(fp8.asnumpy, xs)), 3.0)
    testing.assert_bytes_equal(list(map(device.run.numpy, outputs)), want)


# ---- what is refused ----
XS = matrices("whole")
N, OUTPUTS, CURRENT = len(XS), outputs_for(XS), CurrentScaling()
CAST: dict[str, Any] = {"scales": (1.0,) * N, "outputs": OUTPUTS}
AT_LEAST_ONE = "rowwise, columnwise: expected at least one"


def of_cast(error: type[Exception], message: str, **wrong: Any) -> tuple[Any, ...]:
    """A call of multi_cast_transpose that differs so from a right one."""
    return fp8.multi_cast_transpose, error, message, {"xs": XS, **CAST, **wrong}


def of_quantize(error: type[Exception], message: str, recipe: Any, **options: Any) -> tuple[Any, ...]:
    return fp8.multi_quantize, error, message, {"xs": XS, "recipe": recipe, **options}


@pytest.mark.parametrize(("op", "error", "message", "given"), [
    of_cast(TypeError, "xs: expected a list, got ndarray", xs=XS[0]),
    of_cast(ValueError, rf"scales: expected {N}, one for each array of xs, got {N - 1}",
            scales=[1.0] * (N - 1)),
    of_cast(ValueError, rf"scales: expected shape \({N},\)", scales=np.ones(N + 1, np.float32)),
    of_cast(ValueError, "scales: expected one for each array, got None", scales=None),
    of_cast(TypeError, "scales: expected dtype float32, got float64", scales=np.ones(N)),
    of_cast(TypeError, r"scales\[1\]: expected", scales=[1.0, "two", *[1.0] * (N - 2)]),
    of_cast(ValueError, "amaxes: expected", amaxes=[]),
    of_cast(TypeError, r"amaxes\[0\]: expected", amaxes=[1.0] * N),
    of_cast(ValueError, "outputs: expected", outputs=OUTPUTS[1:]),
    of_cast(TypeError, "outputs: expected a list", outputs=OUTPUTS[0]),
    of_cast(TypeError, r"outputs\[1\]: .*expected a Quantized", outputs=[OUTPUTS[0], None, *OUTPUTS[2:]]),
    of_cast(ValueError, r"outputs\[0\]\.rowwise: expected per-tensor data of shape",
            outputs=[OUTPUTS[1], OUTPUTS[0], *OUTPUTS[2:]]),
    of_cast(ValueError, r"outputs\[1\]: no columnwise part",
            outputs=[OUTPUTS[0], DELAYED.empty(XS[1].shape, like=np), *OUTPUTS[2:]]),
    of_cast(ValueError, r"outputs\[1\].*overlaps outputs\[0\]",
            outputs=[OUTPUTS[0], *[OUTPUTS[0]] * (N - 1)], xs=[XS[0]] * N),
    of_cast(TypeError, r"xs\[1\]: expected dtype bfloat16, that of xs\[0\], got float32",
            xs=[XS[0], XS[1].astype(np.float32), *XS[2:]]),
    of_cast(ValueError, r"xs\[2\]: expected a matrix", xs=[*XS[:2], XS[2].reshape(-1), *XS[3:]]),
    of_cast(TypeError, "dtype", dtype=float16),
    of_cast(ValueError, "noop: needs outputs=", outputs=None, noop=one(0)),
    of_cast(ValueError, "scales: expected none", xs=[], outputs=[]),
    of_quantize(TypeError, "recipe: expected", "current"),
    of_quantize(TypeError, "recipe: expected", [1]),
    of_quantize(ValueError, "scales: delayed scaling needs", DELAYED),
    of_quantize(ValueError, "scales: current scaling", CURRENT, scales=[1.0] * 5),
    of_quantize(ValueError, "scales, amaxes: belong", MXScaling(), amaxes=[1.0] * 5),
    *(of_quantize(ValueError, AT_LEAST_ONE, recipe, rowwise=False) for recipe in KINDS[1:]),
    of_quantize(TypeError, "columnwise: ", MXScaling(), columnwise="yes"),
    of_quantize(ValueError, "noop: needs outputs=", MXScaling(), noop=np.zeros(1, np.float32)),
])
def test_lists_that_do_not_fit(op, error, message, given):
    poison(OUTPUTS)
    with pytest.raises(error, match="^" + message):
        op(**given)
    assert all((a.view(np.uint8) == 0xAA).all() for a in arrays(*OUTPUTS))


def test_arrays_may_share_an_amax(run):
    x, y = (run.array(cases.values("normal", (16, 8), float32, seed)) for seed in (0, 1))
    shared = run.array(one(0))
    fp8.multi_quantize([x, y], DELAYED, scales=[1.0, 1.0], amaxes=[shared, shared])
    assert float(shared[0]) == max(float(abs(x).max()), float(abs(y).max()))


@needs_host
@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_more_blocks_than_a_launch_can_have(recipe, monkeypatch):
    monkeypatch.setattr(tensor_lists, "_MOST_BLOCKS", 2)
    xs = [cases.values("normal", (300, 8), bfloat16, i) for i in range(2)]
    outputs = outputs_for(xs, recipe)
    with (testing.executor("host"),
          pytest.raises(ValueError, match=r"^xs: more than the 2 blocks that a launch can")):
        multi(xs, recipe, outputs=outputs, **scales_of(recipe, xs))
    assert all((a.view(np.uint8) == 0xAA).all() for a in arrays(*outputs))
