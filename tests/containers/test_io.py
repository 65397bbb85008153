"""save/load keep every byte, dtype and piece of metadata; read_matrices finds the matrices of real files."""

import json
import zipfile
from typing import Any

import numpy as np
import pytest
from block_data import COLUMN, ROW, result
from hypothesis import HealthCheck, given, settings

import cupy_fp8 as fp8
from cupy_fp8 import io, testing
from cupy_fp8.formats import FORMATS, float32
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
    # shared when saved, shared when loaded
    assert loaded["q"].rowwise.scale_inv is loaded["q"].columnwise.scale_inv
    np.testing.assert_array_equal(loaded["turned"].dequantize(), q.dequantize().T)


@pytest.mark.parametrize("block", [ROW, COLUMN], ids=str)
@pytest.mark.parametrize("layout", ["compact", "swizzled"])
@pytest.mark.parametrize("transposed", [False, True])
def test_scales_of_blocks_in_every_layout(path, block, layout, transposed):
    saved = {f"d{len(shape)}_{i}": result(shape, block, layout, transposed)
             for i, shape in enumerate([(64, 96), (33, 70), (2, 40, 96), (0, 64), (3, 0, 40)])}
    saved |= {f"{name}_t": s.T for name, s in saved.items()}                # scales that are not contiguous
    io.save(path, **saved)
    loaded = io.load(path)
    assert list(loaded) == list(saved)
    for name, want in saved.items():
        testing.assert_bytes_equal(loaded[name], want)
        testing.assert_bytes_equal(loaded[name].dequantize(), want.dequantize())


def test_both_directions_and_f32_scales(path):
    row, column = result((64, 96), ROW), result((64, 96), COLUMN, "swizzled", True)
    saved = {"q": Quantized(row, column), "one": row, "line": result((9, 50), (1, None), scale=float32),
             "square": result((140, 270), (128, 128), transposed=True, scale=float32)}
    io.save(path, **saved)
    loaded = io.load(path)
    testing.assert_bytes_equal(list(loaded.values()), list(saved.values()))
    assert loaded["one"].data is loaded["q"].rowwise.data                   # stored once


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(testing.mx_results(max_side=70))
def test_any_result(path, s):
    io.save(path, s=s, t=s.T)
    testing.assert_bytes_equal(list(io.load(path).values()), [s, s.T])


def test_what_an_op_remembers_is_not_saved(path):
    s = result((64, 96), ROW)
    s.__dict__["_blocks"] = object()
    io.save(path, s=s)
    assert "_blocks" not in io.load(path)["s"].__dict__


def test_any_name(path):
    arrays = {name: np.full(2, i) for i, name in enumerate(["file", "self", "a b/c", "x.npy", "ü"])}
    io.save(path, **{"file": arrays["file"], **arrays})
    assert {name: a.tolist()
            for name, a in io.load(path).items()} == {name: a.tolist() for name, a in arrays.items()}


def test_is_a_plain_npz(path):
    a = every_code(fp8.float8_e4m3fn)
    io.save(path, a=a)
    with np.load(path, allow_pickle=False) as archive:
        assert sorted(archive.files) == [io.MANIFEST, "a"]
        assert archive["a"].dtype == np.uint8
        assert archive["a"].tobytes() == a.tobytes()
        manifest = json.loads(str(archive[io.MANIFEST]))
    assert manifest == {"format": "cupy_fp8", "version": 1, "dtypes": {"a": "float8_e4m3fn"},
                        "values": {"a": {"array": "a"}}}


