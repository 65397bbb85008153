"""The device flag that keeps a call from writing: 1 writes nothing at all, any other value writes as without
a flag."""

from __future__ import annotations

import numpy as np
from declared import Example, every_noop
from perturbed import change_contents, compare, named, on_host, refused
from places import Place
from trees import snapshot

_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def check(example: Example, value: float) -> None:
    """Check one call with this flag."""
    example.kwargs["noop"].fill(value)
    example.poison()
    before, (args, kwargs) = snapshot(example.tree), on_host(example)
    assert example.call() is example.out
    if value == 1:
        assert snapshot(example.tree) == before
    else:
        compare(example, args, kwargs)


@every_noop
def test_only_a_flag_of_one_writes_nothing(example, place):
    """Also in remembered calls: the flag is read every time. The contents change between two calls, so that
    anything left in a workspace by a call without effect would show in the next one."""
    example = example.on(place.run)
    for value in (1.0, 0.0, 1.0, 2.0, -1.0, np.nan, np.inf, _BELOW_ONE, 2.0**-149, 1.0):
        check(example, value)
        change_contents(example, place)


@every_noop
def test_noop_needs_out(example, place: Place):
    example = example.on(place.run)
    for value in (0.0, 1.0):
        example.kwargs["noop"].fill(value)
        refused(example.with_tree((example.args, example.kwargs, None)),
                named("noop") + r"needs out(puts)?=, since nothing may be written$")
