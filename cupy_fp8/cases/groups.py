"""Sizes of groups of rows."""

from __future__ import annotations

import numpy as np

DIVISIONS = ("ragged", "even", "one", "aligned")


def sizes(total: int, number: int, division: str = "ragged",
          seed: int | np.random.Generator = 0) -> np.ndarray:
    """Return the sizes of `number` groups with `total` rows. 'ragged': random, about a third of them 0;
    'even': as equal as possible; 'one': all rows in the middle group; 'aligned': multiples of 16, except the
    last one."""
    if number == 0:
        return np.zeros(0, np.int64)
    if division == "one":
        return np.where(np.arange(number) == number // 2, total, 0)
    if division == "even":
        return np.diff(np.arange(number + 1) * total // number)
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, total, number - 1, endpoint=True))
    cuts[rng.random(len(cuts)) < 0.3] = total // 2
    if division == "aligned":
        cuts = cuts // 16 * 16
    return np.diff(np.sort(cuts), prepend=0, append=total)
