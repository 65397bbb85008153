"""DLPack capsules carry the right type codes; imports share memory, keep strides, and keep the producer
alive."""

import ctypes
import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import dlpack

CODES = {fp8.float8_e4m3fn: (10, 8), fp8.float8_e5m2: (12, 8), fp8.float8_e8m0fnu: (14, 8),
         fp8.bfloat16: (4, 16)}
TYPED = list(CODES)
# Offset of DLDataType on a 64-bit machine by dlpack.h: data 8, device 8, ndim 4 bytes before it, and in the
# versioned struct version 8, manager_ctx 8, deleter 8, flags 8 before the tensor. Not taken from the module's
# own ctypes structures, which could be wrong.
TYPE_OFFSET = {b"dltensor": 20, b"dltensor_versioned": 52}


def type_bytes(capsule):
    """Return (memory of the 4-byte DLDataType, capsule name, address of the managed tensor)."""
    get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object,
                            ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    name = get_name(capsule)
    address = get(capsule, name)
    return (ctypes.c_uint8 * 4).from_address(address + TYPE_OFFSET[name]), name, address


def codes_array(dtype, shape=(4, 8)):
    return np.arange(int(np.prod(shape))).astype(f"u{dtype.itemsize}").reshape(shape).view(dtype)


class Producer:
    """Another library: an integer array exported under any type code, with or without the newer keywords."""

    def __init__(self, a, code, bits=None, lanes=1, versioned=True):
        self.a, self.type, self.versioned = a, (code, bits or a.itemsize * 8, lanes, 0), versioned
        self.given = None

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()

    def __dlpack__(self, **options):
        self.given = options
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument")
        capsule = self.a.__dlpack__(**options)
        type_bytes(capsule)[0][:] = self.type
        return capsule


@pytest.mark.parametrize("values", [
    np.array(["one", "two"]), np.array([b"x"]), np.array([None]), np.array(["2026-01-01"], "M8[s]"),
    np.ones(2, "m8[s]"), np.ones(2, np.longdouble), np.ones(2, ">f4"), np.ones(2, ml_dtypes.int4),
    np.zeros(2, [("a", "f4")])], ids=lambda a: str(a.dtype))
def test_what_dlpack_lacks(values):
    for call, name in ((fp8.from_dlpack, "x"), (fp8.to_dlpack, "a")):
        with pytest.raises(TypeError, match=f"^{name}: expected an array of numbers that DLPack has, "):
            call(values)


def test_strings_are_no_arrays():
    for text in ("x", b"x", ["x"], np.str_("x")):
        with pytest.raises(TypeError, match=r"^x: expected an object with __dlpack__ and "):
            fp8.from_dlpack(text)


@pytest.mark.parametrize("dtype", TYPED, ids=str)
@pytest.mark.parametrize("max_version", [None, (1, 0), (1, 1)])
def test_exported_type(dtype, max_version):
    a = codes_array(dtype)
    exporter = dlpack.to_dlpack(a)
    capsule = exporter.__dlpack__() if max_version is None else exporter.__dlpack__(max_version=max_version)
    carried, name, address = type_bytes(capsule)
    assert name == (b"dltensor" if max_version is None else b"dltensor_versioned")
    assert tuple(carried) == (*CODES[dtype], 1, 0)
    if max_version and dtype.itemsize == 1:
        # this version has the FP8 codes
        assert tuple((ctypes.c_uint32 * 2).from_address(address)) == (1, 1)
    assert exporter.__dlpack_device__() == (1, 0)


def test_options_reach_numpy():
    a = codes_array(fp8.float8_e4m3fn)
    copied = np.from_dlpack(Reinterpreted(dlpack.to_dlpack(a), copy=True))
    assert not np.shares_memory(copied, a.view(np.uint8))
    with pytest.raises((RuntimeError, ValueError), match="stream"):  # the error depends on NumPy's version
        dlpack.to_dlpack(a).__dlpack__(stream=1)


