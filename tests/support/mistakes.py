"""First mistakes: what a message must say, and that nothing was written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Mistake = tuple[Callable[[], Any], type[BaseException], str]


def expect_advice(mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the mistake in an empty folder. The error has this type, and these words in its message."""
    monkeypatch.chdir(folder)
    call, error, words = mistake
    with pytest.raises(error, match=re.escape(words)) as caught:
        call()
    assert caught.type is error
    assert not list(folder.iterdir())
