"""Damaged and hostile archives: a ValueError that names the file, whatever is wrong, and never an invalid
result that kernels would trust."""

import json
import random
import zipfile
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import io
from cupy_fp8.io.archive import MANIFEST

full = pytest.mark.full


def content():
    x = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    return {
        "q": fp8.cast_transpose(x, 2.0, dbias=True),
        "mx": fp8.quantize_mx(x, columnwise=True),
        "s": fp8.quantize_mx(x).rowwise,
        "plain": x,
        "g": fp8.group_quantize(x, [10, 54], fp8.CurrentScaling(), columnwise=True),
        "routing": fp8.route(np.array([[1, 0], [0, -1]]), num_experts=2, rows=8, align=4),
        "mask": fp8.route(np.array([[True, False, True], [True, False, False]]), topk=2),
        "gate": fp8.topk_gate(x[:6, :8].copy(), 2, return_scores=True, sequences=2),
        "state": fp8.DelayedScalingState(3, fp8.DelayedScaling(history_len=4), like=np),
        "list": [1, "a", None, (2.5,)],
    }


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "a.npz"
    io.save(path, **content())
    return path.read_bytes()


def outcome(path, data):
    """Return what load returned for these bytes, or None after an error that names the file."""
    path.write_bytes(data)
    try:
        return io.load(path)
    except ValueError as error:
        found = error
    assert type(found) is ValueError
    assert str(found).startswith(str(path)), found
    return None


def damaged(archive, seed):
    rng = random.Random(seed)
    data = bytearray(archive)
    if rng.random() < 0.25:
        return bytes(data[:rng.randrange(len(data))])
    ends = len(data) - 3000 if rng.random() < 0.5 else 0        # the directory or the manifest is present
    for _ in range(rng.choice((1, 1, 3, 20))):
        place = rng.randrange(max(ends, 0), len(data)) if ends else rng.randrange(min(4000, len(data)))
        data[place] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 2000), marks=full)], ids=str)
def test_flips_and_truncations(archive, tmp_path, seeds):
    refused = sum(outcome(tmp_path / "a.npz", damaged(archive, seed)) is None for seed in seeds)
    assert refused > len(seeds) / 2


def load_changed(archive, path, change):
    """Load the archive with its manifest changed by change(dict)."""
    path.write_bytes(archive)
    with np.load(path) as members:
        entries = {name: members[name] for name in members.files}
    manifest = json.loads(str(entries[MANIFEST]))
    change(manifest)
    entries[MANIFEST] = np.array(json.dumps(manifest))
    np.savez(path, **entries)
    return io.load(path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.update(version=2), "format version 2; this version of cupy_fp8 reads version 1"),
    (lambda m: m.update(format="other"), "format version None"),
    (lambda m: m.pop("values"), r"damaged file \(KeyError"),
    (lambda m: m["values"]["q"].update(result="Mystery"), "q: this version knows no value of kind 'Mystery'"),
    (lambda m: m["values"]["q"]["fields"].update(surprise=1), r"q: Quantized has no fields \['surprise'\]"),
    (lambda m: m["values"]["plain"].update(array="missing"), r"plain: damaged file \(no entry 'missing'"),
    (lambda m: m["dtypes"].update(plain="float8_e4m3fn"),
     r"entry 'plain': damaged file \(expected the storage of float8_e4m3fn"),
    (lambda m: m["dtypes"].update({"q.rowwise.data": "float7"}),
     r"entry 'q\.rowwise\.data': damaged file \(expected the storage of float7"),
])
def test_damaged_manifest(archive, tmp_path, change, message):
    with pytest.raises(ValueError, match=rf"a\.npz: {message}"):
        load_changed(archive, tmp_path / "a.npz", change)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("q.rowwise", 5, r"q: Quantized: expected a Scaled as rowwise, got int"),
    ("q.rowwise", {"array": "plain"}, r"q: Quantized: expected a Scaled as rowwise, got ndarray"),
    ("q.rowwise.data", {"array": "plain"}, r"q\.rowwise\.data: expected dtype float8_e4m3fn"),
    ("q.dbias", {"array": "plain"}, r"q\.dbias: expected float32 \(96,\)"),
    ("q.rowwise.shape", {"tuple": [1, 1]}, r"q\.rowwise\.data: expected shape \(1, 1\)"),
    ("q.rowwise.scale_inv", {"array": "plain"}, r"q\.rowwise\.scale_inv: expected one scale"),
    ("mx.rowwise.shape", {"tuple": [96, 64]}, r"mx\.rowwise\.data: expected shape \(96, 64\)"),
    ("mx.rowwise.block", {"tuple": [1, 64]}, r"mx\.rowwise\.scale_inv: expected shape \(64, 2\)"),
    ("s.scale_layout", "swizzled", r"s\.scale_inv: expected shape \(128, 4\), swizzled scales"),
    ("s.scale_layout", "other",
     r"s\.scale_layout: expected one of \('compact', 'swizzled', .*\), got 'other'"),
    ("s.scale_layout", None, r"s\.scale_layout: expected one of"),
    ("s.block", {"tuple": [32, 1]}, r"s\.scale_inv: expected shape \(2, 96\), compact scales"),
    ("s.block", {"tuple": [1, 33]}, r"s\.block: expected \(1, B\)"),
    ("s.block", 32, r"s\.block: expected \(1, B\)"),
    ("s.block", None, r"s\.scale_layout: expected None for one scale"),
    ("s.scale_inv", {"array": "s.data"}, r"s\.scale_inv: expected dtype float8_e8m0fnu, float32"),
    ("s.scale_inv", 1.0, r"s\.scale_inv: expected a numpy\.ndarray"),
    ("g.offsets", None, r"g\.offsets: expected a numpy.ndarray"),
    ("g.splits", {"array": "plain"}, r"g\.splits: expected one dimension"),
    ("g.rowwise", {"array": "plain"}, r"g\.rowwise: expected "),
    ("g.shape", {"tuple": [2, 2]}, r"g\.rowwise: expected shape \(4,\)"),
    ("routing.align", 0, r"routing\.align: expected"),
    ("routing.rows", -1, r"routing\.rows: expected"),
    ("routing.row_map", 3, r"routing\.row_map: expected a numpy\.ndarray"),
    ("state.recipe", None, r"state\.expected a DelayedScaling"),
    ("state.scale", {"array": "plain"}, r"state\.expected a DelayedScaling and scales \[n\]"),
    ("state.amax_history", {"array": "plain"}, r"state\.amax_history: expected float32 \(4, 3\)"),
])
def test_results_are_checked(archive, tmp_path, field, value, message):
    def change(manifest):
        first, *between, last = field.split(".")
        node = manifest["values"][first]
        for name in between:
            node = node["fields"][name]
        node["fields"][last] = value

    with pytest.raises(ValueError, match=rf"a\.npz: {message}"):
        load_changed(archive, tmp_path / "a.npz", change)