@pytest.mark.parametrize(("arrays", "error", "message"), [
    ({"a": [1, 2]}, TypeError, "a: expected a numpy"),
    ({"a": None}, TypeError, "a: expected a numpy"),
    ({"a": np.array([None])}, TypeError, "a: cannot store dtype object"),
    ({"q": fp8.quantize_tensor(np.ones(2, np.float32), 1.0), "q.rowwise.data": np.ones(2)}, ValueError,
     "taken by another entry"),
    ({io.MANIFEST: np.ones(2)}, ValueError, "taken by another entry"),
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


def rewrite(path, change):
    """The archive at path with its manifest changed by change(dict)."""
    with np.load(path) as archive:
        entries = {name: archive[name] for name in archive.files}
    manifest = json.loads(str(entries[io.MANIFEST]))
    change(manifest)
    entries[io.MANIFEST] = np.array(json.dumps(manifest))
    np.savez(path, **entries)


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.update(version=2), "format version 2; this version of cupy_fp8 reads version 1"),
    (lambda m: m.update(format="other"), "format version None"),
    (lambda m: m.pop("values"), "damaged"),
    (lambda m: m["values"]["q"].update(result="Mystery"), "no value of kind 'Mystery'"),
    (lambda m: m["values"]["q"]["fields"].update(surprise=1), "damaged"),
    (lambda m: m["values"]["q"]["fields"]["rowwise"]["fields"]["shape"].update(tuple=[1, 1]),
     "does not fit stored data"),
    (lambda m: m["values"]["q"]["fields"]["rowwise"]["fields"].update(scale_inv={"array": "two"}),
     "expected one f32 scale_inv"),
    (lambda m: m["values"]["two"].update(array="missing"), "damaged"),
    (lambda m: m["dtypes"].update(two="float8_e4m3fn"), "expected u1 storage"),
    (lambda m: m["dtypes"].update({"q.rowwise.data": "float7"}), "damaged"),
])
def test_damaged_manifest(path, change, message):
    io.save(path, q=fp8.quantize_tensor(np.ones((2, 3), np.float32), 1.0), two=np.ones(2, np.float32))
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        io.load(path)


@pytest.mark.parametrize(("fields", "message"), [
    ({"scale_layout": "swizzled"}, r"s\.scale_inv: expected shape \(128, 4\) \(swizzled scales"),
    ({"scale_layout": "other"},
     r"s\.scale_layout: expected one of \('compact', 'swizzled', .*\), got 'other'"),
    ({"scale_layout": None}, r"s\.scale_layout: expected one of"),
    ({"block": {"tuple": [32, 1]}}, r"s\.scale_inv: expected shape \(2, 96\) \(compact scales"),
    ({"block": {"tuple": [1, 33]}}, r"s\.block: expected \(1, B\)"),
    ({"block": 32}, r"s\.block: expected \(1, B\)"),
    ({"scale_inv": {"array": "s.data"}},
     r"damaged file \(TypeError: s\.scale_inv: expected dtype float8_e8m0fnu, float32"),
    ({"scale_inv": 1.0}, r"damaged"),
    ({"block": None}, "expected one f32 scale_inv"),
])
def test_damaged_fields_of_blocks(path, fields, message):
    io.save(path, s=result((64, 96), ROW))
    rewrite(path, lambda manifest: manifest["values"]["s"]["fields"].update(fields))
    with pytest.raises(ValueError, match=message):
        io.load(path)


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
        for name, a in ((io.MANIFEST, np.array(evil_manifest)), ("evil", evil)):
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, a, allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
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
    codes = every_code(fp8.float8_e8m0fnu).reshape(2, 128)
    host: dict[str, Any] = {
        "q": fp8.cast_transpose(x, 7.0), "codes": codes, "turned": codes.T, "t": result((33, 70), ROW).T,
        "s": result((64, 96), COLUMN, "swizzled", True)}
    with testing.executor("cuda") as run:
        io.save(path, **{name: run.array(a) for name, a in host.items()})
    for like, kind in ((None, "numpy"), ("cupy", "cupy")):
        loaded = io.load(path, like=like)
        assert fp8.backend.kind_of(loaded["q"].columnwise.data) == kind
        testing.assert_bytes_equal(list(loaded.values()), list(host.values()))


# ---- read_matrices ----
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


def test_read_matrices_errors_come_at_the_call(tmp_path, monkeypatch):
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
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy_fp8\[io\]'"):
        io.read_matrices(beyond)
