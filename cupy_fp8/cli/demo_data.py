"""Two matrices like those of a language model, made from a seed, for a `demo` without files."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, asarray
from ..formats import bfloat16

_OUTLIER_CHANNELS = 6
_OUTLIER_GAIN, _FIRST_TOKEN_GAIN = 30.0, 300.0


def weight(rows: int, columns: int, *, dtype: Any = bfloat16, like: Any = None, seed: int = 0) -> Array:
    """A linear layer's weight [rows, columns] with a standard deviation of about 1/sqrt(columns).

    Rows have unequal sizes. Student's t with 5 degrees of freedom gives rare values of ten standard
    deviations, as trained matrices have.
    """
    rng = np.random.default_rng([seed, 0])
    row_size = np.exp(0.3 * rng.standard_normal((rows, 1), np.float32))
    # t = normal / sqrt(chi2 / 5) with chi2 from f32 gamma samples takes half the time of standard_t in f64.
    w = rng.standard_normal((rows, columns), np.float32)
    w /= np.sqrt(rng.standard_gamma(2.5, (rows, columns), np.float32) / np.float32(2.5))
    return asarray(w * (row_size / np.float32(np.sqrt(columns))), dtype, like=like)


def activation(tokens: int, channels: int, *, dtype: Any = bfloat16, like: Any = None,
               seed: int = 0) -> Array:
    """A residual stream [tokens, channels]: the sizes of channels are log-normal.

    Six channels are 30 times larger for every token (the outlier channels of arXiv 2208.07339), and in those
    the first token is thousands of times larger than most values (the massive activations of arXiv
    2402.17762).
    """
    rng = np.random.default_rng([seed, 1])
    channel_size = np.exp(0.5 * rng.standard_normal(channels, np.float32))
    outliers = rng.choice(channels, min(_OUTLIER_CHANNELS, channels), replace=False)
    channel_size[outliers] *= np.float32(_OUTLIER_GAIN)
    x = rng.standard_normal((tokens, channels), np.float32) * channel_size
    x[:1, outliers] *= np.float32(_FIRST_TOKEN_GAIN)
    return asarray(x, dtype, like=like)
