"""Products by cuBLASLt: which calls the library takes, cached plans, and launches.

cuBLASLt's matrices are column-major. The row-major D = a · bᵀ is its D [N, M] = Aᵀ · B with A := b and B :=
a, so its m is N, its n is M, and the scale mode and scales of its A are those of b.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from ctypes import c_float, c_void_p
from typing import Any, NamedTuple

import numpy as np

from ... import backend
from ...arrays import Array, address, empty_beside, is_contiguous
from ...backend import DeviceError
from ...calls.call import Call
from ...calls.memory import ALLOCATION_ALIGNMENT
from ...formats import bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from ...kernels import capturing, compute_capability
from ...layouts import cdiv
from . import library
from .library import Heuristic, Library, Opaque
from .operands import Operand, Product, scales_for

_MODES = {"tensor": library.SCALE_TENSOR, "row": library.SCALE_OUTER_VECTOR, "vector": library.SCALE_VEC128,
          "block": library.SCALE_BLK128, "mx": library.SCALE_VEC32_UE8M0}
_TYPES = {float8_e4m3fn: library.R_8F_E4M3, float8_e5m2: library.R_8F_E5M2, bfloat16: library.R_16BF,
          float16: library.R_16F, float32: library.R_32F}
#: Dtype of the bias, by that of the result.
_BIAS = {bfloat16: bfloat16, float16: float16, float32: bfloat16}
#: By pair of scalings: compute capabilities (from, to), and the least version of the library.
_PAIRS: dict[tuple[str, str], tuple[int, int, tuple[int, int]]] = {
    ("tensor", "tensor"): (89, 999, (12, 0)), ("mx", "mx"): (100, 999, (12, 8)),
    **dict.fromkeys((("row", "row"), ("vector", "block"), ("block", "vector"), ("vector", "vector")),
                    (90, 90, (12, 9)))}
_ALIGNMENT = 16
_K, _N, _M_OF_VECTOR = 16, 8, 4
#: Most bytes of a workspace. Most algorithms need none; those that split K need the partial sums of small
#: results.
_WORKSPACE = 8 << 20
_MOST_CANDIDATES = 8
_ONE, _ZERO = c_float(1), c_float(0)
_ONE_AT, _ZERO_AT = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)
_ADDRESSES = tuple(library.DESC[name][0] for name in ("a_scale", "b_scale", "bias"))
_POINTER_BYTES = ctypes.sizeof(c_void_p)


# ---- what the library takes ----
def refusal(product: Product, out_at: int) -> str | None:
    """Return why the library does not take a product, or None. It returns NOT_SUPPORTED for all of these, for
    some only at the call."""
    a, b = product.a, product.b
    least, most, version = _PAIRS.get((a.scaling, b.scaling), (0, 0, (0, 0)))
    if not most:
        return f"cuBLASLt has no product of scales per {a.scaling} and per {b.scaling}"
    found = library.found()
    if isinstance(found, str):
        return found
    capability = compute_capability(a.data.array.data.device_id)
    if not least <= capability <= most:
        of = f"{least / 10}" if most == least else f"{least / 10} or later"
        return f"cuBLASLt has this product on compute capability {of}, the GPU has {capability / 10}"
    if found.version < version:
        return (f"this product needs cuBLASLt {'.'.join(map(str, version))}, {found.path} is "
                f"{'.'.join(map(str, found.version))}")
    return _wrong_size(product) or _wrong_address(product, out_at)


def _wrong_size(product: Product) -> str | None:
    a, b, bias = product.a, product.b, product.bias
    if a.dtype == b.dtype == float8_e5m2:
        return "cuBLASLt does not take float8_e5m2 × float8_e5m2"
    if product.k == 0 or product.k % _K or product.n % _N:
        return (f"cuBLASLt wants K in multiples of {_K} and N of {_N}, got K = {product.k}, N = {product.n}")
    if a.scaling == "vector" and product.m % _M_OF_VECTOR:
        return f"cuBLASLt wants M in multiples of {_M_OF_VECTOR} for 1×128 blocks of a, got M = {product.m}"
    if bias is not None and bias.dtype != _BIAS[product.to]:
        return f"cuBLASLt wants a {_BIAS[product.to]} bias for a {product.to} result, got {bias.dtype}"
    return None


def _wrong_address(product: Product, out_at: int) -> str | None:
    a, b, bias = product.a, product.b, product.bias
    found = {"a.data": a.at, "b.data": b.at, "the result": out_at, "bias": 0 if bias is None else bias.at}
    # scales of rows and blocks are copied if they are not aligned
    found.update({f"{one.name}.scale_inv": one.scales.at for one in (a, b) if one.scaling == "tensor"})
    for name, at in found.items():
        if at % _ALIGNMENT:
            return f"cuBLASLt wants addresses in multiples of {_ALIGNMENT}, {name} is at {at:#x}"
    return None


# ---- launches ----
def launches(call: Call, product: Product, out_at: int) -> list[Any] | None:
    """Return the launches of a product that `refusal` allows: those that convert scales to the library's
    layout, and one for the product, or one per matrix of a batch with more than one scale. None if the
    library has no algorithm all the same."""
    a, b, x = product.a, product.b, product.a.data.array
    before: list[Any] = []
    scales = []
    for one in (a, b):
        first, view = scales_for(call, one, _layout(one), _ALIGNMENT)
        before += first
        scales.append(view)
    whole = a.scaling == "tensor" or a.batch == 1
    count = 1 if whole else a.batch
    steps = [b.rows * b.k, a.rows * a.k, product.m * product.n * product.to.itemsize]
    alignment = _alignment([b.at, a.at, out_at, *(steps if count > 1 else ())])
    key = AlgorithmKey(
        device=x.data.device_id, m=product.m, n=product.n, k=product.k, batch=a.batch if whole else 1,
        a_type=b.dtype, b_type=a.dtype, to=product.to, a_mode=_MODES[b.scaling], b_mode=_MODES[a.scaling],
        bias=None if product.bias is None else product.bias.dtype, accumulate=product.accumulate is not None,
        fast_accum=product.fast_accum, autotune=product.autotune, alignment=alignment)
    bias_at = 0 if product.bias is None else product.bias.at
    first_values = [b.at, a.at, out_at, scales[1].at, scales[0].at, bias_at]
    # The trial of a new plan may read scales that `before` has not written yet; its result is overwritten.
    plan = _plan(call, key, x, first_values)
    if plan is None:
        return None
    workspace = call.workspace("cublaslt", plan.workspace_words) if plan.workspace_words else 0
    item = np.dtype(np.uint8 if a.scaling == "mx" else np.float32).itemsize
    steps += [scales[1].matrix * item, scales[0].matrix * item, 0]
    if count > 1:
        for at, nbytes in ((one.at, one.array.nbytes) for o in (a, b) for one in (o.data, o.scales)):
            call.read_inside[at] = max(nbytes, call.read_inside.get(at, 0))
    return before + [
        ProductLaunch(plan, x, [*(at + i * step for at, step in zip(first_values, steps, strict=True)),
                                workspace]) for i in range(count)]


def _alignment(places: list[int]) -> int:
    """Return the alignment that the library may assume. It has faster algorithms for matrices at multiples of
    256 bytes, as allocations are."""
    return ALLOCATION_ALIGNMENT if all(place % ALLOCATION_ALIGNMENT == 0 for place in places) else _ALIGNMENT


def _layout(operand: Operand) -> str | None:
    """Return the layout of scales that the library reads; None: unchanged, a vector with a scale per row."""
    if operand.scaling == "mx":
        return "swizzled"
    vectors = operand.batch == 1 or operand.rows * 4 % _ALIGNMENT == 0
    if operand.scaling == "row" and vectors and is_contiguous(operand.scales.array):
        return None
    return None if operand.scaling == "tensor" else "gemm_ready"


class AlgorithmKey(NamedTuple):
    """Everything that the choice of an algorithm depends on. The names are cuBLASLt's: its A is b.
    """

    device: int
    m: int                              # the rows of the row-major result
    n: int                              # its columns
    k: int
    batch: int
    a_type: np.dtype[Any]
    b_type: np.dtype[Any]
    to: np.dtype[Any]
    a_mode: int
    b_mode: int
    bias: np.dtype[Any] | None
    accumulate: bool
    fast_accum: bool
    autotune: bool
    alignment: int                      # alignment in bytes of the data of a, b and the result

    def __str__(self) -> str:
        return ", ".join(f"{name}={getattr(value, 'name', value)}" for name, value in self._asdict().items())


class MatmulPlan:
    """Layouts and algorithm of products with one key. The description is for launches with new addresses each
    time, under the lock."""

    def __init__(self, lib: Library, key: AlgorithmKey) -> None:
        self.library, self.key, self.handle = lib, key, _handle(lib, key.device)
        m, n, k, batch = key.m, key.n, key.k, key.batch
        self.a = library.layout(lib, _TYPES[key.a_type], k, n, batch)
        self.b = library.layout(lib, _TYPES[key.b_type], k, m, batch)
        self.c = library.layout(lib, _TYPES[key.to], n, m, batch)
        self.beta = _ONE_AT if key.accumulate else _ZERO_AT
        self.description, self.lock = self.describe(), threading.Lock()
        self._addresses: list[int] = []                     # addresses set in the description
        self.algorithm: Heuristic | None = None

    @property
    def workspace_words(self) -> int:
        """u32 words of workspace."""
        assert self.algorithm is not None
        return cdiv(self.algorithm.workspace_bytes, 4)

    def describe(self) -> Opaque:
        """Return a new description, without the addresses."""
        key, made = self.key, library.description(self.library)
        made.set(transa=library.OP_T, transb=library.OP_N)
        if key.a_mode != library.SCALE_TENSOR:              # the default, before 12.8 the only mode
            made.set(a_scale_mode=key.a_mode, b_scale_mode=key.b_mode)
        if key.fast_accum:
            made.set(fast_accum=1)
        if key.bias is not None:
            made.set(epilogue=library.EPILOGUE_BIAS, bias_type=_TYPES[key.bias])
        return made

    def set_addresses(self, description: Opaque, values: list[int]) -> None:
        """Set the addresses in the description: of scales, and of a bias."""
        for number, value in zip(_ADDRESSES, values[3:6], strict=True):
            if value:
                self.library.checked("MatmulDescSetAttribute", description.at, number,
                                     ctypes.byref(c_void_p(value)), _POINTER_BYTES)

    def arguments(self, description: Opaque, values: list[int], algorithm: Heuristic | None = None,
                  d: int = 0) -> tuple[Any, ...]:
        """Return the arguments of cublasLtMatmul except the stream. d: address of the result, if not C.
        """
        algorithm = algorithm or self.algorithm
        assert algorithm is not None
        c = values[2]
        return (self.handle, description.at, _ONE_AT, values[0], self.a.at, values[1], self.b.at, self.beta,
                c, self.c.at, d or c, self.c.at, ctypes.addressof(algorithm), values[6],
                algorithm.workspace_bytes)

    def run(self, values: list[int], algorithm: Heuristic | None = None, d: int = 0) -> int:
        """Launch on the current stream of the current device. Return the status."""
        stream = backend.cupy().cuda.get_current_stream().ptr
        with self.lock:
            if values[3:6] != self._addresses:
                self.set_addresses(self.description, values)
                self._addresses = values[3:6]
            return self.library.matmul(*self.arguments(self.description, values, algorithm, d), stream)

    def failed(self, status: int) -> DeviceError:
        return DeviceError(f"cublasLtMatmul: {self.library.status_name(status)} for {self.key} (cuBLASLt "
                           f"{'.'.join(map(str, self.library.version))})")


class ProductLaunch:
    """A call of cublasLtMatmul, used like a kernel's launch.

    values: addresses of b's data, a's data, the result, b's scales, a's scales, the bias and the workspace; 0
    for what is absent."""

    pointer_positions = tuple(range(7))

    def __init__(self, plan: MatmulPlan, x: Array, values: list[int]) -> None:
        self.plan, self.values, self.device = plan, values, x.data.device_id
        self._arguments: tuple[Any, ...] | None = None

    def run(self) -> None:
        self._start(self.values, self._arguments)

    def run_with(self, values: list[int]) -> None:
        """Launch the same product for arrays at other addresses."""
        self._start(values, None)

    def _start(self, values: list[int], arguments: tuple[Any, ...] | None) -> None:
        cuda = backend.cupy().cuda
        if self.device != cuda.runtime.getDevice():
            with cuda.Device(self.device):
                self._start(values, arguments)
            return
        if arguments is None:
            status = self.plan.run(values)
        else:
            status = self.plan.library.matmul(*arguments, cuda.get_current_stream().ptr)
        if status:
            raise self.plan.failed(status)

    def keep(self) -> None:
        """Give it its own description, with fixed addresses."""
        self._description = self.plan.describe()
        self.plan.set_addresses(self._description, self.values)
        self._arguments = self.plan.arguments(self._description, self.values)


# ---- plans ----
#: Plan of a product; None: the library has no algorithm.
_plans: dict[AlgorithmKey, MatmulPlan | None] = {}
_NEW: Any = object()
_handles: dict[tuple[int, int], int] = {}
_making = threading.Lock()
_MOST_PLANS = 4096


def _handle(lib: Library, device: int) -> int:
    """Return the library's handle of the current device. Threads may share it."""
    key = id(lib), device
    if key not in _handles:
        _handles[key] = lib.create()
    return _handles[key]


