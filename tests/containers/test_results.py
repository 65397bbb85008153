"""Results and recipes: frozen, honest about what they hold, and cheap: one launch per call, none for
`.empty`."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import html
import pickle
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import DelayedScaling, Quantized, Scaled, backend, cases, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from cupy_fp8.kernels import Variant

DIRECTIONS = [{"rowwise": True}, {"rowwise": False, "columnwise": True},
              {"rowwise": True, "columnwise": True}]
SHAPE = (3, 5)
KINDS = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]
kind_parameter = pytest.mark.parametrize("kind", KINDS)
direction_parameter = pytest.mark.parametrize("directions", DIRECTIONS, ids=str)


def x_of(kind: str = "numpy", shape: tuple[int, ...] = SHAPE, dtype: np.dtype = bfloat16) -> fp8.arrays.Array:
    return fp8.asarray(cases.values("normal", shape, dtype), like=kind)


def parts(q: Quantized) -> list[Scaled]:
    return [part for part in (q.rowwise, q.columnwise) if part is not None]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[testing.Executor]:
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)
    with testing.executor(request.param) as executor:
        yield executor


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entry points launched so far, and nothing hidden: every kernel goes through this one method."""
    launched: list[str] = []
    real = Variant.launch

    def launch(self: Variant, x: Any, grid: int, *values: Any, **options: Any) -> None:
        launched.append(self.kernel.entry)
        real(self, x, grid, *values, **options)

    monkeypatch.setattr(Variant, "launch", launch)
    return launched


# ---- Scaled ----
def test_scaled_is_frozen():
    s = fp8.quantize_tensor(x_of(), 2.0).rowwise
    assert s is not None
    for name in ("data", "scale_inv", "shape", "transposed", "block", "scale_layout"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(s, name, getattr(s, name))
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            delattr(s, name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.note = 1                                                          # type: ignore[attr-defined]
    for derived in ("dtype", "nbytes", "T"):
        with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
            setattr(s, derived, None)


@kind_parameter
def test_scaled_unpacks(kind):
    q = fp8.cast_transpose(x_of(kind), 2.0)
    for part in parts(q):
        data, scale_inv = part
        assert data is part.data
        assert scale_inv is part.scale_inv
    assert ([f.name for f in dataclasses.fields(Scaled)]
            == ["data", "scale_inv", "shape", "transposed", "block", "scale_layout"])


def test_scaled_defaults():
    data, scale_inv = np.zeros(SHAPE, float8_e4m3fn), np.ones(1, np.float32)
    s = Scaled(data, scale_inv, SHAPE)
    assert (s.transposed, s.block, s.scale_layout) == (False, None, None)
    assert (s.dtype, s.nbytes) == (float8_e4m3fn, 15 + 4)
    named = Scaled(data=data.reshape(5, 3), scale_inv=np.ones((3, 1), np.float32), shape=list(SHAPE),
                   transposed=True, block=[1, 128], scale_layout="compact")
    assert (named.shape, named.transposed, named.block,
            named.scale_layout) == (SHAPE, True, (1, 128), "compact")


@kind_parameter
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (0, 4), (2, 2, 1, 7)], ids=str)
def test_transposed_view(kind, shape):
    """.T reads the same bytes the other way round."""
    q = fp8.cast_transpose(x_of(kind, shape), 2.0)
    for s in parts(q):
        t = s.T
        assert t.data is s.data
        assert t.scale_inv is s.scale_inv
        assert t.shape == (*shape[:-2], shape[-1], shape[-2])
        assert t.transposed is not s.transposed
        assert (t.T.shape, t.T.transposed) == (s.shape, s.transposed)
        testing.assert_bytes_equal(t.dequantize(), np.swapaxes(fp8.asnumpy(s.dequantize()), -1, -2).copy())
        assert s.shape == shape                             # the one asked stays as it was


def test_transposed_view_of_blocks():
    s = Scaled(np.zeros((4, 64), float8_e4m3fn), np.ones((4, 2), np.float32), (4, 64), block=(1, 32),
               scale_layout="compact")
    assert (s.T.block, s.T.T.block, s.T.scale_layout) == ((32, 1), (1, 32), "compact")


