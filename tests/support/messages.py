"""Lines of tests of error messages: the error, the start of its message, and the call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from trees import leaves, snapshot

from cupy_fp8 import cases, testing
from cupy_fp8.kernels import Launch

Line = tuple[type[Exception], str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def line(error: type[Exception], message: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Line:
    return error, message, call, args, kwargs


def poisoned(tree: Any) -> Any:
    """Return the same result, with poison in its arrays."""
    for a in leaves(tree):
        cases.poison(a)
    return tree


def every_line(lines: list[Line]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("error", "message", "call", "args", "kwargs"), lines,
                                   ids=[f"{i}: {found[1][:40]}" for i, found in enumerate(lines)])


def check(error: type[Exception], message: str, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Check that reference and kernels refuse the call with this message, and write nothing."""
    before = snapshot((args, kwargs))
    for executor in ("reference", "host"):
        if testing.executor_problem(executor) is None:
            with (testing.executor(executor), mock.patch.object(Launch, "start") as start,
                  pytest.raises(error, match="^" + re.escape(message)) as caught):
                call(*args, **kwargs)
            assert caught.type is error
            assert snapshot((args, kwargs)) == before
            start.assert_not_called()
