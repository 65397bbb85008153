"""Benchmark rows of the ops on tensor lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import backend, reference
from ...arrays import Array, asnumpy, bits
from ...formats import bfloat16
from ...ops.quantize.tensor_list import multi_cast_transpose, multi_quantize
from ...ops.scales.amax import compute_amax
from ...ops.scales.scale import compute_scale
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ...results import Quantized
from ...testing import assert_bytes_equal
from .tensor import Spec, _normal, _sample

#: Experts' weights, as (number, shape). Small ones follow, with which the time for finding each block's
#: matrix would show.
_GROUPS = ((8, (2048, 5120)), (32, (2048, 5120)), (64, (2048, 5120)), (8, (4096, 7168)), (256, (2048, 1408)),
           (128, (256, 256)))
_SCALE = 0.37


def _weights(number: int, shape: tuple[int, int]) -> list[Array]:
    """The weights. A large list repeats four different ones, since random numbers take additional memory."""
    some = [_normal(shape, bfloat16) for _ in range(min(number, 4))]
    return [bits(some[i % len(some)]).copy().view(bfloat16) for i in range(number)]


def _check(x: Array, q: Quantized, scale: Any) -> None:
    """Checks sampled rows in both directions."""
    picked = _sample(x.shape[0])
    want = reference.quantize_tensor(asnumpy(x[picked]), asnumpy(scale))
    for part, swapped in ((q._row, False), (q._column, True)):
        if part is not None:
            data = bits(part.data)
            assert_bytes_equal(asnumpy(data[:, picked].T if swapped else data[picked]), bits(want.data))


def _make(number: int, shape: tuple[int, int], recipe: Any, columnwise: bool) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        xs = _weights(number, shape)
        outputs = [recipe.empty(shape, columnwise=columnwise, like=x) for x in xs]
        scales = cp.full(number, _SCALE, cp.float32) if isinstance(recipe, DelayedScaling) else None
        amaxes = None if scales is None else cp.zeros(number, cp.float32)

        def call() -> Any:
            if scales is not None and columnwise:
                return multi_cast_transpose(xs, scales, amaxes=amaxes, outputs=outputs)
            return multi_quantize(xs, recipe, columnwise=columnwise, scales=scales, amaxes=amaxes,
                                  outputs=outputs)

        def check() -> None:
            for i in (0, number // 2, number - 1):
                if isinstance(recipe, (BlockScaling, MXScaling)):
                    again = recipe.quantize(xs[i], columnwise=columnwise)
                    for mine, theirs in zip(outputs[i].parts.values(), again.parts.values(), strict=True):
                        assert_bytes_equal(mine.data, theirs.data)
                        assert_bytes_equal(mine.scale_inv, theirs.scale_inv)
                    continue
                scale = compute_scale(compute_amax(xs[i])) if scales is None else scales[i:i + 1]
                _check(xs[i], outputs[i], scale)
                if amaxes is not None:
                    assert_bytes_equal(amaxes[i:i + 1], compute_amax(xs[i]))

        return call, check

    return make


def _all() -> Iterator[Spec]:
    def spec(op: str, label: str, number: int, shape: tuple[int, int], recipe: Any, columnwise: bool,
             scales: float = 0) -> Spec:
        """scales: their bytes for each element and direction."""
        size = number * shape[0] * shape[1]
        moved = int(size * (2 + (1 + columnwise) * (1 + scales)))
        return Spec(op, f"{label}, group", (number, *shape), moved, _make(number, shape, recipe, columnwise))

    for number, shape in _GROUPS:
        yield spec("multi_cast_transpose", "bf16→e4m3 +amax", number, shape, DelayedScaling(), True)
        yield spec("multi_quantize", "bf16→e4m3 current both", number, shape, CurrentScaling(), True)
    yield spec("multi_quantize", "bf16→e4m3 row +amax", *_GROUPS[1], DelayedScaling(), False)
    for label, recipe, scales in (("1×128", BlockScaling(), 4 / 128),
                                  ("MX", MXScaling(scale_layout="swizzled"), 1 / 32)):
        for columnwise in (True, False):
            yield spec("multi_quantize", f"bf16→e4m3 {label} {'both' if columnwise else 'row'}", *_GROUPS[2],
                       recipe, columnwise, scales)
    yield spec("multi_quantize", "bf16→e4m3 MX row", *_GROUPS[-1], MXScaling(), False, 1 / 32)


SPECS: tuple[Spec, ...] = tuple(_all())
