"""Every op captured into a CUDA graph once, and replayed after its inputs have changed; and what cannot be
captured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from declared import Example, every_example, every_example_that, every_noop, every_result
from perturbed import (
    anew,
    change_contents,
    compare,
    error_of,
    given,
    layouts,
    named,
    on_host,
    parameters,
    refused,
    with_array,
)
from places import Place
from trees import leaves, snapshot

import cupy_fp8 as fp8
from cupy_fp8.kernels import errors


def attempted(device: Place, example: Example) -> tuple[Any, str | None]:
    """Return the graph of a call, and the message of its error; restores memory."""
    before = snapshot(example.tree)
    graph, message = captured(device, lambda: error_of(example))
    assert message is None or snapshot(example.tree) == before, "memory was written before the error"
    return graph, message


def captured(device: Place, call: Callable[[], Any]) -> Any:
    """Return the graph of a call on the current stream, and the result of the call."""
    stream = device.cupy.cuda.get_current_stream()
    stream.begin_capture()
    try:
        found = call()
    finally:
        graph = stream.end_capture()
    return graph, found


@pytest.fixture
def stream(device):
    """A stream that is current and can be captured."""
    device.cupy.cuda.get_current_stream().synchronize()
    with device.cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@every_example
def test_replay(example, device, stream):
    """Twice each time: the second replay finds what the first one left behind."""
    example = example.on(device.run)
    example.call()
    graph, _ = captured(device, example.call)
    for _ in range(2):
        change_contents(example, device)
        for _ in range(2):
            args, kwargs = on_host(example)
            example.poison()
            graph.launch(stream)
            stream.synchronize()
            compare(example, args, kwargs)


@every_noop
def test_replay_looks_at_noop(example, device, stream):
    example = example.on(device.run)
    example.call()
    graph, _ = captured(device, example.call)
    for value in (1.0, 0.0, 1.0):
        example.kwargs["noop"].fill(value)
        example.poison()
        before, (args, kwargs) = [a.get().tobytes() for a in written(example)], on_host(example)
        graph.launch(stream)
        stream.synchronize()
        if value == 1:
            assert [a.get().tobytes() for a in written(example)] == before
        else:
            compare(example, args, kwargs)


def written(example: Example) -> list[Any]:
    """Return the bytes that the call writes."""
    return [a.view(np.uint8) if a.ndim else a.reshape(1).view(np.uint8)
            for name, a in example.named().items() if name in example.written]


@every_result
def test_without_out(example, device, stream):
    """Nothing may be allocated during a capture; afterwards the call still works."""
    example = example.on(device.run)
    for _ in range(2):                                  # the second time the call is known
        with pytest.raises(ValueError, match=r"^out: needed while a CUDA graph is captured, since"):
            captured(device, lambda: anew(example))
        args, kwargs = on_host(example)
        compare(example.with_tree((example.args, example.kwargs, anew(example))), args, kwargs)


@every_example
def test_the_first_call(example, device, stream, monkeypatch):
    """Captured, or refused because memory that must outlive the call would have to be allocated."""
    monkeypatch.setattr(errors, "_words", {})
    example = example.on(device.run)
    graph, message = attempted(device, example)
    if message is None:
        args, kwargs = on_host(example)
        example.poison()
        graph.launch(stream)
        stream.synchronize()
        compare(example, args, kwargs)
    else:
        assert message.startswith("ValueError: ")
        assert message.endswith("call once before the capture"), message
    args, kwargs = on_host(example)
    example.call()
    compare(example, args, kwargs)


@every_example_that(lambda example: "check" in parameters(example))
def test_check_waits_for_the_device(example, device, stream):
    """Waiting is impossible during a capture; before and afterwards the call is right. Options without
    anything to check do not wait."""
    example = example.on(device.run)
    example = example.with_tree((example.args, {**example.kwargs, "check": True}, example.out))
    for _ in range(2):
        args, kwargs = on_host(example)
        example.call()
        compare(example, args, {name: value for name, value in kwargs.items() if name != "check"})
        _, message = attempted(device, example)
        assert message is None or message.startswith("ValueError: check: waits for the device"), message
        assert message is not None or "splits" not in example.named()


@every_example_that(lambda example: "splits" in given(example))
def test_sizes_in_a_list(example, device, stream):
    """They are copied to the device, which is impossible during a capture. A result that holds the sizes
    belongs to an array."""
    example = example.on(device.run)
    example.call()
    sizes = example.named()["splits"]
    listed = with_array(example, sizes, sizes.get().tolist())
    args, kwargs = on_host(example)
    _, message = attempted(device, listed)
    assert message is not None
    if any(a is sizes for a in leaves(example.out)):
        assert re.search(named("splits", "out"), message), message
        return
    assert message.startswith("ValueError: splits: a list would have to be copied"), message
    if sizes.dtype != np.int64 and any(name.endswith(".splits") for name in example.written):
        refused(listed, named("out"))  # the result's copy has another dtype than a list's
        return
    example.poison()
    listed.call()
    compare(example, args, kwargs)


@every_example
def test_arrays_that_would_be_copied(example, device, stream):
    """Refused by name, or read in place."""
    example = example.on(device.run)
    example.call()
    for name, a in given(example).items():
        for how, changed in layouts(fp8.asnumpy(a)):
            if how not in ("misaligned", "read-only"):
                other = with_array(example, a, device.array(changed))
                graph, message = attempted(device, other)
                if message is None:
                    args, kwargs = on_host(other)
                    graph.launch(stream)
                    stream.synchronize()
                    compare(other, args, kwargs)
                else:
                    assert re.search(named(name, "out"), message), message
                    assert re.search("not C-contiguous, and a copy cannot be made|expected|call once before",
                                     message)
