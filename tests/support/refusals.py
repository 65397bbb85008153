"""What calls refuse: checked on the reference and on the CPU executor, where nothing may be launched or
written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cupy_fp8 import testing
from cupy_fp8.kernels import Launch

Refused = Callable[..., None]


@pytest.fixture(params=["reference", "host"])
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refused]:
    """`refused(error, pattern, function, *args, **kwargs)`: the call raises `error` with a message that
    matches from its beginning, launches nothing, and leaves its arrays as they were."""
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)

    def start(launch: Launch, *_: Any) -> None:
        raise AssertionError(f"{launch.variant.kernel.entry} was launched")

    def check(error: type[Exception], pattern: str, function: Callable[..., Any], /, *args: Any,
              **kwargs: Any) -> None:
        held = [a for a in (*args, *kwargs.values()) if isinstance(a, np.ndarray)]
        before = [a.tobytes() for a in held]
        with pytest.raises(error, match=f"^(?:{pattern.removeprefix('^')})") as caught:
            function(*args, **kwargs)
        assert caught.type is error
        assert [a.tobytes() for a in held] == before, "memory was written"

    monkeypatch.setattr(Launch, "start", start)
    with testing.executor(request.param):
        yield check


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)