@pytest.mark.parametrize("shape", [(), (7,)])
def test_transposed_view_of_fewer_than_two_dimensions(shape):
    s = fp8.quantize_tensor(x_of(shape=shape), 2.0).rowwise
    assert s is not None
    assert s.T is s


def test_to_layout():
    s = fp8.quantize_tensor(x_of(), 2.0).rowwise
    assert s is not None
    with pytest.raises(ValueError,
                       match=r"to_layout\('swizzled'\): per-tensor data has a single scale, which has no "
                             r"layout"):
        s.to_layout("swizzled")


@kind_parameter
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@direction_parameter
def test_dequantize_delegates(directions, dtype, kind):
    q = fp8.quantize_tensor(x_of(kind), 2.0, **directions)
    want = fp8.dequantize(q, dtype=dtype)
    assert want.shape == q.shape == SHAPE
    testing.assert_bytes_equal(q.dequantize(dtype), want)
    for part in parts(q):
        testing.assert_bytes_equal(part.dequantize(dtype), want)
        testing.assert_bytes_equal(part.dequantize(dtype=dtype.name), want)
    assert q.dequantize().dtype == float32
    assert backend.kind_of(q.dequantize()) == kind


def test_dequantize_takes_the_row_wise_part():
    row = Scaled(np.full(SHAPE, 3, float8_e4m3fn), np.ones(1, np.float32), SHAPE)
    column = Scaled(np.full((5, 3), 7, float8_e4m3fn), np.ones(1, np.float32), SHAPE, True)
    assert Quantized(row, column).dequantize()[0, 0] == 3
    assert Quantized(None, column).dequantize()[0, 0] == 7


