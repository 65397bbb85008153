"""Two matrices like those of a language model, made from a seed, for a `demo` without files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_OUTLIER_CHANNELS = 6
_OUTLIER_GAIN, _FIRST_TOKEN_GAIN = 30.0, 300.0
_PART = 1 << 22                     # elements with a generator of their own, so that threads share the work
_THREADS = 8


def weight(rows: int, columns: int, *, seed: int = 0) -> np.ndarray:
    """Return a linear layer's weight, f32 [rows, columns], with a standard deviation of about
    1/sqrt(columns).

    Rows have unequal sizes. Student's t with 5 degrees of freedom gives rare values of ten standard
    deviations, as trained matrices have.
    """
    rng = np.random.default_rng([seed, 0])
    row_size = np.exp(0.3 * rng.standard_normal((rows, 1), np.float32))
    row_size /= np.float32(np.sqrt(columns))

    def part(rng: np.random.Generator, w: np.ndarray, first: int) -> None:
        # t is normal / sqrt(chi2 / 5). With chi2 from f32 gamma samples this takes half the time of
        # standard_t in f64.
        rng.standard_normal(out=w, dtype=np.float32)
        chi2 = rng.standard_gamma(2.5, w.shape, np.float32)
        chi2 /= np.float32(2.5)
        w /= np.sqrt(chi2, out=chi2)
        w *= row_size[first:first + len(w)]

    return _in_parts((rows, columns), rng, [seed, 0], part)


def activation(tokens: int, channels: int, *, seed: int = 0) -> np.ndarray:
    """Return a residual stream, f32 [tokens, channels]: the sizes of channels are log-normal.

    Six channels are 30 times larger for every token (the outlier channels of arXiv 2208.07339), and in those
    the first token is thousands of times larger than most values (the massive activations of arXiv
    2402.17762).
    """
    rng = np.random.default_rng([seed, 1])
    channel_size = np.exp(0.5 * rng.standard_normal(channels, np.float32))
    outliers = rng.choice(channels, min(_OUTLIER_CHANNELS, channels), replace=False)
    channel_size[outliers] *= np.float32(_OUTLIER_GAIN)

    def part(rng: np.random.Generator, x: np.ndarray, first: int) -> None:
        rng.standard_normal(out=x, dtype=np.float32)
        x *= channel_size

    x = _in_parts((tokens, channels), rng, [seed, 1], part)
    x[:1, outliers] *= np.float32(_FIRST_TOKEN_GAIN)
    return x


def _in_parts(shape: tuple[int, int], rng: np.random.Generator, seeds: list[int],
              make: Callable[[np.random.Generator, np.ndarray, int], None]) -> np.ndarray:
    """Return a matrix that make(generator, rows, index of the first) fills. The first part continues with
    `rng`."""
    made = np.empty(shape, np.float32)
    step = max(1, _PART // max(1, shape[1]))
    starts = range(0, shape[0], step)
    generators = [rng if not i else np.random.default_rng([*seeds, i]) for i in range(len(starts))]
    with ThreadPoolExecutor(_THREADS) as threads:
        for done in [threads.submit(make, generator, made[first:first + step], first)
                     for generator, first in zip(generators, starts, strict=True)]:
            done.result()
    return made
