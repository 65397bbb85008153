"""Faults to plant in what only the expert layer launches, each in a copy of the sources (mutations.py)."""

from faults import Fault

_BOTH, _QUANTISED, _ADDED = "permute_transpose", "quantize_permute", "grouped_matmul_nt"
_GATHER, _ADDS = "GATHER=1", "ADDS=1"
_EXAMINED = "tests/ops/moe/test_permute.py::test_few_unused_rows"

_EXCHANGE = "tests/distributed/test_exchange.py"
_RANKS = "tests/distributed/test_ranks.py::test_kernels_equal_numpy"
_ALONE = f"{_EXCHANGE}::test_exchanges_alone"

LAYER_FAULTS = (
    # ---- tokens to rows of both directions ----
    Fault("convert/scaling_aware.cu", "strip * (p.down - rest.group_tile) - rest.group_tile",
          "strip * (p.down - rest.group_tile)", _BOTH, define=_GATHER, case="rows", name="rows of nobody"),
    Fault("include/convert/scaling_aware_experts.cuh", "(int)smaller((i64)offset, found.index);", "0;",
          _BOTH, "convert/scaling_aware", _GATHER, name="tiles above"),
    Fault("include/convert/scaling_aware_experts.cuh", "(GATHER ? 0 : start() * p.columns) + first_column",
          "(GATHER ? 0 : start() * p.columns)", _BOTH, "convert/scaling_aware", _GATHER, name="of a strip"),
    Fault("include/convert/scaling_aware_load.cuh", "exists &= token < p.gathered.tokens;", "", _BOTH,
          "convert/scaling_aware", _GATHER, mode="asan", name="an unused row"),
    Fault("include/convert/scaling_aware_load.cuh", "first + row < tile.rows ?", "true ?", _BOTH,
          "convert/scaling_aware", _GATHER, mode="asan", name="rows of the next expert"),
    Fault("ops/moe/permute_transpose.py", "(31 + bits), max(1, divisor)), 31 + bits",
          "(30 + bits), max(1, divisor)), 30 + bits",
          test="tests/ops/moe/test_permute_transpose.py::test_slots_are_divided"),
    # ---- tokens that are quantised on the way to their rows ----
    Fault("moe/quantize_permute.cu", "k == 0 ? first_row : row_of(k + in_block)", "first_row", _QUANTISED,
          case="topk=40"),
    Fault("moe/quantize_permute.cu", "lane - in_block + u * (kLanes / 2)", "lane - in_block", _QUANTISED,
          case="x2064", name="the second unit's scale"),
    Fault("moe/quantize_permute.cu", "column - in_block * kLaneElements < p.columns;",
          "column < p.columns;", _QUANTISED, case="20x1-", name="scales of short blocks"),
    Fault("moe/quantize_permute.cu", "row = p.routes.rows; row <", "row = p.routes.rows + 1; row <",
          _QUANTISED, case="rows=401", name="padding of scales"),
    Fault("moe/quantize_permute.cu", "if (p.rows_probs && pair == 0)", "if (p.rows_probs && pair == 1)",
          _QUANTISED, case="probs=slot", name="probs"),
    Fault("moe/quantize_permute.cu", "index * blocks_of(p) + column / kLength",
          "index * blocks_of(p)", _QUANTISED, name="scales of tokens"),
    Fault("include/scale/block_codes.cuh", "mul_rn(lo, factor), mul_rn(hi, factor)",
          "mul_rn(lo, factor), mul_rn(hi, divisor)", _QUANTISED, "moe/quantize_permute", "DIVIDE=0"),
    Fault("include/moe/routes.cuh", "lane < routes.examined ?", "lane < routes.examined - 1 ?",
          test=_EXAMINED, name="rows that a block examines"),
    # ---- gradients that are added to what was there ----
    Fault("include/matmul/store_tile.cuh", "add(at + 8 * kBoxBytes, sums[4 * i + 2]",
          "add(at + 8 * kBoxBytes, sums[4 * i]", _ADDED, "matmul/wgmma", _ADDS, name="lower rows"),
    Fault("include/matmul/wgmma_copies.cuh", "row < rows ? across : 0", "row < rows ? across - 1 : 0", _ADDED,
          "matmul/wgmma", _ADDS, name="boxes that are added to"),
    Fault("include/matmul/tensor_copy.cuh", "((i64)m.columns - column) * m.element_bytes;",
          "((i64)m.columns - column);", _ADDED, "matmul/wgmma", _ADDS, name="columns of f32"),
    # ---- exchanges of ranks ----
    Fault("include/distributed/windows.cuh",
          "        __threadfence_system();          // What", "        // What", test=_ALONE, mode="tsan",
          name="the fence"),
    Fault("include/distributed/windows.cuh", "host_store_release(flag, value);",
          "host_store_relaxed(flag, value);", test=_ALONE, mode="tsan", name="the flag's order"),
    Fault("include/distributed/windows.cuh", "if (blockIdx.x == 0) tell(1);", "return true;",
          test=f"{_EXCHANGE}::test_a_window_in_use_is_not_written", name="a window in use"),
    Fault("include/distributed/windows.cuh", "== before) {", "!= 0) {",
          test=f"{_EXCHANGE}::test_an_exchange_between_frees_a_window", name="an exchange between"),
    Fault("include/distributed/windows.cuh", "bool fine = !load_relaxed(w.state + kFailed);",
          "bool fine = true;", test=f"{_EXCHANGE}::test_after_a_failure_nothing_is_sent",
          name="after a failure"),
    Fault("include/distributed/windows.cuh", "atomicExch(w.late + rank, number);", "",
          test=f"{_EXCHANGE}::test_a_rank_that_does_not_come_is_named_by_all_others", name="who is late"),
    Fault("include/distributed/windows.cuh", "const i64 first = (i64)piece * kPieceItems;",
          "const i64 first = 0;", test=_RANKS, case="wide rows", name="pieces"),
    Fault("distributed/exchange.cu", "unit(pieces); unit.row < end;",
          "unit(pieces); unit.row + p.windows.ranks < end;", test=_RANKS, case="blocks",
          name="the last token"),
    Fault("distributed/exchange.cu", "[p.windows.me] = p.splits[to];", "[p.windows.me] = p.splits[to] + 1;",
          test=_RANKS, case="fewer", name="a count"),
    Fault("include/distributed/windows.cuh", "(w.staged ? turn.to : w.me) * region", "turn.to * region",
          test=_RANKS, case="blocks", name="whose region"),
    Fault("distributed/exchange.cu", "[to] = load_read_only(p.probs + unit.row);",
          "[to] = load_read_only(p.probs);", test=_RANKS, case="blocks, exact", name="gradients"),
    Fault("distributed/sums.cu", "k < routes.topk; k += 32", "k < routes.topk; k += 1024", test=_RANKS,
          case="many slots", name="slots beyond a warp"),
    Fault("distributed/sums.cu", "to[k] = row < 0 ? 0 : load_read_only(p.probs + row);",
          "to[k] = row < 0 ? 0 : load_read_only(p.probs);", test=_RANKS, case="blocks",
          name="gradients of sums"),
    Fault("distributed/slots.cu", "expert : -1;\n    if (p.back)", "expert : 0;\n    if (p.back)",
          test=_RANKS, case="blocks", name="other ranks' experts"),
    Fault("distributed/slots.cu",
          "while (experts[first] < 0 || (u32)experts[first] / local != rank) first++;", "", test=_RANKS,
          case="blocks", name="the slot that was sent"),
    Fault("distributed/slots.cu", "row - p.offsets[rank]);", "row);", test=_RANKS, case="blocks",
          name="rows that come back"),
)
