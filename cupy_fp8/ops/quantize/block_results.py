"""What quantisers that scale in blocks share: arrays in either memory order, plans that outlive a call, and results given as `out=` checked
against their forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, bits, is_contiguous
from ...calls import validate
from ...formats import INPUT_DTYPES
from ...kernels import Variant, executor_of
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

#: A variant, its blocks, and the members of its struct after x and noop.
Launch = tuple[Variant, int, tuple[Any, ...]]


class Side(NamedTuple):
    """What a kernel writes of the blocks along one axis of memory. Directions by name; None: nothing."""

    data: str | None
    stored: int
    scales: str | None
    strides: tuple[int, ...]            # where each scale goes, as the kernel's struct says it


class Step:
    """A launch, but for the addresses. The struct: both data, both scales and their strides, `members`, and `vector`."""

    def __init__(self, sides: tuple[Side, Side], members: tuple[Any, ...]) -> None:
        fast, slow = sides
        #: Picks the addresses of fast data, slow data, fast scales and slow scales.
        self._pick: Callable[[Addresses], tuple[int, int, int, int]] = itemgetter(
            _DATA[fast.data], _DATA[slow.data], _SCALES[fast.scales], _SCALES[slow.scales])
        self._fast, self._slow, self._members = fast.strides, slow.strides, members

    def bind(self, out: Addresses, aligned: bool) -> Launch:
        """aligned: whether x is, to the `load_bytes` of the plan."""
        raise NotImplementedError


class PanelMembers(Step):
    """Members of the struct of a kernel that keeps panels (panels.py), whatever the variant. chunk: elements of a wide access. grouped: the
    kernel asks for each group of rows what its transposed data allow."""

    def __init__(self, plan: Plan, sides: tuple[Side, Side], members: tuple[Any, ...], chunk: int = LANE_COLUMNS,
                 grouped: bool = False) -> None:
        super().__init__(sides, members)
        self._loads = int(plan.columns % chunk == 0)
        transposed = 1 if grouped else 16 * (plan.rows % 16 == 0)
        #: What addresses must be multiples of for wide stores; 0 where rows do not allow them.
        self._fast_bytes, self._slow_bytes = (transposed if side.stored == TRANSPOSED else chunk * self._loads for side in sides)

    def at(self, out: Addresses, aligned: bool) -> tuple[Any, ...]:
        """Those after x and noop. aligned: whether x is, to chunks."""
        fast, slow, fast_scales, slow_scales = self._pick(out)
        vector = self._loads if aligned else 0
        if self._fast_bytes and fast % self._fast_bytes == 0:
            vector |= 2
        if self._slow_bytes and slow % self._slow_bytes == 0:
            vector |= 4
        return fast, slow, fast_scales, *self._fast, slow_scales, *self._slow, *self._members, vector


class PanelStep(PanelMembers):
    """A launch of such a kernel."""

    def __init__(self, plan: Plan, sides: tuple[Side, Side], members: tuple[Any, ...], wide: tuple[Variant, int],
                 any_shape: tuple[Variant, int], chunk: int = LANE_COLUMNS) -> None:
        """wide: the variant for memory that allows wide accesses everywhere, and its blocks; any_shape: for other memory."""
        super().__init__(plan, sides, members, chunk)
        self._wide, self._any_shape = wide, any_shape

    def bind(self, out: Addresses, aligned: bool) -> Launch:
        members = self.at(out, aligned)
        variant, grid = self._wide if members[-1] == 7 else self._any_shape
        return variant, grid, members


class Plan:
    """What follows from an array and the options, whatever the memory: the forms of the result, and the launches that write it."""

    kind: str                           # of data, for messages

    def __init__(self, shape: tuple[int, ...], forms: dict[str, Form], shared: tuple[str, ...], load_bytes: int) -> None:
        """shape: of x as it lies in memory. shared: 'data', 'scale_inv': what both directions have in common. load_bytes: what the address
        of x must be a multiple of for wide loads."""
        self.shape, self.forms, self.shared, self.load_bytes = shape, forms, shared, load_bytes
        self.size, (self.rows, self.columns) = prod(shape), shape[-2:]

    def empty(self, x: Array) -> Quantized:
        """A result beside x, uninitialised."""
        raise NotImplementedError

    def make_steps(self) -> Iterable[Step]:
        raise NotImplementedError

    @functools.cached_property
    def _steps(self) -> list[Step]:
        """Made for the first launch: the reference needs none."""
        return list(self.make_steps()) if self.size else []

    def launches(self, out: Addresses, aligned: bool) -> list[Launch]:
        return [step.bind(out, aligned) for step in self._steps]


class Target:
    """Where launches write: a result that fits a plan. Kept with the Quantized it describes, so that using a result again as `out=` costs
    one comparison instead of its validation."""

    def __init__(self, out: Quantized, plan: Plan, ranges: Ranges) -> None:
        self._plan, self._out, self.ranges = plan, addresses(out), ranges
        self._launches: dict[bool, list[Launch]] = {}           # by whether x is aligned

    def launch(self, x: Array, at: int, noop_at: int) -> None:
        aligned = at % self._plan.load_bytes == 0
        launches = self._launches.get(aligned)
        if launches is None:
            launches = self._launches[aligned] = self._plan.launches(self._out, aligned)
        for variant, grid, members in launches:
            variant.launch(x, grid, at, noop_at, *members)


class Quantizer:
    """What a call does, whatever the family: `plan` and `reference` are the family's, `options` the names that `reference` has for its
    options. Plans are kept for arrays of the same shape and dtype."""

    def __init__(self, plan: Callable[..., Plan], reference: Callable[..., Quantized], options: tuple[str, ...]) -> None:
        self._make, self._reference, self._options, self._block = plan, reference, options, options.index("block")

        @functools.lru_cache(maxsize=1024, typed=True)
        def cached(shape: tuple[int, ...], source: np.dtype[Any], swapped: bool, *given: Any) -> Plan:
            return plan(shape, source, swapped, given[:len(options)])

        self._cached = cached

    def __call__(self, x: Array, options: tuple[Any, ...], noop: Array | None, out: Quantized | None) -> Quantized:
        x, xp, at, swapped = source(x)
        noop_at = 0 if noop is None else validate.one_f32(noop, x, xp, "noop")
        by_reference = executor_of(xp) == "reference"
        if out is None:
            plan = self._plan(x, swapped, options)
            if noop is not None:
                raise ValueError("noop: needs out=, since nothing may be written")
            if by_reference:
                return self._by_reference(x, swapped, options)
            validate.may_allocate(x)
            out = plan.empty(x)
            for variant, grid, members in plan.launches(addresses(out), at % plan.load_bytes == 0):
                variant.launch(x, grid, at, 0, *members)
            return out
        target = self._target(out, x, xp, swapped, options)
        check_separate(target.ranges, at, x.nbytes, noop_at)
        if not by_reference:
            target.launch(x, at, noop_at)
        elif noop is None or noop.reshape(()) != 1:
            store(out, self._by_reference(x, swapped, options))
        return out

    def _plan(self, x: Array, swapped: bool, options: tuple[Any, ...]) -> Plan:
        # A cache that looks at types, and at those of the block's extents: 1, 1.0 and True are equal, but not all are accepted.
        try:
            return self._cached(x.shape, x.dtype, swapped, *options, *options[self._block])
        except TypeError:                                       # also an option that is not even hashable: the plan says which
            pass
        return self._make(x.shape, x.dtype, swapped, options)

    def _by_reference(self, x: Array, swapped: bool, options: tuple[Any, ...]) -> Quantized:
        return self._reference(x.swapaxes(-1, -2) if swapped else x, **dict(zip(self._options, options, strict=True)))

    def _target(self, out: Quantized, x: Array, xp: Any, swapped: bool, options: tuple[Any, ...]) -> Target:
        """The Target of a result given as `out=`, once it has been found to fit the call."""
        key = (id(out), x.shape, x.dtype, swapped, options, 0 if xp is np else x.data.device_id)
        kept = getattr(out, "_target", None)
        if kept is not None and kept[0] == key:
            found: Target = kept[1]
            return found
        plan = self._plan(x, swapped, options)
        target = Target(out, plan, written(out, plan.forms, x, xp, plan.kind, plan.shared))
        if xp is not np:
            object.__setattr__(out, "_target", (key, target))
        return target


def addresses(out: Quantized) -> Addresses:
    row, column = out.rowwise, out.columnwise
    row_data, row_scales = (validate.address(row.data), validate.address(row.scale_inv)) if row else (0, 0)
    data, scales = (validate.address(column.data), validate.address(column.scale_inv)) if column else (0, 0)
    return 0, row_data, row_scales, data, scales


def source(x: Array) -> tuple[Array, Any, int, bool]:
    """(x as it lies in memory, its module, its address, whether its last two axes are swapped there)."""
    swapped = False
    if not (x.flags.c_contiguous if isinstance(x, np.ndarray) else getattr(x, "_c_contiguous", True)):
        swapped = x.ndim >= 2 and is_contiguous(x.swapaxes(-1, -2))
    return (*validate.source(x.swapaxes(-1, -2) if swapped else x, INPUT_DTYPES), swapped)


def logical(shape: tuple[int, ...], swapped: bool) -> tuple[int, ...]:
    """The shape of an array that lies in memory with this one."""
    return swap_last(shape) if swapped else shape


def stored(form: Form | None, swapped: bool) -> int:
    return ABSENT if form is None else AS_IS if form.transposed == swapped else TRANSPOSED


def written(out: Quantized, forms: Mapping[str, Form], x: Array, xp: Any, kind: str, shared: tuple[str, ...] = ()) -> Ranges:
    """The memory of a result given as `out=`, once every part of it has been found to have its form. `kind` of data, for messages.
    shared: 'data', 'scale_inv': what both directions must have in common; nothing else may overlap."""
    if not isinstance(out, Quantized):
        raise TypeError(f"out: expected a Quantized (an earlier result, or recipe.empty(…)), got {type(out).__name__}")
    found: list[tuple[str, int, int]] = []
    for name, part in (("rowwise", out.rowwise), ("columnwise", out.columnwise)):
        form = forms.get(name)
        if (part is None) != (form is None):
            raise ValueError(f"out: {'no' if part is None else 'has a'} {name} part, but {name}={form is not None} was asked for")
        if part is None or form is None:
            continue
        if (part.shape, part.transposed, part.block, part.scale_layout) != form[1:5]:
            raise ValueError(f"out.{name}: expected {kind} data of shape {form.shape}, {'' if form.transposed else 'not '}stored "
                             f"transposed, block {form.block}, scales {form.scale_layout}; got {part!r}, scales {part.scale_layout}")
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


def check_separate(ranges: Ranges, at: int, nbytes: int, noop_at: int) -> None:
    """ValueError if what is written overlaps the input or noop."""
    for start, end in ranges:
        if at < end and start < at + nbytes:
            raise ValueError("out: overlaps the input in memory; results need memory of their own")
        if start - 3 <= noop_at < end:                 # of four bytes the last may be the first that is written
            raise ValueError("out: overlaps noop in memory; results need memory of their own")


def store(out: Quantized, result: Quantized) -> None:
    for mine, fresh in ((out.rowwise, result.rowwise), (out.columnwise, result.columnwise)):
        if mine is not None and fresh is not None:
            for a, b in zip(mine, fresh, strict=True):
                bits(a)[...] = bits(b)
