"""Tensor lists quantised in blocks, all arrays of a dtype in one launch.

Kernels: those of row groups (ops/quantize/grouped_blocks.py), which take a list as well."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import backend
from ...arrays import Array
from ...calls import tensor_lists, validate
from ...calls.memory import Range, check_separate
from ...calls.tensor_lists import Key, Launch, Table, as_list, of_output, same
from ...formats import INPUT_DTYPES
from ...kernels import executor_of
from ...kernels.warp_tiles import LANE_COLUMNS
from ...layouts import cdiv
from ...recipes import BlockScaling, MXScaling, check_directions
from ...results import Quantized
from . import block_results, blocks, grouped_blocks, mx
from .block_results import TRANSPOSED

_MOST_BLOCKS = 0x7FFFFFFF


class Options(NamedTuple):
    recipe: BlockScaling | MXScaling
    rowwise: bool
    columnwise: bool


class _Form:
    """What arrays of one shape and dtype have in common, whatever the memory."""

    def __init__(self, shape: tuple[int, ...], source: np.dtype[Any], swapped: bool, options: Options) -> None:
        recipe = options.recipe
        if isinstance(recipe, BlockScaling):
            self.plan: grouped_blocks.Plan = blocks.Plan(shape, source, swapped, (
                recipe.dtype, *options[1:], True, recipe.block, recipe.pow2_scale, recipe.eps, recipe.profile, recipe.scale_layout))
        else:
            self.plan = mx.Plan(shape, source, swapped, (
                recipe.dtype, *options[1:], False, recipe.mode, recipe.profile, recipe.block, recipe.scale_layout))
        #: Quantised by a launch of its own.
        self.alone = swapped or None in recipe.block
        self.alignment = LANE_COLUMNS * source.itemsize

    @functools.cached_property
    def _sides(self) -> tuple[tuple[block_results.Side, block_results.Side], block_results.Members]:
        return grouped_blocks.sides_of(self.plan)

    @functools.cached_property
    def members(self) -> block_results.PanelMembers:
        return block_results.PanelMembers(self.plan, *self._sides)

    @functools.cached_property
    def stored(self) -> tuple[int, int]:
        fast, slow = self._sides[0]
        return fast.stored, slow.stored

    def allows_wide(self, vector: int) -> bool:
        """Whether an array with this `vector` suits the program for wide accesses, which asks about transposed rows alone."""
        return all(vector & bit for bit, stored in zip((1, 2, 4), (None, *self.stored), strict=True) if stored != TRANSPOSED)


_form = functools.lru_cache(maxsize=1024)(_Form)


class _Source(NamedTuple):
    """An array as it lies in memory."""

    x: Array
    at: int
    form: _Form


def quantize(xs: Any, options: Options, noop: Array | None, outputs: Any) -> list[Quantized]:
    key = Key.of(xs, None, None, outputs, options) if outputs is not None else None
    plan = tensor_lists.known(key, outputs)
    if plan is not None:
        plan.launch_again(xs[0], noop)
        return same(outputs)
    call = check_call(xs, options, noop, outputs)
    if call is None:
        return [] if outputs is None else same(outputs)
    sources, runs, copied = call
    x, xp = sources[0].x, backend.module_of(xs[0])
    if executor_of(xp) == "reference":
        results = [_alone(given, options, noop, None if outputs is None else outputs[i]) for i, given in enumerate(xs)]
        return results if outputs is None else same(outputs)
    if outputs is None:
        validate.may_allocate(x)
    results = [source.form.plan.empty(source.x) for source in sources] if outputs is None else same(outputs)
    listed = [(source, out) for source, out in zip(sources, results, strict=True) if source.x.size and not source.form.alone]
    if listed:
        # A list with arrays that are quantised alone is looked at anew in every call.
        key = None if copied or any(source.form.alone for source in sources) else Key.of(xs, None, None, results, options)
        noop_at = 0 if noop is None else validate.address(noop)
        tensor_lists.launch(_Table(listed, options), x, noop_at, runs, results, key, xs)
    for given, source, out in zip(xs, sources, results, strict=True):
        if source.form.alone:
            _alone(given, options, noop, out)
    return results


def check_call(xs: Any, options: Options, noop: Array | None, outputs: Any) -> tuple[list[_Source], list[Range], bool] | None:
    """What `_validated` finds, None for a list without arrays."""
    xs = as_list(xs, "xs")
    if noop is not None and outputs is None:
        raise ValueError("noop: needs outputs=, since nothing may be written")
    check_directions((0, 0), options.rowwise, options.columnwise)
    if outputs is not None:
        as_list(outputs, "outputs", len(xs))
    return _validated(xs, options, noop, outputs) if xs else None


def _alone(x: Array, options: Options, noop: Array | None, out: Quantized | None) -> Quantized:
    return options.recipe.quantize(x, rowwise=options.rowwise, columnwise=options.columnwise, noop=noop, out=out)


def _validated(xs: Sequence[Any], options: Options, noop: Array | None, outputs: Any) -> tuple[list[_Source], list[Range], bool]:
    """The arrays, the memory of the call, and whether some arrays are copies of what was given; once nothing about any is wrong."""
    xp, copied = None, False
    sources: list[_Source] = []
    runs: list[Range] = []
    for i, given in enumerate(xs):
        if xp is not None and not isinstance(given, xp.ndarray):
            backend.require_module(given, xp, f"xs[{i}]")
        xp = backend.module_of(given, f"xs[{i}]")
        if given.dtype not in INPUT_DTYPES or given.ndim not in (2, 3):
            validate.source(given, INPUT_DTYPES, f"xs[{i}]")
            raise ValueError(f"xs[{i}]: expected an array of two or three dimensions, got shape {given.shape}")
        if xp is not np:
            validate.same_device(given, xs[0], f"xs[{i}]")
        try:
            x, _, at, swapped = block_results.source(given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"xs[{i}]: {error}") from None
        copied = copied or not (x is given or swapped)
        source = _Source(x, at, _form(x.shape, x.dtype, swapped, options))
        sources.append(source)
        runs.append(Range(at, at + x.nbytes, False, f"xs[{i}]"))
        if outputs is not None:
            plan = source.form.plan
            try:
                ranges = block_results.written(outputs[i], plan.forms, x, xp, plan.kind, plan.shared)
            except (TypeError, ValueError) as error:
                raise of_output(error, i) from None
            runs += [Range(start, end, True, f"outputs[{i}]") for start, end in ranges]
    if noop is not None:
        at = validate.one_f32(noop, xs[0], xp, "noop")
        runs.append(Range(at, at + 4, False, "noop"))
    check_separate(run for run in runs if run.start < run.end)
    return sources, runs, copied


class _Table(Table):
    """A record for each array, those of one dtype together."""

    def __init__(self, listed: list[tuple[_Source, Quantized]], options: Options) -> None:
        records: list[bytes] = []
        counts: list[int] = []
        self._parts: list[tuple[Any, int]] = []                 # variants, and how many blocks each has
        for dtype in dict.fromkeys(source.x.dtype for source, _ in listed):
            chosen = [(source, source.form.members.at(block_results.addresses(out), source.at % source.form.alignment == 0))
                      for source, out in listed if source.x.dtype == dtype]
            form = chosen[0][0].form
            wide = all(source.form.allows_wide(members["vector"]) for source, members in chosen)
            variant, panels = grouped_blocks.variant(form.plan, form.stored, wide)
            params = "BlockParams" if isinstance(form.plan, blocks.Plan) else "MxParams"
            record, first = variant.kernel.record(f"ListedArray<{params}>"), 0
            for source, members in chosen:
                plan = source.form.plan
                across, down = cdiv(plan.columns, panels.columns), cdiv(plan.rows, panels.rows)
                records.append(record.pack(array={"x": source.at, **members}, first=first, across=across, down=down))
                counts.append(plan.size // (plan.rows * plan.columns) * across * down)
                first += counts[-1]
                if first > _MOST_BLOCKS:
                    raise ValueError(f"xs: more than the {_MOST_BLOCKS} blocks that a launch can have; split the list")
            self._parts.append((variant, first))
        super().__init__(b"".join(records), counts, (options, tuple(self._parts)))

    def launches(self, at: int) -> list[Launch]:
        found, numbers = [], at + self.numbers
        for variant, grid in self._parts:
            nothing = variant.kernel.params.unpack(bytes(variant.kernel.params.size))          # of groups of rows, and of one array
            found.append(Launch(variant, grid, nothing[:1], (*nothing[2:-2], at, numbers)))
            numbers += 4 * grid
        return found
