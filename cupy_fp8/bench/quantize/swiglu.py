"""Benchmark rows of SwiGLU with quantisation. A row's shape is that of y."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import asnumpy, bits
from ...formats import FORMATS, bfloat16, float16, float32
from ...layouts import scale_shape
from ...ops.quantize.swiglu import swiglu_backward_quantize, swiglu_quantize
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ...testing import assert_bytes_equal
from .tensor import SIZES, Spec, _normal

_MAIN = SIZES[2]
_ROW, _BOTH = (True, False), (True, True)
_EDGE = 128                                     # of the compared tiles, which are whole blocks
#: The options of gpt-oss' layer besides its bias, and its H.
_GPT_OSS: dict[str, Any] = {"form": "gpt_oss", "clamp": 7.0, "interleaved": True}
_GPT_OSS_SHAPE = (16384, 2880)


class _Biases:
    """The biases of gpt-oss: one for all rows, or one for each expert, with different numbers of rows."""

    def __init__(self, shape: tuple[int, int], source: np.dtype[Any], experts: int | None) -> None:
        self.options: dict[str, Any] = {"bias": _normal((experts or 1, 2 * shape[1]), source)}
        self._sizes: np.ndarray | None = None
        if experts is None:
            self.options["bias"] = self.options["bias"][0]
        else:
            shares = np.random.default_rng(1).dirichlet(np.ones(experts))
            self._sizes = np.random.default_rng(0).multinomial(shape[0], shares)
            self.options["splits"] = backend.cupy().asarray(self._sizes)

    def of_rows(self, first: int, columns: list[slice]) -> dict[str, Any]:
        """The reference's arguments for a tile's rows from `first` on."""
        bias = self.options["bias"]
        parts = asnumpy(backend.cupy().concatenate([bits(bias)[..., part] for part in columns],
                                                   axis=-1)).view(bias.dtype)
        if self._sizes is None:
            return {"bias": parts}
        return {"bias": parts, "splits": np.diff(np.clip(np.cumsum(self._sizes), first, first + _EDGE),
                                                 prepend=first)}


def _swiglu(shape: tuple[int, int], source: np.dtype[Any], recipe: Any, directions: tuple[bool, bool],
            weighted: bool, more: dict[str, Any]) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        rows, columns = shape
        x = _normal((rows, 2 * columns), source)
        probs = cp.random.random(rows, dtype=cp.float32) if weighted else None
        scale = cp.full(1, 4.0, cp.float32) if isinstance(recipe, DelayedScaling) else None
        options: dict[str, Any] = {"rowwise": directions[0], "columnwise": directions[1]}
        out = recipe.empty(shape, like=x, **options)
        options |= {name: value for name, value in more.items() if name != "experts"}
        biases = _Biases(shape, source, more.get("experts")) if "form" in more else None

        def check() -> None:
            """Checks the codes of tiles at the corners and one between."""
            for r, c in ((0, 0), (rows // 2 // _EDGE * _EDGE, columns // 4 // _EDGE * _EDGE),
                         (rows - _EDGE, columns - _EDGE)):
                parts = [slice(at, at + _EDGE) for at in (c, columns + c)]
                if "interleaved" in more:
                    parts = [slice(2 * c, 2 * (c + _EDGE))]
                tile = asnumpy(cp.concatenate([bits(x)[r : r + _EDGE, part] for part in parts],
                                              axis=1)).view(source)
                used, how = scale, recipe
                if isinstance(recipe, CurrentScaling):          # the scale depends on the whole array
                    used, how = 1 / out._any.scale_inv, DelayedScaling(recipe.dtype)
                given = {} if biases is None else biases.of_rows(r, parts)
                if probs is not None:
                    given["probs"] = asnumpy(probs[r : r + _EDGE])
                scale_given = None if used is None else asnumpy(used)
                want = reference.swiglu_quantize(tile, how, scale=scale_given, **options, **given)
                for part, wanted in ((out._row, want._row), (out._column, want._column)):
                    if part is not None and wanted is not None:
                        i, j = (c, r) if part.transposed else (r, c)
                        assert_bytes_equal(bits(part.data)[i : i + _EDGE, j : j + _EDGE].copy(),
                                           bits(wanted.data))

        biased = {} if biases is None else biases.options
        return (lambda: swiglu_quantize(x, recipe, scale=scale, probs=probs, out=out, **options,
                                        **biased)), check

    return make


def _backward(shape: tuple[int, int], recipe: Any, directions: tuple[bool, bool], weighted: bool,
              more: dict[str, Any]) -> Any:
    """shape: grad's shape."""
    def make() -> Any:
        cp = backend.cupy()
        rows, columns = shape
        grad, x = _normal(shape, bfloat16), _normal((rows, 2 * columns), bfloat16)
        probs = cp.random.random(rows, dtype=cp.float32) if weighted else None
        options: dict[str, Any] = {"rowwise": directions[0], "columnwise": directions[1]}
        options |= {name: value for name, value in more.items() if name != "experts"}
        biases = _Biases(shape, bfloat16, more.get("experts")) if "form" in more else None
        biased = {} if biases is None else biases.options
        if isinstance(recipe, DelayedScaling):
            options["scale"] = cp.full(1, 4.0, cp.float32)
        out = swiglu_backward_quantize(grad, x, recipe, probs=probs, **options, **biased)

        def check() -> None:
            """Checks whole rows: the first blocks of each direction."""
            few = slice(0, _EDGE)
            how: dict[str, Any] = {name: asnumpy(a) if name == "scale" else a for name, a in options.items()}
            given = None if probs is None else asnumpy(probs[few])
            some_grad, some_x = (asnumpy(bits(a)[few]).view(bfloat16) for a in (grad, x))
            if biases is not None:
                how |= biases.of_rows(0, [slice(None)])
            want, sums = reference.swiglu_backward_quantize(some_grad, some_x, recipe, probs=given, **how)
            for part, wanted in ((out[0]._row, want._row), (out[0]._column, want._column)):
                if part is not None and wanted is not None:
                    data = bits(part.data)[:, few] if part.transposed else bits(part.data)[few]
                    assert_bytes_equal(data.copy(), bits(wanted.data))
            if sums is not None and out[1] is not None:
                assert_bytes_equal(out[1][few], sums)

        return (lambda: swiglu_backward_quantize(grad, x, recipe, probs=probs, out=out, **options,
                                                 **biased)), check

    return make


