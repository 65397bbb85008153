"""The mistakes of the first ten minutes: each message says what was expected, what came and what to write
instead, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from declared import EXAMPLES, Example, every_example
from mistakes import expect_advice
from perturbed import given, outcome, with_array
from places import Place

import cupy_fp8 as fp8
from cupy_fp8 import advice, recipes, testing
from cupy_fp8.calls import keys, remembered
from cupy_fp8.formats import BYTE_DTYPES

F8: Any = fp8                       # whose types mypy does not compare
X = np.linspace(-3, 3, 64 * 256, dtype=np.float32).reshape(64, 256)
TENSOR, MX, BLOCKS = fp8.quantize_tensor(X), fp8.quantize_mx(X), fp8.quantize_block(X)
COLUMNS = fp8.quantize_mx(X, rowwise=False, columnwise=True)
MASKED = np.ma.masked_greater(X, 1)


class Tensor:
    """Looks like a torch tensor or a JAX array."""

    def __init__(self, a: np.ndarray) -> None:
        self._a = a

    def __dlpack__(self, **options: Any) -> Any:
        return self._a.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._a.__dlpack_device__()


class Frame:
    """Looks like a pandas or polars frame."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return X


def wrong_arrays(a: np.ndarray) -> dict[str, tuple[Any, str]]:
    """Return what may be given for an array by mistake, and what the message says to write."""
    return {"list": (a.tolist(), "asarray("), "tensor": (Tensor(a), "cupy_fp8.from_dlpack("),
            "result": (TENSOR, ".dequantize()"), "frame": (Frame(), "numpy.asarray("),
            "masked": (np.ma.masked_array(a, np.zeros(a.shape, bool)), ".filled(0)"),
            "float64": (np.ones(a.shape), ".astype("),
            "complex": (np.ones(a.shape, np.complex64), ".real.astype("),
            "E4M3FNUZ": (np.ones(a.shape).astype(ml_dtypes.float8_e4m3fnuz), ".astype(")}


#: one call of each op whose first argument is an array
FIRST_ARRAYS = {example.op.name: example for example in reversed(EXAMPLES)
                if example.args and isinstance(example.args[0], np.ndarray)}


#: ops that also move results, and those that take arrays of any dtype or check it themselves
TAKEN = {("splits_to_offsets", "list"),
         *((name, "result") for name in ("permute", "pad_groups", "unpad_groups", "sort_chunks",
                                           "group_sums"))}
OF_OTHER_DTYPES = ("permute", "permute_backward", "pad_groups", "unpad_groups", "sort_chunks",
                   "convert_scales", "update_delayed_scaling")


@pytest.mark.parametrize("name", FIRST_ARRAYS)
def test_something_else_as_the_first_array(name, place):
    example: Example = FIRST_ARRAYS[name].on(place.run)
    first, original = example.args[0], FIRST_ARRAYS[name].args[0]
    for what, (wrong, words) in wrong_arrays(original).items():
        if (name, what) in TAKEN:
            continue
        if isinstance(wrong, np.ndarray) and what != "masked":
            if name in OF_OTHER_DTYPES or original.dtype.kind in "iu" or original.dtype in BYTE_DTYPES:
                continue
            wrong = place.array(wrong)
        message = outcome(with_array(example, first, wrong))
        assert message is not None, (name, what)
        assert message.startswith("TypeError: "), message
        assert words in message, message


@every_example
def test_a_number_for_an_array(example, place):
    """If the message says how to make an array of it, that array has the required dtype and number of
    dimensions."""
    for name in given(example.on(place.run)):
        call = example.on(place.run)
        message = outcome(with_array(call, given(call)[name], 3))
        if message and (advised := re.search(r'cupy_fp8\.asarray\((\[*)[^"]*, "(\w+)"\)', message)):
            made = place.array(np.full((1,) * len(advised[1]), 3, advised[2]))
            again = outcome(with_array(call, given(call)[name], made)) or ""
            assert not re.match(rf"TypeError: {re.escape(name)}\b|.*dimension", again), (message, again)


def test_a_scale_on_another_gpu(device):
    if len(device.devices) < 2:
        pytest.skip("one GPU")
    first, second = device.devices[:2]
    scale = device.array(np.ones(1, np.float32), second)
    message = (f"scale: on GPU {second}, the input is on GPU {first}; `with cupy.cuda.Device({first}): "
               "scale.copy()` copies it there")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fp8.quantize_tensor(device.array(X), scale)


