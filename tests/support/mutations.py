"""Faults that are planted in copies of the CUDA sources, one at a time, to see that cases find them.

This file is also the child process that plants one: `python mutations.py NAME FOLDER` copies kernels_cu into
the folder, plants the fault and runs cases of its op on the CPU. The child prints what found the fault: the
first case whose bytes differ, or an error of the executor. A sanitizer ends the child.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from cupy_fp8 import hostexec, testing
from cupy_fp8.cases import OPS
from cupy_fp8.cases.covering import Recorded, covering_of, record, served_by
from cupy_fp8.cli.selftest import check
from cupy_fp8.kernels import Variant, sources

SURVIVED = "survived"        # how an outcome begins if nothing has found the fault
FOUND_BY_SANITIZER = 66


class Fault(NamedTuple):
    """A text that occurs once in a source, and what replaces it.

    op: one whose cases launch the source. kernel: for a header, the source that they must launch. define: a
    choice of the program that they must launch, as "NAME=value". mode: the build that shows the fault."""

    file: str
    old: str
    new: str
    op: str
    kernel: str = ""
    define: str = ""
    mode: str = "fast"

    @property
    def source(self) -> str:
        """The .cu file that the cases must launch, or "" for any."""
        return self.kernel or (self.file.removesuffix(".cu") if self.file.endswith(".cu") else "")

    def in_program(self, variant: Variant) -> bool:
        """True if the program has the fault."""
        defines = {f"{name}={value}" for name, value in variant.defines}
        return self.source in ("", variant.kernel.source) and (not self.define or self.define in defines)


_FAULTS = (
    # ---- kernels ----
    Fault("convert/astype.cu", "left_of(p.rows - at.row, TILE_ROWS));",
          "left_of(p.rows - at.row - 1, TILE_ROWS));", "transpose"),
    Fault("convert/dequantize.cu", "(row + r) >> p.row_shift", "(row + r + 1) >> p.row_shift", "dequantize"),
    Fault("convert/rebase.cu", "steps_across == 1 ? tile : tile /", "steps_across == 1 ? tile : 0 * tile /",
          "rebase_scales"),
    Fault("convert/scaling_aware.cu", "left_of(all_tiles - first_tile,",
          "left_of(all_tiles - first_tile - 1,", "scaling_aware_transpose"),
    Fault("groups/row_segments.cu", "p.rows_log2, p.first_shift", "p.rows_log2 + 1, p.first_shift",
          "scaling_aware_transpose"),
    Fault("matmul/align_rows.cu", "row * p.row_bytes", "row * (p.row_bytes - 1)", "matmul_nt"),
    Fault("matmul/tiles.cu", "left_of(k_end - at, kChunkBytes)", "left_of(k_end - at - 1, kChunkBytes)",
          "grouped_matmul_nt"),
    Fault("matmul/wgmma.cu", "t.rows - first_row() : 0;", "t.rows - first_row() - 1 : 0;",
          "grouped_matmul_nt"),
    Fault("moe/offsets.cu", "lane < warp ? of_warp", "lane <= warp ? of_warp", "splits_to_offsets"),
    Fault("moe/pad.cu", "left_of(p.rows - first, a.rows_per_block)",
          "left_of(p.rows - first - 1, a.rows_per_block)", "pad_groups"),
    Fault("moe/permute.cu", "k + j < topk ?", "k + j < topk - 1 ?", "permute"),
    Fault("moe/route.cu", "= next + __popc(same_expert);", "= next + __popc(same_expert) + 1;", "route"),
    Fault("moe/unpermute.cu", "rank += given[j] > row", "rank += given[j] < row", "unpermute"),
    Fault("moe/unpermute_backward.cu", "for (int step = 4; step < 32; step *= 2) sum",
          "for (int step = 4; step < 16; step *= 2) sum", "unpermute_backward"),
    Fault("quantize/bias_gradient.cu", "left_of(p.rows - row, ROWS)", "left_of(p.rows - row - 1, ROWS)",
          "cast_transpose"),
    Fault("quantize/whole_vectors.cu", "left_of(p.columns - c, kLaneColumns)",
          "left_of(p.columns - c - 1, kLaneColumns)", "quantize_block"),
    Fault("quantize/block_rows.cu", "+ of_load * step", "+ of_load * kLength", "quantize_block"),
    Fault("quantize/blocks.cu", "row < p.rows ? s.scale_inv", "row < p.rows - 1 ? s.scale_inv",
          "quantize_block"),
    Fault("quantize/grouped_amax.cu", "load_relaxed(amaxes + found.group) <",
          "load_relaxed(amaxes + found.group) >", "group_quantize"),
    Fault("quantize/grouped_rows_columns.cu", "at.row + row, row < rows, s",
          "at.row + row, row < rows - 1, s", "group_quantize"),
    Fault("quantize/grouped_tensor.cu", "p.data_t ? p.data_t + to : nullptr", "p.data_t ? p.data_t : nullptr",
          "group_quantize"),
    Fault("quantize/mx.cu", "<< 8 * i;\n    }\n    return e;", "<< 8 * (i ^ 1);\n    }\n    return e;",
          "quantize_mx"),
    Fault("quantize/swiglu_blocks.cu", "further] = given > 0 ?", "further] = given > 1 ?", "swiglu_quantize"),
    Fault("quantize/swiglu_mx.cu", "*to = given ? (u8)byte : 0;", "*to = (u8)byte;", "swiglu_quantize",
          define="PATH=tiles"),
    Fault("quantize/swiglu_tensor.cu", "if (!kBackward && r >= rows.left) amax = before;", "",
          "swiglu_quantize", define="PATH=options"),
    Fault("quantize/tensor.cu", "in(p.x, p.n, p.vector", "in(p.x, p.n - 1, p.vector", "quantize_tensor"),
    Fault("quantize/tensor_current.cu", "(gridDim.x + 31) / 32 * 32", "gridDim.x / 32 * 32",
          "quantize_tensor", define="OUT=e4m3fn"),
    Fault("quantize/tensor_list.cu", "(i64)down * TILE_ROWS", "(i64)down * TILE_COLUMNS / 2",
          "multi_cast_transpose"),
    Fault("scales/amax.cu", "start = blockIdx.x * kBlock;", "start = (blockIdx.x + 1) * kBlock;",
          "compute_amax"),
    Fault("scales/convert.cu", "+ (b & 3) * block", "+ (b & 1) * block", "convert_scales"),
    Fault("scales/scale.cu", "= other > amax_seen ? other", "= other < amax_seen ? other",
          "update_delayed_scaling"),
    Fault("scales/swizzle.cu", "word = there ? word & mask : 0u;", "word = there ? word : 0u;",
          "swizzle_scales"),
    # ---- headers ----
    Fault("include/convert/rebase_chunk.cuh", "changed = Halves::minus(", "changed = Halves::plus(",
          "rebase_scales"),
    Fault("include/convert/scaling_aware_experts.cuh", "left_of(p.columns - first_column, TILE_COLUMNS",
          "left_of(p.columns - first_column - 1, TILE_COLUMNS", "scaling_aware_transpose"),
    Fault("include/convert/scaling_aware_load.cuh", "exists = row < rows", "exists = row < rows - 1",
          "scaling_aware_transpose"),
    Fault("include/convert/scaling_aware_scales.cuh", "(e[r] - most + 15 + kLift) << 10",
          "(e[r] - most + 16 + kLift) << 10", "scaling_aware_transpose"),
    Fault("include/convert/scaling_aware_store.cuh", "row < tile.rows ? tile.columns - column : 0",
          "row < tile.rows ? tile.columns - column - 1 : 0", "scaling_aware_transpose"),
    Fault("include/convert/scaling_aware_transform.cuh", "(largest + 0x00ff00ffu)", "(largest + 0x007f007fu)",
          "scaling_aware_transpose"),
    Fault("include/groups/group_tiles.cuh", "left_of(size[u] - units_before, kUnits)",
          "left_of(size[u] - units_before - 1, kUnits)", "swizzle_scales", "scales/swizzle",
          "GROUPED=2"),
    Fault("include/groups/quantize_group.cuh", "group.x += found.start;", "group.x += found.result_start;",
          "group_quantize", "quantize/grouped_rows_columns"),
    Fault("include/groups/row_groups.cuh", "p.offsets[g] : first * p.columns;",
          "p.offsets[g] : start * p.columns;", "group_quantize", "quantize/grouped_rows_columns"),
    Fault("include/groups/splits.cuh", ">= step) value += other;", "> step) value += other;", "sort_chunks"),
    Fault("include/matmul/any_bytes.cuh", "word[4] = odd ? load_read_only(words + 4) : 0;", "word[4] = 0;",
          "matmul_nt", "matmul/align_rows"),
    Fault("include/matmul/store_tile.cuh", "both = column + 1 < to.columns;",
          "both = column + 2 < to.columns;", "grouped_matmul_nt", "matmul/wgmma"),
    Fault("include/matmul/tile_queue.cuh", "(int)p.n - t.column;", "(int)p.n - t.column - 1;",
          "grouped_matmul_nt", "matmul/wgmma"),
    Fault("include/matmul/wgmma_copies.cuh", "t.a_row + first_row,", "t.a_row,", "grouped_matmul_nt",
          "matmul/wgmma"),
    Fault("include/memory/chunks.cuh", "w * kPerWord + i < count)\n                    p[",
          "w * kPerWord + i <= count)\n                    p[", "astype", mode="asan"),
    Fault("include/memory/elementwise.cuh", "kElementwiseUnroll * kStep <= n;",
          "kElementwiseUnroll * kStep <= n + 1;", "astype", mode="asan"),
    Fault("include/moe/moved_rows.cuh", "from + from_end - from_rows,", "from + from_end,", "pad_groups"),
    Fault("include/moe/routes.cuh", "__ffs(unused) - 1));", "__ffs(unused)));", "permute"),
    Fault("include/numerics/amax.cuh", "low > high ? low : high", "low < high ? low : high", "compute_amax"),
    Fault("include/numerics/arith.cuh", "as_bits(a) - 1u < 0x7f7fffffu", "as_bits(a) - 1u <= 0x7f7fffffu",
          "compute_scale"),
    Fault("include/numerics/tree_sum.cuh", "return partial[kLevels - 1];", "return partial[0];",
          "cast_transpose"),
    Fault("include/numerics/types.cuh", "(n + align - 1) & (T)(0 - align)", "(n + align) & (T)(0 - align)",
          "pad_groups"),
    Fault("include/numerics/e8m0.cuh", "(254 - e) << 23", "(253 - e) << 23", "quantize_mx",
          "quantize/mx"),
    Fault("include/numerics/formats.cuh", "- 1 + (magnitude >> kShift & 1)", "", "astype"),
    Fault("include/numerics/fp8_pairs.cuh", "mul_rn(a_hi, b_hi)", "mul_rn(a_hi, b_lo)",
          "scaling_aware_transpose"),
    Fault("include/numerics/sigmoid.cuh", "0x3efffed3u", "0x3effe000u", "swiglu_quantize",
          "quantize/swiglu_tensor"),
    Fault("include/scale/block_scale.cuh", "(a_bits >> 23) - (i32)(b_bits >> 23)",
          "(a_bits >> 23) - (i32)(b_bits >> 23) + 1", "quantize_block", "quantize/block_rows"),
    Fault("include/scale/block_write.cuh", "RowOperands::load(rows.factors + quad * 4, factor)",
          "RowOperands::load(rows.factors, factor)", "quantize_block", "quantize/blocks"),
    Fault("include/scale/cast.cuh", "mul_rn(v, scale)", "mul_rn(scale, scale)", "quantize_tensor",
          "quantize/tensor", "DBIAS=0"),
    Fault("include/scale/power_of_two.cuh", "+ 0x3ffff;", "+ 0x7ffff;", "rebase_scales", "convert/rebase"),
    Fault("include/scale/scale.cuh", "return is_infinite(scale) ? largest : scale;", "return scale;",
          "compute_scale"),
    Fault("include/scale/swizzle.cuh", "+ line % 32 * 16\n", "+ line % 16 * 16\n", "dequantize",
          "convert/dequantize"),
    Fault("include/swiglu/swiglu_blocks.cuh", "for (int r = 0; r < 8; r++) column[c] =",
          "for (int r = 0; r < 7; r++) column[c] =", "swiglu_quantize", "quantize/swiglu_blocks",
          "PATH=any"),
    Fault("include/swiglu/swiglu_magnitudes.cuh", "i < 8 / Load::kPerWord;", "i < 8 / Load::kPerWord - 1;",
          "swiglu_quantize", "quantize/swiglu_mx", "PATH=tiles"),
    Fault("include/swiglu/swiglu_options.cuh", "if (clipped >> i & 1) values", "if (clipped >> i & 2) values",
          "swiglu_backward_quantize", "quantize/swiglu_tensor"),
    Fault("include/swiglu/swiglu_patch.cuh", "row < call.rows ? call.probs[row] : 1.0f",
          "row < call.rows - 1 ? call.probs[row] : 1.0f", "swiglu_quantize", "quantize/swiglu_tensor",
          "PATH=any"),
    Fault("include/swiglu/swiglu_rows.cuh", "exists ? 1.0f : 0.0f;", "1.0f;", "swiglu_quantize",
          "quantize/swiglu_tensor", "PATH=rows"),
    Fault("include/swiglu/swiglu_store.cuh", "if (r >= patch.rows_left) return;",
          "if (r >= patch.rows_left - 1) return;", "swiglu_quantize", "quantize/swiglu_tensor", "PATH=any"),
    Fault("include/swiglu/swiglu_stream.cuh", "own < call.rows ? call.probs[own] : 1.0f",
          "own < call.rows - 1 ? call.probs[own] : 1.0f", "swiglu_quantize", "quantize/swiglu_mx"),
    Fault("include/tile/cast_tile.cuh", "add_rn(lower ? lower_half : upper_half, other)",
          "add_rn(lower ? upper_half : lower_half, other)", "cast_transpose"),
    Fault("include/tile/column_segment.cuh", "(in_head ? r - rows_before : r)", "(in_head ? r + 1 : r)",
          "group_quantize", "quantize/blocks", "TILES_PER_BLOCK=2"),
    Fault("include/tile/single_read.cuh", "if (r < rows_here) patch[r]", "if (r < rows_here - 1) patch[r]",
          "multi_quantize", "quantize/tensor_list"),
    Fault("include/tile/tile.cuh", "(row & 4 ? chunk.y : chunk.x)", "(row & 2 ? chunk.y : chunk.x)",
          "transpose"),
    Fault("include/tile/warp_tile.cuh", "unit * 16 < rows_left ? columns_left : 0",
          "unit * 16 + 16 < rows_left ? columns_left : 0", "quantize_mx", "quantize/mx"),
)
#: Each file has one fault.
FAULTS = {fault.file: fault for fault in _FAULTS}
#: The order of these two operands changes no byte.
EQUIVALENT = Fault("scales/amax.cu", "blockIdx.x * kBlock;", "kBlock * blockIdx.x;", "compute_amax")


def fault_of(name: str) -> Fault:
    return EQUIVALENT if name == "equivalent" else FAULTS[name]


def plant(fault: Fault, folder: Path) -> Path:
    """A copy of kernels_cu in the folder, with the fault."""
    root = folder / "kernels_cu"
    shutil.copytree(sources.root(), root)
    file = root / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file}: {fault.old!r} occurs {text.count(fault.old)} times"
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return root


def chosen(fault: Fault) -> Iterator[Recorded]:
    """The cases that cover what the op launches of the source, with few elements before many. Behind them all
    other cases that need no other program. LookupError if no case launches a program with the fault."""
    recorded = [one for one in record(OPS[fault.op]) if one.size and not one.raised and one.variants
                and any(map(fault.in_program, one.variants))]
    if not recorded:
        raise LookupError(f"{fault.file}: no case of {fault.op} launches a program of "
                          f"{fault.source or 'any kernel'} {fault.define}: name another op, kernel or define")
    covers = sorted(covering_of(recorded), key=lambda one: (len(one.variants), one.size))
    yield from covers
    yield from (one for one in served_by(covers, recorded) if one not in covers)


def finding(fault: Fault) -> str:
    """Which case finds the planted fault, and how; or SURVIVED, and which programs with the fault were run by
    how many cases."""
    tried, programs = 0, set()
    with testing.executor("host") as run:
        for one in chosen(fault):
            tried += 1
            programs |= {_shown(variant) for variant in one.variants if fault.in_program(variant)}
            for variant in one.variants:
                variant.compile(None)               # An error of the compiler finds nothing.
            try:
                check(OPS[fault.op], one.case, run)
            except (AssertionError, hostexec.HostError) as error:
                return f"{one.case}: {error}"
    return f"{SURVIVED} {tried} cases of {'; '.join(sorted(programs))}"


def _shown(variant: Variant) -> str:
    return " ".join((variant.kernel.entry, *(f"{name}={value}" for name, value in variant.defines)))


def main(name: str, folder: str) -> None:
    fault = fault_of(name)
    root = plant(fault, Path(folder))
    with mock.patch.object(sources, "root", return_value=root):
        print(json.dumps(finding(fault)))


if __name__ == "__main__":
    main(*sys.argv[1:])
