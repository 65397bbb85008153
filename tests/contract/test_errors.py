"""What the ops refuse: every wrong argument is an error that names it, says what was expected and what came, before a kernel is
launched and before one byte is written. CuPy arrays over made-up addresses, which need no GPU, show the same for the other kind."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import DelayedScaling, Quantized, Scaled, backend, cases, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import BYTE_DTYPES, FORMATS, FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from cupy_fp8.kernels import Variant
from cupy_fp8.results import swap_last

SHAPE = (4, 6)
Refused = Callable[..., None]


# ---- arrays ----
def ones(shape: tuple[int, ...] = SHAPE, dtype: Any = float32) -> np.ndarray:
    return np.ones(shape, np.float32).astype(dtype)


def one(value: float = 2.0) -> np.ndarray:
    return np.array([value], np.float32)


def poisoned(shape: tuple[int, ...] = SHAPE, dtype: Any = float8_e4m3fn) -> np.ndarray:
    a = np.empty(shape, dtype)
    cases.poison(a)
    return a


def carve(buffer: np.ndarray, start: int, shape: tuple[int, ...] = SHAPE, dtype: Any = float8_e4m3fn) -> np.ndarray:
    """An array that lies in a byte buffer from `start` on."""
    end = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
    return buffer[start:end].view(dtype).reshape(shape)


def memory() -> np.ndarray:
    """Poisoned bytes, aligned to 16."""
    buffer = np.full(1024 + 16, 0xAA, np.uint8)
    return buffer[-buffer.ctypes.data % 16 :][:1024]


def result(shape: tuple[int, ...] = SHAPE, dtype: Any = float8_e4m3fn, *, rowwise: bool = True, columnwise: bool = False,
           **arrays: np.ndarray) -> Quantized:
    """A poisoned result; arrays: data, data_t, scale_inv or scale_inv_t to use in it."""
    scale_inv = arrays.get("scale_inv", poisoned((1,), float32))
    row = Scaled._of(arrays.get("data", poisoned(shape, dtype)), scale_inv, shape)
    column = None
    if columnwise:
        data_t = arrays["data_t"] if "data_t" in arrays else poisoned(swap_last(shape), dtype)
        column = Scaled._of(data_t, arrays.get("scale_inv_t", scale_inv), shape, True)
    return Quantized(row if rowwise else None, column)


def fp8_data(shape: tuple[int, ...] = SHAPE) -> Scaled:
    return Scaled._of(ones(shape, float8_e4m3fn), one(), shape)


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """Every NumPy array that an argument leads to, and the memory that it is a view of."""
    if isinstance(value, np.ndarray):
        yield value
        yield from arrays_in(value.base)
    elif isinstance(value, Quantized):
        yield from arrays_in((value.rowwise, value.columnwise))
    elif isinstance(value, Scaled):
        yield from arrays_in((value.data, value.scale_inv))
    elif isinstance(value, dict):
        yield from arrays_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays_in(item)


# ---- what refusing means ----
@pytest.fixture
def never_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: Variant, *_: Any) -> None:
        raise AssertionError(f"{self.kernel.entry} was launched")

    monkeypatch.setattr(Variant, "launch", launch)


def _refused(error: type[Exception], pattern: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The call raises `error` itself with a message that matches, and leaves all memory that its arguments lead to as it was."""
    held = list(arrays_in((args, kwargs)))
    before = [a.tobytes() for a in held]
    with pytest.raises(error, match=pattern) as caught:
        function(*args, **kwargs)
    assert caught.type is error
    assert [a.tobytes() for a in held] == before, "memory was written"


@pytest.fixture(params=["reference", "host"])
def refused(request: pytest.FixtureRequest, never_launched: None) -> Iterator[Refused]:
    """`_refused`, under both executors of NumPy arrays."""
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)
    with testing.executor(request.param):
        yield _refused


def test_a_write_before_the_error_is_caught():
    def writes_first(out: np.ndarray) -> None:
        bits(out)[0] = 0
        raise ValueError("too late")

    with pytest.raises(AssertionError, match="memory was written"):
        _refused(ValueError, "too late", writes_first, out=result().data)


#: name -> (the dtypes it reads, a call that only lacks its array)
READERS: dict[str, tuple[tuple[np.dtype, ...], str, Callable[..., Any]]] = {
    "quantize_tensor": (INPUT_DTYPES, "x", lambda x, **k: fp8.quantize_tensor(x, 2.0, **k)),
    "cast_transpose": (INPUT_DTYPES, "x", lambda x, **k: fp8.cast_transpose(x, 2.0, **k)),
    "recipe.quantize": (INPUT_DTYPES, "x", lambda x, **k: DelayedScaling().quantize(x, scale=2.0, **k)),
    "compute_amax": (INPUT_DTYPES, "x", fp8.compute_amax),
    "astype": (tuple(FORMATS), "a", lambda a, **k: fp8.astype(a, float8_e4m3fn, **k)),
    "transpose": (BYTE_DTYPES, "a", fp8.transpose),
    "dequantize": (FP8_DTYPES, "q.data", lambda a, **k: fp8.dequantize(Scaled._of(a, one(), SHAPE), **k)),
}
#: An `out` that would fit, for each of them.
FITTING: dict[str, Callable[[], Any]] = {
    "quantize_tensor": result, "cast_transpose": lambda: result(columnwise=True), "recipe.quantize": result,
    "compute_amax": lambda: poisoned((1,), float32), "astype": poisoned, "transpose": lambda: poisoned(swap_last(SHAPE)),
    "dequantize": lambda: poisoned(SHAPE, float32),
}  # fmt: skip


# ---- inputs ----
@pytest.mark.parametrize("wrong", [[[1.0, 2.0]], ((1.0,), (2.0,)), 3.0, 3, None, "x", np.float32(1), memoryview(b"x"), {}], ids=repr)
@pytest.mark.parametrize("op", READERS)
def test_not_an_array(op, wrong, refused):
    _, name, call = READERS[op]
    expected = rf"^{re.escape(name)}: expected a numpy.ndarray or cupy.ndarray, got {type(wrong).__name__}"
    refused(TypeError, expected + (".*asarray" if isinstance(wrong, (list, tuple)) else "$"), call, wrong)
    refused(TypeError, expected, call, wrong, out=FITTING[op]())


@pytest.mark.parametrize("op", READERS)
def test_wrong_dtype_of_the_input(op, refused):
    dtypes, name, call = READERS[op]
    others = [np.dtype(t) for t in ("f8", "i1", "u1", "i4", "?", "c8", "O", ">f4", ">f2")] + [d for d in FORMATS if d not in dtypes]
    for dtype in others:
        message = rf"^{re.escape(name)}: expected dtype {', '.join(d.name for d in dtypes)}, got {re.escape(str(dtype))}$"
        a = np.zeros(SHAPE, dtype) if dtype not in FORMATS else ones(SHAPE, dtype)
        refused(TypeError, message, call, a)
        refused(TypeError, message, call, a, out=FITTING[op]())


