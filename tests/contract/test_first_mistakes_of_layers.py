"""First mistakes with norms, activations, gates, experts, ranks and checkpoints, and spellings from before
0.1.0 (test_first_mistakes.py has those with casts and products): the message says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mistakes import expect_advice

import cupy_fp8 as fp8

F8: Any = fp8                       # whose types mypy does not compare
X = np.linspace(-3, 3, 64 * 256, dtype=np.float32).reshape(64, 256)
MX = fp8.quantize_mx(X)
RANKS: Any = {"num_experts": 4, "max_tokens": 2, "hidden": 128, "topk": 1}

MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # ---- norms, activations and gates ----
    "a norm of [B, S, H]": (lambda: F8.norm_quantize(X[None], X[0], fp8.MXScaling()), ValueError,
                            "x.reshape(-1, x.shape[-1]) is a matrix"),
    "a norm without a recipe": (lambda: F8.norm_quantize(X, X[0], 1e-6), TypeError, "recipe: expected a "),
    "a norm with a class": (lambda: F8.norm_quantize(X, X[0], fp8.MXScaling), TypeError, "write MXScaling()"),
    "kind='rmsnorm'": (lambda: F8.norm_quantize(X, X[0], fp8.MXScaling(), kind="rmsnorm"), ValueError,
                       "got 'rmsnorm'; did you mean rms?"),
    "kind='LayerNorm'": (lambda: F8.norm_quantize(X, X[0], fp8.MXScaling(), kind="LayerNorm"), ValueError,
                         "did you mean layer?"),
    "a norm in rows": (lambda: F8.norm_quantize(X, X[0], fp8.BlockScaling((1, None))), ValueError,
                       "quantize_block has the others"),
    "a bias of RMSNorm": (lambda: F8.norm_quantize(X, X[0], fp8.MXScaling(), bias=X[0]), ValueError,
                          "kind='layer' has"),
    "a norm of a result": (lambda: F8.norm_quantize(MX, X[0], fp8.MXScaling()), TypeError,
                           "x.dequantize() has its values"),
    "an activation of [B, S, H]": (lambda: F8.activation_quantize(X[None], fp8.MXScaling()), ValueError,
                                   "x.reshape(-1, x.shape[-1]) is a matrix"),
    "SwiGLU of [B, S, H]": (lambda: F8.swiglu_quantize(X[None], fp8.MXScaling()), ValueError,
                            "x.reshape(-1, x.shape[-1]) is a matrix"),
    "kind='swish'": (lambda: F8.activation_quantize(X, fp8.MXScaling(), kind="swish"), ValueError,
                     "did you mean silu?"),
    "probs of silu": (lambda: F8.activation_quantize(X, fp8.MXScaling(), probs=X[:, 0]), ValueError,
                      "the gated kinds"),
    "logits as assignment": (lambda: F8.route(X, num_experts=2), TypeError,
                             'assignment.astype("int32") converts it'),
    "indices as routing": (lambda: F8.permute(X, np.zeros((64, 1), np.int32)), TypeError,
                           "cupy_fp8.route makes one"),
    "k as a float": (lambda: F8.topk_gate(X, 2.0), TypeError, "k: expected an integer"),
    # ---- experts and ranks ----
    "MX experts": (lambda: F8.moe.Experts(X, X, fp8.MXScaling()), TypeError,
                   "no products of groups of MX blocks"),
    "experts with a class": (lambda: F8.moe.Experts(X, X, fp8.BlockScaling), TypeError,
                             "write BlockScaling()"),
    "ranks without a world": (lambda: F8.distributed.ExpertParallel(2, **RANKS), TypeError,
                              "world: expected a World, as init() makes it, got int"),
    "all ranks as a world": (lambda: F8.distributed.ExpertParallel(fp8.distributed.local(1), **RANKS),
                             TypeError, "got Local; its run() gives each rank one"),
    "local('2')": (lambda: F8.distributed.local("2"), TypeError, "size: expected an integer, got '2'"),
    "from_mpi(MPI)": (lambda: F8.distributed.from_mpi(None), TypeError, "such as MPI.COMM_WORLD"),
    # ---- spellings of before ----
    "scores=": (lambda: F8.topk_gate(X, 2, scores=True), TypeError, "'scores'; write return_scores="),
    "dtype_out=": (lambda: F8.moe.Experts(X, X, dtype_out="float32"), TypeError, "'dtype_out'; write dtype="),
    ".dtype_out": (lambda: F8.moe.Experts.dtype_out, AttributeError, "did you mean dtype?"),
    "cast_transpose(transposed=)": (lambda: F8.cast_transpose(X, transposed=False), TypeError,
                                    "write quantize_tensor(x, columnwise=True, transposed=False)"),
    "MXScaling by position": (lambda: F8.MXScaling("e4m3", "floor"), TypeError, "write mode='floor'"),
    "DelayedScaling by position": (lambda: F8.DelayedScaling("e4m3", 1, 16), TypeError,
        "DelayedScaling: expected dtype alone by position; write margin=1, history_len=16"),
    "CurrentScaling by position": (lambda: F8.CurrentScaling("e4m3", 0.1), TypeError, "write eps=0.1"),
    "BlockScaling by position": (lambda: F8.BlockScaling((1, 128), "e4m3", 0.1), TypeError,
        "expected block and dtype alone by position; write eps=0.1"),
    # ---- checkpoints ----
    "arrays in a list": (lambda: F8.io.save_safetensors("w.safetensors", [X]), TypeError,
                         "expected a dict by name"),
    "a recipe in a file": (lambda: F8.io.save_safetensors("w.safetensors", {"w": fp8.MXScaling()}), TypeError,
                           "a recipe quantises by MXScaling().quantize(x)"),
    "no such checkpoint": (lambda: F8.io.load_safetensors("nowhere"), FileNotFoundError,
                           "nowhere: no such file or folder"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_the_message_teaches(what, tmp_path, monkeypatch):
    expect_advice(MISTAKES[what], tmp_path, monkeypatch)
