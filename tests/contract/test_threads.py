"""Simultaneous calls of several threads, each with its own stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from declared import Example, every_example
from perturbed import change_contents, compare, on_host
from places import Place


def work(example: Example, device: Place, calls: int) -> None:
    """Make calls with arrays and a stream of this thread's own. Only one call if a second one would write
    something else: for ops that update arguments, and where changed values are counted."""
    with device.cupy.cuda.Stream(non_blocking=True) as stream:
        args, kwargs = on_host(example)
        for _ in range(1 if example.updates or "changed" in kwargs else calls):
            example.call()
        stream.synchronize()
        compare(example, args, kwargs)


@pytest.mark.full
@every_example
def test_threads_with_streams_of_their_own(example, device):
    """Many calls, so that threads overlap. A stand-in runs one thread at a time, so more than a few calls
    would be repetitions."""
    examples = [example.on(device.run) for _ in range(4)]
    for seed, own in enumerate(examples):
        for _ in range(seed):
            change_contents(own, device)
    device.cupy.cuda.get_current_stream().synchronize()
    number, calls = (1, 3) if device.name == "stand-in" else (4, 20)
    with ThreadPoolExecutor(number) as threads:
        for done in [threads.submit(work, own, device, calls) for own in examples]:
            done.result()
