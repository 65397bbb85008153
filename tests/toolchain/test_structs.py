"""Parameter structs as Python reads them from the sources match a C++ compiler's."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from programs import launched_variants
from tiers import first_of_each

import cupy_fp8 as fp8
from cupy_fp8 import hostexec
from cupy_fp8.calls import remembered
from cupy_fp8.cases import OPS
from cupy_fp8.cases.covering import record
from cupy_fp8.diagnostics import on_gpu
from cupy_fp8.kernels import Kernel, Variant, sources, structs
from cupy_fp8.ops.matmul.problem import OperandView

ENTRIES = list({(v.kernel.source, v.kernel.entry): v
                for v in (*launched_variants().values(), *on_gpu.variants())}.items())


def family(entry: tuple[tuple[str, str], Variant]) -> str:
    return entry[0][0].split("/")[0]


@pytest.mark.parametrize(("entry", "variant"), first_of_each(family, ENTRIES),
                         ids=["-".join(entry) for entry, _ in ENTRIES])
def test_layout_is_the_compilers(entry, variant, tmp_path):
    """offsetof every member and sizeof the struct, by static assertions that g++ checks."""
    source, name = entry
    layout = structs.of_entry(source, name)
    found = re.search(rf"\b{name}\(\s*const __grid_constant__ (\w+) p\)",
                      (sources.root() / f"{source}.cu").read_text())
    assert found
    checks = [f"static_assert(sizeof({found[1]}) == {layout.size});"]
    checks += [f"static_assert(offsetof({found[1]}, {m.name}) == {m.offset});" for m in layout.members]
    path = tmp_path / "layout.cu"
    path.write_text(f'#include "{sources.root() / source}.cu"\n#include <cstddef>\n' + "\n".join(checks)
                    + "\n")
    hostexec.compile_kernel(path, name, include_dirs=[sources.root() / "include"],
                            defines=sources.all_defines(name, dict(variant.defines)))


def test_the_same_choice_is_the_same_variant():
    kernel = Kernel("convert/astype", "convert", block=128)
    variant = kernel.variant(IN=np.dtype(np.float32), OUT=fp8.float8_e4m3fn, WIDE=True)
    assert variant.defines == (("IN", "f32"), ("OUT", "e4m3fn"), ("WIDE", "1"))
    assert variant is kernel.variant(IN="f32", OUT="e4m3fn", WIDE=1)
    assert variant is kernel.variant(block=128, IN="f32", OUT="e4m3fn", WIDE="1")
    chosen: dict[str, Any] = {"IN": "f32", "OUT": "e4m3fn", "WIDE": 1}
    for other in ({"block": 256}, {"shared": 16}, {"WIDE": 0}):
        assert variant is not kernel.variant(**{**chosen, **other})
    with pytest.raises(AssertionError, match="convert: neither kernel nor variant"):
        Kernel("convert/astype", "convert").variant()


def test_constants_are_those_of_the_source():
    kernel = Kernel("quantize/block_rows", "quantize_block_rows")
    assert (kernel.constant("kLength"), kernel.constant("kWarpBlocks")) == (128, 8)
    with pytest.raises(AssertionError, match="declares kLanes as no number"):
        kernel.constant("kLanes")
    with pytest.raises(AssertionError, match=r"declares kThreads as \['1024', '256'\]"):
        Kernel("quantize/tensor_current", "cast_current").constant("kThreads")


def test_names_are_checked():
    layout = structs.of_entry("convert/astype", "convert")
    packed = layout.packer.pack(*layout.values({"n": 3, "vector": 1}))
    assert packed == bytes(24) + (3).to_bytes(8, "little") + (1).to_bytes(8, "little")
    with pytest.raises(TypeError, match=r"ConvertParams has no members \['vektor'\]"):
        layout.values({"vektor": 1})


def test_nested_structs_are_given_by_name_too():
    """An unnamed value could be another member's: two floats of a rule may swap unnoticed."""
    layout = structs.of_entry("quantize/mx", "quantize_mx_rows")
    given = {"rule": {"factor": 2.0, "bias": 3}, "along_rows": {"to": 7}, "n": 5}
    swapped = {"n": 5, "along_rows": {"to": 7}, "rule": {"bias": 3, "factor": 2.0}}
    assert layout.values(given) == layout.values(swapped)
    with pytest.raises(TypeError, match=r"MXScaleRule has no members \['faktor'\]"):
        layout.values({"rule": {"faktor": 2.0}})
    with pytest.raises(TypeError, match="MXScaleRule: expected members by name, got tuple"):
        layout.values({"rule": (2.0, 0, 3, 254)})


def test_operands_of_products_have_the_names_of_the_struct():
    """Fields of OperandView become members of the struct Operand by name."""
    numbers = list(range(1, 1 + len(OperandView._fields)))
    fields = OperandView(*numbers)._asdict()
    layout = structs.named("matmul/tiles", "Operand")
    assert layout.values(dict(reversed(fields.items()))) == numbers
    with pytest.raises(TypeError, match=r"Operand has no members \['pitches'\]"):
        layout.values({**fields, "pitches": 1})


#: members that are 0 in every launch of an entry point, whose struct serves another one too
_NEVER_NAMED = {
    "cast": {"data_t", "rows", "columns", "aligned", "column_sums"},
    "quantize_whole_vectors": {"square"}, "group_quantize_whole_vectors": {"along_columns"},
    "group_quantize_rows": {"along_columns", "row_amaxes", "column_amaxes"},
    "dequantize_blocks_transposed": {"down", "across", "chunks_log2"},
    "align_groups": {"share"},
}


@pytest.mark.full
def test_launches_name_every_member(monkeypatch):
    """A member that launches forget is 0, without an error."""
    named: dict[str, set[str]] = {}
    kernels: dict[str, Kernel] = {}     # those of an entry point share one struct
    bind = Variant.bind

    def noted(variant: Variant, x: Any, grid: int, /, **members: Any) -> Any:
        kernels[variant.kernel.entry] = variant.kernel
        named.setdefault(variant.kernel.entry, set()).update(members)
        return bind(variant, x, grid, **members)

    monkeypatch.setattr(Variant, "bind", noted)
    remembered.forget()
    for op in OPS.values():
        record(op)
    forgotten = {entry: names for entry, given in named.items()
                 if (names := {member.name for member in kernels[entry].layout.members} - given)}
    assert forgotten == _NEVER_NAMED
