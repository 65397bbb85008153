"""The experts of a rank in float32, expert by expert, instead of PyTorch's products."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_fp8.formats import bfloat16


class Loops:
    """Like `layer_peers.Bf16` for rows in NumPy arrays, expert by expert."""

    name = "loops"

    def __init__(self, given: Any) -> None:
        self.weights = [(up.astype(np.float32), down.astype(np.float32))
                        for up, down in zip(given.up, given.down, strict=True)]

    def forward_rows(self, rows: np.ndarray, ends: np.ndarray, probs: np.ndarray) -> tuple[Any, Any]:
        out, saved, begin = np.zeros(rows.shape, np.float32), [], 0
        for (up, down), end in zip(self.weights, ends, strict=True):
            x, p = rows[begin:end].astype(np.float32), probs[begin:end, None]
            a, b = np.split(x @ up.T, 2, 1)
            saved.append((slice(begin, end), x, p, a, b))
            out[begin:end] = (a / (1 + np.exp(-a)) * b * p) @ down.T
            begin = end
        return out.astype(bfloat16), saved

    def backward_rows(self, grads: np.ndarray, saved: Any) -> tuple[np.ndarray, ...]:
        dx, dp, d_up, d_down = np.zeros(grads.shape, np.float32), np.zeros(len(grads), np.float32), [], []
        for (up, down), (at, x, p, a, b) in zip(self.weights, saved, strict=True):
            g, s = grads[at].astype(np.float32), 1 / (1 + np.exp(-a))
            d = g @ down
            dp[at] = (d * a * s * b).sum(1)
            dh = np.concatenate([d * p * b * s * (1 + a * (1 - s)), d * p * a * s], 1)
            dx[at] = dh @ up
            d_up.append(dh.T @ x)
            d_down.append(g.T @ (a * s * b * p))
        return dx.astype(bfloat16), dp, np.stack(d_up), np.stack(d_down)
