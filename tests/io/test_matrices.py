"""read_matrices finds the matrices of real files."""

import json
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import io
from cupy_fp8.io.found import tensors

SAFETENSORS_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
                     "float8_e4m3fn": "F8_E4M3"}


def write_safetensors(path, tensors, padding=0):
    """Write the format by hand, independently of what the package can write."""
    header: dict[str, Any] = {"__metadata__": {"dtype": "F32", "shape": "22"}}
    data = b""
    for name, a in tensors.items():
        header[name] = {"dtype": SAFETENSORS_NAMES[a.dtype.name], "shape": a.shape,
                        "data_offsets": [len(data), len(data) + a.nbytes]}
        data += a.tobytes()
    text = json.dumps(header).encode() + b" " * padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def model():
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "vector": rng.standard_normal(7, np.float32), "cube": np.zeros((2, 2, 2), np.float32),
        "ids": np.zeros((2, 2), np.int64), "f64": np.array([[0.1, 1e300]]),
        "f32": rng.standard_normal((3, 5), np.float32)}
    return tensors | {"f16": tensors["f32"].astype(np.float16), "bf16": tensors["f32"].astype(fp8.bfloat16),
                      "empty": np.zeros((0, 4), np.float32)}


def expected():
    wanted = {name: a for name, a in model().items() if name in ("f64", "f32", "f16", "bf16")}
    return wanted | {"f64": np.array([[0.1, np.inf]], np.float32)}


def assert_matrices(found, wanted):
    assert [name for name, _ in found] == list(wanted)
    for name, a in found:
        assert type(a) is np.ndarray
        assert fp8.bytes_equal(a, wanted[name]), name


@pytest.mark.parametrize("padding", range(4))
def test_safetensors(tmp_path, padding):
    """Tensors are read whatever the alignment of the data."""
    path = tmp_path / "model.safetensors"
    codes = np.full((2, 2), 0x39, np.uint8).view(fp8.float8_e4m3fn)
    write_safetensors(path, model() | {"fp8": codes}, padding)
    assert_matrices(list(io.read_matrices(path)), expected())       # FP8 codes have no values without scales


def test_safetensors_is_mapped(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, model())
    a = dict(io.read_matrices(path))["f32"]
    while not isinstance(a, np.memmap):
        assert a.base is not None, "a copy"
        a = a.base


def test_npz_and_npy(tmp_path):
    tensors = model()
    np.savez(tmp_path / "model.npz", **{name: a for name, a in tensors.items() if name != "bf16"})
    wanted = {name: a for name, a in expected().items() if name != "bf16"}
    assert_matrices(list(io.read_matrices(tmp_path / "model.npz")), wanted)
    np.save(tmp_path / "layer.npy", tensors["f16"])
    assert_matrices(list(io.read_matrices(tmp_path / "layer.npy")), {"layer": tensors["f16"]})
    np.save(tmp_path / "vector.npy", tensors["vector"])
    assert list(io.read_matrices(tmp_path / "vector.npy")) == []


def test_own_archive(tmp_path):
    """Quantised tensors are read as their values, in containers too."""
    x = np.random.default_rng(1).standard_normal((40, 64), np.float32)
    column = fp8.Quantized(None, fp8.quantize_mx(x, columnwise=True).columnwise)
    block, one = fp8.quantize_block(x), fp8.quantize_tensor(x)
    io.save(tmp_path / "own.npz", q={"a": one, "b": [block, column.columnwise]}, step=3, **model())
    assert_matrices(list(io.read_matrices(tmp_path / "own.npz")), {
        "q.a": one.dequantize(), "q.b.0": block.dequantize(), "q.b.1": column.dequantize(), **expected()})


def test_groups_are_matrices(tmp_path):
    x = np.random.default_rng(2).standard_normal((40, 64), np.float32)
    groups = fp8.group_quantize(x, [8, 0, 32], recipe=fp8.MXScaling())
    io.save(tmp_path / "groups.npz", g=groups)
    found = list(tensors(tmp_path / "groups.npz"))
    assert [(f.name, f.what) for f in found] == [
        ("g.0", "float8_e4m3fn, block 1×32"), ("g.1", "no elements"), ("g.2", "float8_e4m3fn, block 1×32")]
    assert fp8.bytes_equal(found[2].values, groups[2].dequantize())