# ---- Quantized ----
def test_quantized_is_frozen():
    q = fp8.cast_transpose(x_of(), 2.0)
    for name in ("rowwise", "columnwise", "dbias"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(q, name, None)
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            delattr(q, name)
    for derived in ("data", "scale_inv", "shape", "dtype", "nbytes"):
        with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
            setattr(q, derived, None)
    assert q.dbias is None


def test_quantized_is_not_empty():
    for nothing in ((), (None, None), (None, None, np.zeros(3))):
        with pytest.raises(ValueError,
                           match="Quantized: expected a row-wise or a column-wise part, got neither"):
            Quantized(*nothing)


@direction_parameter
def test_quantized_shortcuts(directions):
    q = fp8.quantize_tensor(x_of(), 2.0, **directions)
    assert (q.shape, q.dtype) == (SHAPE, float8_e4m3fn)
    if q.rowwise is not None:
        assert q.data is q.rowwise.data
        assert q.scale_inv is q.rowwise.scale_inv
        return
    for name in ("data", "scale_inv"):
        with pytest.raises(AttributeError, match=rf"no row-wise part: use \.columnwise\.{name}$"):
            getattr(q, name)
        assert not hasattr(q, name)
    assert q.columnwise is not None
    assert q.columnwise.data.shape == (5, 3)


@kind_parameter
def test_nbytes_counts_what_is_shared_once(kind):
    x = x_of(kind)
    assert fp8.quantize_tensor(x, 2.0).nbytes == 15 + 4
    assert fp8.quantize_tensor(x, 2.0, rowwise=False, columnwise=True).nbytes == 15 + 4
    both = fp8.cast_transpose(x, 2.0)
    assert both.nbytes == 15 + 15 + 4                       # one scale_inv
    assert sum(part.nbytes for part in parts(both)) == 2 * (15 + 4)
    assert fp8.cast_transpose(x, 2.0, transposed=False).nbytes == 15 + 4
    apart = Quantized(both.rowwise, Scaled(parts(both)[1].data, both.scale_inv.copy(), SHAPE, True))
    assert apart.nbytes == 15 + 15 + 4 + 4


@kind_parameter
def test_directions_share_scale_inv(kind):
    q = fp8.cast_transpose(x_of(kind), 2.0)
    assert parts(q)[0].scale_inv is parts(q)[1].scale_inv
    same = fp8.cast_transpose(x_of(kind), 2.0, transposed=False)
    assert parts(same)[0].data is parts(same)[1].data


@kind_parameter
def test_repr(kind):
    x = x_of(kind)
    both = fp8.cast_transpose(x, 2.0)
    assert (repr(both)
            == "Quantized(float8_e4m3fn[3, 5], per tensor, rowwise + columnwise (stored transposed), "
            f"{kind})")
    e5m2 = fp8.quantize_tensor(x, 2.0, dtype=float8_e5m2)
    assert repr(e5m2) == f"Quantized(float8_e5m2[3, 5], per tensor, rowwise, {kind})"
    assert repr(both.rowwise) == f"Scaled(float8_e4m3fn[3, 5], per tensor, {kind})"
    assert repr(both.columnwise) == f"Scaled(float8_e4m3fn[3, 5], per tensor, stored transposed, {kind})"
    assert repr(fp8.quantize_tensor(x_of(kind, ()),
                                    2.0).rowwise) == f"Scaled(float8_e4m3fn[], per tensor, {kind})"
    blocks = Scaled(fp8.zeros(SHAPE, float8_e4m3fn, like=kind), fp8.zeros((3, 1), float32, like=kind), SHAPE,
                    block=(1, None), scale_layout="compact")
    assert repr(blocks) == f"Scaled(float8_e4m3fn[3, 5], block 1×row, compact scales, {kind})"
    assert str(both) == repr(both)


@kind_parameter
def test_html(kind):
    q = fp8.cast_transpose(x_of(kind), 2.0)
    table = q._repr_html_()
    assert table.startswith("<table>")
    assert table.endswith("</table>")
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", table)]
    row = ["float8_e4m3fn", "3, 5", "per tensor"]
    assert cells == ["rowwise", *row, "as is", kind, "19", "columnwise", *row, "transposed 5, 3", kind, "19"]
    heads = re.findall(r"<th>(.*?)</th>", table)
    assert heads[1:4] == ["dtype", "shape", "scaling"]
    assert len(cells) == 2 * len(heads)
    assert table.count("<tr>") == 3
    single = parts(q)[0]._repr_html_()
    assert single.count("<tr>") == 2
    assert "Scaled" in single


def test_copies_are_whole():
    x = x_of()
    q = fp8.cast_transpose(x, 2.0)
    for again in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert isinstance(again, Quantized)
        for mine, theirs in zip(parts(q), parts(again), strict=True):
            assert mine.data is not theirs.data
            testing.assert_bytes_equal(mine.data, theirs.data)
            testing.assert_bytes_equal(mine.scale_inv, theirs.scale_inv)
            assert (mine.shape, mine.transposed) == (theirs.shape, theirs.transposed)
        bits(again.data).fill(0)
        assert fp8.cast_transpose(x, 2.0, out=again) is again
        testing.assert_bytes_equal(again.data, q.data)
    assert copy.copy(q).data is q.data


@pytest.mark.gpu
def test_a_copy_of_a_used_result_is_written_where_it_lies():
    """What an op remembers about a result's addresses belongs to that result alone."""
    x = x_of("cupy")
    q = fp8.quantize_tensor(x, 2.0, out=fp8.quantize_tensor(x, 2.0))
    again = copy.deepcopy(q)
    for part in (q, again):
        cases.poison(part.data)
    fp8.quantize_tensor(x, 2.0, out=again)
    testing.assert_bytes_equal(again.data, fp8.quantize_tensor(fp8.asnumpy(x), 2.0).data)
    assert (fp8.asnumpy(q.data).view(np.uint8) == 0xAA).all()


def test_an_op_changes_no_metadata():
    q = fp8.cast_transpose(x_of(), 2.0)
    facts = [(id(p.data), id(p.scale_inv), p.shape, p.transposed) for p in parts(q)]
    fp8.cast_transpose(x_of(), 4.0, out=q)
    fp8.dequantize(q)
    assert [(id(p.data), id(p.scale_inv), p.shape, p.transposed) for p in parts(q)] == facts


# ---- DelayedScaling ----
def test_delayed_scaling_is_frozen_and_comparable():
    recipe = DelayedScaling()
    assert (recipe.dtype, recipe.margin, recipe.history_len, recipe.algo) == (float8_e4m3fn, 0, 1024, "max")
    for name in ("dtype", "margin", "history_len", "algo"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, name, getattr(recipe, name))
    assert recipe == DelayedScaling(float8_e4m3fn.type) == DelayedScaling("float8_e4m3fn")
    assert recipe != DelayedScaling(float8_e5m2)
    assert len({recipe, DelayedScaling(), DelayedScaling(margin=1)}) == 2
    assert type(DelayedScaling(float8_e5m2.type).dtype) is type(float8_e5m2)
    assert dataclasses.replace(recipe, margin=-2).margin == -2
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert DelayedScaling(history_len=1, algo="most_recent",
                          margin=3) == DelayedScaling(float8_e4m3fn, 3, 1, "most_recent")


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"dtype": bfloat16}, TypeError, "dtype: expected one of float8_e4m3fn, float8_e5m2, got bfloat16"),
    ({"dtype": fp8.float8_e8m0fnu}, TypeError,
     "dtype: expected one of float8_e4m3fn, float8_e5m2, got float8_e8m0fnu"),
    ({"dtype": "nope"}, TypeError, "dtype: expected one of float8_e4m3fn, float8_e5m2, got 'nope'"),
    ({"algo": "mean"}, ValueError, r"algo: expected one of \('max', 'most_recent'\), got 'mean'"),
    ({"algo": None}, ValueError, "algo: expected one of .*, got None"),
    ({"history_len": 0}, ValueError, "history_len: expected an integer of 1 or more, got 0"),
    ({"history_len": -4}, ValueError, "history_len: expected an integer of 1 or more, got -4"),
    ({"history_len": 2.0}, ValueError, "history_len: expected an integer of 1 or more, got 2.0"),
    ({"history_len": None}, ValueError, "history_len: expected an integer of 1 or more, got None"),
    ({"margin": 0.5}, TypeError, "margin: expected an integer, got 0.5"),
    ({"margin": "1"}, TypeError, "margin: expected an integer, got '1'"),
    ({"margin": None}, TypeError, "margin: expected an integer, got None"),
], ids=str)  # fmt: skip
def test_delayed_scaling_validates(options, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        DelayedScaling(**options)


def test_delayed_scaling_needs_a_scale():
    with pytest.raises(ValueError,
                       match=r"^scale: delayed scaling needs the scale that earlier steps determined, got "
                             r"None$"):
        DelayedScaling().quantize(x_of())


@kind_parameter
@pytest.mark.parametrize("dtype", [float8_e4m3fn, float8_e5m2], ids=str)
@direction_parameter
def test_quantize_is_quantize_tensor(directions, dtype, kind):
    x, recipe = x_of(kind, (7, 33), float16), DelayedScaling(dtype)
    scale, seen, seen_too = (fp8.full(1, v, float32, like=kind) for v in (3.7, 0, 0))
    want = fp8.quantize_tensor(x, scale, dtype=dtype, amax=seen, **directions)
    out = recipe.empty(x.shape, like=x, **directions)
    for q in (recipe.quantize(x, scale=scale, amax=seen_too, **directions),
              recipe.quantize(x, scale=scale, out=out, noop=fp8.zeros(1, float32, like=kind), **directions)):
        assert [type(p)
                for p in (q.rowwise, q.columnwise)] == [type(p) for p in (want.rowwise, want.columnwise)]
        for mine, theirs in zip(parts(q), parts(want), strict=True):
            testing.assert_bytes_equal(mine.data, theirs.data)
            testing.assert_bytes_equal(mine.scale_inv, theirs.scale_inv)
            assert (mine.shape, mine.transposed) == (theirs.shape, theirs.transposed)
    testing.assert_bytes_equal(seen, seen_too)
    assert float(seen[0]) > 0
    nothing = fp8.full(1, 1, float32, like=kind)
    for a in parts(out):
        cases.poison(a.data)
    assert recipe.quantize(x, scale=scale, out=out, noop=nothing, **directions) is out
    assert all((fp8.asnumpy(p.data).view(np.uint8) == 0xAA).all() for p in parts(out))


# ---- empty ----
@kind_parameter
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (0, 5), (5, 0)], ids=str)
@direction_parameter
def test_empty(directions, shape, kind):
    for like in (kind, x_of(kind)):
        q = DelayedScaling(float8_e5m2).empty(shape, like=like, **directions)
        assert (q.shape, q.dtype) == (shape, float8_e5m2)
        assert [q.rowwise is not None,
                q.columnwise is not None] == [directions["rowwise"], directions.get("columnwise", False)]
        for part in parts(q):
            assert part.transposed is (part is q.columnwise)
            assert part.data.shape == ((*shape[:-2], shape[-1], shape[-2]) if part.transposed else shape)
            assert part.data.dtype == float8_e5m2
            assert part.data.flags.c_contiguous
            assert (part.scale_inv.shape, part.scale_inv.dtype, part.shape) == ((1,), float32, shape)
            assert part.scale_inv is parts(q)[0].scale_inv
            assert backend.kind_of(part.data) == backend.kind_of(part.scale_inv) == kind