class Reinterpreted:
    """A consumer's view of an exporter as uint8, with options of its own."""

    def __init__(self, exporter, **options):
        self.exporter, self.options = exporter, options

    def __dlpack_device__(self):
        return self.exporter.__dlpack_device__()

    def __dlpack__(self, **options):
        capsule = self.exporter.__dlpack__(**{**options, **self.options})
        type_bytes(capsule)[0][0] = 1
        return capsule


@pytest.mark.parametrize("dtype", [*TYPED, np.dtype(np.float32), np.dtype(np.int16), np.dtype(bool)], ids=str)
@pytest.mark.parametrize("view", [
    lambda a: a, lambda a: a.T, lambda a: a[::2, 1::3], lambda a: a[::-1], lambda a: a[:0],
    lambda a: a[:1, 1].reshape(()),
], ids=["whole", "transposed", "strided", "reversed", "empty", "0-d"])
def test_round_trip(dtype, view):
    a = view(codes_array(dtype) if dtype in CODES else np.arange(32).reshape(4, 8).astype(dtype))
    b = dlpack.from_dlpack(dlpack.to_dlpack(a))
    assert type(b) is np.ndarray
    assert fp8.bytes_equal(a, b)
    assert b.__array_interface__["data"][0] == a.__array_interface__["data"][0]
    if a.size > 1:
        assert b.strides == a.strides


def test_memory_is_shared():
    a = codes_array(fp8.float8_e5m2)
    b = dlpack.from_dlpack(dlpack.to_dlpack(a))
    a.view(np.uint8)[1, 2] = 0x55
    assert b.view(np.uint8)[1, 2] == 0x55


class Base(np.ndarray):
    """An array whose deletion can be observed."""


def test_lifetime():
    base = codes_array(fp8.float8_e4m3fn).view(np.uint8).view(Base)
    alive = weakref.ref(base)
    b = dlpack.from_dlpack(dlpack.to_dlpack(base[1:].view(fp8.float8_e4m3fn)))
    del base
    gc.collect()
    assert alive() is not None
    assert b.view(np.uint8)[0, 0] == 8
    c = b[:, 1:]
    del b
    gc.collect()
    assert alive() is not None
    del c
    gc.collect()
    assert alive() is None


