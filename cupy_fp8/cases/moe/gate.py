"""Cases of the gate, its gradient and its losses. A case's shape is [T, E], that of the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray, asnumpy
from ...formats import INPUT_DTYPES, bfloat16, float16, float32
from ...gate import SCORES, Gate
from ...ops.moe import gate, gate_losses
from ..base import Case, laid_out, maker, source, values
from ..registry import Arguments, HostCalls, Registration, Timed, register

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)
#: numbers of experts: each kind of lane, tails, rows without wide loads, and the largest number
_EXPERTS = (1, 2, 8, 13, 32, 33, 60, 64, 72, 128, 160, 256, 264, 384, 512, 1000, 1024)


def turn(choices: tuple[Any, ...], i: int) -> Any:
    """Return the choices in turn."""
    return choices[i % len(choices)]


def _logits(case: Case) -> np.ndarray:
    """Return logits. 'normal': without the large columns of other cases, with which softmax would choose one
    expert in every row. 'equal': few different values, so that there are ties. 'masked': NaN and -Inf among
    normal ones, and rows of nothing else. 'wide': from -200 to 200."""
    kinds = {"normal": _even, "equal": _equal, "masked": _masked, "wide": _wide}
    if case.values not in kinds:
        return source(case)
    made = kinds[case.values](asnumpy(values("normal", case.shape, _FLOAT32)))
    return laid_out(reference.astype(made, case.dtype), case.layout)


def _even(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) > 6, x / np.float32(60), x).astype(np.float32)


def _equal(x: np.ndarray) -> np.ndarray:
    return np.round(np.clip(x, -2, 2)).astype(np.float32)


def _masked(x: np.ndarray) -> np.ndarray:
    kind = np.arange(x.size).reshape(x.shape) * 7919 % 11
    x = np.where(kind < 4, np.float32(-np.inf), np.where(kind < 6, np.float32(np.nan), x))
    for row, only in ((0, -np.inf), (1, np.nan)):
        x[row::8] = np.where(kind[row::8] < 7, np.float32(only), np.float32(-np.inf if row == 0 else np.nan))
    x[2::8, 1:] = np.float32(np.nan)
    if x.shape[1]:
        x[3::8, 0] = np.float32(np.inf)
    return x


def _wide(x: np.ndarray) -> np.ndarray:
    return (x * np.float32(60)).astype(np.float32)


def _bias(experts: int, kind: str = "normal") -> np.ndarray:
    """Return biases. 'normal': of the size of scores; 'bits': any pattern."""
    bias = values(kind, (experts,), _FLOAT32, 5)
    return bias * np.float32(0.25) if kind == "normal" else bias


def _replayed(tokens: int, k: int, experts: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return arbitrary experts, also none or repeated ones."""
    return np.random.default_rng(4).integers(-1, experts, (tokens, k)).astype(dtype)


def _inputs(case: Case) -> Arguments:
    options = dict(case.options)
    tokens, experts = case.shape
    k = options.pop("k")
    if "bias" in options:
        options["bias"] = _bias(experts, options["bias"])
    if "indices" in options:
        options["indices"] = _replayed(tokens, k, experts, options["indices"])
    return (_logits(case), k), options


