"""What quantisers that scale in blocks share: arrays in either memory order, plans that outlive a call, and the description of
their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, bits, empty_beside, is_contiguous
from ...calls import validate
from ...calls.call import Call, Input, Op, run
from ...calls.results import Description, Written
from ...formats import INPUT_DTYPES
from ...kernels import Launch, Variant
from ...kernels.warp_tiles import LANE_COLUMNS
from ...recipes import Form
from ...results import Quantized, swap_last

#: How the data of blocks along the rows of memory (fast) and down its columns (slow) are stored, where they are wanted.
ABSENT, AS_IS, TRANSPOSED = 0, 1, 2

#: Runs of memory, each from an address to another.
Ranges = list[tuple[int, int]]


#: Of a result: 0, which means nowhere; the row-wise data and scales; the column-wise ones.
Addresses = tuple[int, int, int, int, int]
NOWHERE: Addresses = (0, 0, 0, 0, 0)
_DATA: dict[str | None, int] = {None: 0, "rowwise": 1, "columnwise": 3}
_SCALES: dict[str | None, int] = {None: 0, "rowwise": 2, "columnwise": 4}

#: Members of a kernel's struct by name.
Members = dict[str, Any]
#: A variant, its blocks of threads, and the members of its struct but for x and noop.
Choice = tuple[Variant, int, Members]


class Side(NamedTuple):
    """What a kernel writes of the blocks along one axis of memory. Directions by name; None: nothing."""

    data: str | None
    stored: int
    scales: str | None
    strides: tuple[int, ...]            # where each scale goes, as the kernel's struct says it


class Step:
    """A launch, but for the addresses. members: those of the struct that do not depend on them."""

    def __init__(self, sides: tuple[Side, Side], members: Members) -> None:
        fast, slow = sides
        #: Picks the addresses of fast data, slow data, fast scales and slow scales.
        self._pick: Callable[[Addresses], tuple[int, int, int, int]] = itemgetter(
            _DATA[fast.data], _DATA[slow.data], _SCALES[fast.scales], _SCALES[slow.scales])
        self._fast, self._slow, self._members = fast.strides, slow.strides, members

    def places(self, out: Addresses) -> Members:
        """Where data and scales go."""
        fast, slow, fast_scales, slow_scales = self._pick(out)
        return {"fast_data": fast, "slow_data": slow, "fast": (fast_scales, *self._fast), "slow": (slow_scales, *self._slow)}

    def choose(self, out: Addresses, aligned: bool) -> Choice:
        """aligned: whether x is, to the `load_bytes` of the plan."""
        raise NotImplementedError


class PanelMembers(Step):
    """Members of the struct of a kernel that keeps panels (panels.py), whatever the variant. chunk: elements of a wide access. grouped: the
    kernel asks for each group of rows what its transposed data allow."""

    def __init__(self, plan: Plan, sides: tuple[Side, Side], members: Members, chunk: int = LANE_COLUMNS,
                 grouped: bool = False) -> None:
        super().__init__(sides, members)
        self._loads = int(plan.columns % chunk == 0)
        transposed = 1 if grouped else 16 * (plan.rows % 16 == 0)
        #: What addresses must be multiples of for wide stores; 0 where rows do not allow them.
        self._fast_bytes, self._slow_bytes = (transposed if side.stored == TRANSPOSED else chunk * self._loads for side in sides)

    def at(self, out: Addresses, aligned: bool) -> Members:
        """All but x and noop. aligned: whether x is, to chunks."""
        places = self.places(out)
        vector = self._loads if aligned else 0
        if self._fast_bytes and places["fast_data"] % self._fast_bytes == 0:
            vector |= 2
        if self._slow_bytes and places["slow_data"] % self._slow_bytes == 0:
            vector |= 4
        return {**places, **self._members, "vector": vector}


class PanelStep(PanelMembers):
    """A launch of such a kernel."""

    def __init__(self, plan: Plan, sides: tuple[Side, Side], members: Members, wide: tuple[Variant, int],
                 any_shape: tuple[Variant, int], chunk: int = LANE_COLUMNS) -> None:
        """wide: the variant for memory that allows wide accesses everywhere, and its blocks; any_shape: for other memory."""
        super().__init__(plan, sides, members, chunk)
        self._wide, self._any_shape = wide, any_shape

    def choose(self, out: Addresses, aligned: bool) -> Choice:
        members = self.at(out, aligned)
        variant, grid = self._wide if members["vector"] == 7 else self._any_shape
        return variant, grid, members


class Plan:
    """What follows from an array and the options, whatever the memory: the forms of the result, and the launches that write it."""

    kind: str                           # of data, for messages

    def __init__(self, shape: tuple[int, ...], forms: dict[str, Form], shared: tuple[str, ...], load_bytes: int) -> None:
        """shape: of x as it lies in memory. shared: 'data', 'scale_inv': what both directions have in common. load_bytes: what the address
        of x must be a multiple of for wide loads."""
        self.shape, self.forms, self.shared, self.load_bytes = shape, forms, shared, load_bytes
        self.size, (self.rows, self.columns) = prod(shape), shape[-2:]

    def of(self, allocate: Callable[[tuple[int, ...], np.dtype[Any]], Array]) -> Quantized:
        """A result of arrays that are asked for one by one, each once."""
        raise NotImplementedError

    def empty(self, x: Array) -> Quantized:
        """A result beside x, uninitialised."""
        return self.of(functools.partial(empty_beside, x))

    def make_steps(self) -> Iterable[Step]:
        raise NotImplementedError

    @functools.cached_property
    def result(self) -> QuantizedResult:
        return QuantizedResult(self)

    def addresses(self, written: Sequence[int]) -> Addresses:
        """Those of the arrays of `result`, by direction."""
        found = dict(zip((a.name for a in self.result.arrays), written, strict=True))
        row, row_scales = (found.get(f"out.rowwise.{what}", 0) for what in ("data", "scale_inv"))
        shared = ("rowwise" in self.forms and "columnwise" in self.forms) and self.shared
        column, column_scales = (found.get(f"out.columnwise.{what}", at if shared and what in shared else 0)
                                 for what, at in (("data", row), ("scale_inv", row_scales)))
        return 0, row, row_scales, column, column_scales

    @functools.cached_property
    def _steps(self) -> list[Step]:
        """Made for the first launch: the reference needs none."""
        return list(self.make_steps()) if self.size else []

    def choices(self, out: Addresses, aligned: bool) -> list[Choice]:
        return [step.choose(out, aligned) for step in self._steps]


class QuantizedResult(Description):
    """A Quantized whose parts have given forms."""

    def __init__(self, plan: Plan) -> None:
        self._plan, written = plan, []
        for name, form in plan.forms.items():
            for what, shape, dtype in (("data", form.stored, form.dtype), ("scale_inv", form.scale_shape, form.scale_dtype)):
                if not self._is_shared(name, what):
                    written.append(Written(f"out.{name}.{what}", shape, dtype))
        super().__init__(*written)

    @functools.cached_property
    def _places(self) -> list[tuple[str, int, int, Form]]:
        """Of each direction its name, the places of data and scale_inv among the arrays, and its form."""
        names, found = [a.name for a in self.arrays], []
        for name, form in self._plan.forms.items():
            data, scales = (names.index(f"out.{'rowwise' if self._is_shared(name, what) else name}.{what}")
                            for what in ("data", "scale_inv"))
            found.append((name, data, scales, form))
        return found

    def build(self, arrays: Sequence[Array]) -> Quantized:
        parts = {name: form.of(arrays[data], arrays[scales]) for name, data, scales, form in self._places}
        if len(parts) == 2 and self._alike:
            parts["columnwise"] = parts["rowwise"]
        return Quantized(**parts)

    @functools.cached_property
    def _alike(self) -> bool:
        """Whether both directions are one and the same Scaled."""
        return self._plan.forms.get("rowwise") == self._plan.forms.get("columnwise")

    def arrays_of(self, out: Any) -> list[Array]:
        check_forms(out, self._plan.forms, self._plan.kind)
        found = []
        for name, part in out._parts():
            for what, a in zip(("data", "scale_inv"), part, strict=True):
                if not self._is_shared(name, what):
                    found.append(a)
                elif a is not getattr(out.rowwise, what):
                    raise ValueError(f"out.{name}.{what}: expected out.rowwise.{what} itself, since both directions are the same here")
        return found

    def _is_shared(self, name: str, what: str) -> bool:
        return what in self._plan.shared and name == "columnwise" and "rowwise" in self._plan.forms


class _Inputs(NamedTuple):
    x: Input                            # as it lies in memory
    swapped: bool                       # whether its last two axes are swapped there
    plan: Plan
    options: tuple[Any, ...]


class Quantizer(Op[_Inputs]):
    """An op that quantises in blocks: `plan` and `reference` are its own, `options` the names that `reference` has for its
    options. Plans are kept for arrays of the same shape and dtype."""

    def __init__(self, plan: Callable[..., Plan], reference: Callable[..., Quantized], options: tuple[str, ...]) -> None:
        self._make, self._reference, self._options, self._block = plan, reference, options, options.index("block")

        @functools.lru_cache(maxsize=1024, typed=True)
        def cached(shape: tuple[int, ...], source: np.dtype[Any], swapped: bool, *given: Any) -> Plan:
            return plan(shape, source, swapped, given[:len(options)])

        self._cached = cached

    def __call__(self, x: Array, options: tuple[Any, ...], noop: Array | None, out: Quantized | None) -> Quantized:
        result: Quantized = run(self, (x, noop, *options), out)
        return result

    def arguments(self, call: Call, x: Any, noop: Any, *options: Any) -> _Inputs:
        swapped = lies_swapped(x)
        found = call.read("x", x.swapaxes(-1, -2) if swapped else x, INPUT_DTYPES)
        call.noop(noop)
        return _Inputs(found, swapped, self._plan(found.array, swapped, options), options)

    def result(self, inputs: _Inputs) -> Description:
        return inputs.plan.result

    def reference(self, inputs: _Inputs) -> Quantized:
        x = inputs.x.array.swapaxes(-1, -2) if inputs.swapped else inputs.x.array
        return self._reference(x, **dict(zip(self._options, inputs.options, strict=True)))

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        x, plan = inputs.x, inputs.plan
        for variant, grid, members in plan.choices(plan.addresses(written), x.at % plan.load_bytes == 0):
            yield variant.bind(x.array, grid, x=x.at, noop=call.noop_at, **members)

    def _plan(self, x: Array, swapped: bool, options: tuple[Any, ...]) -> Plan:
        # A cache that looks at types, and at those of the block's extents: 1, 1.0 and True are equal, but not all are accepted.
        try:
            return self._cached(x.shape, x.dtype, swapped, *options, *options[self._block])
        except TypeError:                                       # also an option that is not even hashable: the plan says which
            pass
        return self._make(x.shape, x.dtype, swapped, options)


def addresses(out: Quantized) -> Addresses:
    row, column = out.rowwise, out.columnwise
    row_data, row_scales = (validate.address(row.data), validate.address(row.scale_inv)) if row else (0, 0)
    data, scales = (validate.address(column.data), validate.address(column.scale_inv)) if column else (0, 0)
    return 0, row_data, row_scales, data, scales


def lies_swapped(x: Any) -> bool:
    """Whether an array's last two axes are swapped in memory, where it is C-contiguous otherwise."""
    if x.flags.c_contiguous if isinstance(x, np.ndarray) else getattr(x, "_c_contiguous", True):
        return False
    return bool(x.ndim >= 2 and is_contiguous(x.swapaxes(-1, -2)))