def test_scales_belong_to_their_data(tmp_path):
    """FP8 data of a checkpoint are read with their scales, which are not tensors of their own."""
    path = tmp_path / "model.safetensors"
    x = np.random.default_rng(3).standard_normal((2, 256, 128), np.float32)
    experts, rows = fp8.quantize_block(x, block=(128, 128)), fp8.quantize_block(x[0], block=(1, None))
    io.save_safetensors(path, {"experts.weight": experts, "rows.weight": rows.rowwise,
                               "lost.weight_scale_inv": np.ones((2, 2), np.float32),
                               "odd.weight": experts.data,
                               "odd.weight_scale_inv": np.ones((3, 5), np.float32),
                               "codes": np.zeros((2, 2), np.uint8)})
    found = {f.name: f for f in tensors(path)}
    assert found.keys() == {"experts.weight", "rows.weight", "lost.weight_scale_inv", "odd.weight", "codes"}
    assert fp8.bytes_equal(found["experts.weight"].values, experts.dequantize())
    assert fp8.bytes_equal(found["rows.weight"].values, rows.dequantize())
    assert found["experts.weight"].what == "float8_e4m3fn, block 128×128"
    assert found["lost.weight_scale_inv"][1:] == (None, "scales without FP8 data in this file")
    assert found["odd.weight"].values is None
    assert "odd.weight_scale_inv F32 [3, 5] beside odd.weight" in found["odd.weight"].what
    assert found["codes"].what == "uint8, not a float type"
    assert [name for name, _ in io.read_matrices(path)] == ["rows.weight"]
    folder = tmp_path / "shards"
    folder.mkdir()
    path.rename(folder / "model-00001-of-00001.safetensors")
    assert [f.what for f in tensors(folder)] == [f.what for f in found.values()]


@pytest.mark.parametrize(("value", "why"), [
    (np.zeros((2, 2), fp8.float8_e8m0fnu), "scales without FP8 data"), (np.ones(3), "vectors and numbers"),
    (np.float32(1), "vectors and numbers"), (np.ones((1, 2, 2, 2)), "4 dimensions; reshape"),
    (np.ones((0, 4)), "no elements"), (np.ones((2, 2), np.complex64), "complex64, not a float type"),
    ("text", "str, not an array"), (None, "NoneType, not an array"),
], ids=str)
def test_what_is_left_out_has_a_reason(value, why, tmp_path):
    io.save(tmp_path / "own.npz", a=value)
    (found,) = tensors(tmp_path / "own.npz")
    assert found.values is None
    assert found.what.startswith(why)


def test_dtypes_that_npy_forgets(tmp_path):
    scale_inv = np.ones((1, 1), np.float32)
    np.savez(tmp_path / "a.npz", w=np.ones((2, 2), fp8.float8_e4m3fn), w_scale_inv=scale_inv)
    assert [(f.name, f.values, f.what) for f in tensors(tmp_path / "a.npz")] == [
        ("w", None, ".npy and .npz forget the dtypes FP8 and bfloat16; cupy_fp8.save keeps them"),
        ("w_scale_inv", None, "scales without FP8 data in this file")]


def test_read_matrices_errors_come_at_the_call(tmp_path):
    with pytest.raises(FileNotFoundError):
        io.read_matrices(tmp_path / "none.npz")
    with pytest.raises(ValueError, match=r"expected a file ending in \.npy, \.npz, \.safetensors"):
        io.read_matrices(tmp_path / "model.bin")
    for suffix in (".npy", ".npz", ".safetensors"):
        broken = tmp_path / f"broken{suffix}"
        broken.write_bytes(b"\x01\x02 not it at all")
        with pytest.raises(ValueError, match=f"not an? {suffix} file"):
            io.read_matrices(broken)
        broken.write_bytes(b"")
        with pytest.raises(ValueError, match=rf"broken{suffix}: not an {suffix} file \(it is empty\)"):
            io.read_matrices(broken)
    beyond = tmp_path / "beyond.safetensors"
    write_safetensors(beyond, model())
    beyond.write_bytes(beyond.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"not a \.safetensors file"):
        io.read_matrices(beyond)
