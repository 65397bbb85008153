"""Lists of layers as written in configurations: names, patterns with *, and regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

__all__ = ["LayerPatterns", "check_regex", "matches"]

_MOST_REPEATS = 4           # most .* in one regular expression, to bound its run time


class LayerPatterns:
    """A list of layers to match modules against: an entry with 're:' is a regular expression, * is any text,
    and anything else is a sequence of whole parts of the module's name. Names are found by look-up."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = [pattern.removesuffix(".weight") for pattern in patterns if pattern]
        self._names = {pattern for pattern in patterns if not _is_pattern(pattern)}
        self._others = [pattern for pattern in patterns if _is_pattern(pattern)]
        self._longest = max((name.count(".") + 1 for name in self._names), default=0)

    def match(self, module: str) -> str:
        """Return the entry that matches a module, or ''."""
        parts = module.split(".")
        for length in range(min(self._longest, len(parts)), 0, -1):
            for start in range(len(parts) - length + 1):
                if (run := ".".join(parts[start:start + length])) in self._names:
                    return run
        return next((pattern for pattern in self._others if _fits(pattern, module)), "")


def matches(pattern: str, module: str) -> bool:
    """Whether one entry matches a module."""
    return bool(LayerPatterns([pattern]).match(module))


def _is_pattern(text: str) -> bool:
    return text.startswith("re:") or any(sign in text for sign in "*?[")


def _fits(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def check_regex(pattern: str, where: str) -> None:
    """Raise ValueError unless a regular expression is valid and fast: no repeated group, and few repeats
    beside each other."""
    text = pattern[3:]
    if not pattern.startswith("re:"):
        return
    if re.search(r"\)\s*[*+{]", text) or len(re.findall(r"[*+{]", text)) > _MOST_REPEATS:
        raise ValueError(f"{where}: {pattern!r} repeats a group, or has too many repeats; write names or "
                         "simpler patterns")
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{where}: {pattern!r} is no regular expression ({error})") from None
