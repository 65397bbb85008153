"""Every kernel variant through NVRTC, with the options that CuPy uses and without a GPU.

A variant compiles, keeps everything in registers, and computes by the instructions in the sources alone.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import nvrtc
import pytest
from background import Background
from programs import Program, all_programs, launched_variants, programs
from ptx import check_instructions
from tiers import first_of_each

from cupy_fp8 import kernels
from cupy_fp8.arrays import zeros
from cupy_fp8.calls import remembered
from cupy_fp8.cases import OPS, base
from cupy_fp8.formats import FORMATS
from cupy_fp8.kernels import shapes, sources
from cupy_fp8.ops.convert.astype import astype
from cupy_fp8.ops.quantize import grouped_tensor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's wheels are for Linux")

HAS_SHORT_JOBS = True

#: selects the integer conversions of sm_80 on a chip that converts in hardware (numerics/formats.cuh)
BITCODE = (("CUPY_FP8_BITCODE", "1"),)
#: Shared memory per block: of the chips with the least, sm_89 and sm_120, and of those with kernels of their
#: own.
LEAST_SHARED, SHARED = 99 << 10, {"sm_90a": 227 << 10}
#: All options and input types are compiled for sm_90 with CUDA 13, and every choice of options for one of
#: these in turn.
OTHERS = (("sm_80", 13), ("sm_120", 13), ("sm_90", 12), ("sm_100", 13))

LAUNCHED = launched_variants()


def target_of(v: Program) -> str | None:
    """Return the only architecture for which it is compiled; None: all."""
    return LAUNCHED[v].kernel.arch if v in LAUNCHED else None


ALL = [v for v in all_programs() if target_of(v) is None]
OF_ONE_TARGET = [v for v in all_programs() if target_of(v) is not None]
Kind = Callable[[Program], Any]


# ---- what is compiled ----
def types(v: Program) -> tuple[str, str]:
    """Return its input and output types, or '' if these never vary."""
    defines = dict(v.defines)
    return defines.get("IN", ""), defines.get("OUT", "")


def options(v: Program) -> frozenset[tuple[str, str]]:
    return frozenset(d for d in v.defines if d[0] not in ("IN", "OUT", "IN_A", "IN_B"))


def entry(v: Program) -> str:
    return v.entry


def makes_no_bytes(v: Program) -> bool:
    return v.source == "diagnostics/error_sums"


def input_type(v: Program) -> tuple[str, int]:
    """Return its input type, and the width in bytes of its output elements."""
    read, written = types(v)
    return read, {"": 0, **{f.tag: dtype.itemsize for dtype, f in FORMATS.items()}}[written]


def representatives(turn: int, kind: Kind, takes: Callable[[int], bool] = lambda _: True) -> list[Program]:
    """Return one program of each kind whose number `takes` accepts, and of each entry point and pair of
    types.

    Registers depend on little more than options and widths of types: bf16 and f16 differ little, two FP8
    outputs not at all. So types take turns, and each target gets its own `turn`. Conversions between types
    depend on the architecture, so every pair of types is included."""
    found: dict[Any, list[Program]] = {}
    for v in ALL:
        found.setdefault((v.entry, kind(v)), []).append(v)
    chosen = [kinds[(i + turn) % len(kinds)] for i, kinds in enumerate(found.values()) if takes(i)]
    for what in (entry, types):
        met = {what(v) for v in chosen}
        chosen += {what(v): v for v in reversed(ALL) if what(v) not in met}.values()
    return chosen


def taken_by(target: tuple[str, int]) -> Callable[[int], bool]:
    return lambda n: target == OTHERS[n % len(OTHERS)]


PROGRAMS = [
    *((v, "sm_90", 13) for v in representatives(0, lambda v: (options(v), input_type(v)))),
    *((v, *target) for turn, target in enumerate(OTHERS)
      for v in representatives(turn, options, taken_by(target))),
    # sm_89 converts like sm_90, and has as many registers
    *((v, "sm_89", 13) for v in representatives(3, entry)),
    *((v, "sm_120", 12) for v in {v.entry: v for v in ALL}.values()),
    *((v, target_of(v), 13) for v in OF_ONE_TARGET),
    *((v, target_of(v), 12) for v in {options(v): v for v in OF_ONE_TARGET}.values()),
]
#: Programs for any alignment compile slowest, so others represent their entry points.
PROGRAMS.sort(key=lambda program: ("ALIGNED", "0") in program[0].defines)
#: One program of each entry point for each input type. Registers do not matter: only exactness is tested.
BITCODE_VARIANTS = list({(v.entry, types(v)[0]): v._replace(defines=v.defines + BITCODE)
                         for v in ALL}.values())


#: For sm_80 NVRTC does not unroll the loop over the rows of these programs, and keeps the rows being loaded
#: in this many bytes of local memory (fused/rows.cuh). It unrolls the loop of the shortest activation.
ROLLED, ROLLED_STACK = {("BACKWARD", "0"), ("PATH", "rows")}, 48


# ---- the compilations ----
def background_jobs(items: list[Any], background: Background) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Yield the compilations of the selected tests, each in its own process, since NVRTC uses one
    processor."""
    for item in items:
        if item.originalname == "test_variant":
            v, arch, toolkit = (item.callspec.params[name] for name in ("variant", "arch", "toolkit"))
            yield (v, arch, toolkit), partial(background.call, nvrtc.compile_variant, *v, arch, toolkit)
        elif item.originalname == "test_bitcode":
            v = item.callspec.params["variant"]
            yield v, partial(background.call, nvrtc.variant_ptx, *v, "sm_90", 13)


