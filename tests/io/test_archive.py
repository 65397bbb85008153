"""save/load keep every byte, dtype and piece of metadata; read_matrices finds the matrices of real files."""

import json
import zipfile
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import io, testing
from cupy_fp8.formats import FORMATS
from cupy_fp8.io.archive import MANIFEST
from cupy_fp8.results import Quantized


def every_code(dtype):
    f = FORMATS[dtype]
    count = 1 << min(f.bits, 16)
    return np.arange(count).astype(f.storage).view(dtype)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.npz"


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_code_of_every_dtype(path, dtype):
    a = every_code(dtype).reshape(-1, 16)
    io.save(path, a=a, transposed=a.T, one=a[:1, 1].reshape(()), nothing=a[:0], columns=a[:, ::3])
    loaded = io.load(path)
    assert list(loaded) == ["a", "transposed", "one", "nothing", "columns"]
    for name, want in (("a", a), ("transposed", a.T), ("one", a[:1, 1].reshape(())), ("nothing", a[:0]),
                       ("columns", a[:, ::3])):
        assert type(loaded[name]) is np.ndarray
        assert fp8.bytes_equal(loaded[name], want), name


def test_ordinary_dtypes(path):
    arrays: dict[str, Any] = {"i": np.arange(3), "b": np.array([True, False]), "c": np.array([1 + 2j]),
                              "f": np.array([0.1]), "s": np.array(["è", "b"])}
    io.save(path, **arrays)
    for name, a in io.load(path).items():
        assert a.dtype == arrays[name].dtype
        assert a.tobytes() == arrays[name].tobytes()


def test_results_with_metadata(path):
    x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    both = fp8.cast_transpose(x, 7.0, dtype=fp8.float8_e5m2)
    q: Any = Quantized(both.rowwise, both.columnwise, np.array([1, 2, 3, 4, 5], np.float32))
    saved = {"q": q, "column": q.columnwise, "turned": q.rowwise.T, "x": x}
    io.save(path, **saved)
    loaded = io.load(path)
    testing.assert_bytes_equal(list(loaded.values()), list(saved.values()))
    # scales shared when saved are shared when loaded
    assert loaded["q"].rowwise.scale_inv is loaded["q"].columnwise.scale_inv
    assert loaded["q"].nbytes == q.nbytes
    np.testing.assert_array_equal(loaded["turned"].dequantize(), q.dequantize().T)


def test_any_name(path):
    arrays = {name: np.full(2, i) for i, name in enumerate(["file", "self", "a b/c", "x.npy", "ü"])}
    io.save(path, **{"file": arrays["file"], **arrays})
    assert {name: a.tolist()
            for name, a in io.load(path).items()} == {name: a.tolist() for name, a in arrays.items()}


def test_is_a_plain_npz(path):
    a = every_code(fp8.float8_e4m3fn)
    io.save(path, a=a)
    with np.load(path, allow_pickle=False) as archive:
        assert sorted(archive.files) == [MANIFEST, "a"]
        assert archive["a"].dtype == np.uint8
        assert archive["a"].tobytes() == a.tobytes()
        manifest = json.loads(str(archive[MANIFEST]))
    assert manifest == {"format": "cupy_fp8", "version": 1, "dtypes": {"a": "float8_e4m3fn"},
                        "values": {"a": {"array": "a"}}}


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(("arrays", "error", "message"), [
    ({"a": object()}, TypeError, "a: expected a numpy"),
    ({"a": [1, {2}]}, TypeError, r"a\.1: expected a numpy"),
    ({"a": {1: 2}}, TypeError, "a: expected strings as keys, got 1"),
    ({"a": {0: 1, "0": 2}}, TypeError, "a: expected strings as keys, got 0"),
    ({"a": {None: 1}}, TypeError, "a: expected strings as keys, got None"),
    ({"a": np.dtype("S5")}, TypeError, r"a: cannot store dtype \|S5"),
    ({"a": np.dtype(">f4")}, TypeError, "a: cannot store dtype >f4"),
    ({"a": HOLDS_ITSELF}, ValueError, "save: lists, tuples and dicts are nested too deeply"),
    ({}, ValueError, "expected arrays or results by name"),
    ({"a\0b": np.ones(2)}, ValueError, "an .npz file cannot hold"),
    ({"a" * 70_000: np.ones(2)}, ValueError, "an .npz file cannot hold"),
    ({"\ud800": np.ones(2)}, ValueError, "cannot be written as UTF-8"),
    ({"a": np.array([None])}, TypeError, "a: cannot store dtype object"),
    ({"q": fp8.quantize_tensor(np.ones(2, np.float32), 1.0), "q.rowwise.data": np.ones(2)}, ValueError,
     "taken by another entry"),
    ({MANIFEST: np.ones(2)}, ValueError, "taken by another entry"),
])
def test_save_refuses_and_keeps_the_old_file(path, arrays, error, message):
    path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        io.save(path, **arrays)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_failed_write_leaves_the_old_file(path, monkeypatch):
    path.write_bytes(b"old")

    def full(*_args, **_options):
        raise OSError("no space left")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="no space"):
        io.save(path, a=np.ones(2))
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_load_refuses_other_files(path):
    np.savez(path, a=np.ones(2))
    with pytest.raises(ValueError, match=r"not written by cupy_fp8\.save"):
        io.load(path)
    np.save(path.with_suffix(".npy"), np.ones(2))
    with pytest.raises(ValueError, match=r"got a single \.npy"):
        io.load(path.with_suffix(".npy"))
    path.write_bytes(b"PK nonsense")
    with pytest.raises(ValueError, match=r"not an \.npz"):
        io.load(path)
    with pytest.raises(FileNotFoundError):
        io.load(path.with_name("none.npz"))


def test_load_never_unpickles(path):
    evil = np.empty(1, object)
    evil_manifest = json.dumps({"format": "cupy_fp8", "version": 1, "values": {"a": {"array": "evil"}}})
    with zipfile.ZipFile(path, "w") as archive:
        for name, a in ((MANIFEST, np.array(evil_manifest)), ("evil", evil)):
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, a, allow_pickle=True)
    with pytest.raises(ValueError, match="holds Python objects, which are never unpickled"):
        io.load(path)


def test_like_without_a_gpu(path):
    if fp8.backend.gpu_problem() is None:
        pytest.skip("this machine has a GPU")
    io.save(path, a=np.ones(2))
    with pytest.raises(fp8.DeviceError):
        io.load(path, like="cupy")


@pytest.mark.gpu
def test_cupy_arrays(path):
    x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    host: Any = fp8.cast_transpose(x, 7.0)
    device = fp8.cast_transpose(fp8.asarray(x, like="cupy"), 7.0)
    codes = fp8.asarray(every_code(fp8.float8_e8m0fnu).reshape(2, 128), like="cupy")
    io.save(path, q=device, codes=codes, turned=codes.T)
    for like, kind in ((None, "numpy"), ("cupy", "cupy")):
        loaded = io.load(path, like=like)
        assert fp8.backend.kind_of(loaded["q"].columnwise.data) == kind
        assert fp8.bytes_equal(fp8.asnumpy(loaded["q"].columnwise.data), host.columnwise.data)
        assert fp8.bytes_equal(fp8.asnumpy(loaded["turned"]),
                               every_code(fp8.float8_e8m0fnu).reshape(2, 128).T)
