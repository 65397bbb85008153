"""Finds what the PTX of a kernel must not contain: inexact arithmetic, and split 16-byte stores."""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s")
_FLOAT = re.compile(r"\.(?:b?f16(?:x2)?|[tb]?f32|f64)\b")
_MOVES = ("mov.", "ld.", "st.", "selp.")
_ROUNDING = re.compile(r"(?:add|sub|mul|fma|mad|div|rcp|sqrt)\.(?!rn\.)")
#: `reciprocal` of numerics/arith.cuh starts from an approximation and is exact (test_sigmoid.py).
_RECIPROCAL = re.compile(r"rcp\.approx\.ftz\.f32 (%\w+), (%\w+);\s+neg\.f32 e, \2;\s+"
                         r"fma\.rn\.f32 e, e, \1, 0f3F800000;\s+fma\.rn\.f32 \1, e, \1, \1;")


def check_instructions(ptx: str, *, f64: bool = False) -> None:
    """Whether it is f64: no bytes depend on it, the compiler may round f64 freely, and -ftz does not change
    it."""
    inexact = [name for name in inexact_instructions(ptx) if not (f64 and ".f64" in name)]
    assert not inexact, f"{', '.join(inexact)}: floats need the functions of numerics/arith.cuh"
    assert split_stores(ptx) == 0, "16 bytes are written in four instructions: see Chunk::store_whole"


def inexact_instructions(ptx: str) -> list[str]:
    """Return instructions that may flush subnormals, approximate or be contracted (docs/numerics.md, rule 1).

    Outside inline assembly: any floating-point instruction except moves, since the compiler made it from a
    C++ operator, which CuPy's -ftz=true changes. Inside: .ftz, .approx, and arithmetic without .rn, which the
    assembler may contract.
    """
    found, inline = [], False
    for line in _RECIPROCAL.sub("", ptx).splitlines():
        if "begin inline asm" in line or "end inline asm" in line:
            inline = "begin" in line
        match = _INSTRUCTION.match(line)
        if match is None or not _FLOAT.search(match[1]):
            continue
        name = match[1]
        inexact = _ROUNDING.match(name) if inline else not name.startswith(_MOVES)
        if ".ftz" in name or ".approx" in name or inexact:
            found.append(name)
    return found


def split_stores(ptx: str) -> int:
    """Count places where four stores to global memory write four adjacent words.

    That is a 16-byte store that the compiler has split. Lanes then write quarters of their 16 bytes, the
    slowest pattern there is (docs/lab-notes)."""
    first, more = r"st\.global\.[fub]32\s+\[(%rd\d+)\], \S+\s+", r"st\.global\.[fub]32\s+\[\1\+{}\], \S+"
    return len(re.findall(first + r"\s+".join(more.format(4 * i) for i in (1, 2, 3)), ptx))
