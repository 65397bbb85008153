"""libcublasLt through ctypes: where it is found, the functions that products need with their C prototypes,
and the numbers of cublasLt.h.

The library is found as CuPy finds it: through cuda-pathfinder (the process, wheels, conda, the loader's
paths, CUDA_PATH), and by name where that package is missing.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from ...backend import DeviceError

# ---- cublas_api.h, library_types.h ----
SUCCESS, NOT_SUPPORTED = 0, 15
COMPUTE_32F, R_32F, R_16F, R_16BF, R_8F_E4M3, R_8F_E5M2 = 68, 0, 2, 14, 28, 29
OP_N, OP_T = 0, 1
# ---- cublasLt.h ----
SCALE_TENSOR, SCALE_VEC32_UE8M0, SCALE_OUTER_VECTOR, SCALE_VEC128, SCALE_BLK128 = 0, 2, 3, 4, 5
EPILOGUE_DEFAULT, EPILOGUE_BIAS = 1, 4
#: An attribute's number, and its C type, whose size the library checks.
DESC: dict[str, tuple[int, Any]] = {
    "transa": (3, c_int32), "transb": (4, c_int32), "epilogue": (7, c_uint32), "bias": (8, c_void_p),
    "a_scale": (17, c_void_p), "b_scale": (18, c_void_p), "fast_accum": (25, c_int8),
    "bias_type": (26, c_int32), "a_scale_mode": (31, c_int32), "b_scale_mode": (32, c_int32)}
LAYOUT: dict[str, tuple[int, Any]] = {"batch": (5, c_int32), "stride": (6, c_int64)}
PREFERENCE: dict[str, tuple[int, Any]] = {
    "workspace": (1, c_uint64), "align_a": (5, c_uint32), "align_b": (6, c_uint32), "align_c": (7, c_uint32),
    "align_d": (8, c_uint32)}


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t. Its first member is the algorithm, whose address cublasLtMatmul takes.
    """

    _fields_ = (("algo", c_uint64 * 8), ("workspace_bytes", c_size_t), ("state", c_int),
                ("waves", ctypes.c_float), ("reserved", c_int * 4))


_NEW, _SET = (POINTER(c_void_p),), (c_void_p, c_int, c_void_p, c_size_t)
#: Result type and argument types of each function.
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cublasLtGetVersion": (c_size_t, ()),
    "cublasLtGetStatusName": (c_char_p, (c_int,)),
    "cublasLtCreate": (c_int, _NEW),
    "cublasLtMatmulDescCreate": (c_int, (*_NEW, c_int, c_int)),
    "cublasLtMatmulDescSetAttribute": (c_int, _SET),
    "cublasLtMatmulDescDestroy": (c_int, (c_void_p,)),
    "cublasLtMatrixLayoutCreate": (c_int, (*_NEW, c_int, c_uint64, c_uint64, c_int64)),
    "cublasLtMatrixLayoutSetAttribute": (c_int, _SET),
    "cublasLtMatrixLayoutDestroy": (c_int, (c_void_p,)),
    "cublasLtMatmulPreferenceCreate": (c_int, _NEW),
    "cublasLtMatmulPreferenceSetAttribute": (c_int, _SET),
    "cublasLtMatmulPreferenceDestroy": (c_int, (c_void_p,)),
    "cublasLtMatmulAlgoGetHeuristic": (c_int, (*[c_void_p] * 7, c_int, POINTER(Heuristic), POINTER(c_int))),
    # handle, description, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm,
    # workspace, its bytes, stream
    "cublasLtMatmul": (c_int, (*[c_void_p] * 14, c_size_t, c_void_p)),
}