def _plan(call: Call, key: AlgorithmKey, x: Array, values: list[int]) -> MatmulPlan | None:
    """Return the plan of a key, made at its first call. That call's memory serves a trial run of the
    algorithm, since the library refuses some products only then."""
    plan = _plans.get(key, _NEW)
    if plan is not _NEW:
        return plan
    if capturing(key.device):
        for autotune, alignment in itertools.product((key.autotune, False), (key.alignment, _ALIGNMENT)):
            weaker = _plans.get(key._replace(autotune=autotune, alignment=alignment), _NEW)
            if weaker is not _NEW:
                call.repeatable = False                     # the next call may make its own
                return weaker
        raise ValueError(f"{call.result.arrays[0].name}: a product of these shapes, dtypes and alignment is "
                         "called for the first time while a CUDA graph is captured; call once before the "
                         "capture")
    with _making, backend.cupy().cuda.Device(key.device):
        if key in _plans:
            return _plans[key]
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        return _plans.setdefault(key, _make(key, x, values))


def _make(key: AlgorithmKey, x: Array, values: list[int]) -> MatmulPlan | None:
    lib = library.found()
    assert isinstance(lib, Library)
    plan = MatmulPlan(lib, key)
    plan.set_addresses(plan.description, values)            # the heuristic looks at their alignment
    alignments = dict.fromkeys(("align_a", "align_b", "align_c", "align_d"), key.alignment)
    preference = library.preference(lib, workspace=_WORKSPACE, **alignments)
    candidates = lib.algorithms(plan.handle, plan.description, plan.a, plan.b, plan.c, preference,
                                _MOST_CANDIDATES)
    if not candidates:
        return None
    room = empty_beside(x, (max(one.workspace_bytes for one in candidates),), np.dtype(np.uint8))
    # the trial must not add to the result
    result = empty_beside(x, (key.batch, key.m, key.n), key.to) if key.accumulate else None
    d = 0 if result is None else address(result)
    tried = [*values, address(room) if room.size else 0]
    usable = (one for one in candidates if plan.run(tried, one, d) == library.SUCCESS)
    if key.autotune:
        timed = [(_microseconds(lambda one=one: plan.run(tried, one, d)), i, one)
                 for i, one in enumerate(usable)]
        plan.algorithm = min(timed)[2] if timed else None
    else:
        plan.algorithm = next(usable, None)
    return None if plan.algorithm is None else plan


def _microseconds(run: Any) -> float:
    """Return the shortest time of a launch, over several series of launches."""
    cuda = backend.cupy().cuda
    best, launches_in_a_row = float("inf"), 5
    for _ in range(4):
        start, end = cuda.Event(), cuda.Event()
        start.record()
        for _ in range(launches_in_a_row):
            run()
        end.record()
        end.synchronize()
        best = min(best, cuda.get_elapsed_time(start, end) * 1e3 / launches_in_a_row)
    return best

