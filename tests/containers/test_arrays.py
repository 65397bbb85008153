"""Typed arrays of both kinds: making, moving, joining and comparing them, for every dtype, without
unrequested conversions."""

from __future__ import annotations

import re
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_fp8 as fp8
from cupy_fp8 import backend, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import FORMATS, FP8_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float32

DTYPES = list(FORMATS)
OTHER_DTYPES = [np.dtype(t) for t in ("?", "u1", "i4", "f8", "c8")]
SHAPES = [(), (0,), (5,), (1, 1), (3, 0, 2), (2, 3, 5)]
KINDS = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]

dtype_parameter = pytest.mark.parametrize("dtype", DTYPES, ids=str)
kind_parameter = pytest.mark.parametrize("kind", KINDS)
few = settings(max_examples=60, deadline=None)


def of_kind(kind: str, a: np.ndarray) -> fp8.arrays.Array:
    """Return the array moved to a kind by CuPy's own means."""
    return a if kind == "numpy" else backend.cupy().asarray(bits(a)).view(a.dtype)


def raw(a: fp8.arrays.Array) -> bytes:
    """Return the bytes in C order, by NumPy's and CuPy's own means."""
    a = bits(a)
    return bytes((a if isinstance(a, np.ndarray) else a.get()).tobytes())