def _all() -> Iterator[Spec]:
    def spec(label: str, shape: tuple[int, int], recipe: Any, directions: tuple[bool, bool] = _ROW,
             source: np.dtype[Any] = bfloat16, weighted: bool = False, **more: Any) -> Spec:
        scales = 0
        if isinstance(recipe, (BlockScaling, MXScaling)):
            blocks = recipe.block, recipe.block[::-1]
            scales = sum((4 if isinstance(recipe, BlockScaling) else 1)
                         * prod(scale_shape(shape, block, recipe.scale_layout, swapped))
                         for block, swapped, on in zip(blocks, (False, True), directions, strict=True) if on)
        traffic = prod(shape) * (2 * source.itemsize + sum(directions)) + scales
        return Spec("swiglu_quantize", f"{FORMATS[source].tag}→e4m3 {label}", shape, traffic,
                    _swiglu(shape, source, recipe, directions, weighted, more))

    def backward(label: str, shape: tuple[int, int], recipe: Any, directions: tuple[bool, bool],
                 weighted: bool = False, **more: Any) -> Spec:
        scales = 0 if isinstance(recipe, DelayedScaling) else prod(shape) // 16 * sum(directions)
        traffic = prod(shape) * (6 + 2 * sum(directions)) + scales
        return Spec("swiglu_backward_quantize", f"bf16→e4m3 {label}", shape, traffic,
                    _backward(shape, recipe, directions, weighted, more))

    for shape in SIZES:
        yield spec("per tensor row", shape, DelayedScaling())
        yield spec("per tensor both", shape, DelayedScaling(), _BOTH)
        yield spec("1×128 row weighted", shape, BlockScaling(), weighted=True)
        yield spec("1×128 both weighted", shape, BlockScaling(), _BOTH, weighted=True)
        yield spec("MX row", shape, MXScaling())
        yield spec("MX both", shape, MXScaling(), _BOTH)
    for recipe, directions, weighted, label in (
            (DelayedScaling(), _ROW, False, "per tensor row"),
            (DelayedScaling(), _BOTH, False, "per tensor both"),
            (BlockScaling(), _ROW, True, "1×128 row weighted"),
            (BlockScaling(), _BOTH, True, "1×128 both weighted"), (MXScaling(), _BOTH, False, "MX both")):
        for shape in SIZES[1:3]:
            yield backward(label, shape, recipe, directions, weighted)
    for recipe, label in ((DelayedScaling(), "per tensor both gpt-oss"), (MXScaling(), "MX both gpt-oss")):
        for experts, beside in ((None, ""), (32, ", biases of 32 experts")):
            yield spec(label + beside, _GPT_OSS_SHAPE, recipe, _BOTH, **_GPT_OSS, experts=experts)
            yield backward(label + beside, _GPT_OSS_SHAPE, recipe, _BOTH, **_GPT_OSS, experts=experts)
    yield spec("1×128 row clamped", _MAIN, BlockScaling(), clamp=7.0)
    yield spec("current row", _MAIN, CurrentScaling(pow2_scale=True))
    for source in (float32, float16):
        yield spec("per tensor row", _MAIN, DelayedScaling(), source=source)
        yield spec("1×128 row weighted", _MAIN, BlockScaling(), source=source, weighted=True)


SPECS: tuple[Spec, ...] = tuple(_all())