def test_arrays_of_two_kinds(device):
    for x, scale, other, kind in ((device.array(X), np.ones(1, np.float32), "numpy", "cupy"),
                                  (X, device.array(np.ones(1, np.float32)), "cupy", "numpy")):
        message = (f"scale: a {other} array among {kind} arrays; cupy_fp8.asarray(scale, like=\"{kind}\") "
                   "moves it")
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            fp8.quantize_tensor(x, scale)


Mistake = tuple[Callable[[], Any], type[Exception], str]

MISTAKES: dict[str, Mistake] = {
    # ---- shapes and numbers ----
    "a vector": (lambda: F8.quantize_mx(X[0]),
        ValueError, "two or three dimensions, got shape (256,); x.reshape(1, -1)"),
    "four axes": (lambda: F8.quantize_block(X.reshape(2, 2, 16, 256)),
        ValueError, "x.reshape(-1, *x.shape[-2:])"),
    "columns of a vector": (lambda: F8.quantize_tensor(X[0], columnwise=True),
        ValueError, "x.reshape(1, -1)"),
    "a number": (lambda: F8.quantize_mx(3.0), TypeError, 'got float; cupy_fp8.asarray([[x]], "float32")'),
    "a NumPy number": (lambda: F8.compute_amax(np.float32(3)),
        TypeError, "got float32; cupy_fp8.asarray([[x]]"),
    "a generator": (lambda: F8.quantize_mx(row for row in X), TypeError, "cupy_fp8.asarray(list(x), "),
    "a number of sizes": (lambda: F8.splits_to_offsets(5),
        TypeError, 'cupy_fp8.asarray([splits], "int64") makes an array'),
    "the size of a group": (lambda: F8.pad_groups(X, 64, align=16),
        TypeError, 'cupy_fp8.asarray([splits], "int64") makes an array'),
    "a count": (lambda: F8.rebase_scales(MX, block=(1, 128), changed=5),
        TypeError, 'cupy_fp8.asarray([changed], "int64") makes an array'),
    "an amax": (lambda: F8.quantize_tensor(X, 1.0, amax=3.0),
        TypeError, 'cupy_fp8.asarray([amax], "float32") makes an array'),
    "like=3": (lambda: F8.zeros(3, "e4m3", like=3), TypeError, "one of these modules or an array, got 3"),
    "integers of experts": (lambda: F8.route([[0, 1]], num_experts=2), TypeError, '"int32") makes one'),
    "codes": (lambda: F8.quantize_mx(MX.data), TypeError, 'cupy_fp8.astype(x, "float32")'),
    "values to transpose": (lambda: F8.transpose(X),
        TypeError, "quantize_tensor, quantize_block and quantize_mx"),
    "bytes of codes": (lambda: F8.Scaled(X.astype(np.uint8), np.ones(1, np.float32), X.shape), TypeError,
                       "data.view(cupy_fp8.float8_e4m3fn)"),
    "an array of arrays": (lambda: F8.asarray(Tensor(X)), TypeError, "cupy_fp8.from_dlpack(a)"),
    "asarray of a result": (lambda: F8.asarray(MX), TypeError, "a.dequantize()"),
    "NumPy of a result": (lambda: np.asarray(MX), TypeError, "q.dequantize()"),
    "asnumpy of a result": (lambda: F8.asnumpy(MX), TypeError, "a.dequantize()"),
    "from_dlpack of a list": (lambda: F8.from_dlpack([1.0]), TypeError, "got list; cupy_fp8.asarray(x"),
    "like": (lambda: F8.zeros(3, "e4m3", like="cuda"), TypeError, "like: expected 'numpy', 'cupy'"),
    # ---- scales ----
    "scales of rows": (lambda: F8.quantize_tensor(X, np.ones((64, 1), np.float32)),
        ValueError, "quantize_block"),
    "a f64 scale": (lambda: F8.quantize_tensor(X, np.ones(1)), TypeError, 'scale.astype("float32")'),
    "a list as scale": (lambda: F8.quantize_tensor(X, [2.0]), TypeError,
                        "scale: expected a number or a float32 array of one element, got list"),
    "a recipe as scale": (lambda: F8.quantize_tensor(X, fp8.MXScaling()),
        TypeError, "MXScaling().quantize(x)"),
    "a dtype as scale": (lambda: F8.quantize_tensor(X, fp8.float8_e4m3fn), TypeError, "write dtype="),
    "its name as scale": (lambda: F8.quantize_tensor(X, "e4m3"), TypeError, "write dtype="),
    "no delayed scale": (lambda: F8.DelayedScaling().quantize(X), ValueError, "DelayedScalingState keeps it"),
    # ---- results ----
    "no columns": (lambda: MX.columnwise.dequantize(),
        AttributeError, "no column-wise part: quantise with columnwise=True"),
    "no rows": (lambda: COLUMNS.rowwise.dequantize(),
        AttributeError, "no row-wise part: quantise with rowwise=True"),
    "no row-wise data": (lambda: COLUMNS.data, AttributeError, "use .columnwise.data"),
    "scale": (lambda: F8.quantize_mx(X).scale, AttributeError, "did you mean scale_inv?"),
    "astype": (lambda: F8.quantize_mx(X).astype("float32"),
        AttributeError, "did you mean dequantize(dtype)?"),
    "numpy": (lambda: F8.quantize_mx(X).rowwise.numpy(), AttributeError, "did you mean dequantize()?"),
    "@": (lambda: F8.quantize_mx(X) @ TENSOR, TypeError, "cupy_fp8.matmul_nt(a, b)"),
    "array @": (lambda: X @ F8.quantize_mx(X), TypeError, "cupy_fp8.matmul_nt(a, b)"),
    "a Quantized of an array": (lambda: F8.Quantized(X),
        TypeError, "quantize_tensor, quantize_block and quantize_mx"),
    "dequantize(data, s)": (lambda: F8.dequantize(MX.data, MX.scale_inv), TypeError,
                            "dequantize(Scaled(data, scale_inv, data.shape))"),
    "dequantize(q, dtype)": (lambda: F8.dequantize(MX, np.float16), TypeError, "write dtype="),
    "dequantize(data)": (lambda: F8.dequantize(MX.data), TypeError, "use astype for a plain array"),
    "scales to swizzle": (lambda: F8.swizzle_scales(MX), TypeError, "s.scale_inv its scales"),
    # ---- products ----
    "a product of arrays": (lambda: F8.matmul_nt(X, X),
        TypeError, "quantize_tensor, quantize_block and quantize_mx"),
    "b as [K, N]": (lambda: F8.matmul_nt(TENSOR, F8.quantize_tensor(X.T)), ValueError, "b [N, K] transposed"),
    "b stored transposed": (lambda: F8.matmul_nt(TENSOR, F8.cast_transpose(X, 1.0).columnwise), ValueError,
                            "b.T of it is an operand"),
    "b.T": (lambda: F8.matmul_nt(TENSOR, TENSOR.T), ValueError, "b: expected a row-wise part"),
    "blocks of two kinds": (lambda: F8.matmul_nt(MX, BLOCKS),
        ValueError, "to_block((1, 128), scale_layout='gemm_ready')"),
    # ---- options ----
    "one number as block": (lambda: F8.quantize_block(X, block=128), ValueError, "got 128; write (1, 128)"),
    "two arguments as block": (lambda: F8.BlockScaling(1, 128), ValueError, "got 1; write (1, 128)"),
    "a text as block": (lambda: F8.quantize_block(X, block="1x128"),
        ValueError, "a pair of rows and columns"),
    "floats as block": (lambda: F8.BlockScaling((1.0, 128.0)), ValueError, "got (1.0, 128.0)"),
    "the column-wise block": (lambda: F8.quantize_mx(X, block=(32, 1)), ValueError, "columnwise=True"),
    "float8_e4m3": (lambda: F8.quantize_mx(X, dtype="float8_e4m3"), TypeError, "did you mean float8_e4m3fn?"),
    "fp8": (lambda: F8.quantize_mx(X, dtype="fp8"), TypeError, "did you mean float8_e4m3fn or float8_e5m2?"),
    "None as dtype": (lambda: F8.quantize_mx(X, dtype=None), TypeError, "got None"),
    **{f"WeightCache({recipe.__name__})": (
        partial(F8.WeightCache, recipe), TypeError,
        "recipe: expected a DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got the class "
        f"{recipe.__name__}; write {recipe.__name__}()") for recipe in recipes.RECIPES},
    "multi_quantize with a class": (lambda: F8.multi_quantize([X], fp8.MXScaling),
        TypeError, "write MXScaling()"),
    "swiglu_quantize with a class": (lambda: F8.swiglu_quantize(X, fp8.BlockScaling),
        TypeError, "write BlockScaling()"),
    "group_quantize with a class": (lambda: F8.group_quantize(X, [64], fp8.MXScaling),
        TypeError, "write MXScaling()"),
    "a state with a class": (lambda: F8.DelayedScalingState(1, fp8.DelayedScaling),
        TypeError, "write DelayedScaling()"),
    "a text as recipe": (lambda: F8.multi_quantize([X], "mxfp8"), TypeError, "did you mean MXScaling?"),
    # ---- lists and files ----
    "a generator of arrays": (lambda: F8.multi_quantize((x for x in [X]), fp8.MXScaling()),
        TypeError, "list(xs) makes one"),
    "one array as list": (lambda: F8.multi_quantize(X, fp8.MXScaling()), TypeError, "[xs] is a list of one"),
    "one array for current scaling": (lambda: F8.multi_quantize(X, fp8.CurrentScaling()),
        TypeError, "[xs] is a list"),
    "a dict as list": (lambda: F8.multi_quantize({"w": X}, fp8.MXScaling()), TypeError, "list(xs.values())"),
    "one weight": (lambda: F8.WeightCache(fp8.MXScaling()).quantize(X),
        TypeError, "[weights] is a list of one"),
    "scale_layout='comapct'": (lambda: F8.quantize_block(X, scale_layout="comapct"), ValueError,
                               "got 'comapct'; did you mean compact?"),
    "mode='rciel'": (lambda: F8.quantize_mx(X, mode="rciel"), ValueError, "got 'rciel'; did you mean rceil?"),
    "to_layout('swizled')": (lambda: F8.quantize_mx(X).to_layout("swizled"), ValueError,
                             "got 'swizled'; did you mean swizzled?"),
    "update='no'": (lambda: F8.WeightCache(fp8.MXScaling()).quantize([X], update="no"), TypeError,
                    "update: expected True or False, got 'no'"),
    "save(path)": (lambda: F8.save("w.npz"), ValueError, "save(path, weights=q)"),
    "save(array)": (lambda: F8.save(X), TypeError, 'save("w.npz", weights=q)'),
    "save(path, array)": (lambda: F8.save("w.npz", X),
        TypeError, "save(path, weights=q); got ndarray without a name"),
    "save of a masked array": (lambda: F8.save("w.npz", w=MASKED), TypeError, "w.filled(0)"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_the_message_teaches(what, tmp_path, monkeypatch):
    expect_advice(MISTAKES[what], tmp_path, monkeypatch)


# ---- what is accepted ----
@pytest.mark.parametrize("block", [[1, 128], (np.int64(1), np.int32(128)), np.array([1, 128])], ids=repr)
def test_a_block_in_other_words(block):
    assert fp8.BlockScaling(block) == fp8.BlockScaling((1, 128))
    assert fp8.quantize_block(X, block=block) == fp8.quantize_block(X, block) == BLOCKS
    assert fp8.quantize_block(X, block=block).rowwise.block == (1, 128)
    assert MX.to_block(block) == MX.to_block((1, 128))
    s = fp8.quantize_block(X, scale_layout="compact").rowwise
    assert fp8.Scaled(s.data, s.scale_inv, s.shape, block=block, scale_layout="compact") == s
    padded = fp8.convert_scales(s.scale_inv, source="compact", target="gemm_ready", shape=X.shape,
                                block=block)
    assert fp8.bytes_equal(padded, BLOCKS.scale_inv)


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, fp8.float8_e4m3fn) for name in ("e4m3", "E4M3", "e4m3fn", "fp8_e4m3", "float8_e4m3fn")),
    *((name, fp8.float8_e5m2) for name in ("e5m2", "fp8_e5m2", "float8_e5m2"))])