@pytest.mark.parametrize("wrong", [ones(SHAPE, float8_e4m3fn), [1.0], None, 2.0], ids=lambda v: type(v).__name__)
def test_dequantize_wants_a_result(wrong, refused):
    message = f"^q: expected a Scaled or Quantized, got {type(wrong).__name__}; use astype"
    refused(TypeError, message, fp8.dequantize, wrong, out=poisoned(SHAPE, float32))


@pytest.mark.parametrize(("scale_inv", "error", "message"), [
    ([2.0], TypeError, "expected a numpy.ndarray or cupy.ndarray, got list"),
    (2.0, TypeError, "expected a numpy.ndarray or cupy.ndarray, got float"),
    (None, TypeError, "expected a numpy.ndarray or cupy.ndarray, got NoneType"),
    (np.ones(1), TypeError, "expected dtype float32, got float64"),
    (ones((2,)), ValueError, r"expected one element, got shape \(2,\)"),
    (ones((0,)), ValueError, r"expected one element, got shape \(0,\)"),
    (carve(memory(), 3, (1,), float32), ValueError, "is not a multiple of 4"),
])  # fmt: skip
def test_dequantize_wrong_scale_inv(scale_inv, error, message, refused):
    refused(error, rf"^q.scale_inv: .*{message}", fp8.dequantize, Scaled._of(ones(SHAPE, float8_e5m2), scale_inv, SHAPE),
            out=poisoned(SHAPE, float32))


@pytest.mark.parametrize(("data", "shape", "transposed"), [
    ((8, 8), (2, 2), False), ((2, 2), (8, 8), False), ((4, 6), (4, 6), True), ((6, 4), (4, 6), False), ((24,), (4, 6), True)])
def test_dequantize_data_that_is_not_of_its_shape(data, shape, transposed, refused):
    """A Scaled made by hand whose metadata do not fit its data: a kernel would write past the result."""
    s = Scaled._of(ones(data, float8_e4m3fn), one(), shape, transposed)
    message = rf"^q.data: expected .*{re.escape(str(swap_last(shape) if transposed else shape))}.* got .*{re.escape(str(data))}"
    refused(ValueError, message, fp8.dequantize, s, out=poisoned(shape, float32))
    refused(ValueError, message, fp8.dequantize, Quantized(s))


@pytest.mark.parametrize("shape", [(), (1,), (24,)])
def test_fewer_than_two_dimensions(shape, refused):
    x = ones(shape)
    message = rf"^columnwise: expected an array of two or more dimensions, got shape {re.escape(str(shape))}$"
    refused(ValueError, message, fp8.quantize_tensor, x, 2.0, columnwise=True)
    refused(ValueError, message, fp8.quantize_tensor, x, 2.0, rowwise=False, columnwise=True, amax=poisoned((1,), float32))
    refused(ValueError, message, fp8.quantize_tensor, x, 2.0, columnwise=True, out=result(shape))
    refused(ValueError, message, fp8.cast_transpose, x, 2.0)
    refused(ValueError, message, DelayedScaling().quantize, x, scale=2.0, columnwise=True)
    refused(ValueError, message, DelayedScaling().empty, shape, columnwise=True, like="numpy")
    refused(ValueError, rf"^a: expected an array of two or more dimensions, got shape {re.escape(str(shape))}$",
            fp8.transpose, ones(shape, float8_e4m3fn), out=poisoned(shape))


def test_neither_direction(refused):
    message = "^rowwise, columnwise: expected at least one of them, got neither$"
    refused(ValueError, message, fp8.quantize_tensor, ones(), 2.0, rowwise=False, amax=poisoned((1,), float32))
    refused(ValueError, message, fp8.quantize_tensor, ones(), 2.0, rowwise=False, out=result())
    refused(ValueError, message, DelayedScaling().quantize, ones(), scale=2.0, rowwise=False)
    refused(ValueError, message, DelayedScaling().empty, SHAPE, rowwise=False, like="numpy")


# ---- options ----
@pytest.mark.parametrize("wrong", [float8_e8m0fnu, bfloat16, np.float32, np.uint8, "int8", None, "nope", object()], ids=str)
def test_wrong_dtype_option(wrong, refused):
    allowed = "dtype: expected one of float8_e4m3fn, float8_e5m2, got "
    refused(TypeError, allowed, fp8.quantize_tensor, ones(), 2.0, dtype=wrong, amax=poisoned((1,), float32))
    refused(TypeError, allowed, fp8.cast_transpose, ones(), 2.0, dtype=wrong, out=result(columnwise=True))
    refused(TypeError, allowed, DelayedScaling, wrong)


@pytest.mark.parametrize("wrong", [float8_e4m3fn, float8_e8m0fnu, np.float64, "int8", None, "nope", object()], ids=str)
def test_wrong_dtype_of_values(wrong, refused):
    message = "^dtype: expected one of bfloat16, float16, float32, got "
    refused(TypeError, message, fp8.dequantize, fp8_data(), dtype=wrong, out=poisoned(SHAPE, float32))
    refused(TypeError, message, fp8_data().dequantize, wrong)
    if wrong not in FP8_DTYPES and wrong is not float8_e8m0fnu:
        refused(TypeError, "^dtype: expected one of float8_e4m3fn, float8_e5m2, float8_e8m0fnu, bfloat16, float16, float32, got ",
                fp8.astype, ones(), wrong, out=poisoned())


@pytest.mark.parametrize("wrong", ["raise", "", "IGNORE", None, True, 1, []], ids=repr)
def test_wrong_nan_option(wrong, refused):
    refused(ValueError, rf"^nan: expected .*'ignore'.*'propagate'.*, got {re.escape(repr(wrong))}$",
            fp8.compute_amax, ones(), nan=wrong, out=poisoned((1,), float32))


@pytest.mark.parametrize(("scale", "error", "message"), [
    ([2.0], TypeError, "got list"),
    ((2.0,), TypeError, "got tuple"),
    (True, TypeError, "got bool"),
    (np.bool_(True), TypeError, "got bool"),
    ("2", TypeError, "got str"),
    (2j, TypeError, "got complex"),
    (ones((2,)), ValueError, r"expected one element, got shape \(2,\)"),
    (ones((0,)), ValueError, r"expected one element, got shape \(0,\)"),
    (ones((1, 2)), ValueError, r"expected one element, got shape \(1, 2\)"),
    (np.ones(1), TypeError, "expected dtype float32, got float64"),
    (np.ones((), np.int32), TypeError, "expected dtype float32, got int32"),
    (ones((1,), bfloat16), TypeError, "expected dtype float32, got bfloat16"),
    (carve(memory(), 2, (1,), float32), ValueError, "address 0x[0-9a-f]+ is not a multiple of 4"),
], ids=str)  # fmt: skip
def test_wrong_scale(scale, error, message, refused):
    amax, message = poisoned((1,), float32), f"^scale: .*{message}"
    refused(error, message, fp8.quantize_tensor, ones(), scale, amax=amax)
    refused(error, message, fp8.quantize_tensor, ones(), scale, amax=amax, out=result())
    refused(error, message, fp8.cast_transpose, ones(), scale, amax=amax, out=result(columnwise=True))
    refused(ValueError if scale is None else error, "^scale: ", DelayedScaling().quantize, ones(), scale=scale, amax=amax, out=result())