def random(dtype: np.dtype, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    """Return arbitrary bit patterns."""
    storage = FORMATS[dtype].storage
    return np.random.default_rng(7).integers(0, np.iinfo(storage).max, shape, storage,
                                             endpoint=True).view(dtype)


def assert_fresh(a: fp8.arrays.Array, kind: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Check that an array has this kind, shape and dtype, is C-contiguous and writable."""
    assert backend.kind_of(a) == kind
    assert (a.shape, a.dtype) == (shape, dtype)
    assert type(a.dtype) is type(dtype)
    assert a.flags.c_contiguous
    assert a.nbytes == int(np.prod(shape)) * dtype.itemsize
    bits(a).fill(1)
    assert raw(a) == np.ones(shape, f"u{dtype.itemsize}").tobytes()


# ---- making ----
@kind_parameter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtype_parameter
def test_empty(dtype, shape, kind):
    assert_fresh(fp8.empty(shape, dtype, like=kind), kind, shape, dtype)
    assert_fresh(fp8.empty(list(shape), dtype.name, like=kind), kind, shape, dtype)
    assert_fresh(fp8.empty(shape, dtype.type, like=of_kind(kind, np.zeros(1, np.uint8))), kind, shape, dtype)


@kind_parameter
def test_a_shape_may_be_an_integer(kind):
    extents: list[Any] = [4, np.int64(4)]
    for extent in extents:
        assert_fresh(fp8.empty(extent, float8_e5m2, like=kind), kind, (4,), float8_e5m2)
        assert_fresh(fp8.zeros(extent, float8_e5m2, like=kind), kind, (4,), float8_e5m2)
    mixed: Any = (np.int32(2), 3)
    assert_fresh(fp8.empty(mixed, bfloat16, like=kind), kind, (2, 3), bfloat16)


@kind_parameter
def test_like_is_a_module_too(kind):
    module = np if kind == "numpy" else backend.cupy()
    assert backend.kind_of(fp8.zeros(3, float8_e4m3fn, like=module)) == kind


NO_ARRAY = "expected a numpy.ndarray or cupy.ndarray, got "
A = np.zeros((2, 2), float8_e4m3fn)


@pytest.mark.parametrize(("error", "message", "call"), [
    *((TypeError, "like: expected 'numpy', 'cupy', one of these modules or an array, got "
       f"{re.escape(repr(like))}$", lambda like=like: fp8.empty(3, float8_e4m3fn, like=like))
      for like in ("torch", [1.0], 3, float)),
    *((ValueError, "shape: expected an array of at most 2\\*\\*63 - 1 bytes, got ",
       lambda shape=shape: fp8.zeros(shape, float32, like="numpy"))
      for shape in (2**61, (2**62, 2**62), (0, 2**62, 2**62))),
    *((TypeError, f"a: {NO_ARRAY}{type(wrong).__name__}", lambda wrong=wrong: fp8.asnumpy(wrong))
      for wrong in ([1.0], 1.0, None, "x")),
    (ValueError, "arrays: expected at least one array, got none", lambda: fp8.concatenate([])),
    (TypeError, r"arrays\[1\]: expected dtype float8_e4m3fn, as arrays\[0\] has, got float8_e5m2; convert",
     lambda: fp8.concatenate([A, A.view(float8_e5m2)])),
    (TypeError, rf"arrays\[1\]: {NO_ARRAY}list", lambda: fp8.concatenate([A, [[1.0, 2.0]]])),
    (TypeError, rf"arrays\[0\]: {NO_ARRAY}float", lambda: fp8.concatenate([1.0, A])),
    *((ValueError, message, lambda arrays=arrays, axis=axis: fp8.concatenate(arrays, axis))
      for message, arrays, axis in (
          (r"arrays\[1\]: expected the shape of arrays\[0\], \(2, 2\), but for axis 0, got \(3, 3\)$",
           [A, np.zeros((3, 3), float8_e4m3fn)], 0),
          (r"arrays\[1\]: expected the shape of arrays\[0\], \(2, 2\), but for axis -1, got \(2,\)$",
           [A, A[0]], -1),
          ("axis: expected one of the 2 axes", [A, A], 2),
          ("axis: expected one of the 0 axes", [A[0, 0:1].reshape(()), A], 0))),
    *((TypeError, f"{name}: {NO_ARRAY}", lambda pair=pair: fp8.bytes_equal(*pair))
      for pair, name in (((A, [1.0]), "b"), (([1.0], A), "a"), ((A, 1.0), "b"), ((None, A), "a"))),
    *((TypeError, f"dtype: expected one of {', '.join(d.name for d in DTYPES)}, got ",
       lambda dtype=dtype: fp8.finfo(dtype))
      for dtype in (*OTHER_DTYPES, "nope", None, object(), ml_dtypes.float8_e4m3b11fnuz))])
def test_refused(error, message, call):
    with pytest.raises(error, match="^" + message):
        call()


@kind_parameter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtype_parameter
def test_zeros(dtype, shape, kind):
    a = fp8.zeros(shape, dtype, like=kind)
    assert raw(a) == bytes(a.nbytes)
    assert_fresh(a, kind, shape, dtype)


@kind_parameter
@dtype_parameter
def test_full(dtype, kind):
    """Rounded and saturated like astype."""
    for value in (0.0, -0.0, 1.0, -1.1, 0.3, 448.0, 464.5, 1e6, -1e6, 2.0**-140, 1e300, -1e300, float("inf"),
                  float("-inf"), float("nan")):
        a = fp8.full((2, 3), value, dtype, like=kind)
        with np.errstate(over="ignore"):
            want = np.broadcast_to(fp8.astype(np.array([value], np.float32), dtype), (2, 3))
        assert raw(a) == want.tobytes(), value
        assert (a.shape, a.dtype) == ((2, 3), dtype)
    assert_fresh(fp8.full((), 1.0, dtype, like=kind), kind, (), dtype)
    assert_fresh(fp8.full((0, 4), 1.0, dtype, like=kind), kind, (0, 4), dtype)


@kind_parameter
@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_other_dtypes_are_made_too(dtype, kind):
    a = fp8.zeros((2, 2), dtype, like=kind)
    assert backend.kind_of(a) == kind
    assert a.dtype == dtype
    assert fp8.asnumpy(fp8.full(3, 1, dtype, like=kind)).tolist() == np.ones(3, dtype).tolist()


@kind_parameter
@dtype_parameter
def test_empty_like(dtype, kind):
    a = of_kind(kind, random(dtype))
    assert_fresh(fp8.empty_like(a), kind, (3, 5), dtype)
    # empty_like makes C-contiguous arrays, whatever they are like
    assert_fresh(fp8.empty_like(a.T), kind, (5, 3), dtype)
    assert_fresh(fp8.empty_like(a, shape=7), kind, (7,), dtype)
    assert_fresh(fp8.empty_like(a, shape=()), kind, (), dtype)
    assert_fresh(fp8.empty_like(a, float8_e5m2), kind, (3, 5), float8_e5m2)
    assert raw(a) == random(dtype).tobytes()


# ---- asarray, asnumpy ----
@kind_parameter
@dtype_parameter
def test_asarray_of_an_array_is_the_array(dtype, kind):
    for a in (of_kind(kind, random(dtype)), of_kind(kind, random(dtype)).T):
        assert fp8.asarray(a) is a
        assert fp8.asarray(a, dtype) is a
        assert fp8.asarray(a, dtype.type) is a
        assert fp8.asarray(a, like=kind) is a
        assert fp8.asarray(a, like=a) is a


@kind_parameter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtype_parameter
def test_asnumpy(dtype, shape, kind):
    host = random(dtype, shape)
    a = of_kind(kind, host)
    back = fp8.asnumpy(a)
    assert type(back) is np.ndarray
    assert (back is a) == (kind == "numpy")
    assert (back.dtype, back.shape, back.tobytes()) == (dtype, shape, host.tobytes())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtype_parameter
def test_there_and_back(dtype, shape):
    cp = backend.cupy()
    for host in (random(dtype, shape), np.asfortranarray(random(dtype, shape)),
                 random(dtype, (*shape, 4))[..., 1]):
        there = fp8.asarray(host, like="cupy")
        assert isinstance(there, cp.ndarray)
        assert (there.dtype, there.shape) == (dtype, host.shape)
        assert raw(there) == host.tobytes()
        assert fp8.asarray(there) is there
        for back in (fp8.asnumpy(there), fp8.asarray(there, like="numpy"), fp8.asarray(there.T, like=np).T):
            assert isinstance(back, np.ndarray)
            assert (back.dtype, back.shape, back.tobytes()) == (dtype, host.shape, host.tobytes())


@kind_parameter
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_asarray_converts_as_astype(source, to, kind):
    host = random(source)
    want = fp8.astype(host, to)
    for spelled in (to, to.type, to.name):
        converted = fp8.asarray(of_kind(kind, host), spelled)
        assert converted.dtype == to
        if source != to:
            assert raw(converted) == want.tobytes()


@kind_parameter
@pytest.mark.parametrize("values", [
    [1000.0, -1000.0, 1.0], [1000, -1000, 1], [[0.3], [448.0]], 1000.0, 1000, [1e300, -1e300], (2.0, 500),
    []], ids=str)
@pytest.mark.parametrize("to", [*FP8_DTYPES, bfloat16, float32], ids=str)
def test_asarray_of_python_numbers(values, to, kind):
    """Numbers become what astype makes of them from float32, however the dtype is spelled: out-of-range
    numbers saturate."""
    with np.errstate(over="ignore"):
        want = fp8.astype(np.asarray(values, np.float32), to)
    for spelled in (to, to.type, to.name):
        a = fp8.asarray(values, spelled, like=kind)
        assert backend.kind_of(a) == kind
        assert (a.dtype, a.shape, raw(a)) == (to, want.shape, want.tobytes())


@kind_parameter
def test_asarray_without_a_dtype(kind):
    for values, dtype in (([1, 2], np.int64), ([1.0], np.float64), (3.0, np.float64),
                          (np.float32(3), np.float32), ([True], np.bool_)):
        a = fp8.asarray(values, like=kind)
        assert backend.kind_of(a) == kind
        assert a.dtype == dtype
        assert fp8.asnumpy(a).tolist() == np.asarray(values).tolist()


@kind_parameter
def test_asarray_of_other_dtypes_is_the_array_modules(kind):
    a = of_kind(kind, np.array([1, 2, 300], np.int32))
    assert fp8.asarray(a) is a
    assert fp8.asarray(a, np.float32).dtype == np.float32
    assert fp8.asnumpy(fp8.asarray(a, np.uint8)).tolist() == [1, 2, 44]


# ---- concatenate, bytes_equal ----
@kind_parameter
@dtype_parameter
def test_concatenate(dtype, kind):
    host = random(dtype, (4, 5, 6))
    parts = [host[:1], host[1:1], host[1:3], host[3:]]
    for axis in (0, 1, 2, -1, -3):
        moved = [of_kind(kind, np.ascontiguousarray(np.moveaxis(p, 0, axis))) for p in parts]
        joined = fp8.concatenate(moved, axis) if axis else fp8.concatenate(moved)
        assert backend.kind_of(joined) == kind
        assert joined.dtype == dtype
        assert raw(joined) == np.moveaxis(host, 0, axis).tobytes()
    strided = of_kind(kind, random(dtype, (5, 4)))
    assert raw(fp8.concatenate((strided.T,
                                strided.T))) == np.concatenate([bits(random(dtype, (5, 4)).T)] * 2).tobytes()


@kind_parameter
@dtype_parameter
def test_bytes_equal(dtype, kind):
    a, b = of_kind(kind, random(dtype)), of_kind(kind, random(dtype))
    assert fp8.bytes_equal(a, b) is True
    assert fp8.bytes_equal(a, of_kind(kind, np.asfortranarray(random(dtype))))
    bits(b)[2, 4] ^= 1
    assert fp8.bytes_equal(a, b) is False
    assert not fp8.bytes_equal(a, a.T)
    assert not fp8.bytes_equal(a, a.reshape(5, 3))
    assert not fp8.bytes_equal(a, bits(a))
    for shape in ((), (0,), (0, 3)):
        assert fp8.bytes_equal(of_kind(kind, random(dtype, shape)), of_kind(kind, random(dtype, shape)))
    assert not fp8.bytes_equal(of_kind(kind, random(dtype, (0,))), of_kind(kind, random(dtype, (0, 3))))


@kind_parameter
def test_bytes_equal_compares_bytes_not_values(kind):
    def f32(*words: int) -> fp8.arrays.Array:
        return of_kind(kind, np.array(words, np.uint32).view(np.float32))

    assert fp8.bytes_equal(f32(0x7FC00000), f32(0x7FC00000))
    assert not fp8.bytes_equal(f32(0x7FC00000), f32(0x7FC00001))
    assert not fp8.bytes_equal(f32(0), f32(0x80000000))


def test_kinds_are_not_mixed(device):
    host = random(float8_e4m3fn)
    there = device.array(host)
    for call in (lambda: fp8.bytes_equal(host, there), lambda: fp8.bytes_equal(there, host),
                 lambda: fp8.concatenate([host, there]), lambda: fp8.concatenate([there, host])):
        with pytest.raises(TypeError, match=r"array among .* arrays; cupy_fp8\.asarray\(.*\) moves it"):
            call()


# ---- any array ----
typed = st.sampled_from(DTYPES).flatmap(lambda dtype: testing.arrays(dtype, max_side=6))


@few
@given(typed)
def test_any_array_survives(a):
    assert fp8.asarray(a) is a
    assert fp8.bytes_equal(a, a.copy())
    assert fp8.empty_like(a).nbytes == a.nbytes
    if a.ndim:
        assert fp8.bytes_equal(fp8.concatenate([a[:1], a[1:]]), a)
        assert fp8.bytes_equal(fp8.concatenate([a, a[:0]]), a)
    if a.size:
        other = a.copy()
        bits(other).reshape(-1)[-1] ^= 1
        assert not fp8.bytes_equal(a, other)


@few
@given(st.one_of(st.floats(), st.integers(-(2**70), 2**70)), st.sampled_from(DTYPES),
       st.lists(st.integers(0, 3), max_size=3))
def test_full_is_astype(value, dtype, shape):
    with np.errstate(over="ignore"):
        want = fp8.astype(np.array([value], np.float32), dtype)
    a = fp8.full(shape, value, dtype, like="numpy")
    assert (a.shape, a.dtype) == (tuple(shape), dtype)
    assert a.tobytes() == want.tobytes() * a.size


# ---- fp8.xp ----
def test_xp():
    if backend.gpu_problem() is None:
        assert fp8.xp is backend.cupy()
    else:
        assert fp8.xp is np
    assert isinstance(fp8.empty(3, float8_e4m3fn), fp8.xp.ndarray)
    assert isinstance(fp8.asarray([1.0], float8_e4m3fn), fp8.xp.ndarray)
    with pytest.raises(AttributeError, match="module 'cupy_fp8' has no attribute 'np'"):
        _ = cast(Any, fp8).np


@pytest.mark.parametrize("dtype", [float8_e4m3fn, "float8_e4m3fn"], ids=str)
def test_asarray_saturates_whatever_the_numbers_are(dtype):
    for numbers in ([1000.0, -1000.0], [1000, -1000], np.array([1000.0, -1000.0]), np.array([1000, -1000])):
        assert fp8.asarray(numbers, dtype, like=np).astype(np.float32).tolist() == [448.0, -448.0]


def test_large_numpy_arrays_warn_once_and_name_the_users_line(monkeypatch):
    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    monkeypatch.setattr(backend, "NUMPY_WARNING_BYTES", 8)
    backend._warn_once.cache_clear()

    with testing.executor("reference"):             # the CPU was chosen
        fp8.compute_amax(np.ones(4, np.float32))

    def twice():
        fp8.DelayedScaling().quantize(np.ones(4, np.float32), scale=1.0)
        fp8.compute_amax(np.ones(4, np.float32))

    try:
        with pytest.warns(UserWarning, match="above 64 MB") as caught:
            twice()
        assert [w.filename for w in caught] == [__file__]
    finally:
        backend._warn_once.cache_clear()
