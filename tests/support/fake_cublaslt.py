"""A libcublasLt of Python functions behind C function pointers: records its calls, refuses what the library
refuses, and computes products in the CPU's memory as the library's documentation says.

Calls cross a C boundary with the prototypes of cublasLt.h, written down independently here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from cupy_fp8.ops.matmul import cublaslt, library
from cupy_fp8.reference import numerics
from cupy_fp8.reference.scales.swizzle import unswizzle

#: numbers of cudaDataType
TYPES = {28: float8_e4m3fn, 29: float8_e5m2, 14: bfloat16, 2: float16, 0: float32}
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15
#: Bytes of attributes: cublasLtMatmulDescAttributes_t, MatrixLayoutAttribute_t and PreferenceAttributes_t.
DESC_BYTES = {3: 4, 4: 4, 7: 4, 8: 8, 10: 8, 17: 8, 18: 8, 25: 1, 26: 4, 31: 4, 32: 4}
LAYOUT_BYTES = {5: 4, 6: 8}
PREFERENCE_BYTES = {1: 8, 5: 4, 6: 4, 7: 4, 8: 4}
_HANDLE = 0x1000


class Matrix(NamedTuple):
    type: int
    rows: int
    columns: int
    ld: int
    batch: int
    stride: int


class Product(NamedTuple):
    """One call of cublasLtMatmul."""

    description: dict[int, int]
    alpha: float
    beta: float
    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
    pointers: dict[str, int]                # A, B, C, D, workspace
    algorithm: int
    workspace_bytes: int
    stream: int


class FakeCublasLt:
    """algorithms: number that the heuristic proposes; workspace_bytes: needed by each. refuses: numbers of
    algorithms that cublasLtMatmul refuses."""

    def __init__(self, version: int = 130101, algorithms: int = 3, workspace_bytes: int = 0,
                 record: Callable[[Callable[[], Any]], Any] = lambda run: run()) -> None:
        self.objects: dict[int, dict[int, int]] = {}
        self.made: dict[int, tuple[int, ...]] = {}
        self.products: list[Product] = []
        self.refused: list[str] = []
        self.refuses: set[int] = set()
        #: Algorithms that the heuristic proposes with a status other than success.
        self.proposes_in_vain: set[int] = set()
        self.preferences: list[dict[int, int]] = []
        self.algorithms, self.workspace_bytes, self._record = algorithms, workspace_bytes, record
        self._next = 0x100000
        self._name = ctypes.create_string_buffer(b"CUBLAS_STATUS_NOT_SUPPORTED")
        opaque = POINTER(c_void_p)
        attribute = (c_void_p, c_int, c_void_p, c_size_t)
        self._make("cublasLtGetVersion", c_size_t, (), lambda: version)
        self._make("cublasLtGetStatusName", c_void_p, (c_int,), lambda status: ctypes.addressof(self._name))
        self._make("cublasLtCreate", c_int, (opaque,), self._create)
        for kind, arguments, sizes in (
                ("MatmulDesc", (c_int, c_int), DESC_BYTES),
                ("MatrixLayout", (c_int, c_uint64, c_uint64, c_int64), LAYOUT_BYTES),
                ("MatmulPreference", (), PREFERENCE_BYTES)):
            self._make(f"cublasLt{kind}Create", c_int, (opaque, *arguments), self._new)
            self._make(f"cublasLt{kind}SetAttribute", c_int, attribute, self._setter(sizes))
            self._make(f"cublasLt{kind}Destroy", c_int, (c_void_p,), self._destroy)
        self._make("cublasLtMatmulAlgoGetHeuristic", c_int,
                   (*[c_void_p] * 7, c_int, c_void_p, POINTER(c_int)), self._heuristic)
        self._make("cublasLtMatmul", c_int, (*[c_void_p] * 14, c_size_t, c_void_p), self._matmul)

    def _make(self, name: str, result: Any, arguments: tuple[Any, ...], function: Any) -> None:
        setattr(self, name, CFUNCTYPE(result, *arguments)(function))

    def _create(self, handle: Any) -> int:
        handle[0] = _HANDLE
        return SUCCESS

    def _new(self, made: Any, *arguments: int) -> int:
        self._next += 0x100
        self.objects[self._next], self.made[self._next] = {}, arguments
        made[0] = self._next
        return SUCCESS

    def _setter(self, sizes: dict[int, int]) -> Callable[[int, int, int, int], int]:
        def set_attribute(at: int, attribute: int, value: int, size: int) -> int:
            if at not in self.objects or sizes.get(attribute) != size:
                return INVALID_VALUE
            self.objects[at][attribute] = int.from_bytes(ctypes.string_at(value, size), "little", signed=True)
            return SUCCESS

        return set_attribute

    def _destroy(self, at: int) -> int:
        del self.objects[at], self.made[at]
        return SUCCESS

    def _heuristic(self, handle: int, desc: int, a: int, b: int, c: int, d: int, preference: int, most: int,
                   results: int, count: Any) -> int:
        assert handle == _HANDLE
        assert desc in self.objects
        self.preferences.append(dict(self.objects[preference]))
        found = (library.Heuristic * most).from_address(results)
        count[0] = min(most, self.algorithms)
        for i in range(count[0]):
            found[i].algo[0], found[i].workspace_bytes = i + 1, self.workspace_bytes
            found[i].state = NOT_SUPPORTED if i + 1 in self.proposes_in_vain else SUCCESS
        return SUCCESS

    def _matrix(self, at: int) -> Matrix:
        attributes = self.objects[at]
        kind, rows, columns, ld = self.made[at]
        return Matrix(kind, rows, columns, ld, attributes.get(5, 1), attributes.get(6, 0))

    def _matmul(self, handle: int, desc: int, alpha: int, a: int, a_layout: int, b: int, b_layout: int,
                beta: int, c: int, c_layout: int, d: int, d_layout: int, algorithm: int,
                workspace: int | None, workspace_bytes: int, stream: int | None) -> int:
        assert handle == _HANDLE
        matrices = [self._matrix(at) for at in (a_layout, b_layout, c_layout, d_layout)]
        made = Product(
            dict(self.objects[desc]), c_float.from_address(alpha).value, c_float.from_address(beta).value,
            matrices[0], matrices[1], matrices[2], matrices[3],
            {"A": a, "B": b, "C": c, "D": d, "workspace": workspace or 0},
            c_uint64.from_address(algorithm).value, workspace_bytes, stream or 0)
        self.products.append(made)
        reason = refusal(made)
        if reason:
            self.refused.append(reason)
        if reason or made.algorithm in self.refuses:
            return NOT_SUPPORTED
        self._record(lambda: compute(made))
        return SUCCESS


def refusal(p: Product) -> str | None:
    """What cuBLASLt on Hopper does not take, as measured."""
    modes = p.description.get(31, 0), p.description.get(32, 0)
    bias = TYPES.get(p.description.get(26, -1))
    addresses = [*p.pointers.values(), p.description.get(17, 0), p.description.get(18, 0),
                 p.description.get(8, 0)]
    wrong = {
        "layouts": p.description[3] != 1 or p.description[4] != 0,
        "modes": modes not in ((0, 0), (3, 3), (4, 4), (4, 5), (5, 4), (2, 2)),
        "e5m2 × e5m2": p.a.type == p.b.type == 29,
        "K": p.a.rows % 16 or p.a.rows != p.b.rows, "N": p.d.rows % 8,
        "M": modes[1] == 4 and p.d.columns % 4,
        "shapes": (p.d.rows, p.d.columns) != (p.a.columns, p.b.columns) or p.c != p.d,
        "addresses": any(at % 16 for at in addresses), "workspace": p.pointers["workspace"] % 256,
        "fast accumulation": p.description.get(25, 0) and modes[0] in (4, 5),
        "bias": p.description.get(7) == 4 and bias != {14: bfloat16, 2: float16, 0: bfloat16}[p.d.type],
        "batch of blocks": p.d.batch > 1 and modes != (0, 0)}
    return next((name for name, found in wrong.items() if found), None)


# ---- the computation ----
def at(address: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the memory at an address as a writable array."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


def _operand(matrix: Matrix, address: int, i: int, mode: int, scale_at: int) -> np.ndarray:
    """Return the columns of a column-major FP8 matrix as rows of f64, scaled."""
    assert matrix.ld == matrix.rows
    data = at(address + i * matrix.stride, TYPES[matrix.type], (matrix.columns, matrix.rows))
    values = numerics.widen(data).astype(np.float64)
    lines, k = values.shape
    blocks = -(-k // 128)
    if mode == 0:
        return values * at(scale_at, np.float32, (1,))
    if mode == 3:
        return values * at(scale_at, np.float32, (lines, 1))
    if mode == 4:                           # scales: [blocks along K][lines rounded up to 4]
        grid = at(scale_at, np.float32, (blocks, -(-lines // 4) * 4))[:, :lines].T
        return values * np.repeat(grid, 128, axis=1)[:, :k]
    if mode == 5:                           # scales: [blocks of lines][blocks along K rounded up to 4]
        grid = at(scale_at, np.float32, (-(-lines // 128), -(-blocks // 4) * 4))[:, :blocks]
        return values * np.repeat(np.repeat(grid, 128, axis=0)[:lines], 128, axis=1)[:, :k]
    per_line = -(-k // 32)
    tiles = at(scale_at, float8_e8m0fnu, (-(-lines // 128) * 128, -(-per_line // 4) * 4))
    return values * np.repeat(numerics.widen(unswizzle(tiles, lines, per_line)), 32, axis=1)[:, :k]


def compute(p: Product) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        for i in range(p.d.batch):
            _compute(p, i)


def _compute(p: Product, i: int) -> None:
    """Return one matrix of a batch."""
    d_type = np.dtype(TYPES[p.d.type])
    a = _operand(p.a, p.pointers["A"], i, p.description.get(31, 0), p.description[17])
    b = _operand(p.b, p.pointers["B"], i, p.description.get(32, 0), p.description[18])
    offset, shape = i * p.d.stride * d_type.itemsize, (p.d.columns, p.d.rows)
    total = p.alpha * (b @ a.T)
    if p.beta:
        total += p.beta * at(p.pointers["C"] + offset, d_type, shape).astype(np.float64)
    if p.description.get(7, 1) == 4:
        total += at(p.description[8], TYPES[p.description[26]], (p.d.rows,)).astype(np.float64)
    at(p.pointers["D"] + offset, d_type, shape)[...] = numerics.narrow_f64(total, d_type)


@contextmanager
def installed(fake: FakeCublasLt, capability: int = 90) -> Iterator[FakeCublasLt]:
    """Install the fake as the library that is found, on GPUs of a compute capability."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, fake, capability)
        yield fake


def install(patch: pytest.MonkeyPatch, fake: FakeCublasLt, capability: int = 90) -> None:
    made = library.Library(fake, "a fake")
    patch.setattr(library, "found", lambda: made)
    patch.setattr(cublaslt, "compute_capability", lambda device: capability)
    patch.setattr(cublaslt, "_plans", {})
    patch.setattr(cublaslt, "_handles", {})