def _gate_of(case: Case) -> Gate:
    """Return a Gate with indices that do not depend on logits; what its gradient does not read is left
    empty."""
    given = {"k": 1, "score": "softmax", "normalize": True, "factor": 1.0, "sequences": None, **case.options}
    (tokens, experts), k = case.shape, given["k"]
    if "indices" in given:
        chosen = _replayed(tokens, k, experts, given["indices"]).astype(_INT32)
    else:
        first = np.random.default_rng(4).integers(0, experts, (tokens, 1))
        chosen = ((first + np.arange(k) * max(1, experts // k)) % experts).astype(_INT32)
        chosen[first[:, 0] % 11 == 5, -1] = -1
    counts = np.zeros((given["sequences"] or 1, experts), _INT32)
    sums = counts.astype(np.float32) if given["sequences"] else None
    return Gate(chosen, np.zeros(chosen.shape, np.float32), counts if given["sequences"] else counts[0],
                None, sums, given["score"], given["normalize"], given["factor"])


def _backward_inputs(case: Case) -> Arguments:
    options, given = case.options, _gate_of(case)
    grad = values(options.get("grads", "normal"), given.indices.shape, _FLOAT32, 6)
    if "shares" not in options:
        return (grad, _logits(case), given), {}
    return (grad, _logits(case), given), {"score_grads": values(options["shares"], given.counts.shape,
                                                                _FLOAT32, 7)}


def _balance_inputs(case: Case) -> Arguments:
    options = dict(case.options)
    coeff, k = options.pop("coeff", 0.01), options.pop("k")
    return (reference.topk_gate(asnumpy(_logits(case)), k, **options), coeff), {}


def _z_inputs(case: Case) -> Arguments:
    return (_logits(case), case.options.get("coeff", 0.001)), {}


def _cases() -> Iterator[Case]:
    case = maker("topk_gate", "normal")
    # few blocks first, for callers that take only a few cases: every kind of score
    for i, score in enumerate(SCORES):
        yield case(INPUT_DTYPES[i], (70, 64), k=4, score=score, sequences=2, return_scores=True)
        yield case(float32, (40, 24), "masked", k=6, score=score, bias="normal", groups=4, group_topk=2)
    for i, (experts, score) in enumerate(product(_EXPERTS, SCORES)):
        k = min(experts, turn((1, 2, 8, 6), i))
        dtype = turn(INPUT_DTYPES, i + i // 3)
        yield case(dtype, (37, experts), k=k, score=score, sequences=1, return_scores=i % 2 == 0)
        yield case(dtype, (21, experts), "bits", k=k, score=score, bias=turn(("normal", "bits"), i),
                   normalize=i % 4 < 2, factor=2.5)
        yield case(dtype, (24, experts), "masked", k=k, score=score, sequences=3, return_scores=True)
        yield case(dtype, (24, experts), "equal", k=min(experts, 9), score=score)
    for dtype, score, of_lane in product(INPUT_DTYPES, SCORES, gate.experts_of_lane()):
        yield case(dtype, (5, 30 * of_lane), k=8, score=score)
    for dtype, score in product(INPUT_DTYPES, SCORES):
        for kind in ("wide", "edges", "bits"):
            yield case(dtype, (19, 96), kind, k=5, score=score, sequences=1, return_scores=True)
            yield case(dtype, (19, 96), kind, k=5, score=score, indices=turn((_INT32, _INT64), len(kind)))
    yield from _selection_cases(case)
    yield from _sum_cases(case)


def _selection_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of many slots, and of groups."""
    for score in SCORES:
        for k in (31, 32, 33, 64):
            yield case(float32, (9, 200), k=k, score=score, sequences=1)
            yield case(bfloat16, (9, 200), "masked", k=k, score=score, bias="normal")
            yield case(float16, (9, 200), k=k, score=score, indices=_INT64, sequences=9)
        for experts, groups, kept, k in ((256, 8, 4, 8), (64, 64, 6, 6), (1024, 1024, 3, 3), (96, 3, 1, 32),
                                         (60, 4, 2, 7), (20, 20, 20, 20), (33, 1, 1, 5), (512, 40, 8, 8)):
            if experts % groups == 0:
                for kind in ("normal", "equal", "masked", "bits"):
                    yield case(float32, (18, experts), kind, k=k, score=score, groups=groups, group_topk=kept,
                               bias="normal")
                yield case(float32, (18, experts), "equal", k=k, score=score, groups=groups, group_topk=kept)


def _sum_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of sums over tokens, and of steps that occur once."""
    # segments, parts of them, and sums of many parts
    for tokens, sequences in ((1, 1), (2, 2), (31, 1), (32, 1), (33, 1), (511, 1), (513, 1), (1030, 2),
                              (700, 7), (96, 96)):
        yield case(bfloat16, (tokens, 8), k=2, sequences=sequences)
    for tokens in (100, 2100, 4200):
        yield case(float32, (tokens, 520), k=2, sequences=1, score="sigmoid")
        yield case(float32, (tokens, 264), k=2, sequences=1)
    for layout in ("offset", "strided"):
        yield case(bfloat16, (20, 64), "normal", layout, k=4, return_scores=True)
        yield case(float32, (20, 64), "normal", layout, k=4, score="sigmoid")
    yield case(float32, (0, 64), k=4, sequences=3, return_scores=True)
    yield case(float32, (0, 64), k=4)
    yield case(float32, (20, 16), k=3, normalize=False, factor=-0.37)
    yield case(float32, (20, 16), k=3, factor=0.0)


def _backward_cases() -> Iterator[Case]:
    case = maker("topk_gate_backward", "normal")
    for i, score in enumerate(SCORES):
        yield case(INPUT_DTYPES[i], (70, 64), k=4, score=score, sequences=2, shares="normal")
        yield case(float32, (40, 24), "masked", k=6, score=score)
    for i, (experts, score) in enumerate(product(_EXPERTS, SCORES)):
        k = min(experts, turn((1, 2, 8, 6), i))
        dtype = turn(INPUT_DTYPES, i + i // 3)
        yield case(dtype, (37, experts), k=k, score=score, sequences=1, shares="normal")
        yield case(dtype, (21, experts), "bits", k=k, score=score, normalize=i % 4 < 2, factor=2.5)
        yield case(dtype, (24, experts), "masked", k=k, score=score, sequences=3, shares="normal")
    for dtype, score, of_lane in product(INPUT_DTYPES, SCORES, gate.experts_of_lane()):
        yield case(dtype, (5, 30 * of_lane), k=8, score=score)
    for dtype, score in product(INPUT_DTYPES, SCORES):
        for kind in ("wide", "edges", "bits"):
            yield case(dtype, (19, 96), kind, k=5, score=score, sequences=1, shares="normal")
            yield case(dtype, (19, 96), kind, k=5, score=score, indices=turn((_INT32, _INT64), len(kind)))
        yield case(dtype, (19, 96), k=5, score=score, sequences=19, grads="bits", shares="bits")
    for score in SCORES:
        for k in (31, 32, 33, 64):
            yield case(float32, (9, 200), k=k, score=score)
            yield case(float16, (9, 200), k=k, score=score, indices=_INT64, normalize=False)
    for layout in ("offset", "strided"):
        yield case(bfloat16, (20, 64), "normal", layout, k=4)
        yield case(float32, (20, 64), "normal", layout, k=4, score="sigmoid")
    yield case(float32, (0, 64), k=4, sequences=3, shares="normal")
    yield case(bfloat16, (0, 64), k=4)


def _balance_cases() -> Iterator[Case]:
    case = maker("load_balance_loss", "normal")
    for (tokens, experts), sequences, score in product(((60, 8), (60, 13), (120, 300), (6, 1024)), (1, 3),
                                                       SCORES):
        yield case(float32, (tokens, experts), k=2, sequences=sequences, score=score)
    yield case(float32, (60, 8), "masked", k=2, sequences=1, coeff=-3.0)
    yield case(float32, (0, 8), k=2, sequences=2)
    yield case(float32, (9000, 2), k=1, sequences=1)                # counts of more than 12 bits
    yield case(float32, (300, 1000), k=1, sequences=300, coeff=1e30)
    yield case(float32, (40, 1), k=1, sequences=1, coeff=0.0)


def _z_cases() -> Iterator[Case]:
    case = maker("z_loss", "normal")
    for i, experts in enumerate(_EXPERTS):
        for j, kind in enumerate(("normal", "bits", "masked", "wide", "edges")):
            yield case(turn(INPUT_DTYPES, i + j), (37, experts), kind)
    for tokens in (0, 1, 15, 16, 17, 8191, 8200):
        yield case(float32, (tokens, 8), coeff=1.0)
    yield case(bfloat16, (9000, 3), coeff=-1.0)
    yield case(float32, (40, 16), coeff=3e38)
    for layout in ("offset", "strided"):
        yield case(bfloat16, (20, 64), "normal", layout)


_TIMED = ((8192, 256), (16384, 128), (16384, 256))


def _timed() -> Iterator[Timed]:
    case = maker("topk_gate", "normal")
    for shape, score in product(_TIMED, ("softmax", "sigmoid")):
        yield Timed(f"f32 {score}, k 8", case(float32, shape, k=8, score=score))
    for shape in _TIMED:
        yield Timed("bf16 softmax, k 8", case(bfloat16, shape, k=8))
        yield Timed("f32 softmax, k 8, sums", case(float32, shape, k=8, sequences=1))
    yield Timed("f32 sigmoid, k 8, bias, 8 groups", case(
        float32, _TIMED[0], k=8, score="sigmoid", bias="normal", groups=8, group_topk=4))
    yield Timed("f32 softmax, k 8, scores", case(float32, _TIMED[0], k=8, return_scores=True))


def _backward_timed() -> Iterator[Timed]:
    case = maker("topk_gate_backward", "normal")
    for shape, score in product(_TIMED, ("softmax", "sigmoid")):
        yield Timed(f"f32 {score}, k 8", case(float32, shape, k=8, score=score))
    for shape in _TIMED:
        yield Timed("f32 softmax, k 8, sums", case(float32, shape, k=8, sequences=1, shares="normal"))
        yield Timed("bf16 softmax, k 8", case(bfloat16, shape, k=8))


def _balance_timed() -> Iterator[Timed]:
    yield Timed("256 experts", maker("load_balance_loss", "normal")(float32, (256, 256), k=8, sequences=1))


def _z_timed() -> Iterator[Timed]:
    for shape in _TIMED:
        yield Timed("f32", maker("z_loss", "normal")(float32, shape))


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", gate.topk_gate, asarray(np.zeros((16, 8), np.float32), like=x), 2)


register(
    Registration("topk_gate", gate.topk_gate, reference.topk_gate, _inputs, _cases,
                 "experts, weights and counts of each token: top k with defined ties",
                 programs=(gate.variants,), timed=_timed, host_calls=_host_calls),
    Registration("topk_gate_backward", gate.topk_gate_backward, reference.topk_gate_backward,
                 _backward_inputs, _backward_cases, "gradient of the gate's logits",
                 programs=(gate.backward_variants,), timed=_backward_timed),
    Registration("load_balance_loss", gate_losses.load_balance_loss, reference.load_balance_loss,
                 _balance_inputs, _balance_cases, "auxiliary loss of even loads, and its gradient",
                 programs=(gate_losses.balance_variants,), timed=_balance_timed),
    Registration("z_loss", gate_losses.z_loss, reference.z_loss, _z_inputs, _z_cases,
                 "loss of large logits, and its gradient",
                 programs=(gate_losses.z_variants,), timed=_z_timed),
)
