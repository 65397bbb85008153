"""NumPy mixed with CuPy arrays, arrays of another device, and devices that are not current, for each
argument."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from declared import Example, every_example
from perturbed import compare, on_host, refused
from places import Place
from trees import leaves, map_arrays

import cupy_fp8 as fp8
from cupy_fp8.gate import Gate
from cupy_fp8.routing import Routing


def moved_one_by_one(example: Example, move: Callable[[Any], Any]) -> Iterator[tuple[str, Example]]:
    """Yield the call with one array elsewhere, named as in messages. All arrays of a Routing or a Gate move
    together."""
    together = {id(a): part for part in (*example.args, *example.kwargs.values())
                if isinstance(part, (Routing, Gate)) for a in leaves(part)}
    before: set[int] = set()
    for name, a in example.named().items():
        part = together.get(id(a))
        gone = {id(b) for b in leaves(part)} if part else {id(a)}
        if id(a) in before:
            continue
        before |= gone
        tree = map_arrays(
            example.tree, lambda b, gone=gone: move(b) if id(b) in gone else b)  # type: ignore[misc]
        yield name.partition(".")[0] if part else name, example.with_tree(tree)


def refused_one_by_one(example: Example, move: Callable[[Any], Any], message: str, reverse: str) -> None:
    """The first array determines where the others must be: if only it is moved, the next one is in the wrong
    place."""
    for i, (name, wrong) in enumerate(moved_one_by_one(example, move)):
        which, wanted = (rf"{re.escape(name)}(\.\w+)?", message) if i else (r"[\w.\[\]]+", reverse)
        refused(wrong, rf"^\w+: {which}: {wanted}")


@every_example
def test_mixed_kinds(example, device):
    there, here = example.on(device.run), example.fresh()
    messages = [f"a {kind} array among {other} arrays; "
                rf'cupy_fp8\.asarray\([\w.\[\]]+, like="{other}"\) moves it$'
                for kind, other in (("numpy", "cupy"), ("cupy", "numpy"))]
    refused_one_by_one(there, fp8.asnumpy, *messages)
    refused_one_by_one(here, device.run.array, *reversed(messages))


def on_second(device: Place) -> int:
    if len(device.devices) < 2:
        pytest.skip("needs two GPUs")
    return device.devices[1]


@every_example
def test_other_device(example, device):
    first, second = device.devices[0], on_second(device)
    refused_one_by_one(example.on(device.run), lambda a: device.array(fp8.asnumpy(a), second),
                       f"on GPU {second}, the input is on GPU {first}; `with cupy.cuda.Device",
                       f"on GPU {first}, the input is on GPU {second}; `with cupy.cuda.Device")


@every_example
def test_a_device_that_is_not_current(example, device):
    """A call runs where its arrays are, whatever device is current, and allocates there too."""
    second = on_second(device)
    example = example.with_tree(map_arrays(example.fresh().tree, lambda a: device.array(a, second)))
    options = {name: value for name, value in example.kwargs.items() if name != "noop"}
    for current in device.devices[:2]:
        with device.cupy.cuda.Device(current):
            args, kwargs = on_host(example)
            example.poison()
            example.call()
            assert device.cupy.cuda.runtime.getDevice() == current
        device.cupy.cuda.Device(second).synchronize()
        compare(example, args, kwargs)
        if not example.updates:
            with device.cupy.cuda.Device(current):
                made = example.op.function(*example.args, **options)
            assert {a.data.device_id for a in leaves(made)} == {second}
