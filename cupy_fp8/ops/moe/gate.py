"""Chooses the experts of each token. Kernels: kernels_cu/moe/gate.cu, gate_backward.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ... import advice, reference
from ...advice import shown, without_rest
from ...arrays import Array, address
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Written, one_array
from ...formats import INPUT_DTYPES, choice, flag, float32, integer, number
from ...gate import MOST_SLOTS, SCORES, Gate, Score
from ...kernels import Kernel, Launch, Variant, grid_size, multiprocessors
from ...layouts import cdiv
from ...routing import MOST_EXPERTS
from ...typed_array import TypedArray

_GATE, _BACKWARD = Kernel("moe/gate", "topk_gate"), Kernel("moe/gate_backward", "topk_gate_backward")
_LANES = 32
_MOST_WARPS, _EXPERTS_OF_BLOCK = 16, 2048   # warps times experts that fit into a thread block's shared memory
_LOAD = 16                                      # bytes of the widest load
_WARPS_PER_SM, _BLOCKS_ON_CPU = 32, 4           # with more tokens, thread blocks have several segments
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


@without_rest
def topk_gate(logits: Array, k: int, *, score: Score = "softmax", bias: Array | None = None,
              groups: int | None = None, group_topk: int | None = None, normalize: bool = True,
              factor: float = 1.0, indices: Array | None = None,
              return_scores: bool = False, sequences: int | None = None, out: Gate | None = None,
              **renamed: NoReturn) -> Gate:
    """Choose the k best experts of each token and their weights: what `route` and `permute` begin with.

        s = softmax(logits), sigma(logits) or sqrt(softplus(logits))         scores
        indices = the k experts with the largest s + bias                    the best one first
        weights = s[indices] / (sum of s[indices] + 1e-20) * factor          without normalize: s * factor

    in f32, each operation rounded. Equal ones go to the smaller index. A logit of NaN is no candidate, and
    one of -Inf is chosen only where nothing else is left; where fewer than k candidates are left, indices are
    -1 and weights 0. The bias chooses, and is in no weight.

    Parameters
    ----------
    logits : bfloat16, float16 or float32 array [T, E], E from 1 to 1024
    k : experts of a token, 1 to 64 and at most E
    score : 'softmax', 'sigmoid' or 'sqrtsoftplus'
    bias : f32 array [E], added to scores for the selection alone
    groups, group_topk : E / groups consecutive experts are a group, whose score is the sum of its
        k // group_topk largest; experts come from the group_topk best groups alone
    normalize : the weights of a token add up to `factor`
    factor : a finite number, rounded to f32
    indices : int32 or int64 array [T, k] of an earlier gate: the same experts again, whose weights follow
        these logits; -1: none. bias, groups and group_topk then change nothing
    return_scores : s of all experts too
    sequences : S, which divides T: return sums over the T / S tokens of each sequence of s (softmax), or of
        s / (sum of s + 1e-20), and counts by sequence, as `load_balance_loss` needs them. 1: all tokens
    out : an earlier result of the same shapes and options; written in place and returned. With it the call
        can be captured into a CUDA graph

    Returns
    -------
    Gate: indices, weights, counts of the slots of each expert; scores; score_sums. The same arguments give
    the same bytes: sums follow the fixed tree of docs/numerics.md.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. A wrong expert among `indices` on the
    device counts as -1, and `device_errors` reports it.

    One launch, which reads the logits once. Source: arXiv 2101.03961 (softmax), 2412.19437 (sigmoid, bias,
    groups); docs/numerics.md section 14.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> gate = fp8.topk_gate(np.float32([[0, 2, 1, 2], [3, -1, float("nan"), 0]]), 2)
    >>> gate.indices.tolist(), gate.weights.astype(float).round(3).tolist(), gate.counts.tolist()
    ([[1, 3], [0, 3]], [[0.5, 0.5], [0.953, 0.047]], [1, 1, 0, 2])
    >>> gate
    Gate(2 tokens x 2 of 4 experts, softmax, numpy)
    >>> fp8.route(gate.indices, num_experts=4, align=16)
    Routing(2 tokens x 2 slots -> 64 rows of 4 experts, aligned to 16, numpy)
    """
    if renamed:
        raise advice.renamed("topk_gate", renamed, scores="return_scores")
    given = (logits, k, score, bias, groups, group_topk, normalize, factor, indices, return_scores, sequences)
    result: Gate = run(_TOPK_GATE, given, out)
    return result


def topk_gate_backward(grad: Array, logits: Array, gate: Gate, *, score_grads: Array | None = None,
                       out: Array | None = None) -> TypedArray:
    """The gradient of the logits of `topk_gate`, from that of its weights. The selection is constant.

    Parameters
    ----------
    grad : f32 array [T, k], the gradient of the weights
    logits : as `topk_gate` had them
    gate : what it returned; of its arrays only indices are read
    score_grads : f32 array [S, E], the gradient of the gate's score_sums (`load_balance_loss` gives it)
    out : array [T, E] of the logits' dtype, written and returned; with it the call allocates nothing and can
        be captured into a CUDA graph

    Returns
    -------
    Array [T, E] of the logits' dtype, computed in f32 from scores that are computed again; 0 for a logit of
    NaN. Raises TypeError, ValueError, DeviceError, before anything is written.

    One launch; bytes moved: the logits, and as many written. Source: docs/numerics.md section 14.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> logits = np.float32([[0, 2, 1, 2]])
    >>> gate = fp8.topk_gate(logits, 2)
    >>> fp8.topk_gate_backward(np.float32([[1, 0]]), logits, gate).round(3).tolist()
    [[0.0, 0.25, 0.0, -0.25]]
    """
    result: TypedArray = run(_TOPK_GATE_BACKWARD, (grad, logits, gate, score_grads), out)
    return result


# ---- what follows from shapes and options ----
class RowShape(NamedTuple):
    """How a kernel's warps take rows of logits: `of_lane` experts per lane."""

    tokens: int
    experts: int
    of_lane: int

    @property
    def warps(self) -> int:
        """Warps per thread block."""
        return min(_MOST_WARPS, _EXPERTS_OF_BLOCK // (_LANES * self.of_lane))

    def variant(self, kernel: Kernel, logits: np.dtype[Any], score: str, shared: int = 0) -> Variant:
        return kernel.variant(block=_LANES * self.warps, shared=shared, IN=logits, SCORE=score,
                              COUNT=self.of_lane)

    def is_vector(self, itemsize: int, *addresses: int) -> int:
        """1 if rows of such elements are whole, aligned loads."""
        load = min(self.of_lane, _LOAD // itemsize)
        return int(self.experts % load == 0 and not any(at % (load * itemsize) for at in addresses))


def row_shape(shape: tuple[int, ...]) -> RowShape:
    if len(shape) != 2 or not 1 <= shape[1] <= MOST_EXPERTS:
        raise ValueError(f"logits: expected shape [T, E] with 1 to {MOST_EXPERTS} experts, got {shape}")
    return RowShape(*shape, 1 << (cdiv(shape[1], _LANES) - 1).bit_length())


def experts_of_lane() -> Iterator[int]:
    """Yield every value of `of_lane`."""
    return (1 << i for i in range((MOST_EXPERTS // _LANES).bit_length()))


class _Groups(NamedTuple):
    number: int = 0                     # 0: none
    topk: int = 0
    terms: int = 0                      # experts that make a group's score


def _groups(groups: Any, group_topk: Any, experts: int, k: int) -> _Groups:
    if groups is None and group_topk is None:
        return _Groups()
    if groups is None or group_topk is None:
        raise ValueError(f"group_topk: expected with groups, got groups={shown(groups)} and "
                         f"group_topk={shown(group_topk)}")
    number, kept = integer(groups, "groups"), integer(group_topk, "group_topk")
    if number < 1 or experts % number:
        raise ValueError(f"groups: expected a divisor of the {experts} experts, got {shown(number)}")
    if not 1 <= kept <= min(number, k):
        raise ValueError(f"group_topk: expected 1 to {min(number, k)}, the groups or k, got {shown(kept)}")
    if kept * (experts // number) < k:
        raise ValueError(f"group_topk: expected groups that have k={k} experts, got {kept} of "
                         f"{experts // number}")
    return _Groups(number, kept, k // kept)


# ---- the gate ----
class _Result(Description):
    """Description of a Gate with these arrays and options."""

    def __init__(self, arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]], score: str, normalize: bool,
                 factor: float) -> None:
        #: names of the arrays, and of the kernel's members
        self.names = tuple(arrays)
        self._options = {"score": score, "normalize": normalize, "factor": factor}
        super().__init__(*(Written(f"out.{name}", *each) for name, each in arrays.items()))

    def build(self, arrays: Sequence[Array]) -> Gate:
        parts = dict(zip(self.names, arrays, strict=True))
        return Gate._of_fields(**{"scores": None, "score_sums": None, **parts}, **self._options)

    def arrays_of(self, out: Any) -> list[Array]:
        if not isinstance(out, Gate):
            raise TypeError(f"out: expected a Gate (an earlier result), got {type(out).__name__}")
        for name in ("scores", "score_sums"):
            if (name in self.names) != (getattr(out, name) is not None):
                option = "sequences" if name == "score_sums" else name
                raise ValueError(f"out: made {'without' if name in self.names else 'with'} {option}")
        for name, value in self._options.items():
            if (had := getattr(out, name)) != value:
                raise ValueError(f"out: made with {name}={shown(had)}, got {shown(value)}")
        return [getattr(out, name) for name in self.names]


class _Inputs(NamedTuple):
    logits: Input
    rows: RowShape
    k: int
    score: Score
    bias: Input | None
    groups: _Groups
    normalize: bool
    factor: float
    given: Input | None
    sequences: int | None
    result: _Result


class _TopkGate(Op[_Inputs]):
    def arguments(self, call: Call, logits: Any, k: Any, score: Any, bias: Any, groups: Any, group_topk: Any,
                  normalize: Any, factor: Any, indices: Any, return_scores: Any, sequences: Any) -> _Inputs:
        score, normalize = choice(score, "score", SCORES), flag(normalize, "normalize")
        factor, with_scores = number(factor, "factor"), flag(return_scores, "return_scores")
        x = call.read("logits", logits, INPUT_DTYPES)
        rows = row_shape(x.shape)
        tokens, experts, _ = rows
        k = integer(k, "k")
        if not 1 <= k <= min(MOST_SLOTS, experts):
            raise ValueError(f"k: expected 1 to {min(MOST_SLOTS, experts)}, the experts or {MOST_SLOTS}, got "
                             f"{shown(k)}")
        of_selection = None if bias is None else call.read("bias", bias, (float32,), (experts,),
                                                           "one for each expert")
        chosen = _groups(groups, group_topk, experts, k)
        given = None if indices is None else call.read("indices", indices, (_INT32, _INT64), (tokens, k),
                                                       "k for each token")
        number_of = None if sequences is None else integer(sequences, "sequences")
        if number_of is not None and (number_of < 1 or tokens % number_of):
            raise ValueError(f"sequences: expected a divisor of the {tokens} tokens, got {shown(number_of)}")
        options = k, groups, group_topk, sequences
        # a mutable object, such as an array of one element, can change before the next call
        call.repeatable &= all(option is None or type(option) is int for option in options)
        arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "indices": ((tokens, k), _INT32), "weights": ((tokens, k), float32),
            "counts": ((experts,) if number_of is None else (number_of, experts), _INT32)}
        if with_scores:
            arrays["scores"] = (tokens, experts), float32
        if number_of is not None:
            arrays["score_sums"] = (number_of, experts), float32
        return _Inputs(x, rows, k, score, of_selection, chosen, normalize, factor, given, number_of,
                       _Result(arrays, score, normalize, factor))

    def reference(self, inputs: _Inputs) -> Gate:
        i = inputs
        return reference.topk_gate(
            i.logits.array, i.k, score=i.score, bias=i.bias and i.bias.array, groups=i.groups.number or None,
            group_topk=i.groups.topk or None, normalize=i.normalize, factor=i.factor,
            indices=i.given and i.given.array, return_scores="scores" in i.result.names,
            sequences=i.sequences)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        x, rows, groups, given = inputs.logits, inputs.rows, inputs.groups, inputs.given
        places = dict(zip(inputs.result.names, written, strict=True))
        sequences = inputs.sequences or 1
        length = rows.tokens // sequences
        segments = max(1, cdiv(length, rows.warps * _GATE.constant("kTokens")))
        parts = cdiv(segments, _GATE.constant("kSegments"))
        rounds = cdiv(sequences * segments, _blocks_at_once(x.array, rows))
        blocks, copies = cdiv(segments, rounds), max(1, _GATE.constant("kMostCopies") // sequences)
        sums = 0
        if inputs.sequences:
            sums = address(call.scratch("sums of scores", sequences * (segments + parts) * rows.experts))
        yield _variant(rows, x.dtype, inputs.score).bind(
            x.array, grid_size(sequences * blocks, x.shape), shared=4 * rows.warps * max(1, groups.number),
            logits=x.at, bias=inputs.bias.at if inputs.bias else 0, given=given.at if given else 0, **places,
            of_segments=sums, counted=call.workspace("counts of a gate", copies * sequences * rows.experts),
            done=call.workspace("blocks of a gate", sequences * (1 + parts)), errors=call.error_word(),
            length=length, segments=segments, parts=parts, blocks=blocks, rounds=rounds,
            copies=copies, experts=rows.experts, k=inputs.k, groups=groups.number, group_topk=groups.topk,
            group_terms=groups.terms, group_lanes=_group_lanes(rows, groups.number), factor=inputs.factor,
            normalize=int(inputs.normalize), wide=int(given is not None and given.dtype == _INT64),
            vector=rows.is_vector(x.dtype.itemsize, x.at),
            vector_scores=rows.is_vector(float32.itemsize, places.get("scores", 0)),
            vector_bias=rows.is_vector(float32.itemsize, inputs.bias.at if inputs.bias else 0))


def _group_lanes(rows: RowShape, groups: int) -> int:
    """Return the lanes that share a group, a power of two; 0 if groups are not whole lanes."""
    lanes, rest = divmod(rows.experts, groups * rows.of_lane) if groups else (0, 0)
    return 0 if rest or lanes & (lanes - 1) else lanes


def _blocks_at_once(logits: Array, rows: RowShape) -> int:
    """Return about how many thread blocks are resident at a time."""
    if isinstance(logits, np.ndarray):
        return _BLOCKS_ON_CPU
    return _WARPS_PER_SM // rows.warps * multiprocessors(logits.data.device_id)


def _variant(rows: RowShape, dtype: np.dtype[Any], score: str) -> Variant:
    return rows.variant(_GATE, dtype, score, shared=4 * rows.warps * _LANES * rows.of_lane)


_TOPK_GATE = _TopkGate()


# ---- its gradient ----
class _BackwardInputs(NamedTuple):
    grad: Input
    logits: Input
    rows: RowShape
    gate: Gate
    score_grads: Input | None


class _TopkGateBackward(Op[_BackwardInputs]):
    def arguments(self, call: Call, grad: Any, logits: Any, gate: Any, score_grads: Any) -> _BackwardInputs:
        given = call.read("grad", grad, (float32,))
        x = call.read("logits", logits, INPUT_DTYPES)
        rows = row_shape(x.shape)
        gate = call.gate("gate", gate, "indices")
        if (gate.tokens, gate.num_experts) != (rows.tokens, rows.experts):
            raise ValueError(f"logits: expected shape {(gate.tokens, gate.num_experts)}, as the gate's were, "
                             f"got {x.shape}")
        if given.shape != gate.indices.shape:
            raise ValueError(f"grad: expected shape {gate.indices.shape}, that of the gate's weights, got "
                             f"{given.shape}")
        grads = None
        if score_grads is not None:
            if gate.score_sums is None:
                raise ValueError("score_grads: expected a gate that was made with sequences=, got one "
                                 "without")
            grads = call.read("score_grads", score_grads, (float32,), gate.counts.shape,
                              "that of the gate's score_sums")
        return _BackwardInputs(given, x, rows, gate, grads)

    def result(self, inputs: _BackwardInputs) -> Description:
        return one_array(inputs.logits.shape, inputs.logits.dtype)

    def reference(self, inputs: _BackwardInputs) -> np.ndarray:
        i = inputs
        return reference.topk_gate_backward(i.grad.array, i.logits.array, i.gate,
                                            score_grads=i.score_grads and i.score_grads.array)

    def launches(self, call: Call, inputs: _BackwardInputs, *written: int) -> Iterator[Launch]:
        x, rows, gate, grads = inputs.logits, inputs.rows, inputs.gate, inputs.score_grads
        if rows.tokens == 0:
            return
        yield rows.variant(_BACKWARD, x.dtype, gate.score).bind(
            x.array, grid_size(cdiv(rows.tokens, rows.warps), x.shape), logits=x.at,
            indices=address(gate.indices), grad=inputs.grad.at, score_grads=grads.at if grads else 0,
            out=written[0], tokens=rows.tokens,
            length=rows.tokens // (grads.shape[0] if grads else 1), experts=rows.experts, k=gate.topk,
            factor=gate.factor, normalize=int(gate.normalize),
            vector=rows.is_vector(x.dtype.itemsize, x.at, written[0]))


_TOPK_GATE_BACKWARD = _TopkGateBackward()


def variants() -> Iterator[Variant]:
    """Yields every variant that topk_gate may launch."""
    for dtype, score, of_lane in product(INPUT_DTYPES, SCORES, experts_of_lane()):
        yield _variant(RowShape(0, 0, of_lane), dtype, score)


def backward_variants() -> Iterator[Variant]:
    """Yields every variant that topk_gate_backward may launch."""
    for dtype, score, of_lane in product(INPUT_DTYPES, SCORES, experts_of_lane()):
        yield RowShape(0, 0, of_lane).variant(_BACKWARD, dtype, score)