@pytest.fixture(scope="module")
def compiled(background_result: Callable[[Any], Any]) -> Iterator[Callable[..., nvrtc.Compiled]]:
    """Yield a function that returns the result of one compilation. At the end pytest -s shows a table of
    all."""
    rows: list[tuple[tuple[Program, str, int], nvrtc.Compiled]] = []

    def result(*program: Any) -> nvrtc.Compiled:
        rows.append((program, background_result(program)))
        return rows[-1][1]

    yield result
    print("\nregisters  stack  spills")
    for (variant, arch, toolkit), c in rows:
        spills = c.spill_stores + c.spill_loads
        print(f"{c.registers:9}  {c.stack:5}  {spills:6}  {arch:6}  CUDA {toolkit}  {variant}")


@pytest.mark.parametrize(("variant", "arch", "toolkit"),
                         first_of_each(lambda program: program[0].entry, PROGRAMS), ids=str)
def test_variant(variant, arch, toolkit, compiled, record_property):
    c = compiled(variant, arch, toolkit)
    record_property("registers", c.registers)
    is_rolled = arch == "sm_80" and entry(variant) == "swiglu_cast" and options(variant) >= ROLLED
    stack = ROLLED_STACK if is_rolled and ("ACT", "Relu") not in variant.defines else 0
    assert (c.stack, c.spill_stores, c.spill_loads) == (stack, 0, 0), "not everything fits in registers"
    dynamic = LAUNCHED[variant].shared if variant in LAUNCHED else 0
    assert c.shared + dynamic <= SHARED.get(arch, LEAST_SHARED), "more shared memory than a block has"
    check_instructions(c.ptx, f64=makes_no_bytes(variant))


@pytest.mark.full
@pytest.mark.parametrize("variant", BITCODE_VARIANTS, ids=str)
def test_bitcode(variant, background_result):
    check_instructions(background_result(variant), f64=makes_no_bytes(variant))


def test_errors_name_the_file():
    with pytest.raises(nvrtc.CompileError, match=r"quantize/tensor\.cu\(\d+\): error"):
        nvrtc.compile_variant("quantize/tensor", "cast", (("IN", "no_such_format"), ("OUT", "e4m3fn")),
                              "sm_90", 13)


# ---- everything is compiled ----
def test_targets_have_every_entry_and_type():
    """Each architecture and compiler has every entry point, and all but one has every pair of types."""
    targets: dict[tuple[str | None, int], list[Program]] = {}
    for v, arch, toolkit in PROGRAMS:
        if target_of(v) is None:
            targets.setdefault((arch, toolkit), []).append(v)
    assert set(targets) == {*OTHERS, ("sm_89", 13), ("sm_90", 13), ("sm_120", 12)}

    def kinds(chosen: Iterable[Program], kind: Kind) -> set[Any]:
        return {(v.entry, kind(v)) for v in chosen}

    def but_for_output(v: Program) -> tuple[object, ...]:
        return options(v), types(v)[0]

    assert kinds(targets["sm_90", 13], but_for_output) == kinds(ALL, but_for_output)
    for target, chosen in targets.items():
        assert set(map(entry, chosen)) == set(map(entry, ALL))
        assert target == ("sm_120", 12) or set(map(types, chosen)) == set(map(types, ALL))
    assert set().union(*(kinds(targets[target], options) for target in OTHERS)) == kinds(ALL, options)


def test_every_source_is_covered():
    every = [*ALL, *OF_ONE_TARGET]
    assert sorted({v.source for v in every}) == sources.names()
    for source in sources.names():
        entries = set(re.findall(r"(\w+)\(const __grid_constant__", sources.path(source).read_text()))
        assert entries == {v.entry for v in every if v.source == source}


# ---- ops launch what they are registered with ----
@contextmanager
def launches() -> Iterator[set[Program]]:
    """Collect the program of every launch. Nothing runs."""
    with kernels.forced_executor("host"), kernels.recording() as variants:
        seen: set[Program] = set()
        yield seen
        seen.update(map(Program.of, variants))


@functools.cache
def launched_by(name: str) -> set[Program]:
    """Return what all cases of an op launch with the tiles for small arrays, and with those for large arrays
    on a GPU."""
    op = OPS[name]
    with launches() as seen, base.values_made_by(base.zeros):
        for case in op.cases():
            args, kwargs = op.inputs(case)          # made once for all calls, which write nothing
            remembered.forget()
            op.function(*args, **kwargs)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shapes, "choose_tile", lambda x, large, size=0: large)
                remembered.forget()
                op.function(*args, **kwargs)
                if name in ("group_quantize", "multi_cast_transpose"):
                    patch.setattr(shapes, "fills_wide", lambda columns: True)
                    patch.setattr(grouped_tensor, "_TALL", 0)
                    remembered.forget()
                    op.function(*args, **kwargs)
    return seen


@pytest.mark.full
@pytest.mark.parametrize("name", OPS)
def test_an_op_launches_its_programs(name):
    """All of them, except those launched by another op that registers them too; and no others."""
    own, registered = launched_by(name), programs(OPS[name]).keys()
    assert not own - registered, f"variants() of {name} lacks programs that its cases launch"
    missing = registered - own
    for other in OPS:
        if other != name and missing & programs(OPS[other]).keys():
            missing -= launched_by(other)
    assert not missing, f"no case of {name} launches these programs of variants(): add cases"


def test_astype_launches_known_variants():
    """`saturate` matters only for FP8: the other formats have one variant, not two."""
    with launches() as seen:
        for source, to, saturate in itertools.product(FORMATS, FORMATS, (True, False)):
            astype(zeros(3, source, like="numpy"), to, saturate=saturate)
    assert seen
    assert seen <= LAUNCHED.keys()