class Library:
    """The functions of libcublasLt, with their prototypes, and its version."""

    def __init__(self, functions: Any, path: str) -> None:
        self.path = path
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.matmul: Callable[..., int] = functions.cublasLtMatmul
        number = self._call("GetVersion")
        #: (major, minor): 13.1.1 is 130101, 12.9.1 is 120901.
        self.version = number // 10000, number // 100 % 100

    def _call(self, function: str, *arguments: Any) -> Any:
        return getattr(self, f"cublasLt{function}")(*arguments)

    def checked(self, function: str, *arguments: Any) -> None:
        """Call a function that returns a status. DeviceError unless it succeeds."""
        status = self._call(function, *arguments)
        if status != SUCCESS:
            raise DeviceError(f"cublasLt{function}: {self.status_name(status)} (cuBLASLt "
                              f"{'.'.join(map(str, self.version))}, {self.path})")

    def status_name(self, status: int) -> str:
        return (self._call("GetStatusName", status) or b"?").decode()

    def create(self) -> int:
        """Return a handle for the current device. It lives as long as the process."""
        handle = c_void_p()
        self.checked("Create", ctypes.byref(handle))
        return handle.value or 0

    def algorithms(self, handle: int, description: Opaque, a: Opaque, b: Opaque, c: Opaque,
                   preference: Opaque, most: int) -> list[Heuristic]:
        """Return what the heuristic proposes, best first; empty if it knows no algorithm."""
        found, count = (Heuristic * most)(), c_int()
        status = self._call("MatmulAlgoGetHeuristic", handle, description.at, a.at, b.at, c.at, c.at,
                            preference.at, most, found, ctypes.byref(count))
        if status != SUCCESS:
            return []
        return [one for one in found[:count.value] if one.state == SUCCESS]


class Opaque:
    """A description of a product, a matrix layout or a preference of the heuristic, destroyed with this
    object."""

    def __init__(self, library: Library, kind: str, attributes: dict[str, tuple[int, Any]],
                 *arguments: Any) -> None:
        self._library, self._set, self._attributes = library, f"{kind}SetAttribute", attributes
        made = c_void_p()
        library.checked(f"{kind}Create", ctypes.byref(made), *arguments)
        self.at = made.value
        weakref.finalize(self, library._call, f"{kind}Destroy", self.at).atexit = False

    def set(self, **values: int) -> None:
        for name, value in values.items():
            number, kind = self._attributes[name]
            held = kind(value)
            self._library.checked(self._set, self.at, number, ctypes.byref(held), ctypes.sizeof(held))


def description(library: Library) -> Opaque:
    return Opaque(library, "MatmulDesc", DESC, COMPUTE_32F, R_32F)


def layout(library: Library, kind: int, rows: int, columns: int, batch: int = 1) -> Opaque:
    """Return a column-major matrix of adjacent columns, or a batch of them, one after the other."""
    made = Opaque(library, "MatrixLayout", LAYOUT, kind, rows, columns, rows)
    if batch > 1:
        made.set(batch=batch, stride=rows * columns)
    return made


def preference(library: Library, **values: int) -> Opaque:
    made = Opaque(library, "MatmulPreference", PREFERENCE)
    made.set(**values)
    return made


# ---- finding it ----
_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12", "cublasLt64_13.dll", "cublasLt64_12.dll")


@functools.cache
def found() -> Library | str:
    """Return the library, or why there is none."""
    path = _path_by_pathfinder()
    for name in filter(None, (path, *_NAMES)):
        try:
            return Library(ctypes.CDLL(name), name)
        except (OSError, AttributeError):
            continue
    return ("cuBLASLt (libcublasLt) is not installed: pip install 'cupy_fp8[gemm]' (CUDA 13) or "
            "'cupy_fp8[gemm12]' (CUDA 12), or a CUDA toolkit whose libraries the loader finds")


def _path_by_pathfinder() -> str | None:
    try:
        from cuda import pathfinder
    except ImportError:
        return None
    try:
        loaded = pathfinder.load_nvidia_dynamic_lib("cublasLt")
    except RuntimeError:                        # DynamicLibNotFoundError is a RuntimeError
        return None
    return None if loaded.abs_path is None else str(loaded.abs_path)