def test_an_integer_scale_that_no_float_holds(refused):
    refused(ValueError, "^scale: ", fp8.quantize_tensor, ones(), 10**400, amax=poisoned((1,), float32), out=result())


@pytest.mark.parametrize("name", ["amax", "noop"])
@pytest.mark.parametrize(("wrong", "error", "message"), [
    ([0.0], TypeError, "expected a numpy.ndarray or cupy.ndarray, got list"),
    (0.0, TypeError, "expected a numpy.ndarray or cupy.ndarray, got float"),
    (np.float32(0), TypeError, "expected a numpy.ndarray or cupy.ndarray, got float32"),
    (True, TypeError, "expected a numpy.ndarray or cupy.ndarray, got bool"),
    (ones((2,)), ValueError, r"expected one element, got shape \(2,\)"),
    (ones((0, 1)), ValueError, r"expected one element, got shape \(0, 1\)"),
    (np.ones(1), TypeError, "expected dtype float32, got float64"),
    (ones((1,), bfloat16), TypeError, "expected dtype float32, got bfloat16"),
    (np.ones(1, np.int32), TypeError, "expected dtype float32, got int32"),
    (carve(memory(), 1, (1,), float32), ValueError, "address 0x[0-9a-f]+ is not a multiple of 4"),
], ids=str)  # fmt: skip
def test_wrong_amax_or_noop(name, wrong, error, message, refused):
    for extra in ({}, {"out": result()}):
        refused(error, f"^{name}: {message}", fp8.quantize_tensor, ones(), 2.0, **{name: wrong}, **extra)
    refused(error, f"^{name}: {message}", fp8.cast_transpose, ones(), one(), **{name: wrong}, out=result(columnwise=True))


def test_noop_without_out(refused):
    message = "^noop: needs out=, since nothing may be written$"
    refused(ValueError, message, fp8.quantize_tensor, ones(), 2.0, noop=one(1.0), amax=poisoned((1,), float32))
    refused(ValueError, message, fp8.cast_transpose, ones(), 2.0, noop=one(0.0))
    refused(ValueError, message, DelayedScaling().quantize, ones(), scale=2.0, noop=one(0.0))


@pytest.mark.parametrize("op", ["quantize_tensor", "cast_transpose"])
def test_read_only_amax(op, refused):
    amax = poisoned((1,), float32)
    amax.flags.writeable = False
    call = READERS[op][2]
    refused(ValueError, "^amax: .*read-only", call, ones(), amax=amax)
    refused(ValueError, "^amax: .*read-only", call, ones(), amax=amax, out=FITTING[op]())


# ---- out: what it is ----
@pytest.mark.parametrize("wrong", [[1], 1.0, "out", poisoned(), fp8_data(), (poisoned(), one()), {}], ids=lambda v: type(v).__name__)
def test_out_of_a_quantiser_is_a_result(wrong, refused):
    message = rf"^out: expected a Quantized \(an earlier result, or recipe.empty\(…\)\), got {type(wrong).__name__}$"
    refused(TypeError, message, fp8.quantize_tensor, ones(), 2.0, amax=poisoned((1,), float32), out=wrong)
    refused(TypeError, message, fp8.cast_transpose, ones(), 2.0, out=wrong)


