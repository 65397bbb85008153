"""Every kernel variant through NVRTC, with the options that CuPy uses and without a GPU: it compiles, keeps everything in
registers, and computes only by the instructions that are written in the sources."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import nvrtc
import pytest
from background import Background
from tiers import first_of_each

from cupy_fp8 import cases, kernels
from cupy_fp8.arrays import zeros
from cupy_fp8.calls import remembered
from cupy_fp8.formats import FORMATS
from cupy_fp8.kernels import Variant, sources, tiles
from cupy_fp8.ops.convert.astype import astype
from cupy_fp8.ops.programs import Program, all_variants, launched_variants
from cupy_fp8.ops.quantize import grouped_tensor, tensor_current

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's wheels are for Linux")

#: The integer conversions that sm_80 needs, on a chip that converts in hardware (kernels_cu/include/numerics/formats.cuh).
BITCODE = (("CUPY_FP8_BITCODE", "1"),)

_WIDTHS = {"": 0, **{f.tag: dtype.itemsize for dtype, f in FORMATS.items()}}


def types(v: Program) -> tuple[str, str]:
    """What it reads and writes, '' where that is always the same."""
    defines = dict(v.defines)
    return defines.get("IN", ""), defines.get("OUT", "")


def widths(v: Program) -> tuple[int, ...]:
    return tuple(_WIDTHS[t] for t in types(v))


def representatives(turn: int, kind_of: Callable[[Program], tuple[object, ...]], *, any_options: bool = False,
                    takes: Callable[[int], bool] = lambda _: True) -> list[Program]:
    """Of every entry point, choice of options (unless any will do) and kind of types a variant, if `takes` wants that number. Types take
    turns: each target is given a `turn` of its own. Registers depend on options and widths, on hardly anything else: bf16 and f16 differ by
    little, two FP8 outputs not at all. Beside these one of every entry point and of every pair of types, whose conversions are an
    architecture's own."""
    found: dict[tuple[Any, ...], list[Program]] = {}
    for v in all_variants():
        options = () if any_options else tuple(d for d in v.defines if d[0] not in ("IN", "OUT"))
        found.setdefault((v.entry, options, kind_of(v)), []).append(v)
    chosen = [variants[(i + turn) % len(variants)] for i, variants in enumerate(found.values()) if takes(i)]
    for what in (lambda v: v.entry, types):
        met = {what(v) for v in chosen}
        chosen += {what(v): v for v in reversed(all_variants()) if what(v) not in met}.values()
    return chosen


def whatever(_: Program) -> tuple[object, ...]:
    return ()


def input_type(v: Program) -> tuple[object, ...]:
    """What it reads, and how wide it writes."""
    return types(v)[0], widths(v)[1]


#: Beside sm_90 with CUDA 13, for which all options and types of input are compiled, every choice of options is for two of these, each
#: pair of them in turn.
OTHERS = (("sm_120", 13), ("sm_80", 13), ("sm_90", 12), ("sm_100", 13))
PAIRS = list(itertools.combinations(OTHERS, 2))


def taken_by(target: tuple[str, int]) -> Callable[[int], bool]:
    return lambda n: target in PAIRS[n % len(PAIRS)]


PROGRAMS = [
    *((v, "sm_90", 13) for v in representatives(0, input_type)),
    *((v, *target) for turn, target in enumerate(OTHERS)
      for v in representatives(turn, whatever, takes=taken_by(target))),
    # Converts as sm_90 does, and has its registers.
    *((v, "sm_89", 13) for v in representatives(3, whatever, any_options=True)),
    *((v, "sm_120", 12) for v in {v.entry: v for v in all_variants()}.values()),
]
#: Of every entry point and type of input one. Only tests of exactness launch these: how many registers they take does not matter.
BITCODE_VARIANTS = list({(v.entry, types(v)[0]): v._replace(defines=v.defines + BITCODE) for v in all_variants()}.values())

LAUNCHED = launched_variants()
#: Bytes of shared memory that a block can have on the chips that have least. (What a launch chooses by the chip is not in a Variant.)
LEAST_SHARED = 99 << 10

Compile = Callable[[Program, str, int], nvrtc.Compiled]


