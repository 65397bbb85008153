"""The checks of PTX detect what they look for."""

from __future__ import annotations

import sys

import nvrtc
import pytest
from ptx import inexact_instructions, split_stores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's wheels are for Linux")


def compiled(body: str) -> nvrtc.Compiled:
    head = '#include "numerics/arith.cuh"\nextern "C" __global__ void k(float* p, int i)'
    return nvrtc.compile_text(f"{head} {{ {body} }}", "sm_90")


@pytest.mark.parametrize(("body", "instructions"), [
    ("p[0] = mul_rn(p[1], p[2]);", []),
    ("p[0] = p[1] * p[2];", ["mul.ftz.f32"]),
    ("p[0] = __fmul_rn(p[1], p[2]);", ["mul.rn.ftz.f32"]),
    ("p[0] = p[1] * p[2] + p[3];", ["fma.rn.ftz.f32"]),
    ("p[0] = fmaxf(p[1], p[2]);", ["max.ftz.f32"]),
    ("p[0] = p[1] < p[2] ? 1 : 2;", ["setp.lt.ftz.f32"]),
    ("p[0] = i;", ["cvt.rn.f32.s32"]),
    ('asm("mul.f32 %0, %1, %1;" : "=f"(p[0]) : "f"(p[1]));', ["mul.f32"]),
    ('asm("rcp.approx.f32 %0, %1;" : "=f"(p[0]) : "f"(p[1]));', ["rcp.approx.f32"]),
    ('asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(p[0]) : "f"(p[1]));', ["rcp.approx.ftz.f32"]),
    ("p[0] = reciprocal(p[1]);", []),
])
def test_inexact_instructions_are_seen(body, instructions):
    assert inexact_instructions(compiled(body).ptx) == instructions


def test_split_stores_are_seen():
    four = [f"\tst.global.u32 \t[%rd5{f'+{4 * i}' if i else ''}], %r{i};" for i in range(4)]
    assert split_stores("\n".join(four)) == 1
    assert split_stores(compiled("*(uint4*)p = make_uint4(i, 0, 0, 0);").ptx) == 0


def test_a_stack_frame_is_seen():
    assert compiled("volatile float a[64]; a[i] = p[0]; p[1] = a[p[2] > p[3]];").stack == 256
