"""Wrong facts that only the device knows, sizes of groups above all: calls write what the reference makes of
them, and nothing else; the device's error word says what was found, and `check=True` refuses the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from arena import apart
from declared import ALIGNED, EXAMPLES, Example, example_of, in_contract
from perturbed import compare, given, on_host, outcome, parameters
from places import Place
from tiers import quick_if

import cupy_fp8 as fp8
from cupy_fp8.arrays import bits
from cupy_fp8.cases import OPS, Case
from cupy_fp8.formats import float32
from cupy_fp8.kernels.errors import MESSAGES, Fact

NEGATIVE = MESSAGES[Fact.SPLIT_NEGATIVE]


def changed(place: int, value: float) -> Callable[[np.ndarray], None]:
    """Return a function that sets one element, counted modulo the size."""
    def change(a: np.ndarray) -> None:
        a.reshape(-1)[place] = value

    return change


def added(more: int) -> Callable[[np.ndarray], None]:
    """Return a function that adds this many rows to the last of the largest groups."""
    def change(sizes: np.ndarray) -> None:
        sizes[len(sizes) - 1 - np.argmax(sizes[::-1])] += more

    return change


def by_turns(sizes: np.ndarray) -> None:
    sizes[::2], sizes[1::2] = np.iinfo(sizes.dtype).max, np.iinfo(sizes.dtype).min


#: Changes of sizes. No call has so many rows.
WRONG: dict[str, Callable[[np.ndarray], None]] = {
    "negative first": changed(0, -1), "negative last": changed(-1, -5), "long first": changed(0, 1 << 20),
    "long last": changed(-1, 1 << 20), "smallest": changed(0, -(2**31)),
    "one more last": added(1), "one less last": added(-1),
    "huge": lambda sizes: sizes.fill(np.iinfo(sizes.dtype).max), "huge by turns": by_turns,
    "nothing": lambda sizes: sizes.fill(0)}


def has_sizes(example: Example) -> bool:
    """Whether a call has sizes; given offsets must match the original ones."""
    return "splits" in given(example) and "offsets" not in given(example)


def with_most_groups(name: str) -> Example:
    """Return a call of an op with so many groups that kernels read their sizes in several rounds."""
    op = in_contract(OPS[name])

    def number(case: Case) -> int:
        return case.options.get("groups") or case.options.get("experts") or (
            case.shape[0] if name == "splits_to_offsets" else 0)

    return example_of(op, max(op.cases(), key=number), quick=False)


def called(example: Example, device: Place, name: str,
           change: Callable[[np.ndarray], None]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (an argument with a change, the device's errors after the call with it)."""
    example = example.on(device.run)
    argument = given(example)[name]
    wrong = fp8.asnumpy(argument).copy()
    change(wrong)
    bits(argument)[...] = bits(device.array(wrong))
    example, arena = apart(example, device)
    args, kwargs = on_host(example)
    message = outcome(example)
    assert message is None, message
    compare(example, args, kwargs)
    assert arena.is_intact()
    found = fp8.device_errors(clear=True)
    if "check" in parameters(example):
        message = outcome(example.with_tree((example.args, {**example.kwargs, "check": True}, example.out)))
        assert (message is not None) == bool(found), (message, found)
        assert message is None or ("sizes of 0 or more" in message) == (NEGATIVE in found), message
        assert fp8.device_errors() == ()
    return wrong, found


def check_sizes(example: Example, device: Place, how: str) -> None:
    sizes, found = called(example, device, "splits", WRONG[how])
    assert (NEGATIVE in found) == bool((sizes < 0).any()), found
    if "check" not in parameters(example):              # the sizes may leave rows over
        assert bool(found) == (how != "nothing" and not how.startswith("one ")), found


WITH_SIZES = [example for example in (*EXAMPLES, *ALIGNED) if has_sizes(example)]
#: a product of groups of columns, in the quick tier in addition to its usual calls
OF_COLUMNS = next(example for example in WITH_SIZES if example.kwargs.get("group") == "k")


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("example", quick_if(lambda it: it.quick or it is OF_COLUMNS, WITH_SIZES), ids=str)
def test_wrong_sizes(example, how, device):
    check_sizes(example, device, how)


@pytest.mark.parametrize("how", quick_if(lambda how: how.endswith("last"), WRONG))
@pytest.mark.parametrize("op", {example.op.name: None for example in WITH_SIZES})
def test_wrong_sizes_of_many_groups(op, how, device):
    check_sizes(with_most_groups(op), device, how)


def twice(order: np.ndarray) -> None:
    order[0] = order[-1]


#: other facts, by the names of arguments
OTHERS: dict[str, dict[str, Callable[[np.ndarray], None]]] = {
    "order": {"twice": twice, "negative": changed(0, -1), "of no group": changed(-1, 1 << 20)},
    "assignment": {"of no expert": changed(0, 1 << 20), "negative": changed(-1, -2),
                   "all": lambda assignment: assignment.fill(1)},
    "scale_inv": {"no power of two": changed(0, 3), "negative": changed(-1, -1), "zero": changed(0, 0),
                  "infinite": changed(0, np.inf)}}


def calls_with_other_facts() -> Iterator[Any]:
    for example in EXAMPLES:
        arguments = given(example) if "check" in parameters(example) else {}
        for name, a in arguments.items():
            kind = name.rpartition(".")[2]
            if kind == "scale_inv" and a.dtype != float32:          # every byte of E8M0 is a scale
                continue
            for how, change in OTHERS.get(kind, {}).items():
                marks = () if example.quick else pytest.mark.full
                yield pytest.param(example, name, change, id=f"{example}-{name}-{how}", marks=marks)


@pytest.mark.parametrize(("example", "name", "change"), calls_with_other_facts())
def test_other_facts(example, name, change, device):
    called(example, device, name, change)