def test_a_dtype_by_its_name(name, dtype):
    for call in (fp8.quantize_mx, fp8.quantize_block, fp8.quantize_tensor, fp8.cast_transpose):
        assert call(X, dtype=name) == call(X, dtype=dtype)
    for recipe in recipes.RECIPES:
        assert recipe(dtype=name) == recipe(dtype=dtype)
    by_name, by_dtype = (fp8.multi_cast_transpose([X], [1.0], dtype=of) for of in (name, dtype))
    assert by_name == by_dtype
    assert fp8.finfo(name) is fp8.finfo(dtype)
    for a in (fp8.astype(X, name), fp8.asarray(X, name, like=np), fp8.empty(3, name, like=np),
              fp8.zeros(3, name, like=np), fp8.full(3, 1.0, name, like=np),
              fp8.from_dlpack(np.zeros(3, np.uint8), dtype=name)):
        assert a.dtype == dtype
    amax = np.ones(1, np.float32)
    assert fp8.bytes_equal(fp8.compute_scale(amax, dtype=name), fp8.compute_scale(amax, dtype=dtype))


def test_names_of_other_dtypes():
    assert fp8.astype(X, "bf16").dtype == MX.dequantize("bf16").dtype == fp8.bfloat16
    as_words = MX.to_block((1, 128), scale_dtype="e8m0")
    assert as_words.scale_inv.dtype == as_words.to_layout("compact", dtype="e8m0").scale_inv.dtype
    assert as_words.scale_inv.dtype == fp8.float8_e8m0fnu