def test_empty_of_an_integer_shape():
    assert DelayedScaling().empty(7, like="numpy").shape == (7,)
    assert DelayedScaling().empty((), like="numpy").shape == ()


@direction_parameter
def test_empty_initialises_nothing(directions, monkeypatch):
    """NumPy's own empty arrays, with the bytes that they came with."""
    made: list[np.ndarray] = []
    real = np.empty

    def empty(*args: Any, **kwargs: Any) -> np.ndarray:
        made.append(real(*args, **kwargs))
        made[-1].view(np.uint8).fill(0xAA)
        return made[-1]

    monkeypatch.setattr(np, "empty", empty)
    q = DelayedScaling().empty(SHAPE, like="numpy", **directions)
    held = {id(a): a for part in parts(q) for a in part}
    assert {id(a) for a in made} == set(held)
    assert all((a.view(np.uint8) == 0xAA).all() for a in held.values())


@kind_parameter
@direction_parameter
def test_empty_uses_buffers_as_they_are(directions, kind):
    buffers = {name: (fp8.empty(SHAPE if name == "rowwise" else SHAPE[::-1], float8_e4m3fn, like=kind),
                      fp8.empty(1, float32, like=kind))
               for name, on in directions.items() if on}
    for pair in buffers.values():
        for a in pair:
            cases.poison(a)
    q = DelayedScaling().empty(SHAPE, buffers=buffers, **directions)
    for name, (data, scale_inv) in buffers.items():
        part = getattr(q, name)
        assert part.data is data
        assert part.scale_inv is scale_inv
        assert part.transposed is (name == "columnwise")
        assert (fp8.asnumpy(data).view(np.uint8) == 0xAA).all()
        assert (fp8.asnumpy(scale_inv).view(np.uint8) == 0xAA).all()
    x = x_of(kind)
    assert fp8.quantize_tensor(x, 2.0, out=q, **directions) is q
    want = fp8.quantize_tensor(x, 2.0, **directions)
    for mine, theirs in zip(parts(q), parts(want), strict=True):
        testing.assert_bytes_equal(mine.data, theirs.data)
        testing.assert_bytes_equal(mine.scale_inv, theirs.scale_inv)


