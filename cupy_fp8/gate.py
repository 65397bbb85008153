"""The result of a gate: the experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from . import backend
from .advice import shown
from .arrays import Array, Result, aligned_address, is_contiguous
from .formats import choice, flag, float32, number
from .results import facts_table
from .routing import MOST_EXPERTS
from .typed_array import TypedArray

__all__ = ["Gate"]

Score: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES: tuple[Score, ...] = get_args(Score)
#: most experts of a token
MOST_SLOTS = 64

_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, eq=False)
class Gate(Result):
    """The k experts of each of T tokens, as `topk_gate` chooses them.

    indices      int32 [T, k]: experts, the best one first; -1: none was left
    weights      f32 [T, k]: what their outputs are multiplied by; 0 for index -1
    counts       int32 [E]: slots of each expert; [S, E] for S sequences
    scores       f32 [T, E], of all experts; None: not requested
    score_sums   f32 [S, E]: sums over the tokens of each sequence; None: not requested
    score, normalize, factor    options of the gate, which its gradient needs

    `route(gate.indices, num_experts=E)` and `permute(…, probs=gate.weights)` go on from here.
    """

    indices: TypedArray
    weights: TypedArray
    counts: TypedArray
    scores: TypedArray | None = None
    score_sums: TypedArray | None = None
    score: Score = "softmax"
    normalize: bool = True
    factor: float = 1.0

    if TYPE_CHECKING:               # arrays of any class are accepted
        def __init__(self, indices: Array, weights: Array, counts: Array, scores: Array | None = None,
                     score_sums: Array | None = None, score: str = "softmax", normalize: bool = True,
                     factor: float = 1.0) -> None: ...

    def __post_init__(self) -> None:
        xp = backend.module_of(self.indices, "indices")
        self.__dict__.update(score=choice(self.score, "score", SCORES),
                             normalize=flag(self.normalize, "normalize"),
                             factor=number(self.factor, "factor"))
        if self.indices.ndim != 2 or not 1 <= self.indices.shape[1] <= MOST_SLOTS:
            raise ValueError(f"indices: expected shape [T, k] with k from 1 to {MOST_SLOTS}, got "
                             f"{self.indices.shape}")
        backend.require_module(self.counts, xp, "counts")
        if self.counts.ndim not in (1, 2) or not 1 <= self.num_experts <= MOST_EXPERTS:
            raise ValueError(f"counts: expected shape [E] or [S, E] with 1 to {MOST_EXPERTS} experts, got "
                             f"{self.counts.shape}")
        if (self.score_sums is None) != (self.counts.ndim == 1):
            raise ValueError("score_sums: expected with counts [S, E], and only with these")
        sequences = 1 if self.counts.ndim == 1 else self.counts.shape[0]
        if sequences == 0 or self.tokens % sequences:
            raise ValueError(f"counts: expected {self.tokens} tokens in sequences of one length, got "
                             f"{shown(sequences)} sequences")
        parts: dict[str, tuple[Any, tuple[int, ...], np.dtype[Any]]] = {
            "indices": (self.indices, self.indices.shape, _INT32),
            "weights": (self.weights, self.indices.shape, float32),
            "counts": (self.counts, self.counts.shape, _INT32)}
        if self.scores is not None:
            parts["scores"] = self.scores, (self.tokens, self.num_experts), float32
        if self.score_sums is not None:
            parts["score_sums"] = self.score_sums, self.counts.shape, float32
        for name, (a, shape, dtype) in parts.items():
            backend.require_module(a, xp, name)
            if a.dtype != dtype or a.shape != shape or not is_contiguous(a):
                raise ValueError(f"{name}: expected a C-contiguous {dtype} array of shape {shape}, got "
                                 f"{a.dtype} of shape {a.shape}")
            aligned_address(a, name)
            if xp is not np:
                backend.same_device(a, self.indices, name, "indices")

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.indices.shape[0])

    @property
    def topk(self) -> int:
        """Slots of a token."""
        return int(self.indices.shape[1])

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return int(self.counts.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(a.nbytes) for a in self._arrays().values())

    def _arrays(self) -> dict[str, Array]:
        """Return the arrays by name, without absent ones."""
        names = ("indices", "weights", "counts", "scores", "score_sums")
        return {name: a for name in names if (a := getattr(self, name)) is not None}

    def _facts(self) -> dict[str, str]:
        return {"tokens": f"{self.tokens:,}", "slots": str(self.topk), "experts": str(self.num_experts),
                "score": self.score, "kind": backend.kind_of(self.indices)}

    def __repr__(self) -> str:
        f = self._facts()
        return (f"Gate({f['tokens']} tokens x {f['slots']} of {f['experts']} experts, {f['score']}, "
                f"{f['kind']})")

    def _repr_html_(self) -> str:
        return facts_table(self._facts())
