"""What ExpertParallel refuses before anything is sent, and how it ends."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from rank_loops import NAMED, of_ranks

import cupy_fp8 as fp8
from cupy_fp8.cli.selftest_ranks import parallel
from cupy_fp8.distributed import ExpertParallel, RankError

FINE: dict[str, Any] = {"num_experts": 4, "max_tokens": 8, "hidden": 128, "topk": 2, "like": np}
IDS = np.array([[0, 1], [3, -1]], np.int32)


def alone(**options: Any) -> ExpertParallel:
    (world,) = fp8.distributed.local(1)
    return ExpertParallel(world, **{**FINE, **options})


@pytest.mark.parametrize(("options", "message"), [
    ({"num_experts": 0}, "num_experts: expected 1 or more, got 0"),
    ({"max_tokens": -1}, "max_tokens: expected 1 or more, got -1"),
    ({"num_experts": 2000}, "num_experts, topk: expected at most 1024, got 2000 and 2"),
    ({"recipe": fp8.CurrentScaling()}, "recipe: each rank would find a scale of its own"),
    ({"recipe": fp8.BlockScaling((128, 128))}, r"recipe: expected blocks \(1, n\)"),
    ({"reduce": "sum"}, "reduce: "), ({"transport": "mpi"}, "transport: "),
    ({"align": 3}, "align: expected a power of two from 1 to 128, got 3"),
    ({"rows": 0}, "rows: expected 1 or more, got 0"),
    ({"num_sms": 0}, "num_sms: expected 1 or more, got 0"),
    ({"max_tokens": 1 << 30},
     r"max_tokens: 1 ranks with 1073741824 tokens of 2 slots are more slots than int32")])
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        alone(**options)


@pytest.mark.parametrize(("options", "message"), [
    ({"recipe": "mx"}, "recipe: expected a BlockScaling, MXScaling, DelayedScaling"),
    ({"topk": 1.5}, "topk: "), ({"dtype": "float8_e4m3fn"}, "dtype: "), ({"world": 4},
                                                                         "world: expected a World")])
def test_types_of_options(options, message):
    (world,) = fp8.distributed.local(1)
    with pytest.raises(TypeError, match=message):
        ExpertParallel(**{"world": world, **FINE, **options})


def test_experts_that_do_not_divide():
    def refused(world: Any) -> None:
        with pytest.raises(ValueError, match="num_experts: expected a multiple of the 3 ranks, got 4"):
            ExpertParallel(world, **FINE)

    of_ranks(3, refused)


@pytest.mark.parametrize("name", ["max_tokens", "hidden", "topk", "num_experts", "rows", "align", "reduce",
                                  "dtype",
                                  "recipe"])
def test_ranks_that_do_not_agree_are_told(name):
    other = {"max_tokens": 9, "hidden": 256, "topk": 1, "num_experts": 8, "rows": 512, "align": 16,
             "reduce": "exact", "dtype": np.float32, "recipe": None}[name]

    def told(world: Any) -> str:
        with pytest.raises(ValueError, match="all ranks need the same") as caught:
            ExpertParallel(world, **{**FINE, **({name: other} if world.rank else {})})
        return str(caught.value)

    assert all(text.startswith("exact: " if name == "reduce" else f"{name}: ") or name in ("topk",
                                                                                           "max_tokens",
               "num_experts", "align") for text in of_ranks(2, told))


@pytest.mark.parametrize(("ids", "error", "message"), [
    (np.zeros((2, 3), np.int32), ValueError, r"topk_ids: expected shape \(T, 2\) with T up to max_tokens=8"),
    (np.zeros((9, 2), np.int32), ValueError, r"max_tokens=8, got \(9, 2\)"),
    (np.zeros(4, np.int32), ValueError, r"got \(4,\)"),
    (np.zeros((2, 2), np.float32), TypeError, "topk_ids: expected int32 or int64, got float32"),
    ([[0, 1]], TypeError, "topk_ids: expected a numpy.ndarray"),
    (np.array([[0, 4]], np.int32), ValueError,
     r"expected experts 0 to 3, or -1 for none, got 4 at \[0, 1\]")])
def test_ids(ids, error, message):
    with alone() as ep, pytest.raises(error, match=message):
        ep.route(ids)


def test_what_is_dispatched():
    x = np.ones((2, 128), np.float32)
    with alone() as ep:
        routing = ep.route(IDS)
        for wrong, error, message in (
                (x[:1], ValueError, r"x: expected shape \(2, 128\), got \(1, 128\)"),
                (x.astype(np.int32), TypeError, "x: expected bfloat16, float16, float32, got int32"),
                (fp8.quantize_tensor(x), ValueError, "x: expected row-wise data of BlockScaling"),
                (fp8.quantize_mx(x), ValueError, "x: expected row-wise data of BlockScaling")):
            with pytest.raises(error, match=message):
                ep.dispatch(wrong, routing)
            with pytest.raises(error, match=message.replace("x: ", "grad: ")):
                ep.combine_backward(wrong, routing)
        with pytest.raises(ValueError, match=r"probs: expected a C-contiguous array of shape \(2, 2\)"):
            ep.dispatch(x, routing, np.ones((2, 1), np.float32))
        with pytest.raises(TypeError, match="probs: expected float32, got float64"):
            ep.dispatch(x, routing, np.ones((2, 2)))
        with pytest.raises(TypeError, match="routing: expected what route"):
            ep.dispatch(x, fp8.route(IDS, num_experts=4))  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="rows: expected bfloat16, got float32"):
            ep.combine(np.ones((routing.rows, 128), np.float32), routing)
        with pytest.raises(ValueError, match=r"dx_rows: expected a C-contiguous array of shape"):
            ep.dispatch_backward(fp8.zeros((3, 128), fp8.bfloat16, like=np), None, routing)
    with alone(recipe=None) as ep:
        routing = ep.route(IDS)
        with pytest.raises(TypeError,
                           match="x: expected an array of bfloat16, since recipe=None, got Quantized"):
            ep.dispatch(fp8.quantize_block(x), routing)
    with alone(recipe=fp8.DelayedScaling()) as ep, pytest.raises(TypeError,
                       match="x: expected a Scaled, quantised with the scale that all ranks have"):
        ep.dispatch(x, ep.route(IDS))


def test_routings_of_others():
    with alone() as ep, alone(max_tokens=9) as other:
        routing = other.route(IDS)
        with pytest.raises(ValueError, match="routing: belongs to another ExpertParallel"):
            ep.dispatch(np.ones((2, 128), np.float32), routing)
        with pytest.raises(ValueError, match="out: expected a RankRouting of 2 tokens"):
            ep.route(IDS, out=ep.route(IDS[:1]))


def test_one_scale_that_all_ranks_have():
    """Codes move, and rows keep the scale."""
    q = fp8.quantize_tensor(np.array([[1, 2] * 64, [3, 4] * 64], np.float32), 2.0)
    with alone(recipe=fp8.DelayedScaling(), align=1) as ep:
        rows, _ = ep.dispatch(q, ep.route(IDS))
    assert rows.block is None
    assert rows.scale_inv is q.scale_inv
    assert fp8.bytes_equal(rows.data[:2], q.data[np.array([0, 0])])


def test_rows_that_do_not_suffice():
    with alone(rows=128) as ep, pytest.raises(ValueError, match="rows: expected at least the 384"):
        ep.route(IDS)


def test_closed_twice_and_then_used():
    ep = alone()
    ep.close()
    ep.close()
    assert repr(ep) == "ExpertParallel(rank 0 of 1, 4 experts, 8 tokens x 128, closed)"
    with pytest.raises(ValueError, match="this ExpertParallel is closed"):
        ep.route(IDS)


def test_not_closed():
    held = [alone()]
    with pytest.warns(ResourceWarning, match="was not closed: its windows stay until the process ends"):
        held.clear()


def test_a_rank_that_fails_leaves_the_others_with_an_error():
    case = NAMED["blocks"]

    def fails(world: Any) -> Any:
        with parallel(world, case, np) as ep:
            if world.rank == 1:
                raise KeyError("lost")
            with pytest.raises(RankError) as caught:
                ep.route(np.zeros((1, case.topk), np.int32))
            with pytest.raises(RankError, match="unusable since a rank did not come"):
                ep.route(np.zeros((1, case.topk), np.int32))
            return caught.value

    with pytest.raises(KeyError, match="lost"):
        of_ranks(3, fails)


def test_ranks_of_another_version_are_told(monkeypatch):
    monkeypatch.setattr("cupy_fp8.kernels.sources.digest", lambda: threading.current_thread().name)

    def told(world: Any) -> None:
        with pytest.raises(ValueError, match=r"kernels: rank . has 'rank .', rank . 'rank .'"):
            ExpertParallel(world, **FINE)

    of_ranks(2, told)
