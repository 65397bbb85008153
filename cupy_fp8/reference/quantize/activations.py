"""act(a) and act'(a) of every activation in f32 (docs/numerics.md, sections 9 and 13)."""

from __future__ import annotations

import numpy as np

from .. import numerics

Pair = tuple[np.ndarray, np.ndarray]

_ONE, _ZERO = numerics.F32_ONE, np.float32(0)
#: gelu_tanh: 2 u = a * (k + k3 * a^2), with k = 2 * sqrt(2 / pi), k3 = 0.044715 * k, and k9 = 3 * k3
_K, _K3, _K9 = np.array([0x3FCC422A, 0x3D922279, 0x3E5B33B6], np.uint32).view(np.float32)
#: g(t) = 1 - t * phi(t) / Phi(-t): the coefficient of t^8 first
_G = np.array([0xB64633A7, 0x3834635F, 0xB8D52948, 0xBB0303EE, 0x3CAF5A51, 0xBDE1D94E, 0xBF22E3B6, 0xBF4C440A,
               0x3F800000], np.uint32).view(np.float32)


def activation(a: np.ndarray, kind: str) -> Pair:
    """(act(a), act'(a)) in f32."""
    return _ACTIVATIONS[kind](a)


def silu(a: np.ndarray, u: np.ndarray) -> Pair:
    """a * sigma(u) and its derivative, for u = a; other u: `gpt_oss` of section 9."""
    sigma = numerics.sigmoid(u)
    slope = numerics.mul(sigma, numerics.add(_ONE, numerics.mul(u, numerics.sub(_ONE, sigma))))
    return numerics.mul(a, sigma), slope


def _gelu(a: np.ndarray) -> Pair:
    t = numerics.tail_argument(a)
    q = numerics.normal_tail(t)
    y = numerics.fma(-t, q, _positive(a))
    m = numerics.mul(q, numerics.polynomial(_G, t))
    return y, np.where(np.signbit(a), m, numerics.sub(_ONE, m))


def _gelu_tanh(a: np.ndarray) -> Pair:
    square = numerics.mul(a, a)
    sigma = numerics.sigmoid(numerics.mul(a, numerics.fma(square, _K3, _K)))
    inner = numerics.fma(np.minimum(square, np.float32(128)), _K9, _K)
    rest = numerics.mul(sigma, numerics.sub(_ONE, sigma))
    return numerics.mul(a, sigma), numerics.fma(numerics.mul(a, rest), inner, sigma)


def _relu(a: np.ndarray) -> Pair:
    return _positive(a), np.where(a <= 0, _ZERO, _ONE)


def _relu2(a: np.ndarray) -> Pair:
    r = _positive(a)
    return numerics.mul(r, r), np.minimum(numerics.mul(r, np.float32(2)), numerics.F32_MAX)


def _positive(a: np.ndarray) -> np.ndarray:
    """max(a, 0); NaN stays, and -0 becomes +0."""
    return np.where(a <= 0, _ZERO, a)


_ACTIVATIONS = {"silu": lambda a: silu(a, a), "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu,
                "relu2": _relu2}
#: y = act(a) * b
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