def source(x: Array) -> tuple[Array, Any, int, bool]:
    """(x as it lies in memory, its module, its address, whether its last two axes are swapped there)."""
    swapped = lies_swapped(x)
    return (*validate.source(x.swapaxes(-1, -2) if swapped else x, INPUT_DTYPES), swapped)


def logical(shape: tuple[int, ...], swapped: bool) -> tuple[int, ...]:
    """The shape of an array that lies in memory with this one."""
    return swap_last(shape) if swapped else shape


def stored(form: Form | None, swapped: bool) -> int:
    return ABSENT if form is None else AS_IS if form.transposed == swapped else TRANSPOSED


def check_forms(out: Any, forms: Mapping[str, Form], kind: str) -> None:
    """TypeError or ValueError unless a result given as `out=` is one of these forms. kind: of data, for messages."""
    if not isinstance(out, Quantized):
        raise TypeError(f"out: expected a Quantized (an earlier result, or recipe.empty(…)), got {type(out).__name__}")
    for name, part in (("rowwise", out.rowwise), ("columnwise", out.columnwise)):
        form = forms.get(name)
        if (part is None) != (form is None):
            raise ValueError(f"out: {'no' if part is None else 'has a'} {name} part, but {name}={form is not None} was asked for")
        if part is None or form is None:
            continue
        if (part.shape, part.transposed, part.block, part.scale_layout) != form[1:5]:
            raise ValueError(f"out.{name}: expected {kind} data of shape {form.shape}, {'' if form.transposed else 'not '}stored "
                             f"transposed, block {form.block}, scales {form.scale_layout}; got {part!r}, scales {part.scale_layout}")


