"""Helpers for tests of numerics: a byte comparison that shows the first difference, the bound of matrix
products, the choice of executor, and Hypothesis strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from . import backend, kernels
from .advice import public_only, shown, type_name
from .arrays import Array, Result, _same, asarray, asnumpy, check_comparable, is_array, once, pairs, raw_bytes
from .formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, DType, as_dtype, choice, float8_e8m0fnu, lookup
from .gate import Gate
from .grouped import Grouped
from .layouts import scale_shape, swap_last
from .ops.matmul.dense import matmul_nt
from .ops.matmul.grouped import GroupedAxis, grouped_matmul_nt
from .reference.matmul.dense import magnitudes
from .reference.matmul.grouped import grouped_magnitudes
from .reference.matmul.tolerance import PROMISED, assert_within
from .results import Quantized, Scaled
from .routing import Routing

__all__ = ["EXECUTORS", "Executor", "arrays", "assert_bytes_equal", "assert_product_close", "executor",
           "executor_problem", "mx_results", "scales"]

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_Made = TypeVar("_Made")
_Arguments = TypeVar("_Arguments", bound=tuple[Any, ...])
_Keywords = TypeVar("_Keywords", bound=dict[str, Any])
ExecutorName: TypeAlias = Literal["reference", "host", "cuda"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)


def assert_bytes_equal(actual: Any, desired: Any) -> None:
    """Raise AssertionError unless both arrays (of either kind) have the same dtype, shape and bytes.

    Also takes results (`Scaled`, `Quantized`, `Grouped`, `Routing`, `Gate`) and lists and tuples of arrays
    and results; their metadata must be equal as well. The message names the field that differs, and for an
    array the first differing index, both elements in hex and as values, and how many differ. Raises TypeError
    for anything else.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> a = fp8.asarray([1.0, 2.0], fp8.float8_e4m3fn, like=np)
    >>> fp8.testing.assert_bytes_equal(a, a.copy())
    >>> q = fp8.quantize_tensor(np.float32([1, 2]), 1.0)
    >>> fp8.testing.assert_bytes_equal(q, fp8.quantize_tensor(np.float32([1, 3]), 1.0))
    Traceback (most recent call last):
        ...
    AssertionError: rowwise.data: 1 of 2 elements of float8_e4m3fn[2] differ; first at (1,): ...
    """
    __tracebackhide__ = True                            # pytest shows the caller's line instead
    check_comparable(actual, "actual")
    check_comparable(desired, "desired")
    for path, a, b in pairs(actual, desired):
        where = path.removeprefix(".")
        if is_array(a) and is_array(b):
            _assert_same_bytes(asnumpy(a), asnumpy(b), f"{where}: " if where else "")
        elif is_array(a) or is_array(b) or isinstance(a, Result) or isinstance(b, Result):
            raise AssertionError(f"{where or 'type'}: actual {_named(a)}, desired {_named(b)}")
        elif a != b:
            raise AssertionError(f"{where or 'type'}: actual {a!r}, desired {b!r}")


def _assert_same_bytes(a: np.ndarray, b: np.ndarray, where: str) -> None:
    __tracebackhide__ = True
    if a.dtype != b.dtype:
        raise AssertionError(f"{where}dtype: actual {a.dtype}, desired {b.dtype}")
    if a.shape != b.shape:
        raise AssertionError(f"{where}shape: actual {a.shape}, desired {b.shape}")
    if _same(a, b):
        return
    differ = np.asarray(raw_bytes(a) != raw_bytes(b)).reshape(*a.shape, -1).any(axis=-1)
    count = int(np.count_nonzero(differ))
    first = np.unravel_index(int(np.argmax(differ)), differ.shape)
    shown = [f"{name} 0x{v[first].tobytes()[::-1].hex().upper()} ({v[first]})"
             for name, v in (("actual", a), ("desired", b))]
    where = f"{where}{count} of {a.size} elements of {a.dtype}{list(a.shape)} differ"
    raise AssertionError(f"{where}; first at {tuple(map(int, first))}: {', '.join(shown)}")


def _named(a: Any) -> str:
    return "None" if a is None else f"of type {type(a).__name__}"


def assert_product_close(actual: Array, a: Scaled | Quantized | Grouped, b: Scaled | Quantized | Grouped,
                         splits: Any = None, *, group: GroupedAxis = "m", bias: Array | None = None,
                         bias_weights: Array | None = None, accumulate: Array | None = None,
                         rtol: float = PROMISED) -> None:
    """Raise AssertionError unless `actual` is the product of two FP8 operands, within the bound of
    `matmul_nt` and `grouped_matmul_nt`.

        |actual - D| <= rtol * S + ulp(D)       D = Σ_k a[m, k] · b[n, k] + bias[n] + accumulate[m, n]
                                                S = the same sum of magnitudes

    of the dequantised values, D summed in f64 and rounded once to actual's dtype, ulp its unit in the last
    place. Where a term is NaN or Inf, actual must be either; where S exceeds the float32 range, any result is
    accepted. The message names the element with the largest error relative to its bound: index, both values,
    difference and bound, and how many elements are wrong.

    Parameters
    ----------
    actual : bfloat16, float16 or float32 array [M, N] or [B, M, N], for groups [sum m, N] or ("k") [E, M, N]
    a, b : the operands, in all forms that `matmul_nt` takes; with splits, for a `Grouped` and for group="k"
        those that `grouped_matmul_nt` takes. b is [N, K]
    splits, group : as for `grouped_matmul_nt`
    bias : [N]; for groups [E, N], which `bias_weights` [sum m] may scale
    accumulate : float32 array, the contents of actual before the product was added
    rtol : relative to S. docs/numerics.md section 10 promises 2⁻⁶ for tensor cores that add in float32; usual
        values come closer (this package's own tests allow 2⁻⁸)

    Arrays may be of NumPy or CuPy, and are compared on the host, in f64: M · N · K multiplications, twice.
    Raises TypeError and ValueError for operands that cannot be multiplied, and for other dtypes of actual.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.random.default_rng(0).standard_normal((32, 256), np.float32)
    >>> a, b = fp8.quantize_block(x), fp8.quantize_block(x[:16])
    >>> y = a.dequantize() @ b.dequantize().T
    >>> fp8.testing.assert_product_close(y, a, b)
    >>> y[3, 5] += 9
    >>> fp8.testing.assert_product_close(y, a, b)
    Traceback (most recent call last):
        ...
    AssertionError: product: 1 of 512 elements of float32[32, 16] are out of bounds; worst at (3, 5): ...
    """
    __tracebackhide__ = True
    if not is_array(actual):
        raise TypeError(f"actual: expected a NumPy or CuPy array, got {type_name(actual)}")
    to = lookup(actual.dtype, INPUT_DTYPES, "actual").dtype
    if not rtol >= 0:
        raise ValueError(f"rtol: expected a number of 0 or more, got {shown(rtol)}")
    left, right, splits, *added = (_map_arrays(each, asnumpy) for each in (a, b, splits, bias, accumulate))
    addends: dict[str, Any] = dict(zip(("bias", "accumulate"), added, strict=True))
    before = {"accumulate": None if added[1] is None else added[1].copy()}       # the call adds to it
    with kernels.forced_executor("reference"):
        if splits is None and group == "m" and not _has_sizes(left):
            if bias_weights is not None:
                raise ValueError("bias_weights: belong to products of groups; give splits")
            desired = matmul_nt(left, right, dtype=to, **addends | before)
            sizes = magnitudes(left, right, **addends)
        else:
            addends["bias_weights"] = _map_arrays(bias_weights, asnumpy)
            desired = grouped_matmul_nt(left, right, splits, group=group, dtype=to, **addends | before)
            sizes = grouped_magnitudes(left, right, splits, group=group, **addends)
    assert_within(actual, desired, sizes, "product", rtol)


def _has_sizes(a: Any) -> bool:
    """Whether rows of an operand are laid out by sizes of groups."""
    s = a._row if isinstance(a, Quantized) else a
    return isinstance(s, Grouped) or (isinstance(s, Scaled) and s.splits is not None)


@dataclass(frozen=True)
class Executor:
    """A place where kernels run. `array` moves a NumPy array or a result there, and `numpy` brings it
    back."""

    name: ExecutorName

    def __post_init__(self) -> None:
        choice(self.name, "name", EXECUTORS)

    def array(self, a: _Made) -> _Made:
        """Move a NumPy array, a result, or a list or tuple of these to where kernels run."""
        on_gpu = self.name == "cuda"
        moved: _Made = _map_arrays(a, lambda v: asarray(v, like="cupy") if on_gpu else v)
        return moved

    def array_arguments(self, args: _Arguments, kwargs: _Keywords) -> tuple[_Arguments, _Keywords]:
        """Return the arguments of a call, each moved by `array`."""
        moved: Any = tuple(map(self.array, args)), {name: self.array(a) for name, a in kwargs.items()}
        return moved

    def numpy(self, a: _Made) -> _Made:
        """Bring the same back: NumPy arrays."""
        back: _Made = _map_arrays(a, asnumpy)
        return back


@contextmanager
def executor(name: ExecutorName) -> Iterator[Executor]:
    """Run kernels in one place for the length of a `with` block.

    'host': NumPy arrays run the CUDA sources on the CPU (needs g++). 'cuda': the GPU (`array` makes CuPy
    arrays). 'reference': NumPy arrays run the reference, as always outside such a block. Raises DeviceError
    if that is not possible.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> with fp8.testing.executor("host") as run:                                    # doctest: +SKIP
    ...     q = fp8.quantize_tensor(run.array(np.ones((2, 2), np.float32)), 1.0)
    """
    problem = executor_problem(name)
    if problem:
        raise backend.DeviceError(f"executor {name!r}: {problem}")
    if name == "cuda":
        yield Executor(name)
        return
    with kernels.forced_executor(name):
        yield Executor(name)


def executor_problem(name: ExecutorName) -> str | None:
    """Return why an executor cannot be used on this machine, or None."""
    choice(name, "executor", EXECUTORS)
    if name == "cuda":
        return backend.gpu_problem()
    if name == "host":
        from . import hostexec

        return hostexec.available()
    return None


def _map_arrays(a: Any, move: Any) -> Any:
    if isinstance(a, Scaled):
        return a._with_arrays(move)
    if isinstance(a, Quantized):
        move_once = once(move, {})                             # both directions may share an array
        row, column = (s and s._with_arrays(move_once) for s in (a._row, a._column))
        return Quantized(row, column, None if a.dbias is None else move(a.dbias))
    if isinstance(a, Grouped):
        move_once = once(move, {})
        fields = {f.name: getattr(a, f.name) for f in dataclasses.fields(a)}
        return Grouped._of_fields(**{name: move_once(v) if is_array(v) else v for name, v in fields.items()})
    if isinstance(a, (Gate, Routing)):
        return dataclasses.replace(a, **{name: move(v) for name, v in a._arrays().items()})
    return move(a) if hasattr(a, "dtype") and hasattr(a, "ndim") and not np.isscalar(a) else a


def _strategies() -> Any:
    """Return hypothesis.strategies. ImportError with the line that installs it."""
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise ImportError(
            f"these strategies need Hypothesis ({error}): pip install 'cupy_fp8[test]' or hypothesis",
            name="hypothesis",
        ) from None
    return strategies


def arrays(dtype: DType | None = None, *, max_side: int = 40,
           max_dims: int = 3) -> SearchStrategy[np.ndarray]:
    """Return a Hypothesis strategy: NumPy arrays of any bit patterns (NaN, Inf, -0, subnormals included) of
    `dtype`, or of any dtype that quantisers read; up to `max_dims` dimensions, sides from 0."""
    st = _strategies()

    dtypes = st.sampled_from(INPUT_DTYPES) if dtype is None else st.just(as_dtype(dtype))
    shapes = st.lists(st.integers(0, max_side), min_size=0, max_size=max_dims).map(tuple)

    def array(draw: Any) -> np.ndarray:             # failures show what a composite strategy returns
        return _random_bits(draw(dtypes), draw(shapes), draw(st.integers(0, 2**32 - 1)))

    made: SearchStrategy[np.ndarray] = st.composite(array)()
    return made


def scales() -> SearchStrategy[float]:
    """Return a Hypothesis strategy: f32 scales over the whole range, subnormals, 0, negative, Inf and NaN
    included."""
    st = _strategies()

    made: SearchStrategy[float] = st.one_of(
        st.floats(width=32), st.integers(-149, 127).map(lambda e: float(np.float32(2.0**e))))
    return made


def mx_results(*, max_side: int = 140) -> SearchStrategy[Scaled]:
    """Return a Hypothesis strategy: `Scaled`s of any FP8 codes with any E8M0 scales, in blocks of 32 along
    rows or columns, 2-D and 3-D, sides from 0, data stored either way round, scales compact or swizzled (with
    anything in the padding)."""
    st = _strategies()

    side = st.integers(0, max_side)

    def result(draw: Any) -> Scaled:
        dtype, transposed = draw(st.sampled_from(FP8_DTYPES)), draw(st.booleans())
        shape = (*draw(st.lists(st.integers(0, 3), max_size=1)), draw(side), draw(side))
        block = draw(st.sampled_from([(1, 32), (32, 1)]))
        layout = draw(st.sampled_from(["compact", "swizzled"]))
        seed = draw(st.integers(0, 2**32 - 1))
        data = _random_bits(dtype, swap_last(shape) if transposed else shape, seed)
        scale_inv = _random_bits(float8_e8m0fnu, scale_shape(shape, block, layout, transposed), seed + 1)
        # failures show the call that `builds` makes, with its arrays; the repr of a result has none
        made: Scaled = draw(st.builds(Scaled, st.just(data), st.just(scale_inv), st.just(shape),
                                      st.just(transposed), st.just(block), st.just(layout)))
        return made

    results: SearchStrategy[Scaled] = st.composite(result)()
    return results


def _random_bits(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray:
    storage = FORMATS[dtype].storage
    return (np.random.default_rng(seed).integers(0, np.iinfo(storage).max, shape, storage,
                                                 endpoint=True).reshape(shape).view(dtype))


if not TYPE_CHECKING:               # otherwise type checkers accept any name
    __getattr__, __dir__ = public_only(globals())