def test_unused_capsules_release_the_array():
    base = codes_array(fp8.float8_e4m3fn).view(np.uint8).view(Base)
    alive = weakref.ref(base)
    exporter = dlpack.to_dlpack(base.view(fp8.float8_e4m3fn))
    capsules = [exporter.__dlpack__(), exporter.__dlpack__(max_version=(1, 0))]
    del base, exporter
    gc.collect()
    assert alive() is not None
    del capsules
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", TYPED, ids=str)
def test_import_from_another_library(dtype, versioned):
    a = codes_array(dtype)
    b = dlpack.from_dlpack(Producer(a.view(f"u{dtype.itemsize}"), CODES[dtype][0], versioned=versioned))
    assert fp8.bytes_equal(a, b)
    assert np.shares_memory(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("code", [1, 3, 2], ids=["uint", "opaque", "CuPy's 8-bit float"])
@pytest.mark.parametrize("dtype", TYPED, ids=str)
def test_dtype_names_bare_bytes(dtype, code):
    if (code, dtype) == (2, fp8.bfloat16):
        return      # a 16-bit float has a name: float16
    a = codes_array(dtype)
    assert fp8.bytes_equal(dlpack.from_dlpack(Producer(a.view(f"u{dtype.itemsize}"), code), dtype=dtype), a)


def test_dtype_may_repeat_what_the_producer_says():
    a = codes_array(fp8.float8_e5m2)
    assert fp8.bytes_equal(dlpack.from_dlpack(dlpack.to_dlpack(a), dtype="float8_e5m2"), a)
    x = np.ones(3, np.float32)
    assert dlpack.from_dlpack(x,
                              dtype=np.float32).__array_interface__["data"] == x.__array_interface__["data"]


def test_other_fp8_types_by_name():
    a = np.array([0x40, 0x7F], np.uint8).view(ml_dtypes.float8_e4m3fnuz)
    with pytest.raises(TypeError, match="code 11, 8 bits"):
        dlpack.from_dlpack(Producer(a.view(np.uint8), 11))
    assert fp8.bytes_equal(dlpack.from_dlpack(Producer(a.view(np.uint8), 11), dtype=a.dtype), a)


@pytest.mark.parametrize(("x", "dtype", "message"), [
    ([1, 2], None, "expected an object with __dlpack__"),
    (Producer(np.zeros(4, np.uint8), 2), None, "code 2, 8 bits"),
    (Producer(np.zeros(4, np.uint8), 3), None, "code 3, 8 bits"),
    (Producer(np.zeros(4, np.uint8), 10, lanes=2), None, "vector type"),
    (Producer(np.zeros(4, np.uint8), 10), "float8_e5m2",
     "float8_e5m2 was asked for, the producer says float8_e4m3fn"),
    (np.zeros(4, np.float32), "float8_e5m2", "has 8 bits, the producer says"),
    (np.zeros(4, np.float16), "bfloat16", "bfloat16 was asked for, the producer says float16"),
    (np.zeros(4, np.int8), "float8_e5m2", "float8_e5m2 was asked for, the producer says int8"),
])
def test_import_errors(x, dtype, message):
    with pytest.raises(TypeError, match=message):
        dlpack.from_dlpack(x, dtype=dtype)


def test_export_errors():
    with pytest.raises(TypeError, match="a: expected a numpy"):
        dlpack.to_dlpack([1.0])
    a = codes_array(fp8.float8_e4m3fn)
    a.flags.writeable = False
    with pytest.raises(BufferError):
        dlpack.to_dlpack(a).__dlpack__()
    # a versioned capsule can state that it is read-only
    assert fp8.bytes_equal(dlpack.from_dlpack(dlpack.to_dlpack(a)), a)


def test_used_capsule():
    capsule = dlpack.to_dlpack(codes_array(fp8.float8_e4m3fn)).__dlpack__()
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object,
                               ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
    rename(capsule, b"used_dltensor")
    try:
        with pytest.raises(TypeError, match="unused capsule"):
            dlpack._managed(capsule)
    finally:
        rename(capsule, b"dltensor")     # its destructor then frees it


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPED, ids=str)
def test_cupy(dtype):
    host = codes_array(dtype)
    a = fp8.asarray(host, like="cupy")
    capsule = dlpack.to_dlpack(a).__dlpack__(max_version=(1, 1))
    assert tuple(type_bytes(capsule)[0]) == (*CODES[dtype], 1, 0)
    views: list[Any] = [a, a.T, a[::2, 1::3]]
    for view in views:
        b = dlpack.from_dlpack(dlpack.to_dlpack(view))
        assert fp8.backend.kind_of(b) == "cupy"
        assert (b.dtype, b.strides, b.data.ptr) == (view.dtype, view.strides, view.data.ptr)
        assert fp8.bytes_equal(fp8.asnumpy(b), fp8.asnumpy(view))
    assert fp8.bytes_equal(fp8.asnumpy(dlpack.from_dlpack(a)), host)


def test_torch():
    torch = pytest.importorskip("torch")
    a = codes_array(fp8.bfloat16)
    t = torch.from_dlpack(dlpack.to_dlpack(a))
    assert t.dtype == torch.bfloat16
    assert fp8.bytes_equal(dlpack.from_dlpack(t), a)
    t8 = torch.arange(32, dtype=torch.uint8)
    assert dlpack.from_dlpack(t8, dtype=fp8.float8_e4m3fn).view(np.uint8).tolist() == list(range(32))
