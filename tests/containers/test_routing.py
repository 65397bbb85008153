"""Routing: errors of its constructor, repr and copies."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from moe_arrays import assert_equal

import cupy_fp8 as fp8
from cupy_fp8.cases.moe.route import indices, mask


def test_arrays_that_make_no_routing():
    r = fp8.route(indices(9, 2, 4), num_experts=4)
    wrong: Any
    for name, wrong in (("splits", r.splits.astype(np.int64)), ("offsets", r.offsets[1:]),
                        ("sources", r.sources[::2]), ("row_map", np.asfortranarray(r.row_map)),
                        ("experts", r.row_map[:3])):
        with pytest.raises(ValueError, match=f"^{name}: expected a C-contiguous"):
            dataclasses.replace(r, **{name: wrong})
    with pytest.raises(ValueError, match=r"^row_map: expected shape \[T, topk\]"):
        dataclasses.replace(r, row_map=r.splits)
    wide: Any = np.zeros((1, 1025), np.int32)
    odd: Any = np.zeros(r.row_map.nbytes + 1, np.uint8)[1:].view(np.int32).reshape(r.row_map.shape)
    with pytest.raises(ValueError,
                       match=r"^row_map: address 0x[0-9a-f]+ is not a multiple of the element size 4"):
        dataclasses.replace(r, row_map=odd)
    with pytest.raises(ValueError, match=r"^Routing: expected at most 1024 experts"):
        dataclasses.replace(r, row_map=wide)
    with pytest.raises(dataclasses.FrozenInstanceError):
        r.rows = 3              # type: ignore[misc]


def test_what_a_routing_shows():
    r = fp8.route(mask(1000, 8, 2), topk=2, align=16)
    assert repr(r) == "Routing(1,000 tokens x 2 slots -> 2,112 rows of 8 experts, aligned to 16, numpy)"
    assert "<td>2,112</td>" in r._repr_html_()
    assert "<td>mask</td>" in r._repr_html_()
    assert r.nbytes == 4 * (2000 + 2000 + 8 + 8 + 2112) + 8 * 9
    for again in (copy.copy(r), copy.deepcopy(r), pickle.loads(pickle.dumps(r))):
        assert_equal(again, r)
        assert repr(again) == repr(r)
