"""Memory of a call: outputs overlap nothing, nothing beside them is written, adjacent arrays do not count as
overlapping, and arrays may begin anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from arena import ROOM, Arena, apart
from declared import Example, every_example
from perturbed import bytes_of, compare, given, on_host, outcome, refused, with_array
from trees import leaves, map_arrays

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, cases
from cupy_fp8.arrays import Result
from cupy_fp8.formats import float8_e4m3fn, float8_e8m0fnu

OVERLAPS = r"^ValueError: [\w.\[\]]+: overlaps [\w.\[\]]+ in memory; results need memory of their own$"


def pairs(example: Example) -> Iterator[tuple[str, str]]:
    """Yield the names of every two arrays of which one is written."""
    arrays = {name: a for name, a in example.named().items() if a.nbytes}
    for name, other in product(arrays, arrays):
        if name in example.written and name != other and (other not in example.written or name < other):
            yield name, other


def starts(a: Any, other_start: int, other_end: int) -> set[int]:
    """Return starts at which `a` shares the first byte of another array, its last one, or one in between."""
    size = a.itemsize
    first = other_start // size * size + size - a.nbytes
    return {first, (other_end - 1) // size * size, (first + other_end) // 2 // size * size}


@every_example
def test_what_is_written_overlaps_nothing(example, place):
    example = example.on(place.run)
    arrays = example.named()
    for name, other in pairs(example):
        a, b = arrays[name], arrays[other]
        arena = Arena(place, 2 * a.nbytes + b.nbytes)
        at = arena.end + -(-a.nbytes // ROOM) * ROOM
        for start in starts(a, at, at + b.nbytes):
            wrong = with_array(example, a, arena.take(a, start))
            refused(with_array(wrong, b, arena.take(b, at)), OVERLAPS)
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            refused(with_array(example, a, b), OVERLAPS)                # the very same array


@pytest.mark.parametrize("turned", [lambda a: a[:, ::2], lambda a: a[::-1, ::-2]])
def test_an_input_that_is_copied_keeps_its_memory(turned):
    """A result in it would destroy the caller's data."""
    memory = np.arange(4096, dtype=np.float32).reshape(64, 64)
    x, inside = turned(memory), memory.reshape(-1)[1024:3072].reshape(64, 32)
    with pytest.raises(ValueError, match=r"^out: overlaps a in memory"):
        fp8.astype(x, "float32", out=inside)
    assert (memory.reshape(-1) == np.arange(4096)).all()


@pytest.mark.parametrize("scales_first", [False, True])
def test_the_first_argument_that_overlaps_is_named_wherever_it_lies(scales_first):
    memory, data_at = np.zeros(512 + 16, np.uint8), 16 * scales_first
    data = memory[data_at:data_at + 512].view(float8_e4m3fn).reshape(4, 128)
    scales = memory[512 * (not scales_first):][:16].view(float8_e8m0fnu).reshape(4, 4)
    q = Scaled(data, scales, (4, 128), False, (1, 32), "compact")
    with pytest.raises(ValueError, match=r"^out\.data: overlaps q\.data in memory"):
        fp8.rebase_scales(q, block=(1, 32), out=q)


@every_example
def test_arrays_that_touch(example, place):
    """All arrays of a call, one after the other without a gap: accepted, and nothing beside the result is
    written. Sorted by the powers of two that divide their bytes, since some must begin at a multiple of
    16."""
    example = example.on(place.run)
    arena = Arena(place, sum(a.nbytes + a.itemsize for a in leaves(example.tree)))
    arena.end = ROOM
    arrays = {id(a): a for a in leaves(example.tree)}
    order = sorted(arrays, key=lambda i: -(arrays[i].nbytes & -arrays[i].nbytes))
    moved = {i: arena.append(arrays[i]) for i in order}
    example = example.with_tree(map_arrays(example.tree, lambda a: moved[id(a)])).declare()
    args, kwargs = on_host(example)
    example.poison()
    before = {name: bytes_of(a).tobytes() for name, a in example.named().items()}
    example.call()
    compare(example, args, kwargs)
    changed = {name for name, a in example.named().items() if bytes_of(a).tobytes() != before[name]}
    assert changed <= example.written
    assert arena.is_intact()


@every_example
@pytest.mark.parametrize("lead", [1, 2, 4, 8])
def test_any_address(example, lead, place):
    """Arrays that begin this many bytes past a multiple of 32, with guards around them: the reference's
    bytes, or a message that names the required multiple."""
    check_addresses(*apart(example.on(place.run), place, lead))


@every_example
@pytest.mark.parametrize("leads", [(4, 0), (0, 4)], ids=["arguments", "result"])
def test_any_address_beside_others(example, leads, device):
    """An aligned address for wide accesses beside an unaligned one: which of them kernels check."""
    check_addresses(*apart(example.on(device.run), device, *leads))


def check_addresses(example: Example, arena: Arena) -> None:
    args, kwargs = on_host(example)
    if (message := outcome(example)) is None:
        compare(example, args, kwargs)
    else:
        assert re.search(r"address 0x\w+ is not a multiple of \d+", message), message
    assert arena.is_intact()


@every_example
def test_arrays_that_are_read_may_be_the_same(example, place):
    """Two arguments of the same shape and dtype in the same memory."""
    example = example.on(place.run)
    arrays = {name: a for name, a in given(example).items() if name not in example.written}
    for (name, a), (other, b) in product(arrays.items(), repeat=2):
        if name < other and a.shape == b.shape and a.dtype == b.dtype:
            shared = with_array(example, b, a[...])
            args, kwargs = on_host(shared)
            if (message := outcome(shared)) is None:
                compare(shared, args, kwargs)
            else:                                       # sizes that are not those of an order, for example
                assert "overlaps" not in message


@every_example
def test_what_is_not_declared_is_not_looked_at(example):
    """Undeclared memory is not checked, so every written array must be declared."""
    args_and_kwargs, original = on_host(example), example
    for i, _ in enumerate(leaves((example.args, example.kwargs))):
        example = original.fresh()                      # the call may update some of its arrays
        a = list(leaves((example.args, example.kwargs)))[i]
        in_results = {id(a) for part in (*example.args, *example.kwargs.values()) if isinstance(part, Result)
                      for a in leaves(part)}
        if id(a) not in {id(a) for a in example.named().values()}:
            other = with_array(example, a, poisoned(a) if id(a) in in_results else object())
            other.call()
            compare(other, *args_and_kwargs)
    written = {id(a) for name, a in example.named().items() if name in example.written}
    assert {id(a) for a in example.result} <= written


def poisoned(a: np.ndarray) -> np.ndarray:
    found = np.empty_like(a)
    cases.poison(found)
    return found
