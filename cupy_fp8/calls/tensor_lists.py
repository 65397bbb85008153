"""What ops on lists of arrays share: tables that tell a launch of every array, kept with the results that are written again and again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .. import backend
from ..arrays import Array, empty_beside
from ..kernels import Variant, capturing
from ..results import Quantized
from . import validate
from .memory import Range, check_separate

KEPT = 4                                        # plans of a result that no graph has captured


# ---- arguments ----
def as_list(a: Any, name: str, number: int | None = None) -> Sequence[Any]:
    if not isinstance(a, (list, tuple)):
        raise TypeError(f"{name}: expected a list, got {type(a).__name__}")
    if number is not None and len(a) != number:
        raise ValueError(f"{name}: expected {number}, one for each array of xs, got {len(a)}")
    return a


def of_output(error: Exception, i: int) -> Exception:
    """What an op says of `out`, said of one of `outputs`."""
    message = str(error)
    return type(error)(f"outputs[{i}]{message[3:]}" if message.startswith("out") else f"outputs[{i}]: {message}")


def same(outputs: Any) -> list[Quantized]:
    found: list[Quantized] = outputs
    return found


# ---- calls that come again ----
class Key(NamedTuple):
    """What a call must have in common with an earlier one to launch the same: the identities of its arrays (all of them alive, see
    `Plan.alive`), their shapes, which can be assigned to, and where the scales and amaxes are. NumPy arrays can also move their memory."""

    options: Any                                    # what differs most often comes first
    scales: Any
    amaxes: Any
    xs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]

    @staticmethod
    def of(xs: Any, scales: Any, amaxes: Any, outputs: Any, options: Any) -> Key | None:
        """None for what is no call at all."""
        if type(xs) not in (list, tuple) or type(outputs) not in (list, tuple) or not xs or not outputs:
            return None
        if type(outputs[0]) is not Quantized:
            return None
        try:
            shapes = tuple(map(_SHAPE, xs))
            scales_key, amaxes_key = _identity(scales), _identity(amaxes)
        except AttributeError:
            return None
        memory: tuple[int, ...] = ()
        if isinstance(xs[0], np.ndarray):
            held = [*xs, *_members(scales), *_members(amaxes)]
            memory = tuple(a.ctypes.data for a in held if isinstance(a, np.ndarray))
        return Key(options, scales_key, amaxes_key, tuple(map(id, xs)), tuple(map(id, outputs)), shapes, memory)


_SHAPE = attrgetter("shape")


def _members(a: Any) -> Sequence[Any]:
    return a if isinstance(a, (list, tuple)) else ()


def _identity(a: Any) -> Any:
    """Of scales or amaxes. One array is known by its memory: views of a state's arrays come and go."""
    if a is None or isinstance(a, (list, tuple)):
        return a and tuple(map(id, a))
    return validate.address(a), a.shape, a.strides, a.dtype, type(a)


class Launch(NamedTuple):
    variant: Variant
    grid: int
    before: tuple[Any, ...]                         # the members of its struct before noop, and after it
    after: tuple[Any, ...]


