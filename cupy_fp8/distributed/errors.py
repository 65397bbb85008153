"""Errors of ranks that are missing or disagree."""

from __future__ import annotations

from collections.abc import Iterable


class RankError(RuntimeError):
    """A rank has ended, is late, or was started for something else. `ranks`: which ones, as far as is known.
    Whatever the ranks shared is unusable afterwards."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def named(ranks: Iterable[int]) -> str:
    """
    >>> named([3]), named([0, 2, 5])
    ('rank 3', 'ranks 0, 2, 5')
    """
    found = list(ranks)
    return f"rank{'s' if len(found) != 1 else ''} {', '.join(map(str, found))}"
