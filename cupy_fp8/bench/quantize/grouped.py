"""Samples of group_quantize: groups, compared with the recipe's result for each separately."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import asnumpy, bits, zeros
from ...formats import float32
from ...grouped import Grouped
from ...layouts import round_up
from ...testing import assert_bytes_equal
from ..data import sample


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Grouped) -> None:
    x, splits, recipe = args
    host, align = asnumpy(splits), options.get("align", 1)
    starts, aligned = np.cumsum(host) - host, [round_up(int(size), align) for size in host]
    assert asnumpy(out.splits).tolist() == aligned
    for g in sample(len(host), 3):
        own: dict[str, Any] = {name: options[name] for name in ("rowwise", "columnwise") if name in options}
        group = zeros((aligned[g], x.shape[1]), x.dtype, like=x)
        bits(group)[: host[g]] = bits(x)[starts[g] : starts[g] + host[g]]
        if "scales" in options:
            own["scale"] = options["scales"][g : g + 1]
        if "amax" in options:
            own["amax"] = zeros((1,), float32, like=x)
        assert_bytes_equal(out[g], recipe.quantize(group, **own))
        assert "amax" not in own or float(own["amax"][0]) == float(options["amax"][g])


COMPARE = {"group_quantize": _compare}