class Table:
    """What the launches read of each array, but for where the table itself will be: a record, and for each block of threads the number of
    its record. Equal tables make equal launches."""

    def __init__(self, packed: bytes, blocks: Sequence[int], options: Any, extra: int = 0) -> None:
        """packed: the records; blocks: of threads, of each; options: what else launches depend on; extra: bytes of a workspace, zeros."""
        self.packed, self.blocks, self.options = packed, blocks, options
        #: Where in the table the numbers of blocks begin, and the workspace.
        self.numbers = len(packed)
        self.workspace = -(-(self.numbers + 4 * sum(blocks)) // 16) * 16
        self.nbytes = self.workspace + extra

    def write(self, host: np.ndarray, at: int) -> None:
        """The table, which will be at that address, into memory of zeros."""
        host[:self.numbers] = np.frombuffer(self.packed, np.uint8)
        count = sum(self.blocks)
        numbers = np.arange(len(self.blocks), dtype=np.uint32)
        host[self.numbers:self.numbers + 4 * count].view(np.uint32)[:] = np.repeat(numbers, self.blocks)

    def launches(self, at: int) -> list[Launch]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and (self.packed, self.options, self.blocks) == (other.packed, other.options, other.blocks)

    __hash__ = None                                 # type: ignore[assignment]


class Plan:
    """A list's table in its memory, and the launches that read it.

    Kept with the first of the results that it writes, so that a call with the same arrays neither validates nor copies anything; where a
    CUDA graph has captured it for as long as that result lives.
    """

    captured = False

    def __init__(self, table: Table, x: Array, written: list[Range]) -> None:
        self.table, self.key, self._written = table, None, written
        self._alive = [True]
        host = np.zeros(table.nbytes, np.uint8)
        memory: Array = host if isinstance(x, np.ndarray) else empty_beside(x, host.shape, host.dtype)
        self._memory = host, memory                 # host: the copy may still be reading it
        at = validate.address(memory)
        table.write(host, at)
        if memory is not host:
            with backend.cupy().cuda.Device(x.data.device_id):
                memory.data.copy_from_host_async(host.ctypes.data, host.nbytes)
        self._launches = table.launches(at)
        self._checked = {0}                         # addresses of noop that overlap nothing

    key: Key | None

    @property
    def alive(self) -> bool:
        """Whether all arrays still exist: else their identities may be others' by now."""
        return self._alive[0]

    def watch(self, key: Key | None, xs: Any, scales: Any, amaxes: Any, results: Sequence[Quantized]) -> None:
        """From now on calls with this key are this plan's, for as long as these arrays live."""
        self.key, self._alive = key, [True]
        died = functools.partial(_died, self._alive)
        held = [*xs, *results, *_members(scales), *_members(amaxes)]
        # Scalars cannot be watched, but kept.
        self._held = [weakref.ref(a, died) if isinstance(a, Quantized) or (hasattr(a, "strides") and not np.isscalar(a)) else a
                      for a in held]

    def launch_again(self, x: Array, noop: Array | None) -> None:
        on_device = not isinstance(x, np.ndarray)
        noop_at = 0
        if noop is not None:
            noop_at = validate.one_f32(noop, x, backend.cupy() if on_device else np, "noop")
            if noop_at not in self._checked:
                check_separate([Range(noop_at, noop_at + 4, False, "noop"), *self._written])
        if on_device and not self.captured:
            self.captured = capturing(x.data.device_id)
        self.launch(x, noop_at)

    def launch(self, x: Array, noop_at: int) -> None:
        self._checked.add(noop_at)
        for variant, grid, before, after in self._launches:
            variant.launch(x, grid, *before, noop_at, *after)


def _died(alive: list[bool], _: Any) -> None:
    alive[0] = False


def known(key: Key | None, outputs: Any) -> Plan | None:
    """The plan of an earlier call with this key, which wrote these results."""
    if key is not None:
        for plan in outputs[0].__dict__.get("_lists", ()):
            if plan.key == key and plan.alive:
                found: Plan = plan
                return found
    return None


def launch(table: Table, x: Array, noop_at: int, runs: Iterable[Range], results: list[Quantized], key: Key | None, xs: Any,
           scales: Any = None, amaxes: Any = None) -> None:
    """Launch a call that is not known by its key, but perhaps by its table. key: None where other arrays than the caller's are read."""
    in_capture = not isinstance(x, np.ndarray) and capturing(x.data.device_id)
    plans = results[0].__dict__.setdefault("_lists", [])
    plan = next((plan for plan in plans if plan.table == table), None)
    if plan is None:
        if in_capture:
            raise ValueError("outputs: used with these arrays for the first time while a CUDA graph is captured; call once before the "
                             "capture")
        plan = Plan(table, x, [run for run in runs if run.written])
        _forget(plans)
        plans.append(plan)
    plan.watch(key, xs, scales, amaxes, results)
    plan.launch(x, noop_at)
    plan.captured = plan.captured or in_capture


def _forget(plans: list[Plan]) -> None:
    """Makes room for another plan: graphs that are replayed still read the tables of some."""
    free = [plan for plan in plans if not plan.captured]
    for i, plan in enumerate(free):
        if not plan.alive or i <= len(free) - KEPT:
            plans.remove(plan)
