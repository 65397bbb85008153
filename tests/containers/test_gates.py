"""Gate: what its constructor refuses, what it shows, copies and archives of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8

GATE = fp8.topk_gate(np.array([[0, 2, 1], [3, 1, 2], [1, 0, 2], [5, 6, 7]], np.float32), 2,
                     score="sigmoid", scores=True, sequences=2, factor=1.5)

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"indices": GATE.indices.astype(np.int64)}, "indices: expected a C-contiguous int32 array"),
    "slots": ({"indices": np.zeros((4, 65), np.int32)}, "indices: expected shape [T, k] with k of at most"),
    "axes": ({"indices": GATE.indices[0]}, "indices: expected shape [T, k]"),
    "weights": ({"weights": GATE.weights[:3]}, "weights: expected a C-contiguous float32 array of shape (4,"),
    "no experts": ({"counts": np.zeros((2, 0), np.int32)}, "counts: expected shape [E] or [S, E]"),
    "many experts": ({"counts": np.zeros((2, 1025), np.int32)}, "counts: expected shape [E] or [S, E]"),
    "sequences": ({"counts": np.zeros((3, 3), np.int32)}, "counts: expected 4 tokens in sequences"),
    "sums without": ({"counts": np.zeros(3, np.int32)}, "score_sums: expected with counts [S, E]"),
    "no sums": ({"score_sums": None}, "score_sums: expected with counts [S, E]"),
    "sums": ({"score_sums": np.zeros((2, 4), np.float32)}, "score_sums: expected a C-contiguous float32"),
    "scores": ({"scores": np.zeros((4, 4), np.float32)}, "scores: expected a C-contiguous float32"),
    "score": ({"score": "relu"}, "score: expected one of ('softmax', 'sigmoid', 'sqrtsoftplus')"),
    "factor": ({"factor": float("inf")}, "factor: expected a finite float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    change, message = WRONG[name]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        dataclasses.replace(GATE, **change)


def test_options_of_wrong_types():
    for change, message in (({"normalize": 3}, "normalize: expected True or False"),
                            ({"factor": "1"}, "factor: expected a number")):
        with pytest.raises(TypeError, match="^" + message):
            dataclasses.replace(GATE, **change)


def test_what_it_shows():
    assert repr(GATE) == "Gate(4 tokens x 2 of 3 experts, sigmoid, numpy)"
    assert (GATE.tokens, GATE.topk, GATE.num_experts, GATE.nbytes) == (4, 2, 3, 160)
    assert "sigmoid" in GATE._repr_html_()


def test_copies_and_archives(tmp_path):
    assert copy.deepcopy(GATE) == pickle.loads(pickle.dumps(GATE)) == GATE
    fp8.save(tmp_path / "gate.npz", gate=GATE)
    assert fp8.load(tmp_path / "gate.npz", like=np)["gate"] == GATE