@pytest.mark.parametrize("wrong", [[1], 1.0, "out", result(), fp8_data()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("op", ["compute_amax", "astype", "transpose", "dequantize"])
def test_out_of_the_others_is_an_array(op, wrong, refused):
    dtypes, _, call = READERS[op]
    message = f"^out: expected a numpy.ndarray or cupy.ndarray, got {type(wrong).__name__}"
    refused(TypeError, message, call, ones(SHAPE, dtypes[0]), out=wrong)


@pytest.mark.parametrize("op", ["astype", "transpose", "dequantize"])
@pytest.mark.parametrize("shape", [(), (24,), (3, 6), (1, 4, 6), (4, 7)])
def test_out_of_the_wrong_shape(op, shape, refused):
    dtypes, _, call = READERS[op]
    fitting = FITTING[op]()
    message = rf"^out: expected shape {re.escape(str(fitting.shape))}, got {re.escape(str(shape))}$"
    refused(ValueError, message, call, ones(SHAPE, dtypes[0]), out=poisoned(shape, fitting.dtype))


@pytest.mark.parametrize("shape", [(2,), (0,), (4, 6)])
def test_out_of_compute_amax_has_one_element(shape, refused):
    refused(ValueError, rf"^out: expected one element, got shape {re.escape(str(shape))}$",
            fp8.compute_amax, ones(), out=poisoned(shape, float32))


@pytest.mark.parametrize("op", ["compute_amax", "astype", "transpose", "dequantize"])
def test_out_of_the_wrong_dtype(op, refused):
    dtypes, _, call = READERS[op]
    fitting = FITTING[op]()
    others: list[np.dtype] = [np.dtype("f8"), np.dtype("u1"), np.dtype("i4"), *FORMATS]
    for dtype in others:
        if dtype != fitting.dtype:                      # transpose keeps the input's dtype, here the first that it reads
            refused(TypeError, f"^out: expected dtype {fitting.dtype}, got {dtype}$",
                    call, ones(SHAPE, dtypes[0]), out=np.zeros(fitting.shape, dtype))


def test_results_of_the_wrong_dtype(refused):
    for asked, given in ((float8_e4m3fn, float8_e5m2), (float8_e5m2, float8_e4m3fn)):
        refused(TypeError, rf"^out.rowwise.data: expected dtype {asked}, got {given}$",
                fp8.quantize_tensor, ones(), 2.0, dtype=asked, amax=poisoned((1,), float32), out=result(dtype=given))
    refused(TypeError, "^out.rowwise.data: expected dtype float8_e4m3fn, got uint8$",
            fp8.quantize_tensor, ones(), 2.0, out=result(data=np.zeros(SHAPE, np.uint8)))
    refused(TypeError, "^out.columnwise.data: expected dtype float8_e4m3fn, got float8_e5m2$",
            fp8.cast_transpose, ones(), 2.0, out=result(columnwise=True, data_t=poisoned((6, 4), float8_e5m2)))
    refused(TypeError, "^out.rowwise.scale_inv: expected dtype float32, got float64$",
            fp8.quantize_tensor, ones(), 2.0, out=result(scale_inv=np.zeros(1)))
    refused(TypeError, "^out.columnwise.scale_inv: expected dtype float32, got bfloat16$",
            fp8.cast_transpose, ones(), 2.0, out=result(columnwise=True, scale_inv_t=poisoned((1,), bfloat16)))


def test_results_of_the_wrong_shape(refused):
    shapes: tuple[tuple[int, ...], ...] = ((6, 4), (4, 7), (24,), (1, 4, 6))
    for shape in shapes:
        refused(ValueError, rf"^out.rowwise: expected per-tensor data of shape \(4, 6\) not stored transposed, got Scaled\(.*"
                rf"\[{', '.join(map(str, shape))}\]", fp8.quantize_tensor, ones(), 2.0, amax=poisoned((1,), float32), out=result(shape))
    # the metadata fit, the arrays do not
    refused(ValueError, r"^out.rowwise.data: expected shape \(4, 6\), got \(4, 5\)$",
            fp8.quantize_tensor, ones(), 2.0, out=result(data=poisoned((4, 5))))
    refused(ValueError, r"^out.columnwise.data: expected shape \(6, 4\), got \(4, 6\)$",
            fp8.cast_transpose, ones(), 2.0, out=result(columnwise=True, data_t=poisoned((4, 6))))
    scalars: tuple[tuple[int, ...], ...] = ((), (2,), (1, 1), (0,))
    for shape in scalars:
        refused(ValueError, rf"^out.rowwise.scale_inv: expected shape \(1,\), got {re.escape(str(shape))}$",
                fp8.quantize_tensor, ones(), 2.0, out=result(scale_inv=poisoned(shape, float32)))


def test_results_of_the_wrong_directions(refused):
    row, column, both = result(), result(rowwise=False, columnwise=True), result(columnwise=True)
    for out, directions, message in (
        (row, {"columnwise": True}, "no columnwise part, but columnwise=True"),
        (row, {"rowwise": False, "columnwise": True}, "has a rowwise part, but rowwise=False"),
        (column, {}, "no rowwise part, but rowwise=True"),
        (column, {"columnwise": True}, "no rowwise part, but rowwise=True"),
        (both, {}, "has a columnwise part, but columnwise=False"),
        (both, {"rowwise": False, "columnwise": True}, "has a rowwise part, but rowwise=False"),
    ):
        refused(ValueError, f"^out: {message} was asked for$", fp8.quantize_tensor, ones(), 2.0, out=out, **directions)
        refused(ValueError, f"^out: {message} was asked for$", DelayedScaling().quantize, ones(), scale=2.0, out=out, **directions)
    refused(ValueError, "^out: no columnwise part, but columnwise=True was asked for$", fp8.cast_transpose, ones(), 2.0, out=row)


def test_results_stored_the_other_way(refused):
    square = (5, 5)
    refused(ValueError, r"^out.columnwise: expected per-tensor data of shape \(5, 5\) not stored transposed, got Scaled\(",
            fp8.cast_transpose, ones(square), 2.0, transposed=False, out=result(square, columnwise=True))
    shared = Scaled._of(poisoned(square), one(), square)
    plain = Quantized(shared, shared)
    refused(ValueError, r"^out.columnwise: expected per-tensor data of shape \(5, 5\) stored transposed, got Scaled\(",
            fp8.cast_transpose, ones(square), 2.0, out=plain)
    flipped = result(square, columnwise=True).columnwise
    refused(ValueError, r"^out.rowwise: expected per-tensor data of shape \(5, 5\) not stored transposed",
            fp8.quantize_tensor, ones(square), 2.0, out=Quantized(flipped))
    apart = Quantized(Scaled._of(poisoned(square), one(), square), Scaled._of(poisoned(square), one(), square))
    refused(ValueError, "^out: with transposed=False both directions are the same bytes; expected them to share one data array$",
            fp8.cast_transpose, ones(square), 2.0, transposed=False, out=apart)
    blocked = Quantized(Scaled._of(poisoned(square), one(), square, False, (1, 128), "gemm_ready"))
    refused(ValueError, r"^out.rowwise: expected per-tensor data .* got Scaled\(.*block 1×128",
            fp8.quantize_tensor, ones(square), 2.0, out=blocked)


# ---- out: how it lies in memory ----
def strided(a: np.ndarray) -> np.ndarray:
    """An array of a's shape whose rows do not follow one another."""
    return poisoned((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)[..., ::2]


def read_only(a: np.ndarray) -> np.ndarray:
    a.flags.writeable = False
    return a


def misaligned(a: np.ndarray) -> np.ndarray:
    return carve(memory(), 1, a.shape, a.dtype)


SPOILED: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "strided": (strided, r"expected a C-contiguous array, got strides \(.*\); make one with cupy_fp8.empty$"),
    "fortran": (np.asfortranarray, r"expected a C-contiguous array, got strides \(.*\); make one with cupy_fp8.empty$"),
    "read-only": (read_only, "the array is read-only$"),
    "misaligned": (misaligned, "address 0x[0-9a-f]+ is not a multiple of the element size [24]$"),
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize(("op", "to"), [
    ("astype", float8_e4m3fn), ("astype", bfloat16), ("dequantize", float32), ("transpose", float8_e5m2)])
def test_layout_of_out(op, to, how, refused):
    spoil, message = SPOILED[how]
    if how == "misaligned" and to.itemsize == 1:
        pytest.skip("bytes are always aligned")
    out = spoil(poisoned(swap_last(SHAPE) if op == "transpose" else SHAPE, to))
    calls: dict[str, Callable[[], None]] = {
        "astype": lambda: refused(ValueError, f"^out: {message}", fp8.astype, ones(), to, out=out),
        "dequantize": lambda: refused(ValueError, f"^out: {message}", fp8.dequantize, fp8_data(), dtype=to, out=out),
        "transpose": lambda: refused(ValueError, f"^out: {message}", fp8.transpose, ones(SHAPE, to), out=out),
    }
    calls[op]()


@pytest.mark.parametrize("how", SPOILED)
def test_layout_of_results(how, refused):
    spoil, message = SPOILED[how]
    x, amax = ones(), poisoned((1,), float32)
    if how != "misaligned":
        refused(ValueError, f"^out.rowwise.data: {message}", fp8.quantize_tensor, x, 2.0, amax=amax, out=result(data=spoil(poisoned())))
        refused(ValueError, f"^out.columnwise.data: {message}",
                fp8.cast_transpose, x, 2.0, out=result(columnwise=True, data_t=spoil(poisoned((6, 4)))))
    if how in ("misaligned", "read-only"):
        refused(ValueError, f"^out.rowwise.scale_inv: {message}",
                fp8.quantize_tensor, x, 2.0, amax=amax, out=result(scale_inv=spoil(poisoned((1,), float32))))
        refused(ValueError, f"^out.columnwise.scale_inv: {message}",
                fp8.cast_transpose, x, 2.0, out=result(columnwise=True, scale_inv_t=spoil(poisoned((1,), float32))))


def test_layout_of_an_amax(refused):
    refused(ValueError, "^out: the array is read-only$", fp8.compute_amax, ones(), out=read_only(poisoned((1,), float32)))
    refused(ValueError, "^out: address 0x[0-9a-f]+ is not a multiple of (the element size )?4$",
            fp8.compute_amax, ones(), out=misaligned(poisoned((1,), float32)))


# ---- overlaps ----
OVERLAP = "overlaps .* in memory; .*memory of"
X_AT, X_BYTES = 256, 96             # where `carve` puts an f32 x of SHAPE in these tests


@pytest.mark.parametrize("start", [X_AT - 23, X_AT, X_AT + 10, X_AT + X_BYTES - 1])
def test_result_overlaps_the_input(start, refused):
    buffer = memory()
    x = carve(buffer, X_AT, SHAPE, float32)
    data = carve(buffer, start)
    amax = poisoned((1,), float32)
    refused(ValueError, f"^out.rowwise.data: {OVERLAP}", fp8.quantize_tensor, x, 2.0, amax=amax, out=result(data=data))
    refused(ValueError, f"^out.columnwise.data: {OVERLAP}",
            fp8.cast_transpose, x, 2.0, amax=amax, out=result(columnwise=True, data_t=data.reshape(6, 4)))
    refused(ValueError, f"^out: {OVERLAP}", fp8.astype, x, float8_e4m3fn, out=data)
    bytes_in = carve(buffer, X_AT, (8, 12))
    refused(ValueError, f"^out: {OVERLAP}", fp8.transpose, bytes_in, out=carve(buffer, start, (12, 8)))
    refused(ValueError, f"^out: {OVERLAP}",
            fp8.dequantize, Scaled._of(bytes_in, one(), (8, 12)), dtype=bfloat16, out=carve(buffer, start // 2 * 2, (8, 12), bfloat16))


def test_one_element_overlaps_the_input(refused):
    buffer = memory()
    x, inside = carve(buffer, X_AT, SHAPE, float32), carve(buffer, X_AT + 8, (1,), float32)
    refused(ValueError, f"^out: {OVERLAP}", fp8.compute_amax, x, out=inside)
    refused(ValueError, f"^out.rowwise.scale_inv: {OVERLAP}", fp8.quantize_tensor, x, 2.0, out=result(scale_inv=inside))
    refused(ValueError, f"^out.columnwise.scale_inv: {OVERLAP}",
            fp8.cast_transpose, x, 2.0, out=result(columnwise=True, scale_inv_t=inside))


def test_amax_overlaps_the_input(refused):
    """It is raised while x is read."""
    buffer = memory()
    x, inside = carve(buffer, X_AT, SHAPE, float32), carve(buffer, X_AT + 8, (1,), float32)
    refused(ValueError, f"^amax: {OVERLAP}", fp8.quantize_tensor, x, 2.0, amax=inside)
    refused(ValueError, f"^amax: {OVERLAP}", fp8.quantize_tensor, x, 2.0, amax=inside, out=result())
    refused(ValueError, f"^amax: {OVERLAP}", fp8.cast_transpose, x, one(), amax=inside, out=result(columnwise=True))
    halves = carve(buffer, X_AT + 2, SHAPE, bfloat16)   # starts inside the four bytes before its first multiple of four
    refused(ValueError, f"^amax: {OVERLAP}", fp8.quantize_tensor, halves, 2.0, amax=carve(buffer, X_AT, (1,), float32))


def test_amax_overlaps_what_is_read(refused):
    shared = poisoned((1,), float32)
    again = shared[:]
    for out in ({}, {"out": result()}):
        refused(ValueError, f"^amax: {OVERLAP}", fp8.quantize_tensor, ones(), shared, amax=again, **out)
    refused(ValueError, f"^amax: {OVERLAP}", fp8.quantize_tensor, ones(), 2.0, amax=shared, noop=again, out=result())


@pytest.mark.parametrize("name", ["scale", "amax", "noop"])
def test_result_overlaps_a_scalar_argument(name, refused):
    def call(*, columnwise: bool = False, **arrays: Any) -> None:
        given: dict[str, Any] = {"scale": 2.0, name: scalar}
        refused(ValueError, rf"^out(\.\w+)*: {OVERLAP}", fp8.quantize_tensor, ones(), columnwise=columnwise, **given,
                out=result(columnwise=columnwise, **arrays))

    buffer = memory()
    scalar = carve(buffer, 64, (1,), float32)
    call(scale_inv=carve(buffer, 64, (1,), float32))
    call(columnwise=True, scale_inv_t=carve(buffer, 64, (1,), float32))
    for start in (41, 44, 50, 64):                      # the last byte of the data, its middle, its start
        call(data=carve(buffer, start))
        call(columnwise=True, data_t=carve(buffer, start, (6, 4)))
    for start in (65, 67):                              # only the scalar's last bytes
        call(data=carve(buffer, start))


def test_results_overlap_one_another(refused):
    buffer, x = memory(), ones()
    message = rf"^out\.(row|column)wise\.(data|scale_inv): {OVERLAP}"
    refused(ValueError, message, fp8.cast_transpose, x, 2.0,
            out=result(columnwise=True, data=carve(buffer, 0), data_t=carve(buffer, 23, (6, 4))))
    refused(ValueError, message, fp8.quantize_tensor, x, 2.0,
            out=result(data=carve(buffer, 5), scale_inv=carve(buffer, 28, (1,), float32)))
    refused(ValueError, message, fp8.cast_transpose, x, 2.0,
            out=result(columnwise=True, data=carve(buffer, 0), scale_inv_t=carve(buffer, 8, (1,), float32)))
    scale_inv = carve(buffer, 0, (1,), float32)
    refused(ValueError, message, fp8.cast_transpose, x, 2.0, out=result(columnwise=True, scale_inv=scale_inv, scale_inv_t=scale_inv[:]))


def test_dequantize_out_overlaps_scale_inv(refused):
    buffer = memory()
    s = Scaled._of(ones(SHAPE, float8_e4m3fn), carve(buffer, 64, (1,), float32), SHAPE)
    for start in (64, 0, 64 - 92, 40):
        if start >= 0:
            refused(ValueError, f"^out: {OVERLAP}", fp8.dequantize, s, out=carve(buffer, start, SHAPE, float32))


def test_neighbours_do_not_overlap():
    """Arrays that touch, in one allocation, as arenas lay them out."""
    buffer = memory()
    x = carve(buffer, 96, SHAPE, float32)
    x[...] = 1
    scale, amax, inverse = (carve(buffer, at, (1,), float32) for at in (92, 88, 216))
    scale[...], amax[...] = 2, 0
    out = result(data=carve(buffer, 192), scale_inv=inverse)
    assert fp8.quantize_tensor(x, scale, amax=amax, out=out) is out
    testing.assert_bytes_equal(out.data, np.full(SHAPE, 2, float8_e4m3fn))
    assert (float(amax[0]), float(inverse[0])) == (1.0, 0.5)
    assert (buffer[:88] == 0xAA).all()
    assert (buffer[220:] == 0xAA).all()


# ---- recipe.empty(buffers=…) ----
@pytest.mark.parametrize(("buffers", "directions", "error", "message"), [
    ({}, {}, ValueError, r"buffers: expected a \(data, scale_inv\) pair for each of \['rowwise'\], got \[\]"),
    ({"columnwise": (poisoned((6, 4)), one())}, {}, ValueError, r"buffers: .*for each of \['rowwise'\], got \['columnwise'\]"),
    ({"rowwise": (poisoned(), one())}, {"columnwise": True}, ValueError, r"each of \['rowwise', 'columnwise'\], got \['rowwise'\]"),
    ({"rowwise": (poisoned(), one()), "columnwise": (poisoned((6, 4)), one())}, {}, ValueError,
     r"buffers: .*each of \['rowwise'\], got \['columnwise', 'rowwise'\]"),
    ({"rows": (poisoned(), one())}, {}, ValueError, r"buffers: .* got \['rows'\]"),
    ({"rowwise": poisoned()}, {}, ValueError, r"buffers\['rowwise'\]: expected a \(data, scale_inv\) pair, got ndarray"),
    ({"rowwise": (poisoned(),)}, {}, ValueError, r"buffers\['rowwise'\]: expected a \(data, scale_inv\) pair, got tuple"),
    ({"rowwise": None}, {}, ValueError, r"buffers\['rowwise'\]: expected a \(data, scale_inv\) pair, got NoneType"),
    ({"rowwise": (poisoned(), None)}, {}, TypeError, r"buffers\['rowwise'\] scale_inv: expected a numpy.ndarray .*got NoneType"),
    ({"rowwise": (None, one())}, {}, TypeError, r"buffers\['rowwise'\] data: expected a numpy.ndarray .*got NoneType"),
    ({"rowwise": ([1], one())}, {}, TypeError, r"buffers\['rowwise'\] data: expected a numpy.ndarray .*got list"),
    ({"rowwise": (poisoned(SHAPE, float8_e5m2), one())}, {}, TypeError, "data: expected dtype float8_e4m3fn, got float8_e5m2"),
    ({"rowwise": (np.zeros(SHAPE, np.uint8), one())}, {}, TypeError, "data: expected dtype float8_e4m3fn, got uint8"),
    ({"rowwise": (poisoned(), np.ones(1))}, {}, TypeError, "scale_inv: expected dtype float32, got float64"),
    ({"rowwise": (poisoned((4, 7)), one())}, {}, ValueError, r"data: expected a C-contiguous array of shape \(4, 6\), got shape \(4, 7\)"),
    ({"rowwise": (poisoned((24,)), one())}, {}, ValueError, r"data: expected .*shape \(4, 6\), got shape \(24,\)"),
    ({"rowwise": (strided(poisoned()), one())}, {}, ValueError, r"data: expected a C-contiguous array .*strides \(12, 2\)"),
    ({"rowwise": (poisoned(), ones((2,)))}, {}, ValueError, r"scale_inv: expected .*shape \(1,\), got shape \(2,\)"),
    ({"columnwise": (poisoned(), one())}, {"rowwise": False, "columnwise": True}, ValueError,
     r"buffers\['columnwise'\] data: expected .*shape \(6, 4\), got shape \(4, 6\)"),
], ids=lambda v: None)  # fmt: skip
def test_empty_with_wrong_buffers(buffers, directions, error, message, refused):
    refused(error, message, DelayedScaling().empty, SHAPE, buffers=buffers, **directions)


@pytest.mark.parametrize("shape", [-1, (4, -6), (-1,)])
def test_empty_with_a_negative_extent(shape, refused):
    refused(ValueError, r"^shape: expected extents of zero or more, got \(.*-\d", DelayedScaling().empty, shape, like="numpy")


# ---- the two kinds of array ----
class StandIn:
    """What the checks see of a CuPy array before they refuse it."""

    dtype, shape, size = float32, (1,), 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """An array of a module called cupy, on machines without CuPy too."""
    backend.gpu_problem()                               # asks the real CuPy, if there is one, and remembers
    module = types.ModuleType("cupy")
    module.ndarray = StandIn                            # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    return StandIn()


def test_mixed_kinds_without_cupy(stand_in, refused):
    mixed = ": a cupy array among numpy arrays; move it with cupy_fp8.asarray"
    x, amax = ones(), poisoned((1,), float32)
    refused(TypeError, f"^scale{mixed}", fp8.quantize_tensor, x, stand_in, amax=amax, out=result())
    refused(TypeError, f"^amax{mixed}", fp8.quantize_tensor, x, 2.0, amax=stand_in, out=result())
    refused(TypeError, f"^noop{mixed}", fp8.quantize_tensor, x, 2.0, amax=amax, noop=stand_in, out=result())
    refused(TypeError, f"^out.rowwise.data{mixed}", fp8.quantize_tensor, x, 2.0, amax=amax,
            out=Quantized(Scaled._of(stand_in, one(), SHAPE)))
    refused(TypeError, f"^out.rowwise.scale_inv{mixed}", fp8.quantize_tensor, x, 2.0,
            out=Quantized(Scaled._of(poisoned(), stand_in, SHAPE)))
    refused(TypeError, f"^q.scale_inv{mixed}", fp8.dequantize, Scaled._of(ones(SHAPE, float8_e4m3fn), stand_in, SHAPE))
    for op in ("compute_amax", "astype", "transpose", "dequantize"):
        refused(TypeError, f"^out{mixed}", READERS[op][2], ones(SHAPE, READERS[op][0][0]), out=stand_in)
    refused(TypeError, rf"^buffers\['rowwise'\] scale_inv{mixed}",
            DelayedScaling().empty, SHAPE, buffers={"rowwise": (poisoned(), stand_in)})


class Fake:
    """CuPy arrays over addresses that nobody owns: enough for everything that is checked before a launch."""

    def __init__(self, cupy: Any) -> None:
        self.cupy, self.next = cupy, 1 << 30

    def __call__(self, shape: tuple[int, ...] = SHAPE, dtype: Any = float32, *, device: int = 0, at: int | None = None, lead: int = 0,
                 strides: tuple[int, ...] | None = None) -> Any:
        """An array of its own, or at an address; `lead` bytes past where it would be aligned."""
        if at is None:
            at, self.next = self.next, self.next + (1 << 16)
        allocation = self.cupy.cuda.memory.UnownedMemory(at, 1 << 15, None, device_id=device)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(allocation, lead), strides)

    def one(self, **where: Any) -> Any:
        return self((1,), float32, **where)

    def result(self, *, columnwise: bool = False, **arrays: Any) -> Quantized:
        scale_inv = arrays.get("scale_inv", self.one())
        column = Scaled._of(arrays.get("data_t", self((6, 4), float8_e4m3fn)), arrays.get("scale_inv_t", scale_inv), SHAPE, True)
        return Quantized(Scaled._of(arrays.get("data", self(SHAPE, float8_e4m3fn)), scale_inv, SHAPE), column if columnwise else None)


@pytest.fixture
def fake(never_launched: None) -> Fake:
    return Fake(pytest.importorskip("cupy"))


def test_mixed_kinds(fake, refused):
    mixed = ": a cupy array among numpy arrays; move it with cupy_fp8.asarray"
    x = ones()
    refused(TypeError, f"^scale{mixed}", fp8.quantize_tensor, x, fake.one(), out=result())
    refused(TypeError, f"^amax{mixed}", fp8.quantize_tensor, x, 2.0, amax=fake.one(), out=result())
    refused(TypeError, f"^out.rowwise.data{mixed}", fp8.quantize_tensor, x, 2.0, amax=poisoned((1,), float32), out=fake.result())
    refused(TypeError, f"^out{mixed}", fp8.compute_amax, x, out=fake.one())
    refused(TypeError, f"^out{mixed}", fp8.astype, x, float8_e4m3fn, out=fake(SHAPE, float8_e4m3fn))
    refused(TypeError, f"^out{mixed}", fp8.transpose, ones(SHAPE, float8_e5m2), out=fake((6, 4), float8_e5m2))
    refused(TypeError, f"^q.scale_inv{mixed}", fp8.dequantize, Scaled._of(ones(SHAPE, float8_e5m2), fake.one(), SHAPE))
    refused(TypeError, f"^out{mixed}", fp8.dequantize, fp8_data(), out=fake())


def test_mixed_kinds_the_other_way(fake):
    mixed = ": a numpy array among cupy arrays; move it with cupy_fp8.asarray"
    x, x8 = fake(), fake(SHAPE, float8_e4m3fn)
    _refused(TypeError, f"^scale{mixed}", fp8.quantize_tensor, x, one(), out=fake.result())
    _refused(TypeError, f"^amax{mixed}", fp8.quantize_tensor, x, 2.0, amax=poisoned((1,), float32), out=fake.result())
    _refused(TypeError, f"^noop{mixed}", fp8.quantize_tensor, x, 2.0, noop=one(), out=fake.result())
    _refused(TypeError, f"^out.rowwise.data{mixed}", fp8.quantize_tensor, x, 2.0, out=result())
    _refused(TypeError, f"^out.columnwise.scale_inv{mixed}",
             fp8.cast_transpose, x, 2.0, out=fake.result(columnwise=True, scale_inv_t=poisoned((1,), float32)))
    _refused(TypeError, f"^out{mixed}", fp8.compute_amax, x, out=poisoned((1,), float32))
    _refused(TypeError, f"^out{mixed}", fp8.astype, x, float8_e4m3fn, out=poisoned())
    _refused(TypeError, f"^out{mixed}", fp8.transpose, x8, out=poisoned((6, 4)))
    _refused(TypeError, f"^q.scale_inv{mixed}", fp8.dequantize, Scaled._of(x8, one(), SHAPE))
    _refused(TypeError, f"^out{mixed}", fp8.dequantize, Scaled._of(x8, fake.one(), SHAPE), out=poisoned(SHAPE, float32))
    _refused(TypeError, r"^buffers\['rowwise'\] scale_inv" + mixed, DelayedScaling().empty, SHAPE, buffers={"rowwise": (x8, one())})
    for wrong in ([2.0], True):
        _refused(TypeError, "^scale: expected a numpy.ndarray or cupy.ndarray, got ", fp8.quantize_tensor, x, wrong, out=fake.result())


def test_other_device(fake):
    """Device 1 beside an input on device 0: named, and refused before anything else happens."""
    elsewhere = ": on GPU 1, the input is on GPU 0$"
    x, x8 = fake(), fake(SHAPE, float8_e4m3fn)
    far, far8, far8_t = fake.one(device=1), fake(SHAPE, float8_e4m3fn, device=1), fake((6, 4), float8_e4m3fn, device=1)
    _refused(ValueError, f"^scale{elsewhere}", fp8.quantize_tensor, x, far, out=fake.result())
    _refused(ValueError, f"^amax{elsewhere}", fp8.quantize_tensor, x, 2.0, amax=far, out=fake.result())
    _refused(ValueError, f"^noop{elsewhere}", fp8.quantize_tensor, x, 2.0, noop=far, out=fake.result())
    _refused(ValueError, f"^out.rowwise.data{elsewhere}", fp8.quantize_tensor, x, 2.0, out=fake.result(data=far8))
    _refused(ValueError, f"^out.rowwise.scale_inv{elsewhere}", fp8.quantize_tensor, x, 2.0, out=fake.result(scale_inv=far))
    _refused(ValueError, f"^out.columnwise.data{elsewhere}", fp8.cast_transpose, x, 2.0, out=fake.result(columnwise=True, data_t=far8_t))
    _refused(ValueError, f"^out.columnwise.scale_inv{elsewhere}",
             fp8.cast_transpose, x, 2.0, out=fake.result(columnwise=True, scale_inv_t=far))
    _refused(ValueError, f"^out{elsewhere}", fp8.compute_amax, x, out=far)
    _refused(ValueError, f"^out{elsewhere}", fp8.astype, x, float8_e4m3fn, out=far8)
    _refused(ValueError, f"^out{elsewhere}", fp8.transpose, x8, out=far8_t)
    _refused(ValueError, f"^q.scale_inv{elsewhere}", fp8.dequantize, Scaled._of(x8, far, SHAPE), out=fake())
    _refused(ValueError, f"^out{elsewhere}", fp8.dequantize, Scaled._of(x8, fake.one(), SHAPE), out=fake(device=1))


def test_layout_on_a_gpu(fake):
    strides = r": expected a C-contiguous array, got strides \("
    x, x8 = fake(), fake(SHAPE, float8_e4m3fn)
    _refused(ValueError, "^out.rowwise.data" + strides,
             fp8.quantize_tensor, x, 2.0, out=fake.result(data=fake(SHAPE, float8_e4m3fn, strides=(12, 2))))
    _refused(ValueError, "^out.columnwise.data" + strides,
             fp8.cast_transpose, x, 2.0, out=fake.result(columnwise=True, data_t=fake((6, 4), float8_e4m3fn, strides=(1, 6))))
    _refused(ValueError, "^out" + strides, fp8.astype, x, bfloat16, out=fake(SHAPE, bfloat16, strides=(24, 4)))
    _refused(ValueError, "^out" + strides, fp8.transpose, x8, out=fake((6, 4), float8_e4m3fn, strides=(8, 2)))
    _refused(ValueError, "^out" + strides, fp8.dequantize, Scaled._of(x8, fake.one(), SHAPE), out=fake(strides=(4, 16)))
    _refused(ValueError, r"^buffers\['rowwise'\] data: expected a C-contiguous array of shape \(4, 6\), got .* strides \(12, 2\)$",
             DelayedScaling().empty, SHAPE, buffers={"rowwise": (fake(SHAPE, float8_e4m3fn, strides=(12, 2)), fake.one())})


def test_misaligned_on_a_gpu(fake):
    """A kernel's loads would fault; a copy, as NumPy arrays get one, would hide an allocation."""
    address = "address 0x[0-9a-f]+ is not a multiple of "
    for dtype, lead in ((float32, 2), (bfloat16, 1)):
        x = fake(SHAPE, dtype, lead=lead)
        _refused(ValueError, f"^x: {address}the element size {dtype.itemsize}$", fp8.quantize_tensor, x, 2.0, out=fake.result())
        _refused(ValueError, f"^x: {address}the element size {dtype.itemsize}$", fp8.compute_amax, x, out=fake.one())
        _refused(ValueError, f"^a: {address}the element size {dtype.itemsize}$", fp8.astype, x, float8_e4m3fn)
        _refused(ValueError, f"^out: {address}the element size {dtype.itemsize}$",
                 fp8.dequantize, Scaled._of(fake(SHAPE, float8_e4m3fn), fake.one(), SHAPE), dtype=dtype, out=x)
    _refused(ValueError, f"^scale: {address}4$", fp8.quantize_tensor, fake(), fake.one(lead=2), out=fake.result())
    _refused(ValueError, f"^amax: {address}4$", fp8.quantize_tensor, fake(), 2.0, amax=fake.one(lead=1), out=fake.result())
    _refused(ValueError, f"^out.rowwise.scale_inv: {address}the element size 4$",
             fp8.quantize_tensor, fake(), 2.0, out=fake.result(scale_inv=fake.one(lead=1)))


def test_overlaps_on_a_gpu(fake):
    x = fake(at=1 << 20)                                # 96 bytes
    _refused(ValueError, f"^out.rowwise.data: {OVERLAP}",
             fp8.quantize_tensor, x, 2.0, out=fake.result(data=fake(SHAPE, float8_e4m3fn, at=(1 << 20) + 95)))
    _refused(ValueError, f"^out.columnwise.data: {OVERLAP}",
             fp8.cast_transpose, x, 2.0, out=fake.result(columnwise=True, data_t=fake((6, 4), float8_e4m3fn, at=(1 << 20) - 23)))
    _refused(ValueError, f"^out: {OVERLAP}", fp8.astype, x, float8_e4m3fn, out=fake(SHAPE, float8_e4m3fn, at=1 << 20))
    _refused(ValueError, f"^out: {OVERLAP}", fp8.compute_amax, x, out=fake.one(at=(1 << 20) + 92))
    _refused(ValueError, f"^amax: {OVERLAP}", fp8.quantize_tensor, x, 2.0, amax=fake.one(at=(1 << 20) + 4), out=fake.result())
    x8 = fake(SHAPE, float8_e4m3fn, at=1 << 21)
    _refused(ValueError, f"^out: {OVERLAP}", fp8.transpose, x8, out=fake((6, 4), float8_e4m3fn, at=(1 << 21) + 23))
    _refused(ValueError, f"^out: {OVERLAP}", fp8.dequantize, Scaled._of(x8, fake.one(at=1 << 22), SHAPE), out=fake(at=(1 << 22) - 92))


def test_an_assignment_that_is_checked_is_examined_in_every_call(fake, monkeypatch):
    """Without check=True a call with the same memory is launched again at once; with it the data are read."""
    launches: list[str] = []
    on_device = np.zeros((64, 2), np.int64)
    monkeypatch.setattr(Variant, "launch", lambda self, *values: launches.append(self.kernel.entry))
    monkeypatch.setattr("cupy_fp8.calls.call.error_word", lambda x: 1 << 29)
    monkeypatch.setattr("cupy_fp8.ops.moe.route._on_host", lambda x: on_device)
    x = fake((64, 2), np.dtype(np.int64))
    shapes = {"row_map": (64, 2), "splits": (4,), "aligned_splits": (4,), "offsets": (5,), "sources": (128,)}
    parts = {name: fake(shape, np.dtype(np.int64 if name == "offsets" else np.int32))
             for name, shape in shapes.items()}
    out = fp8.Routing(**parts, rows=128, align=1)
    for check in (False, True, False, True):
        assert fp8.route(x, num_experts=4, check=check, out=out) is out
    on_device[3, 1] = 4
    _refused(ValueError, r"^assignment: expected experts 0 to 3, or -1 for none, got 4 at \[3, 1\]",
             fp8.route, x, num_experts=4, check=True, out=out)
    fp8.route(x, num_experts=4, out=out)
    assert launches == ["route_rank"] * 5
    _refused(ValueError, "^out.row_map: overlaps assignment in memory", fp8.route, out.row_map, num_experts=4,
             out=out)


def test_routings_of_another_kind_or_device(fake):
    r = fp8.route(np.zeros((64, 2), np.int64), num_experts=4)
    x, y = fake((64, 32)), fake((128, 32))
    _refused(TypeError, "^routing: a numpy array among cupy arrays", fp8.permute, x, r, out=y)
    parts = {name: fake(a.shape, a.dtype, device=1) for name, a in r._arrays().items()}
    elsewhere = fp8.Routing(**parts, rows=r.rows, align=1)
    _refused(TypeError, "^routing: a cupy array among numpy arrays", fp8.permute, ones((64, 32)), elsewhere)
    for call in (lambda: fp8.permute(x, elsewhere, out=y), lambda: fp8.unpermute(y, elsewhere, out=x)):
        _refused(ValueError, "^routing: on GPU 1, the input is on GPU 0$", call)


def test_a_result_that_fitted_once_is_still_checked(fake, monkeypatch):
    """A result keeps that it was found to fit; what changes from call to call is looked at again."""
    launches: list[Any] = []
    monkeypatch.setattr(Variant, "launch", lambda self, *values: launches.append(values))
    x, out = fake(), fake.result()
    assert fp8.quantize_tensor(x, 2.0, out=out) is out
    assert fp8.quantize_tensor(fake(), 2.0, out=out) is out
    assert len(launches) == 2
    start = out.data.data.ptr
    again = r"^out: overlaps .* in memory; results need memory of their own$"
    _refused(ValueError, again, fp8.quantize_tensor, fake(at=start - 92), 2.0, out=out)
    _refused(ValueError, again, fp8.quantize_tensor, x, fake.one(at=start), out=out)
    _refused(ValueError, again, fp8.quantize_tensor, x, 2.0, amax=fake.one(at=start + 8), out=out)
    _refused(ValueError, again, fp8.quantize_tensor, x, 2.0, noop=out.scale_inv, out=out)
    _refused(ValueError, "^out.rowwise.data: on GPU 0, the input is on GPU 1$", fp8.quantize_tensor, fake(device=1), 2.0, out=out)
    _refused(ValueError, r"^out.rowwise: expected .*shape \(6, 4\)", fp8.quantize_tensor, fake((6, 4)), 2.0, out=out)
    _refused(TypeError, "^out.rowwise.data: expected dtype float8_e5m2", fp8.quantize_tensor, x, 2.0, dtype=float8_e5m2, out=out)
    _refused(ValueError, "^out: no columnwise part", fp8.quantize_tensor, x, 2.0, columnwise=True, out=out)
    assert len(launches) == 2


# ---- no GPU ----
def test_without_a_gpu_cupy_is_refused_by_name():
    problem = backend.gpu_problem()
    if problem is None:
        pytest.skip("there is a GPU")
    for call in (lambda: fp8.empty(3, float8_e4m3fn, like="cupy"), lambda: DelayedScaling().empty(SHAPE, like="cupy"),
                 lambda: fp8.asarray([1.0], like="cupy")):
        with pytest.raises(fp8.DeviceError, match=re.escape(problem)):
            call()
    assert issubclass(fp8.DeviceError, RuntimeError)