def background_jobs(items: list[Any], background: Background) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """The compilations of the selected tests, each in a process of its own: NVRTC uses one processor per process."""
    for item in items:
        if item.originalname == "test_variant":
            v, arch, toolkit = (item.callspec.params[name] for name in ("variant", "arch", "toolkit"))
            yield (v, arch, toolkit), partial(background.call, nvrtc.compile_variant, *v, arch, toolkit)
        elif item.originalname == "test_bitcode":
            v = item.callspec.params["variant"]
            yield v, partial(background.call, nvrtc.variant_ptx, *v, "sm_90", 13)


@pytest.fixture(scope="module")
def compiled(background_result: Callable[[Any], Any]) -> Iterator[Compile]:
    """The result of one compilation."""
    rows: list[tuple[tuple[Program, str, int], nvrtc.Compiled]] = []

    def result(*program: Any) -> nvrtc.Compiled:
        rows.append((program, background_result(program)))
        return rows[-1][1]

    yield result
    print("\nregisters  stack  spills")                         # shown by pytest -s
    for (variant, arch, toolkit), c in rows:
        print(f"{c.registers:9}  {c.stack:5}  {c.spill_stores + c.spill_loads:6}  {arch:6}  CUDA {toolkit}  {variant}")


@pytest.mark.parametrize(("variant", "arch", "toolkit"), first_of_each(lambda program: program[0].entry, PROGRAMS), ids=str)
def test_variant(variant, arch, toolkit, compiled, record_property):
    c = compiled(variant, arch, toolkit)
    record_property("registers", c.registers)
    assert (c.stack, c.spill_stores, c.spill_loads) == (0, 0, 0), "not everything fits in registers"
    dynamic = LAUNCHED[variant].shared if variant in LAUNCHED else 0
    assert c.shared + dynamic <= LEAST_SHARED, "more shared memory than a block has on sm_89 and sm_120"
    check_instructions(c.ptx)


@pytest.mark.full
@pytest.mark.parametrize("variant", BITCODE_VARIANTS, ids=str)
def test_bitcode(variant, background_result):
    check_instructions(background_result(variant))


def check_instructions(ptx: str) -> None:
    assert inexact_instructions(ptx) == []
    assert split_stores(ptx) == 0, "16 bytes are written in four instructions: see Chunk::store_whole"


