"""Faults to plant in what norms are made of (kernels_cu/include/norm and source/norm.cuh), as those of
faults_in_kernels.py are."""

from faults import Fault

_FORWARD, _BACKWARD, _NORM = "norm_quantize", "norm_backward_quantize", "quantize/norm"
_TESTS = "tests/ops/quantize/test_norm_blocks.py"

NORM_FAULTS = (
    Fault("quantize/norm.cu", "if (!is_set(p.call.noop)) norm<RowMx,", "if (blockIdx.x == 0) norm<RowMx,",
          _FORWARD),
    # ---- formulas ----
    Fault("include/source/norm.cuh", "mul_rn(normed(z, of), of.mean_product)", "mul_rn(z, of.mean_product)",
          _BACKWARD, _NORM),
    Fault("include/source/norm.cuh", "quick_quotient(sum, call.columns_f32, call.columns_inverse)",
          "mul_rn(sum, call.columns_inverse)", _BACKWARD, _NORM, "PATH=rows", case="kind=layer",
          name="a mean"),
    Fault("include/source/norm.cuh", "kRms ? rest : sub_rn(rest, of.mean_grad)", "rest", _BACKWARD, _NORM,
          case="layer", name="the mean of the gradient"),
    Fault("include/source/norm.cuh", "w = add_rn(w, call.weight_offset);", "w = add_rn(w, 0.5f);", _FORWARD,
          _NORM, "IN=bf16", name="the offset of weights"),
    Fault("include/source/norm.cuh", "if (call.rounds()) round_eight<IN>(z);", "", _FORWARD, _NORM,
          "IN=bf16", case="round_through", name="sums that are rounded"),
    Fault("include/source/norm.cuh", "call.has(SourceCall::kRoundBf16)) round_eight<bf16>(y);",
          "call.has(SourceCall::kRoundBf16)) round_eight<f16>(y);", _FORWARD, _NORM, "IN=bf16",
          case="round_through", name="what y is rounded to"),
    Fault("include/source/norm.cuh", "if (i >= count) values[i] = 0.0f;", "if (i > count) values[i] = 0.0f;",
          _FORWARD, _NORM, "PATH=any", case="bias", name="elements that do not exist"),
    # ---- path any ----
    Fault("include/norm/statistics.cuh", "(round * kStatisticsThreads + threadIdx.x) * 8;",
          "(round * kStatisticsThreads + threadIdx.x) * 4;", _FORWARD, _NORM),
    Fault("include/norm/statistics.cuh", "for (int w = 0; w < kWarps; w++) total",
          "for (int w = 0; w < kWarps - 1; w++) total", _BACKWARD, _NORM, name="sums of columns"),
    # ---- path rows ----
    Fault("include/norm/rows.cuh", "for (int step = 4; step < 32; step *= 2)",
          "for (int step = 8; step < 32; step *= 2)", _BACKWARD, _NORM, "PATH=rows"),
    Fault("include/norm/value_rows.cuh", "add_residual<true>(call, residual, at.first() + at.at(c)",
          "add_residual<true>(call, residual, at.at(c)", _FORWARD, _NORM, "PATH=rows",
          case="return_residual=True"),
    Fault("include/norm/rows.cuh", "row += call.row_step * (call.rows_per_block - 1);",
          "row += call.row_step * call.rows_per_block;", test=f"{_TESTS}::test_rows_one_below_the_other",
          name="rows that have blocks of their own"),
    Fault("include/norm/rows.cuh", "call.rows + blockIdx.x; row < call.all_rows;",
          "call.rows + blockIdx.x; row < call.all_rows - 1;", _FORWARD, _NORM, "PATH=rows",
          name="rows that have only scales"),
    Fault("include/norm/gradient_rows.cuh", "v[i] = add_rn(lower[i], v[i]);",
          "v[i] = add_rn(v[i], v[i]);", _BACKWARD, _NORM, "PATH=rows"),
    Fault("include/norm/gradient_rows.cuh", "rest & 1; rest >>= 1, level", "rest & 3; rest >>= 2, level",
          _BACKWARD, _NORM, "PATH=rows", name="levels of sums"),
    Fault("include/norm/row_cast.cuh", "largest = raised_by(largest, y[c]);", "largest = raised_by(0, y[c]);",
          _FORWARD, _NORM, "PATH=rows"),
    Fault("include/norm/row_blocks.cuh", "scales && at.has_row(row)", "scales && row == 0", _BACKWARD, _NORM,
          "PATH=rows"),
    Fault("include/norm/row_mx.cuh", "byte << lane / 4 % 4 * 8", "byte << lane / 4 % 2 * 8", _FORWARD, _NORM,
          "PATH=rows", case="MXScaling"),
    Fault("include/norm/arrays.cuh", "(patch.row + r) * p.call.columns", "patch.row * p.call.columns",
          _BACKWARD, _NORM, "PATH=any"),
    Fault("include/norm/arrays.cuh", "p.dx + at.first() + at.at(c)", "p.dx + at.at(c)", _BACKWARD, _NORM,
          "PATH=rows", name="the next rows"),
    # ---- path plain ----
    Fault("include/norm/ahead.cuh", "step <= kAhead + call.parts", "step <= kAhead",
          test=f"{_TESTS}::test_a_block_that_waits_in_vain_finds_statistics", name="rows that others lack"),
    Fault("include/norm/ahead.cuh", "(u32)(found[i] >> 32) == launch", "true",
          test=f"{_TESTS}::test_a_block_that_waits_in_vain_finds_statistics",
          name="statistics of another launch"),
    Fault("include/norm/ahead.cuh", "atomicExch(&progress.launches, launch);", "",
          test=f"{_TESTS}::test_a_block_that_waits_in_vain_finds_statistics", name="the number of a launch"),
    Fault("include/norm/tiles.cuh", "add_rn(own[i].sum(), __shfl_xor_sync(~0u, own[i].sum(), 16))",
          "own[i].sum()", _BACKWARD, _NORM, "PATH=plain", name="rows of sums"),
    Fault("include/norm/drivers.cuh", "patches<OfPatches>(p, call, more...);",
          "blockIdx.x ? 0 : patches<OfPatches>(p, call, more...);", _FORWARD, _NORM, "PATH=any"),
)