# ---- launches ----
@direction_parameter
def test_empty_launches_nothing(directions, run, launches):
    x = run.array(x_of())
    row = (run.array(np.empty(SHAPE, float8_e4m3fn)), run.array(np.empty(1, np.float32)))
    launches.clear()
    DelayedScaling().empty((300, 500), like=x, **directions)
    DelayedScaling().empty(SHAPE, buffers={"rowwise": row})
    assert launches == []


CASTS: list[Callable[..., Quantized]] = [
    lambda x, s, **k: fp8.quantize_tensor(x, s, **k),
    lambda x, s, **k: DelayedScaling().quantize(x, scale=s, **k),
]


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (5, 0), (130, 257), (2, 133, 144)], ids=str)
@pytest.mark.parametrize(("rowwise", "columnwise", "transposed"),
                         [d for d in product((True, False), repeat=3) if d[0] or d[1]])
def test_one_launch_per_cast(rowwise, columnwise, transposed, shape, run, launches):
    x, scale, amax = (run.array(a) for a in (x_of(shape=shape), np.array([2.0], np.float32),
                                             np.zeros(1, np.float32)))
    flag = run.array(np.zeros(1, np.float32))
    directions = {"rowwise": rowwise, "columnwise": columnwise, "transposed": transposed}
    expected = "cast_transpose" if columnwise and transposed else "cast"
    out = fp8.quantize_tensor(x, scale, **directions)
    for options in ({}, {"amax": amax}, {"out": out}, {"amax": amax, "noop": flag, "out": out}):
        for value in (scale, 2.0):
            launches.clear()
            fp8.quantize_tensor(x, value, **options, **directions)
            assert launches == [expected]


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (130, 257)], ids=str)
def test_one_launch_per_call(shape, run, launches):
    """Of everything else that quantises, and of compute_amax; conversions of nothing launch nothing."""
    x, scale = run.array(x_of(shape=shape)), run.array(np.array([2.0], np.float32))
    both = fp8.cast_transpose(x, scale)
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "cast_transpose": (lambda: fp8.cast_transpose(x, scale), "cast_transpose"),
        "cast_transpose out": (lambda: fp8.cast_transpose(x, scale, out=both), "cast_transpose"),
        "untransposed": (lambda: fp8.cast_transpose(x, scale, transposed=False), "cast"),
        "recipe": (lambda: DelayedScaling().quantize(x, scale=scale), "cast"),
        "recipe both": (lambda: DelayedScaling().quantize(x, scale=scale, columnwise=True, out=both),
                        "cast_transpose"),
        "compute_amax": (lambda: fp8.compute_amax(x), "compute_amax"),
        "compute_amax out": (lambda: fp8.compute_amax(x, out=scale), "compute_amax"),
    }
    for name, (call, entry) in calls.items():
        launches.clear()
        call()
        assert launches == [entry], name
    nothing = 0 in shape
    conversions: dict[str, tuple[Callable[[], Any], str]] = {
        "astype": (lambda: fp8.astype(x, float8_e4m3fn), "convert"),
        "transpose": (lambda: fp8.transpose(both.data), "transpose"),
        "dequantize": (both.dequantize, "convert"),
        "dequantize stored transposed": (parts(both)[1].dequantize, "dequantize_blocks_transposed"),
    }
    for name, (call, entry) in conversions.items():
        launches.clear()
        call()
        assert launches == ([] if nothing else [entry]), name


