"""State of a step of the layer: its buffers, and what the backward pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..arrays import Array, address, zeros
from ..calls.memory import Occupied, Range
from ..calls.validate import byte_range
from ..formats import SIZE_DTYPES
from ..ops.convert.scaling_aware import scaling_aware_transpose
from ..ops.moe.permute import permute
from ..ops.moe.permute_transpose import permute_transpose
from ..results import Quantized, Scaled
from ..routing import Routing
from ..typed_array import TypedArray

if TYPE_CHECKING:
    from .experts import Experts


class Unique:
    """An object that cannot be copied or pickled: copies would share its arrays, or belong to no layer."""

    #: what to do instead
    _instead = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: cannot be copied or pickled; {self._instead}")


class Buffers(Unique):
    """Every array of a step, for reuse by the next step with as many tokens: made by `Experts.empty`, passed
    to `forward` and `backward` as `out`. They belong to one layer, and to one step at a time: what a step has
    saved is gone once the next one begins.

    nbytes : of all arrays
    """

    _instead = "empty() of the layer makes others"
    #: backward does not write forward's results, so the gradient of y may overwrite y
    _RESULTS = "y", "rows out"

    def __init__(self, owner: Experts, facts: dict[str, Any]) -> None:
        self._owner, self._facts = owner, facts
        self._made: dict[str, Any] = {}
        #: The last `rows` passed to `Calls.columns` under each name, with the `out` for them, so that
        #: remembered calls are found again.
        self._columns: dict[str, tuple[Scaled, Any, Quantized]] = {}
        self._step = 0
        self._all = self._of_backward = Occupied([])

    def _complete(self) -> None:
        """Note where the arrays are, once a step has made them."""
        self._all = Occupied(self._ranges())
        self._of_backward = Occupied(self._ranges(self._RESULTS))

    def _ranges(self, but: tuple[str, ...] = ()) -> Iterator[Range]:
        for name, made in self._made.items():
            if name not in but:
                yield from ranges_of(made, f"out ({name})")

    @property
    def nbytes(self) -> int:
        return nbytes_of(self._made.values())

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self._facts.items()
                          if value is not None or name == "keep")
        return f"Buffers({facts}: {self.nbytes:,} bytes)"


class Calls:
    """Calls ops, with the buffer of each call's name as `out` if there are buffers. begins: a step begins, so
    what the previous one saved is refused from here on."""

    def __init__(self, buffers: Buffers | None, *, begins: bool = False) -> None:
        self._made = None if buffers is None else buffers._made
        self._columns = {} if buffers is None else buffers._columns
        if buffers is not None and begins:
            buffers._step += 1

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._made is None:
            return function(*args, **options)
        made = self._made[name] = function(*args, **options, out=self._made.get(name))
        return made

    def columns(self, name: str, function: Callable[..., Quantized], rows: Scaled, splits: Array
                ) -> Quantized:
        """Call a transpose whose result includes the data of `rows`, which may be the caller's: these get no
        buffer. Sizes are copied to arrays of their own dtype."""
        if self._made is None:
            return function(rows, splits=splits)
        if name not in self._made:
            made = function(rows, splits=splits)
            (other,) = {*SIZE_DTYPES} - {splits.dtype}
            self._made[name] = (made.columnwise, made.rowwise.scale_inv,
                                zeros(splits.shape, other, like=splits))
            return made
        known, dtype, out = self._columns.get(name, (None, None, None))
        if known is not rows or dtype != splits.dtype:
            out = self._columns_of(name, rows, splits)
            if any(rows is own for made in self._made.values() for own in _scaled_of(made)):
                self._columns[name] = rows, splits.dtype, out
        return function(rows, splits=splits, out=out)

    def both(self, name: str, tokens: Scaled, routing: Routing, probs: Array | None) -> Any:
        """Return (the result of permute_transpose on FP8 tokens, their rows' probs). Uses the buffers of
        `permute` and `columns`, which make them in the first step."""
        of_rows, of_columns, splits = f"{name} permuted", f"{name} columns", routing.aligned_splits
        if self._made is None:
            made = permute_transpose(tokens, routing, probs=probs)
            return made if probs is not None else (made, None)
        if of_columns not in self._made:
            moved = self(of_rows, permute, tokens, routing, probs=probs)
            self.columns(of_columns, scaling_aware_transpose, moved if probs is None else moved[0], splits)
        moved = self._made[of_rows]
        rows, row_probs = moved if isinstance(moved, tuple) else (moved, None)
        known, _, out = self._columns.get(of_rows, (None, None, None))
        if known is not rows:
            out = Quantized._of(rows, self._columns_of(of_columns, rows, splits).columnwise)
            self._columns[of_rows] = rows, splits.dtype, out
        if probs is None:
            return permute_transpose(tokens, routing, out=out), None
        assert out is not None
        return permute_transpose(tokens, routing, probs=probs, out=(out, row_probs))

    def _columns_of(self, name: str, rows: Scaled, splits: Array) -> Quantized:
        """Return the `out` for a transpose of these rows."""
        assert self._made is not None
        column, scale_inv, sizes = self._made[name]
        if column.splits.dtype == splits.dtype:
            sizes = column.splits
        else:
            column = Scaled._of(column.data, column.scale_inv, column.shape, True, column.block,
                                column.scale_layout, sizes)
        row = Scaled._of(rows.data, scale_inv, rows.shape, False, rows.block, "gemm_ready", sizes)
        return Quantized._of(row, column)


@dataclass(frozen=True, eq=False, repr=False)
class Saved(Unique):
    """What `backward` needs of a forward pass.

    It refers to the caller's objects without a copy: the routing and probs; a Scaled that was given for x; x
    itself with 'both_directions' and less kept; and for `forward_rows` the rows, splits and row_probs. They
    must not change before the backward pass. (A list of splits is copied. A rewritten routing is noticed,
    other arrays are not.)

    nbytes : of the arrays that it keeps, including the caller's. The routing, probs, splits and weights are
        not counted
    """

    _instead = "call forward again, or backward first; copy the arrays that they return"

    experts: Experts
    weights: int                        # updates of the weights so far
    scales: int                         # updates of the delayed scaling so far
    keep: str
    splits: Array
    align: int
    row_probs: Array | None
    routing: Routing | None = None
    routed: int = 0                     # times that the routing has been written
    probs: Array | None = None
    tokens: TypedArray | Scaled | Quantized | None = None   # x in FP8, from which rows are permuted again
    rows: TypedArray | Scaled | Quantized | None = None
    hidden: TypedArray | Quantized | None = None            # h, or h in FP8
    activation: Quantized | None = None
    buffers: Buffers | None = None
    step: int = 0

    @property
    def nbytes(self) -> int:
        return nbytes_of([self.tokens, self.rows, self.hidden, self.activation, self.row_probs])

    def __repr__(self) -> str:
        kept = [name for name in ("tokens", "rows", "hidden", "activation")
                if getattr(self, name) is not None]
        return f"Saved(keep={self.keep!r}: {', '.join(kept)}, {self.nbytes:,} bytes)"


def _scaled_of(made: Any) -> Iterator[Scaled]:
    """Yield every Scaled of a result."""
    if isinstance(made, Scaled):
        yield made
    elif isinstance(made, Quantized):
        yield from made.parts.values()
    elif isinstance(made, tuple):
        for part in made:
            yield from _scaled_of(part)


def nbytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of all arrays, each counted once."""
    return sum({address(a): int(a.nbytes) for value in values for a in arrays_of(value) if a.size}.values())


def ranges_of(value: Any, name: str, *, written: bool = False) -> Iterator[Range]:
    """Yield the memory range of each array."""
    for a in arrays_of(value):
        yield Range(*byte_range(a), written, name)


def arrays_of(value: Any) -> Iterator[Array]:
    """Yield the arrays in the result of an op."""
    if isinstance(value, tuple):
        for part in value:
            yield from arrays_of(part)
    elif isinstance(value, Quantized):
        yield from arrays_of(tuple(value.parts.values()))
    elif isinstance(value, Routing):
        yield from value._arrays().values()
    elif isinstance(value, Scaled):
        yield from value
        if value.splits is not None:
            yield value.splits
    elif value is not None:
        yield value
