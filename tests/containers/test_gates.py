"""Gate: its contents, repr and copies. (contract/test_messages_of_gates.py has its messages.)"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from moe_arrays import assert_equal, normal

import cupy_fp8 as fp8


def test_what_a_gate_shows():
    gate = fp8.topk_gate(normal((1200, 16)), 2, score="sigmoid", return_scores=True, sequences=3)
    assert repr(gate) == "Gate(1,200 tokens x 2 of 16 experts, sigmoid, numpy)"
    assert "<td>1,200</td>" in gate._repr_html_()
    assert "<td>sigmoid</td>" in gate._repr_html_()
    assert (gate.tokens, gate.topk, gate.num_experts) == (1200, 2, 16)
    assert gate.nbytes == 4 * (2 * 2400 + 3 * 16 * 2 + 1200 * 16)
    for again in (copy.copy(gate), copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert_equal(again, gate)
        assert repr(again) == repr(gate)


def test_absent_arrays():
    gate = fp8.topk_gate(normal((12, 16)), 2)
    assert (gate.scores, gate.score_sums, gate.counts.shape) == (None, None, (16,))
    assert gate.nbytes == 4 * (2 * 24 + 16)
    assert_equal(pickle.loads(pickle.dumps(gate)), gate)


def test_options_are_kept_as_they_were_rounded():
    gate = fp8.topk_gate(normal((12, 16)), 2, score="sqrtsoftplus", normalize=False, factor=0.1)
    assert (gate.score, gate.normalize, gate.factor) == ("sqrtsoftplus", False, float(np.float32(0.1)))
    given: Any = np.bool_(False)
    again = dataclasses.replace(gate, factor=np.float64(0.1), normalize=given)
    assert again == gate
    assert type(again.factor) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        gate.factor = 3         # type: ignore[misc]


def test_an_array_that_is_not_aligned():
    gate = fp8.topk_gate(normal((12, 16)), 2)
    odd: Any = np.zeros(gate.weights.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(gate.weights.shape)
    with pytest.raises(ValueError, match=r"^weights: address 0x[0-9a-f]+ is not a multiple of the element"):
        dataclasses.replace(gate, weights=odd)


def test_arrays_of_two_places(device):
    """All arrays of a gate must be where its indices are."""
    gate = fp8.topk_gate(normal((12, 16)), 2, return_scores=True, sequences=2)
    there = device.run.array(gate)
    for name in ("weights", "counts", "scores", "score_sums"):
        with pytest.raises(TypeError, match=rf"^{name}: a numpy array among cupy arrays"):
            dataclasses.replace(there, **{name: getattr(gate, name)})
    if len(device.devices) > 1:
        other = device.array(gate.weights, device.devices[1])
        with pytest.raises(ValueError, match=r"^weights: on GPU "):
            dataclasses.replace(there, weights=other)
