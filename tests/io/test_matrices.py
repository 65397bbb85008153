"""read_matrices finds the matrices of real files."""

import json
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import io

SAFETENSORS_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
                     "float8_e4m3fn": "F8_E4M3"}


def write_safetensors(path, tensors, padding=0):
    """The format by hand, so that it does not depend on what the package can write."""
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
    wanted = {name: a for name, a in model().items() if name in ("f64", "f32", "f16", "bf16", "empty")}
    return wanted | {"f64": np.array([[0.1, np.inf]], np.float32)}


def assert_matrices(found, wanted):
    assert [name for name, _ in found] == list(wanted)
    for name, a in found:
        assert type(a) is np.ndarray
        assert fp8.bytes_equal(a, wanted[name]), name


@pytest.mark.parametrize("padding", range(4))
def test_safetensors(tmp_path, padding):
    """Whatever the alignment of the data."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, model() | {"fp8": np.zeros((2, 2), fp8.float8_e4m3fn)}, padding)
    assert_matrices(list(io.read_matrices(path)), expected())


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
    io.save(tmp_path / "own.npz", q=fp8.quantize_tensor(np.ones((2, 2), np.float32), 1.0), **model())
    assert_matrices(list(io.read_matrices(tmp_path / "own.npz")), expected())


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
    beyond = tmp_path / "beyond.safetensors"
    write_safetensors(beyond, model())
    beyond.write_bytes(beyond.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"not a \.safetensors file"):
        io.read_matrices(beyond)