def test_a_name_and_its_dtype_are_remembered_apart(place: Place):
    """Calls launched again return what each was asked for."""
    x = place.array(X)
    for _ in range(3):
        name: Any
        for name, dtype in (("e4m3", fp8.float8_e4m3fn), ("e5m2", fp8.float8_e5m2)):
            by_name, by_dtype = (fp8.astype(x, of) for of in (name, dtype))
            assert by_name.dtype == by_dtype.dtype == dtype
            testing.assert_bytes_equal(by_name, by_dtype)
    if place.devices:
        key = keys.key_of("op", (x, "e4m3"), None)
        assert key != keys.key_of("op", (x, "e5m2"), None)
        assert len(remembered._calls) == 4


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_arrays_that_only_look_different():
    strided, swapped = np.repeat(X, 2, axis=1)[:, ::2], np.asfortranarray(X)
    for x in (strided, swapped, X.T.copy().T, X.view(np.matrix)):
        assert fp8.quantize_mx(x, columnwise=True) == fp8.quantize_mx(X, columnwise=True)
        assert fp8.quantize_tensor(x, 1.0, dbias=True) == fp8.quantize_tensor(X, 1.0, dbias=True)


# ---- names ----
@pytest.mark.parametrize(("name", "meant"), [
    ("quantise_block", "quantize_block?"), ("dequantise", "dequantize?"), ("Quantised", "Quantized?"),
    ("quantise", "quantize?"), ("quantize_mxfp8", "quantize_mx?"),
    ("quantize_fp8", "quantize?"), ("matmul", "matmul_nt?"),
    ("qunatize_block", "quantize_block"), ("gemm", "matmul_nt or grouped_matmul_nt?"),
    ("scaled_mm", "matmul_nt"), ("cast", "quantize_tensor or astype?"), ("mx_scaling", "MXScaling?"),
    ("float8_e4m3", "float8_e4m3fn?"), ("bf16", "bfloat16?"), ("from_torch", "from_dlpack?"),
    ("to_numpy", "asnumpy?"), ("save_safetensors", "io.save_safetensors?"),
    ("scale_span", "diagnostics.scale_span?")])