# ---- CUDA graphs know everything that a call puts on its stream ----
def nodes_of(call: Callable[[], Any]) -> int:
    """How many nodes a call has when it is captured. Once before, it compiles, and fills the stream's memory
    pool."""
    cp = backend.cupy()
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        try:
            # memory must not go back to the pool before the capture ends
            kept = call()
        finally:
            graph = stream.end_capture()
        count = ctypes.c_size_t()
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuGraphGetNodes(ctypes.c_void_p(graph.graph), None, ctypes.byref(count)) == 0
    del kept
    return count.value


@pytest.mark.gpu
@direction_parameter
def test_empty_puts_nothing_on_the_stream(directions):
    cp = backend.cupy()
    assert nodes_of(lambda: DelayedScaling().empty((300, 500), like="cupy", **directions)) == 0
    x = cp.zeros((300, 500), cp.float32)
    out = fp8.quantize_tensor(x, 2.0, **directions)
    # the same count sees a kernel
    assert nodes_of(lambda: fp8.quantize_tensor(x, 2.0, out=out, **directions)) == 1


@pytest.mark.gpu
def test_one_node_per_call_with_out():
    cp = backend.cupy()
    x, scale = x_of("cupy", (130, 257)), cp.ones(1, cp.float32)
    amax, flag = cp.zeros(1, cp.float32), cp.zeros(1, cp.float32)
    both = fp8.cast_transpose(x, scale)
    values, data, flipped = both.dequantize(bfloat16), fp8.astype(x, float8_e4m3fn), fp8.transpose(both.data)
    for call in (lambda: fp8.cast_transpose(x, scale, amax=amax, noop=flag, out=both),
                 lambda: fp8.compute_amax(x, out=amax),
                 lambda: fp8.dequantize(both, dtype=bfloat16, out=values),
                 lambda: fp8.astype(x, float8_e4m3fn, out=data),
                 lambda: fp8.transpose(both.data, out=flipped)):
        assert nodes_of(call) == 1
