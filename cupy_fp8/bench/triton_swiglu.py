# mypy: disable-error-code="no-untyped-def"
"""SwiGLU in bfloat16 as a Triton kernel, for the layer that this package is compared with: one program per
row. Importing this module needs Triton."""

import triton
import triton.language as tl


def _forward(H, P, A, INNER: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, INNER)
    a = tl.load(H + row * 2 * INNER + column).to(tl.float32)
    b = tl.load(H + row * 2 * INNER + INNER + column).to(tl.float32)
    p = tl.load(P + row)
    tl.store(A + row * INNER + column, (a * tl.sigmoid(a) * b * p).to(tl.bfloat16))


def _backward(G, H, P, DH, DP, INNER: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, INNER)
    a = tl.load(H + row * 2 * INNER + column).to(tl.float32)
    b = tl.load(H + row * 2 * INNER + INNER + column).to(tl.float32)
    p = tl.load(P + row)
    g = tl.load(G + row * INNER + column).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(DP + row, tl.sum(g * a * s * b))
    g = g * p
    tl.store(DH + row * 2 * INNER + column, (g * b * s * (1 + a * (1 - s))).to(tl.bfloat16))
    tl.store(DH + row * 2 * INNER + INNER + column, (g * a * s).to(tl.bfloat16))


forward, backward = triton.jit(_forward), triton.jit(_backward)
WARPS = 8