def test_misspelt_functions(name, meant):
    message = f"module 'cupy_fp8' has no attribute {name!r}; did you mean {meant}"
    with pytest.raises(AttributeError, match=re.escape(message)):
        getattr(fp8, name)
    assert not hasattr(fp8, name)


@pytest.mark.parametrize(("module", "name", "meant"), [
    ("plot", "histogramm", "histogram?"), ("diagnostics", "errors", "error?"), ("io", "loads", "load"),
    ("recipes", "MXFP8BlockScaling", "MXScaling?"),
    ("testing", "assert_bytes_equals", "assert_bytes_equal?")])
def test_misspelt_names_of_modules(module, name, meant):
    message = f"'cupy_fp8.{module}' has no attribute {name!r}; did you mean {meant}"
    with pytest.raises(AttributeError, match=re.escape(message)):
        getattr(getattr(fp8, module, recipes), name)


def test_names_that_nothing_is_like():
    for name in ("zzz", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"^module 'cupy_fp8' has no attribute '{name}'$"):
            getattr(fp8, name)
    assert advice.meant("zzz", fp8.__all__) == ""


def test_directions_by_name():
    both = fp8.quantize_mx(X, columnwise=True)
    assert list(both.parts) == ["rowwise", "columnwise"]
    assert list(MX.parts) == ["rowwise"]
    assert COLUMNS.parts.get("rowwise") is None
    assert COLUMNS.parts["columnwise"] is COLUMNS.columnwise
    assert not {"scale", "astype", "float"} & set(dir(both))


@pytest.mark.full
def test_torch_tensors():
    """The line in the message works with the real library."""
    torch = pytest.importorskip("torch")
    tensor = torch.linspace(-3, 3, 64 * 256).reshape(64, 256)
    for x in (tensor, tensor.bfloat16()):
        with pytest.raises(TypeError, match=r"got Tensor; cupy_fp8\.from_dlpack\(x\)"):
            F8.quantize_mx(x)
        assert fp8.quantize_mx(fp8.from_dlpack(x)).shape == (64, 256)
    with pytest.raises(TypeError, match='write "float8_e4m3fn"'):
        F8.quantize_mx(X, dtype=torch.float8_e4m3fn)