def written(out: Quantized, forms: Mapping[str, Form], x: Array, xp: Any, kind: str, shared: tuple[str, ...] = ()) -> Ranges:
    """The memory of a result given as `out=`, once every part of it has been found to have its form. `kind` of data, for messages.
    shared: 'data', 'scale_inv': what both directions must have in common; nothing else may overlap."""
    check_forms(out, forms, kind)
    found: list[tuple[str, int, int]] = []
    for name, part in out._parts():
        form = forms[name]
        for what, a, shape, dtype in (("data", part.data, form.stored, form.dtype),
                                      ("scale_inv", part.scale_inv, form.scale_shape, form.scale_dtype)):
            at = validate.destination(a, shape, dtype, x, xp, validate.address(x), f"out.{name}.{what}")
            if what in shared and name == "columnwise" and out.rowwise is not None:
                if a is not getattr(out.rowwise, what):
                    raise ValueError(f"out.{name}.{what}: expected out.rowwise.{what} itself, since both directions are the same here")
                continue
            for other, other_at, other_nbytes in found:
                validate.separate(at, a.nbytes, other_at, other_nbytes, f"out.{name}.{what}", other)
            found.append((f"out.{name}.{what}", at, a.nbytes))
    return [(at, at + nbytes) for _, at, nbytes in found if nbytes]


def store(out: Quantized, result: Quantized) -> None:
    for mine, fresh in ((out.rowwise, result.rowwise), (out.columnwise, result.columnwise)):
        if mine is not None and fresh is not None:
            for a, b in zip(mine, fresh, strict=True):
                bits(a)[...] = bits(b)