def test_targets_have_every_entry_and_type():
    """What is compiled for each architecture by each compiler."""
    targets: dict[tuple[str, int], list[Program]] = {}
    for v, arch, toolkit in PROGRAMS:
        targets.setdefault((arch, toolkit), []).append(v)
    assert set(targets) == {*((arch, 13) for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")), ("sm_90", 12), ("sm_120", 12)}

    def kinds(programs: Iterable[Program], kind: Callable[[Program], Any]) -> set[Any]:
        return {(v.entry, kind(v)) for v in programs}

    def options(v: Program) -> frozenset[tuple[str, str]]:
        return frozenset(d for d in v.defines if d[0] not in ("IN", "OUT"))

    def but_for_output(v: Program) -> tuple[object, ...]:
        return options(v), types(v)[0]

    assert kinds(targets["sm_90", 13], but_for_output) == kinds(all_variants(), but_for_output)
    for target, programs in targets.items():
        assert {v.entry for v in programs} == {v.entry for v in all_variants()}
        if target != ("sm_120", 12):
            assert {types(v) for v in programs} == {types(v) for v in all_variants()}
    compiled = [kind for target in OTHERS for kind in kinds(targets[target], options)]
    assert {kind for kind in compiled if compiled.count(kind) >= 2} == kinds(all_variants(), options)


_INSTRUCTION = re.compile(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s")
_FLOAT = re.compile(r"\.(?:b?f16(?:x2)?|[tb]?f32|f64)\b")
_MOVES = ("mov.", "ld.", "st.", "selp.")
_ROUNDING = re.compile(r"(?:add|sub|mul|fma|mad|div|rcp|sqrt)\.(?!rn\.)")


#: reciprocal() of kernels_cu/include/numerics/arith.cuh: exact, with the approximation that it starts from (test_sigmoid.py).
_RECIPROCAL = re.compile(r"rcp\.approx\.ftz\.f32 (%\w+), (%\w+);\s+neg\.f32 e, \2;\s+fma\.rn\.f32 e, e, \1, 0f3F800000;\s+"
                         r"fma\.rn\.f32 \1, e, \1, \1;")


def inexact_instructions(ptx: str) -> list[str]:
    """Instructions that may flush subnormals, approximate or be contracted (docs/numerics.md, rule 1).

    Outside inline assembly any floating-point instruction but a move: the compiler made it from a C++ operator, which CuPy's
    -ftz=true changes. Inside it .ftz, .approx, and arithmetic without .rn, which the assembler may contract.
    """
    found, inline = [], False
    for line in _RECIPROCAL.sub("", ptx).splitlines():
        if "begin inline asm" in line or "end inline asm" in line:
            inline = "begin" in line
        match = _INSTRUCTION.match(line)
        if match is None or not _FLOAT.search(match[1]):
            continue
        name = match[1]
        if ".ftz" in name or ".approx" in name or (_ROUNDING.match(name) if inline else not name.startswith(_MOVES)):
            found.append(name)
    return found


def split_stores(ptx: str) -> int:
    """How many runs of four stores to global memory write four neighbouring words: what a 16-byte store became where the compiler lost
    it. Lanes then write quarters of their 16 bytes, the slowest pattern there is (docs/performance.md)."""
    return len(re.findall(r"st\.global\.[fub]32\s+\[(%rd\d+)\], \S+\s+" + r"\s+".join(
        rf"st\.global\.[fub]32\s+\[\1\+{4 * i}\], \S+" for i in (1, 2, 3)), ptx))


def kernel(body: str) -> str:
    return f'#include "numerics/arith.cuh"\nextern "C" __global__ void k(float* p, int i) {{ {body} }}'


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
def test_the_check_sees(body, instructions):
    assert inexact_instructions(nvrtc.compile_text(kernel(body), "sm_90").ptx) == instructions


def test_split_stores_are_seen():
    assert split_stores("\n".join(f"\tst.global.u32 \t[%rd5{f'+{4 * i}' if i else ''}], %r{i};" for i in range(4))) == 1
    assert split_stores(nvrtc.compile_text(kernel("*(uint4*)p = make_uint4(i, 0, 0, 0);"), "sm_90").ptx) == 0


def test_a_stack_frame_is_seen():
    c = nvrtc.compile_text(kernel("volatile float a[64]; a[i] = p[0]; p[1] = a[p[2] > p[3]];"), "sm_90")
    assert c.stack == 256


def test_errors_name_the_file():
    with pytest.raises(nvrtc.CompileError, match=r"quantize/tensor\.cu\(\d+\): error"):
        nvrtc.compile_variant("quantize/tensor", "cast", (("IN", "no_such_format"), ("OUT", "e4m3fn")), "sm_90", 13)


def test_every_source_is_covered():
    assert sorted({v.source for v in all_variants()}) == sources.names()
    for source in sources.names():
        entries = set(re.findall(r"#ifdef ENTRY_(\w+)", (sources.root() / f"{source}.cu").read_text()))
        assert entries == {v.entry for v in all_variants() if v.source == source}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Program]]:
    """Every launch, which happens in name only; each must be of a known variant."""
    seen = set()

    def launch(self, *_, **__):
        program = Program(self.kernel.source, self.kernel.entry, self.defines)
        assert program in all_variants(), f"{program} is missing from the variants() of its ops module"
        seen.add(program)

    monkeypatch.setattr(Variant, "launch", launch)
    with kernels.forced_executor("host"):
        yield seen


def test_ops_launch_all_known_variants_and_no_other(launched, monkeypatch):
    """Over all cases, with the tiles that ops choose for small arrays, and those for large arrays on a GPU."""
    not_an_op = {"bench/delay"}                                       # the benchmark's
    known = {v for v in all_variants() if v.source not in not_an_op}
    for case in cases.all_cases():
        op = cases.OPS[case.op]
        args, kwargs = op.inputs(case)                          # takes longer than the calls, in which nothing is written
        remembered.forget()
        op.function(*args, **kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(tiles, "choose", lambda x, large, size=0: large)
            patch.setattr(tensor_current, "_CPU", tensor_current._Machine(4, 1024, 40 << 10))
            remembered.forget()
            op.function(*args, **kwargs)
            if case.op in ("group_quantize", "multi_cast_transpose"):
                patch.setattr(tiles, "fills_wide", lambda columns: True)
                patch.setattr(grouped_tensor, "_TALL", 0)
                remembered.forget()
                op.function(*args, **kwargs)
    assert launched == known


def test_astype_launches_known_variants(launched):
    """`saturate` means something for FP8 only: the other formats have one variant, not two."""
    for source, to, saturate in itertools.product(FORMATS, FORMATS, (True, False)):
        astype(zeros(3, source, like="numpy"), to, saturate)
    assert launched
