"""Any value of an option is refused by name, or is listed here as valid: every public function with every
kind of nonsense for every parameter."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import pytest
from trees import leaves, snapshot

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, WeightCache, cases, testing
from cupy_fp8.advice import shown
from cupy_fp8.cases import OPS
from cupy_fp8.kernels import Launch

X = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
Q = fp8.quantize_block(X)
ROW = fp8.quantize_block(X, scale_layout="compact").rowwise
MX = fp8.quantize_mx(X)
ROUTING = fp8.route(np.zeros((64, 2), np.int64) + np.arange(2), num_experts=4)
MOVED, PROBS = fp8.permute(X, ROUTING), X[:, :2].copy()
SPLITS = np.array([32, 32])
assert ROW is not None

INDICES, WORDS = np.array([1, 0]), np.array(["one", "two"])
MATRIX, ZERO_D, NESTED = np.array([[1, 48]]), np.array(1.5, np.float32), [INDICES]
HUGE, VAST = 10**400, -10**5000             # Python refuses to print the second one
NAN, F32 = float("nan"), np.float32(2)
F16_INF, F16_LARGE = np.float16(np.inf), np.float16(65504)     # compared with in float16 by NumPy
MEMORY = memoryview(bytearray(b"x"))        # unhashable, for which Python raises ValueError
NONSENSE: list[Any] = [
    INDICES, WORDS, MATRIX, ZERO_D, NESTED, [1], [64, -1], [64, 64], (1, 48), [2**63], [[1, 48]], [[]],
    [VAST], ["compact"], ("one", "two"), (None,), {"one": 1}, set(), object(), "x", b"x", MEMORY, None,
    VAST, HUGE, 2**63, 1 << 17, 12, 0, -1, 1.5, NAN, F32, F16_INF, F16_LARGE, True, [True], (True, 128)]
ARRAYS = [INDICES, WORDS, MATRIX, ZERO_D]
COUNTS = [12, 1 << 17]
SIZES = [0, *COUNTS]
NUMBERS = [*SIZES, -1, 2**63, 1.5, NAN, F32, F16_INF, F16_LARGE]

FINITE = [*SIZES, -1, 2**63, 1.5, F32, F16_LARGE]

#: Nonsense that is valid, by the parameter, or by the call and the parameter. None is valid where it is the
#: default, and 0 for a flag.
VALID: dict[str, list[Any]] = {
    "asarray.a": [*ARRAYS, NESTED, [1], [64, -1], [64, 64], (1, 48), [2**63], [[1, 48]], [[]],
                  ["compact"], ("one", "two"), "x", b"x", MEMORY, *NUMBERS, True, [True], (True, 128)],
    "asnumpy.a": [*ARRAYS, NESTED], "a": ARRAYS, "like": ARRAYS, "arrays": [MATRIX, NESTED],
    "compute_amax.x": [ZERO_D], "quantize_tensor.x": [ZERO_D], "CurrentScaling.quantize.x": [ZERO_D],
    "DelayedScaling.quantize.x": [ZERO_D], "compute_scale.amax": [ZERO_D], "compute_amax.out": [ZERO_D],
    "amax": [ZERO_D], "noop": [ZERO_D], "scale": [*NUMBERS, ZERO_D], "fill_value": [*NUMBERS, ZERO_D, True],
    "scales": [[1], (1, 48), [64, -1], [64, 64], [2**63]],
    "shape": [INDICES, [1], [64, 64], (1, 48), *SIZES], "convert_scales.shape": [],
    "unswizzle_scales.shape": [], "BlockScaling.empty.shape": [INDICES, [64, 64], (1, 48)],
    "MXScaling.empty.shape": [INDICES, [64, 64], (1, 48)], "axis": [0], "concatenate.axis": [0, -1],
    "margin": [*SIZES, -1, 2**63, HUGE, VAST],
    "eps": [*SIZES, 2**63, 1.5, F32, F16_LARGE],
    "clamp": [*COUNTS, 2**63, 1.5, F32, F16_INF, F16_LARGE], "block": [*COUNTS, [64, 64]],
    "history_len": [*COUNTS, 2**63, HUGE], "rows": [1 << 17], "num_experts": [12],
    "k": [12], "factor": FINITE, "coeff": FINITE, "weight_offset": FINITE,
    "route of a mask.topk": [0], "route of a mask.rows": SIZES,
    "splits": [INDICES, [1], (1, 48)], "order": [INDICES],
    "splits_to_offsets.splits": [INDICES, [1], [64, 64], (1, 48)],
    "splits_to_offsets, two.splits": [INDICES, [1], [64, 64], (1, 48)],
    "strides": [INDICES, [1], [64, 64], (1, 48)], "pow2_scale": [0, True],
    "include_leading_zero": [[1], [True]], "splits_to_offsets, two.include_leading_zero": [INDICES],
}  # fmt: skip

@functools.wraps(WeightCache(CurrentScaling()).quantize)
def quantize_new_weights(*args: Any, **options: Any) -> Any:
    return WeightCache(CurrentScaling()).quantize(*args, **options)


#: a valid call of each
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "asnumpy": (fp8.asnumpy, (X,), {}), "to_dlpack": (fp8.to_dlpack, (X,), {}),
    "asarray": (fp8.asarray, (X,), {}), "concatenate": (fp8.concatenate, ([X, X],), {}),
    "empty": (fp8.empty, (3, fp8.float32), {}),
    "zeros": (fp8.zeros, (3, fp8.float32), {}), "full": (fp8.full, (3, 1.0, fp8.float32), {}),
    "empty_like": (fp8.empty_like, (X,), {}),
    "astype": (fp8.astype, (X, fp8.float8_e4m3fn), {}), "transpose": (fp8.transpose, (Q.data,), {}),
    "finfo": (fp8.finfo, (fp8.float32,), {}),
    "compute_amax": (fp8.compute_amax, (X,), {}), "compute_scale": (fp8.compute_scale,
        (np.ones(1, np.float32),), {}),
    "convert_scales": (fp8.convert_scales, (ROW.scale_inv,),
                       {"source": "compact", "target": "gemm_ready", "shape": (64, 256), "block": (1, 128)}),
    "update_delayed_scaling": (fp8.update_delayed_scaling, (X[:2].copy(), X[0].copy()),
                               {"dtype": fp8.float8_e4m3fn}),
    "swizzle_scales": (fp8.swizzle_scales, (MX.scale_inv,), {}),
    "swizzle_scales of groups": (fp8.swizzle_scales, (MX.scale_inv,), {"splits": [30, 34]}),
    "unswizzle_scales": (fp8.unswizzle_scales, (fp8.swizzle_scales(MX.scale_inv),),
                         {"shape": MX.scale_inv.shape}),
    "quantize_tensor": (fp8.quantize_tensor, (X, 1.0), {}), "cast_transpose": (fp8.cast_transpose, (X, 1.0),
        {}),
    "quantize_block": (fp8.quantize_block, (X,), {}), "quantize_mx": (fp8.quantize_mx, (X,), {}),
    "dequantize": (fp8.dequantize, (Q,), {}),
    "matmul_nt": (fp8.matmul_nt, (Q, Q), {}),
    "grouped_matmul_nt": (fp8.grouped_matmul_nt, (Q, fp8.quantize_block(X[None]), [64]), {}),
    "multi_cast_transpose": (fp8.multi_cast_transpose, ([X, X], [1.0, 2.0]), {}),
    "multi_quantize": (fp8.multi_quantize, ([X], CurrentScaling()), {}),
    "multi_quantize, delayed": (fp8.multi_quantize, ([X], DelayedScaling()), {"scales": [1.0]}),
    "multi_quantize, blocks": (fp8.multi_quantize, ([X], BlockScaling()), {}),
    "rebase_scales": (fp8.rebase_scales, (MX,), {"block": (1, 128)}),
    "scaling_aware_transpose": (fp8.scaling_aware_transpose, (ROW,), {}),
    "group_quantize": (fp8.group_quantize, (X, SPLITS, BlockScaling()), {}),
    "group_quantize, current": (fp8.group_quantize, (X, SPLITS, CurrentScaling()), {}),
    "group_quantize, delayed": (fp8.group_quantize, (X, SPLITS, DelayedScaling()),
                                {"scales": X[0, :2].copy()}),
    "splits_to_offsets": (fp8.splits_to_offsets, (SPLITS,), {}),
    "splits_to_offsets, two": (fp8.splits_to_offsets, (SPLITS,), {"strides": (1, 2)}),
    "group_sums": (fp8.group_sums, (X, [30, 34]), {}),
    "pad_groups": (fp8.pad_groups, (X, [30, 34]), {"align": 16}),
    "unpad_groups": (fp8.unpad_groups, (X, [30, 20]), {"align": 16}), "sort_chunks": (fp8.sort_chunks,
        (X, [32, 32], [1, 0]), {}),
    "route": (fp8.route, (np.zeros((64, 2), np.int64),), {"num_experts": 4}),
    "route of a mask": (fp8.route, (np.zeros((64, 4), bool),), {"topk": 2}), "permute": (fp8.permute,
        (X, ROUTING), {}), "permute with scales": (fp8.permute, (Q, ROUTING), {}),
    "unpermute": (fp8.unpermute, (MOVED, ROUTING), {}), "permute_backward": (fp8.permute_backward,
        (MOVED, ROUTING), {}),
    "unpermute_backward": (fp8.unpermute_backward, (X, MOVED, ROUTING), {"probs": PROBS}),
    "swiglu_quantize": (fp8.swiglu_quantize, (X,), {"recipe": BlockScaling()}),
    "swiglu_quantize, current": (fp8.swiglu_quantize, (X,), {"recipe": CurrentScaling()}),
    "swiglu_quantize, delayed": (fp8.swiglu_quantize, (X,), {"recipe": DelayedScaling(), "scale": 1.0}),
    "swiglu_quantize of experts": (fp8.swiglu_quantize, (X,), {
        "recipe": MXScaling(), "bias": X[:2].copy(), "splits": SPLITS}),
    "swiglu_backward_quantize": (fp8.swiglu_backward_quantize, (X[:, :128].copy(), X),
                                 {"recipe": BlockScaling()}),
    "activation_quantize": (fp8.activation_quantize, (X,), {"recipe": BlockScaling()}),
    "activation_quantize of two halves": (fp8.activation_quantize, (X,), {
        "recipe": BlockScaling(), "kind": "geglu"}),
    "activation_backward_quantize": (fp8.activation_backward_quantize, (X, X), {"recipe": BlockScaling()}),
    "BlockScaling": (BlockScaling, (), {}), "CurrentScaling": (CurrentScaling, (), {}),
    "DelayedScaling": (DelayedScaling, (), {}),
    "MXScaling": (MXScaling, (), {}), "BlockScaling.quantize": (BlockScaling().quantize, (X,), {}),
    "CurrentScaling.quantize": (CurrentScaling().quantize, (X,), {}),
    "MXScaling.quantize": (MXScaling().quantize, (X,), {}),
    "DelayedScaling.quantize": (DelayedScaling().quantize, (X,), {"scale": 1.0}),
    "BlockScaling.empty": (BlockScaling().empty, ((4, 128),), {}),
    "CurrentScaling.empty": (CurrentScaling().empty, ((4, 128),), {}),
    "MXScaling.empty": (MXScaling().empty, ((4, 128),), {}),
    "WeightCache.quantize": (WeightCache(CurrentScaling()).quantize, ([X],), {}),
    "WeightCache.quantize, new weights": (quantize_new_weights, ([X],), {}),
    "device_errors": (fp8.device_errors, (), {}),
    "scale_span": (fp8.diagnostics.scale_span, (Q,), {}),
}  # fmt: skip
_CALLED = {function.__name__ for function, _, _ in CALLS.values()}
# ops without a call here are called with their first non-empty case
CALLS |= {op.name: (op.function, *op.inputs(next(case for case in op.cases() if prod(case.shape))))
          for op in OPS.values() if op.name not in _CALLED}
#: public functions without such a call, and where else they get nonsense
ELSEWHERE = {"load": "test_errors_of_tools", "save": "test_errors_of_tools",
             "from_dlpack": "containers/test_dlpack", "bytes_equal": "containers/test_results_equal"}


def test_every_function_is_called():
    functions = {name for name in fp8.__all__ if inspect.isfunction(getattr(fp8, name))}
    lacking = functions - OPS.keys() - _CALLED - ELSEWHERE.keys()
    assert not lacking, f"{sorted(lacking)}: add a call to CALLS, or to ELSEWHERE where it is tested"
    assert ELSEWHERE.keys() < functions


@pytest.fixture(params=["reference", "host"])
def nothing_launched(request):
    """Accepted nonsense is computed by the reference, or prepares launches, none of which happens."""
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)
    with mock.patch.object(Launch, "start"), testing.executor(request.param):
        yield


@pytest.mark.usefixtures("nothing_launched")
@pytest.mark.filterwarnings("ignore::cupy_fp8.diagnostics.scale_report.ScaleWarning")
@pytest.mark.parametrize("name", CALLS)
def test_nonsense_is_refused_by_name(name):
    """With and without a result to write into; nothing is written."""
    function, args, options = CALLS[name]
    parameters = inspect.signature(function).parameters
    out = {"out": function(*args, **options)} if "out" in parameters else {}
    assert refusal(function, *args, **options, **out) is None
    arguments = {id(a) for a in leaves((args, options))}
    for a in leaves(out):
        if id(a) not in arguments:                          # a Grouped holds the sizes from which it was made
            cases.poison(a)
    named_in_messages = [*parameters, "columnwise"]         # cast_transpose is quantize_tensor, columnwise
    starts = re.compile(rf"({'|'.join(named_in_messages)})(\.\w+|\[.+?\])*(, \w+)*: ")
    for place, parameter in enumerate(parameters.values()):
        for wrong in NONSENSE:
            given = [wrong if i == place else a for i, a in enumerate(args)]
            named = options if place < len(args) else {**options, parameter.name: wrong}
            is_valid = is_one_of(wrong, valid(name, parameter))
            message = refusal(function, *given, **named)
            if message is None:
                assert is_valid, (parameter.name, shown(wrong))
            else:
                assert starts.match(message), (parameter.name, shown(wrong), message)
                assert not re.search(r"\d{60}", message), (parameter.name, message)
                with_out = refusal(function, *given, **{**out, **named})
                assert with_out is not None or is_valid, (parameter.name, shown(wrong))


def valid(name: str, parameter: inspect.Parameter) -> list[Any]:
    """Return the nonsense that is valid for a parameter."""
    found = VALID.get(f"{name}.{parameter.name}", VALID.get(parameter.name, []))
    of_flags = [0, True] if isinstance(parameter.default, bool) else []
    return [*found, *of_flags, *([None] if parameter.default is None else [])]


def is_one_of(value: Any, values: list[Any]) -> bool:
    return any(type(value) is type(other) and shown(value) == shown(other) for other in values)


def refusal(function: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """Return the message of the error that a call raises, which must leave all memory unchanged."""
    before = snapshot(args, options)
    try:
        function(*args, **options)
    except (TypeError, ValueError, fp8.DeviceError) as error:
        assert snapshot(args, options) == before
        return str(error)
    return None


@pytest.mark.parametrize("wrong", [np.array([1, 0]), np.array(True), [1], "yes", 1.0, None], ids=repr)
@pytest.mark.parametrize("flag", ["rowwise", "columnwise", "transposed", "dbias", "pow2_scale"])
def test_flags_are_true_or_false(flag, wrong):
    with pytest.raises(TypeError, match=f"^{flag}: expected True or False, got "):
        fp8.quantize_tensor(X, None, **{flag: wrong})
    function: Any = fp8.quantize_tensor
    assert function(X, rowwise=np.bool_(True), columnwise=1) == fp8.quantize_tensor(X, columnwise=True)


ANY: Any = fp8          # whose types mypy does not compare
HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: ANY.full((2,), 10**400, fp8.float8_e4m3fn, like=np), ValueError,
     "fill_value: expected a number that float8_e4m3fn h"),
    (lambda: ANY.full((2,), "3", fp8.float32, like=np), TypeError, "fill_value: expected a number, got '3'"),
    (lambda: ANY.full((2,), [1, 2], fp8.float32, like=np), TypeError, "fill_value: expected a number, got"),
    (lambda: ANY.full(2, Q, fp8.float32, like=np), TypeError, "fill_value: expected a number, got Quantized"),
    (lambda: ANY.full(2, np.array(None, object), fp8.float32, like=np), TypeError,
     "fill_value: expected a number, got None"),
    (lambda: ANY.full(2, np.complex64(1 + 2j), fp8.float32, like=np), TypeError,
     "fill_value: expected a real number, got "),
    (lambda: ANY.asarray(np.ma.ones(2)), TypeError, "a: expected .* got MaskedArray; a.filled"),
    (lambda: ANY.swiglu_quantize(X, BlockScaling(), bias=np), TypeError, "bias: expected .* got module"),
    (lambda: ANY.unpad_groups(X, [64], align=16, out=np), TypeError, "out: expected .* got module"),
    (lambda: ANY.quantize_tensor(HOLDS_ITSELF, 1.0), TypeError, "x: expected a numpy"),
    (lambda: ANY.bytes_equal(HOLDS_ITSELF, X), ValueError, "a: lists are nested too deeply"),
    (lambda: ANY.astype(X, CurrentScaling), TypeError, "dtype: expected "),
    (lambda: ANY.concatenate({"a": X}), TypeError, "arrays: expected a list of arrays, got dict"),
    (lambda: ANY.concatenate(x for x in [X]), TypeError, "arrays: expected a list of arrays, got generator"),
    (lambda: ANY.concatenate([X], axis=1.0), TypeError, "axis: expected an integer, got 1.0"),
    (lambda: ANY.concatenate([X], axis=2), ValueError, "axis: expected one of the 2 axes of arrays"),
    (lambda: ANY.zeros(1.5, fp8.float32, like=np), TypeError,
     "shape: expected an integer or a sequence of integers, got 1.5"),
    (lambda: ANY.empty((2, None), fp8.float32, like=np), TypeError,
     "shape: expected an integer or a sequence of integers"),
    (lambda: ANY.empty(2**64, fp8.float32, like=np), ValueError, "shape: expected extents of at most 2"),
    (lambda: ANY.zeros(3, "float9", like=np), TypeError,
     "dtype: expected a dtype, its type or its name, got 'float9'"),
    (lambda: ANY.scaling_aware_transpose(ROW, target=["column"]), ValueError, "target: expected one of"),
    (lambda: ANY.unpermute_backward(X[:3], None, ROUTING), ValueError,
     "grad: expected 64 rows, the tokens of the routing"),
])  # fmt: skip
def test_messages(call, error, message):
    with pytest.raises(error, match="^" + message):
        call()
