"""The wording of errors about gates and their losses: one line for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from messages import Line, check, every_line, line, poisoned

import cupy_fp8 as fp8

T, V = TypeError, ValueError
GATE, BACK, BALANCE, Z = fp8.topk_gate, fp8.topk_gate_backward, fp8.load_balance_loss, fp8.z_loss


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


X, WIDE, GRAD = ones(6, 8), ones(6, 100), ones(6, 2)
MADE, WITH_SUMS = GATE(X, 2), GATE(X, 2, sequences=3)
OUT, SUMS = poisoned(GATE(X, 2)), poisoned(GATE(X, 2, sequences=3))
SCORES = poisoned(GATE(X, 2, return_scores=True))
FIRST_SUM = np.asarray(SUMS.score_sums).reshape(-1)[:1]
LOSS = poisoned(Z(X, 1.0))


def gate(error: type[Exception], message: str, x: Any = X, k: Any = 2, **options: Any) -> Line:
    return line(error, message, GATE, x, k, **options)


GATES: list[Line] = [
    *[line(V, f"logits: expected shape [T, E] with 1 to 1024 experts, got {x.shape}", call, *args)
      for x in (ones(8), ones(6, 8, 1), ones(6, 0), ones(6, 1025))
      for call, *args in ((GATE, x, 1), (Z, x, 1.0), (BACK, GRAD, x, MADE))],
    *[line(T, "logits: expected dtype bfloat16, float16, float32, got float64", call, *args)
      for call, *args in ((GATE, X.astype(np.float64), 1), (Z, X.astype(np.float64), 1.0),
                          (BACK, GRAD, X.astype(np.float64), MADE))],
    *[gate(V, f"k: expected 1 to 8, the experts or 64, got {k}", k=k) for k in (0, -1, 9, 2**70)],
    gate(V, "k: expected 1 to 64, the experts or 64, got 65", WIDE, 65),
    gate(T, "k: expected an integer, got 2.0", k=2.0), gate(T, "k: expected an integer, got True", k=True),
    gate(V, "score: expected one of ('softmax', 'sigmoid', 'sqrtsoftplus'), got 'tanh'", score="tanh"),
    gate(T, "bias: expected dtype float32, got float64", bias=np.ones(8)),
    gate(V, "bias: expected shape (8,), one for each expert, got (7,)", bias=ones(7)),
    gate(V, "group_topk: expected with groups, got groups=4 and group_topk=None", groups=4),
    gate(V, "group_topk: expected with groups, got groups=None and group_topk=1", group_topk=1),
    *[gate(V, f"groups: expected a divisor of the 8 experts, got {n}", groups=n, group_topk=1)
      for n in (0, 3, -4, 16)],
    gate(T, "groups: expected an integer, got 4.0", groups=4.0, group_topk=1),
    gate(T, "group_topk: expected an integer, got '1'", groups=4, group_topk="1"),
    *[gate(V, f"group_topk: expected 1 to 2, the groups or k, got {n}", groups=4, group_topk=n)
      for n in (0, 3)],
    gate(V, "group_topk: expected 1 to 2, the groups or k, got 4", k=3, groups=2, group_topk=4),
    gate(V, "group_topk: expected groups that have k=4 experts, got 1 of 2", k=4, groups=4, group_topk=1),
    gate(T, "normalize: expected True or False, got 'yes'", normalize="yes"),
    gate(T, "return_scores: expected True or False, got 2", return_scores=2),
    *[line(T, f"{name}: expected a number, got {shown}", call, *args, **options)
      for wrong, shown in (("2", "'2'"), (True, "True"), (None, "None"), ([1.0], "[1.0]"))
      for name, call, args, options in (("factor", GATE, (X, 2), {"factor": wrong}),
                                        ("coeff", BALANCE, (WITH_SUMS, wrong), {}),
                                        ("coeff", Z, (X, wrong), {}))],
    *[line(V, f"{name}: {message}", call, *args, **options)
      for wrong, message in ((float("nan"), "expected a finite float32, got nan"),
                             (-np.inf, "expected a finite float32, got -inf"),
                             (1e39, "expected a finite float32, got 1e+39"),
                             (10**40, "expected a finite float32, got an integer of 133 bits"),
                             (10**400, "an integer of 1329 bits, beyond every float"))
      for name, call, args, options in (("factor", GATE, (X, 2), {"factor": wrong}),
                                        ("coeff", BALANCE, (WITH_SUMS, wrong), {}),
                                        ("coeff", Z, (X, wrong), {}))],
    gate(T, "indices: expected dtype int32, int64, got float32", indices=GRAD),
    gate(V, "indices: expected shape (6, 2), k for each token, got (6, 3)",
         indices=ones(6, 3, dtype=np.int32)),
    *[gate(V, f"sequences: expected a divisor of the 6 tokens, got {n}", sequences=n)
      for n in (0, -1, 4, 12)],
    gate(T, "sequences: expected an integer, got 1.5", sequences=1.5),
    # ---- results of other calls ----
    gate(T, "out: expected a Gate (an earlier result), got tuple", out=(X, X)),
    gate(V, "out: made with scores", out=SCORES),
    gate(V, "out: made without scores", return_scores=True, out=OUT),
    gate(V, "out: made with sequences", out=SUMS),
    gate(V, "out: made without sequences", sequences=3, out=OUT),
    gate(V, "out: made with score='softmax', got 'sigmoid'", score="sigmoid", out=OUT),
    gate(V, "out: made with normalize=True, got False", normalize=False, out=OUT),
    gate(V, "out: made with factor=1.0, got 2.5", factor=2.5, out=OUT),
    gate(V, "out.indices: expected shape (6, 3), got (6, 2)", k=3, out=OUT),
    gate(V, "out.counts: expected shape (100,), got (8,)", WIDE, out=OUT),
    gate(V, "out.counts: expected shape (2, 8), got (3, 8)", sequences=2, out=SUMS),
    gate(V, "out.indices: overlaps indices in memory; results need memory of their own", indices=OUT.indices,
         out=OUT),
    # ---- gradients ----
    line(T, "gate: expected a Gate (cupy_fp8.topk_gate makes one), got ndarray", BACK, GRAD, X, X),
    line(V, "logits: expected shape (6, 8), as the gate's were, got (6, 100)", BACK, GRAD, WIDE, MADE),
    line(V, "grad: expected shape (6, 2), that of the gate's weights, got (6, 3)", BACK, ones(6, 3), X, MADE),
    line(T, "grad: expected dtype float32, got float64", BACK, GRAD.astype(np.float64), X, MADE),
    line(V, "score_grads: expected a gate that was made with sequences=, got one without", BACK, GRAD, X,
         MADE, score_grads=ones(1, 8)),
    line(V, "score_grads: expected shape (3, 8), that of the gate's score_sums, got (8,)", BACK, GRAD, X,
         WITH_SUMS, score_grads=ones(8)),
    line(V, "out: expected shape (6, 8), got (6, 9)", BACK, GRAD, X, MADE, out=ones(6, 9)),
    # ---- losses ----
    line(T, "gate: expected a Gate (cupy_fp8.topk_gate makes one), got ndarray", BALANCE, X, 1.0),
    line(V, "gate: expected one that was made with sequences=, got one without", BALANCE, MADE, 1.0),
    line(V, "out[1]: expected shape (3, 8), got (6, 8)", BALANCE, WITH_SUMS, 1.0, out=LOSS),
    line(V, "out[0]: expected shape (1,), got (2,)", Z, X, 1.0, out=(ones(2), ones(6, 8))),
    line(T, "out: expected a tuple of two (an earlier result), got ndarray", Z, X, 1.0, out=X.copy()),
    line(V, "out[0]: overlaps gate.score_sums in memory; results need memory of their own", BALANCE,
         SUMS, 1.0, out=(FIRST_SUM, ones(3, 8))),
]

MAKE: Any = fp8.Gate
INDICES, COUNTS = np.zeros((6, 2), np.int32), np.zeros(8, np.int32)


def made(message: str, error: Any = V, **parts: Any) -> Line:
    given = {"indices": INDICES, "weights": GRAD, "counts": COUNTS, **parts}
    return line(error, message, MAKE, **given)


BUILT: list[Line] = [
    made("indices: expected a numpy.ndarray or cupy.ndarray, got list", T, indices=[[1]]),
    *[made(f"indices: expected shape [T, k] with k from 1 to 64, got {shape}",
           indices=np.zeros(shape, np.int32)) for shape in ((6,), (6, 0), (6, 65), (6, 2, 1))],
    *[made(f"counts: expected shape [E] or [S, E] with 1 to 1024 experts, got {shape}",
           counts=np.zeros(shape, np.int32)) for shape in ((), (0,), (1025,), (1, 1, 8), (3, 0))],
    made("score_sums: expected with counts [S, E], and only with these", score_sums=ones(8)),
    made("score_sums: expected with counts [S, E], and only with these", counts=COUNTS.reshape(1, 8)),
    *[made(f"counts: expected 6 tokens in sequences of one length, got {n} sequences",
           counts=np.zeros((n, 8), np.int32), score_sums=ones(n, 8)) for n in (0, 4, 12)],
    *[made(f"{name}: expected a C-contiguous {dtype} array of shape {shape}, got", **{name: wrong})
      for name, dtype, shape, wrong in (
          ("indices", "int32", (6, 2), INDICES.astype(np.int64)),
          ("indices", "int32", (6, 2), np.asfortranarray(INDICES)),
          ("weights", "float32", (6, 2), ones(6, 3)), ("weights", "float32", (6, 2), np.ones((6, 2))),
          ("counts", "int32", (8,), COUNTS.astype(np.int64)), ("scores", "float32", (6, 8), ones(6, 7)))],
    made("score_sums: expected a C-contiguous float32 array of shape (3, 8), got float32 of shape (8, 3)",
         counts=np.zeros((3, 8), np.int32), score_sums=ones(8, 3)),
    made("weights: expected a numpy.ndarray or cupy.ndarray, got NoneType", T, weights=None),
    made("score: expected one of ('softmax', 'sigmoid', 'sqrtsoftplus'), got 'tanh'", score="tanh"),
    made("normalize: expected True or False, got 2", T, normalize=2),
    made("factor: expected a finite float32, got inf", factor=np.inf),
    made("factor: expected a number, got '1'", T, factor="1"),
    line(V, "score_sums: expected with counts [S, E], and only with these", replace, WITH_SUMS,
         score_sums=None),
]


@every_line([*GATES, *BUILT])
def test_message(error, message, call, args, kwargs):
    check(error, message, call, args, kwargs)