def test_a_member_that_claims_more_bytes_than_it_can_hold(tmp_path):
    """Those bytes are never allocated."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.zeros(10, np.float32))
    claimed = [mock.Mock(file_size=1 << 60, compress_type=zipfile.ZIP_DEFLATED, filename="a.npy")]
    with mock.patch.object(zipfile.ZipFile, "infolist", return_value=claimed), pytest.raises(
            ValueError, match=r"damaged file \(entry 'a.npy' claims 1152921504606846976 bytes\)"):
        io.load(path)


def test_a_header_that_claims_terabytes(tmp_path):
    path = tmp_path / "a.npz"
    manifest = {"format": "cupy_fp8", "version": 1, "values": {"a": {"array": "a"}}}
    with zipfile.ZipFile(path, "w") as file:
        with file.open(f"{MANIFEST}.npy", "w") as member:
            np.lib.format.write_array(member, np.array(json.dumps(manifest)))
        with file.open("a.npy", "w") as member:
            header = {"descr": "<f4", "fortran_order": False, "shape": (10**12,)}
            np.lib.format.write_array_header_1_0(member, header)
            member.write(bytes(400))
    with pytest.raises(ValueError,
                       match=r"entry 'a': shape \(1000000000000,\) of float32 does not fit its bytes"):
        io.load(path)


def test_deep_nesting(archive, tmp_path):
    path = tmp_path / "a.npz"
    text = ('{"format": "cupy_fp8", "version": 1, "values": {"a": ' + '{"list": [' * 20_000
            + "]}" * 20_000 + "}}")
    entries: Any = {MANIFEST: np.array(text)}
    np.savez(path, **entries)
    with pytest.raises(ValueError, match=r"a\.npz: damaged file"):
        io.load(path)


@pytest.mark.parametrize(("values", "names"), [
    ({"x": 1, "x.npy": -1}, ("x", "x.npy")), ({f"{MANIFEST}.npy": 3}, (f"{MANIFEST}.npy",)),
    ({"w.rowwise.data.npy": 7}, ("w.rowwise.data.npy",))])
def test_members_are_read_by_exact_name(tmp_path, values, names):
    path, w = tmp_path / "a.npz", fp8.quantize_tensor(np.ones((2, 3), np.float32), 2.0)
    io.save(path, w=w, **{name: np.full(4, value) for name, value in values.items()})
    loaded = io.load(path)
    assert {name: int(loaded[name][0]) for name in names} == values
    assert loaded["w"] == w


def test_state_and_containers(tmp_path):
    path, given = tmp_path / "a.npz", content()
    state = given["state"]
    state.amax_history[0] = 3
    state.update()
    recipes = {"mx": fp8.MXScaling(),
               "blocks": [fp8.BlockScaling((1, None)), fp8.CurrentScaling(fp8.float8_e5m2)]}
    io.save(path, **given, recipes=recipes, step=np.int64(7), loss=0.25, nothing=None, empty={})
    loaded = io.load(path)
    assert loaded["recipes"] == recipes
    assert (int(loaded["step"]), loaded["loss"], loaded["nothing"], loaded["empty"]) == (7, 0.25, None, {})
    assert loaded["list"] == given["list"]
    for name in ("q", "mx", "s", "g", "routing", "mask"):
        assert loaded[name] == given[name], name
    again = loaded["state"]
    assert again.recipe == state.recipe
    assert again.scale.tolist() == state.scale.tolist()
    assert again.amax_history.tolist() == state.amax_history.tolist()
    again.update()                                              # the run goes on


def test_a_safetensors_file_names_its_reader(tmp_path):
    path = tmp_path / "model.safetensors"
    io.save_safetensors(path, {"a": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"a \.safetensors file; use cupy_fp8\.io\.load_safetensors"):
        io.load(path)
