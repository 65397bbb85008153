"""Checkpoints of .safetensors files: every dtype, scales found from names, dtypes and shapes, and damaged or
hostile files."""

import json
import os
import random
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import io
from cupy_fp8.io.checkpoint import INDEX, Checkpoint
from cupy_fp8.io.safetensors import DTYPES, TensorFile

safetensors = pytest.importorskip("safetensors", reason="the safetensors package is the other reader")

RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 0x7E, (256, 320), np.uint8).view(fp8.float8_e4m3fn)


def powers(*shape: int) -> np.ndarray:
    return RNG.integers(117, 130, shape).astype(np.uint8)


def write(path, tensors: dict[str, Any], **metadata):
    io.save_safetensors(path, tensors, metadata=metadata)
    return path


# ---- the format ----
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_there_and_back(tmp_path, name):
    dtype = DTYPES[name]
    a = RNG.integers(0, 2 if name == "BOOL" else 256, (5, 3 * dtype.itemsize), np.uint8).view(dtype)
    path = write(tmp_path / "a.safetensors",
                 {"a": a, "none": a[:0], "one": a[:1, 0].reshape(()), "columns": a[:, ::2]})
    loaded = io.load_safetensors(path, raw=True)
    for key, want in (("a", a), ("none", a[:0]), ("one", a[0, 0]), ("columns", a[:, ::2])):
        assert (loaded[key].dtype, loaded[key].shape) == (dtype, want.shape)
        assert loaded[key].tobytes() == want.tobytes()


def test_the_package_reads_what_we_write_and_the_other_way_round(tmp_path):
    tensors = {"w": CODES, "s": np.ones((2, 3), np.float32), "b": np.ones(3, fp8.bfloat16), "i": np.arange(4)}
    path = write(tmp_path / "a.safetensors", tensors, format="pt")
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert {name: (about["dtype"], about["shape"], bytes(about["data"]))
            for name, about in found.items()} == {
        name: (next(key for key, dtype in DTYPES.items() if dtype == a.dtype), list(a.shape), a.tobytes())
        for name, a in tensors.items()}
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    from safetensors.numpy import save_file

    other = tmp_path / "b.safetensors"
    save_file({"x": np.array([1, 2], np.float32)}, other)
    assert io.load_safetensors(other)["x"].tolist() == [1, 2]


def test_tensors_are_mapped(tmp_path):
    a = io.load_safetensors(write(tmp_path / "a.safetensors", {"a": np.ones((4, 4), np.float32)}))["a"]
    assert not a.flags.writeable
    while not isinstance(a, np.memmap):
        assert a.base is not None, "a copy"
        a = a.base


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files as Linux shows them")
def test_tensors_share_a_mapping(tmp_path):
    """A mapping holds a file open, and checkpoints have more tensors than a process may have open files."""
    many = {f"{i}": np.full(2, i, np.float32) for i in range(100)}
    before = len(os.listdir("/proc/self/fd"))
    found = io.load_safetensors(write(tmp_path / "a.safetensors", many))
    assert len(os.listdir("/proc/self/fd")) < before + 10
    assert all(found[name].tobytes() == a.tobytes() for name, a in many.items())


def raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(("header", "message"), [
    (b"not json", "Expecting value"), (b"[]", "no JSON object"), (b'{"a": 1}', "expected dtype"),
    (b'{"a": NaN}', "NaN in the header"), (b"[" * 100_000, "recursion"), (b'{"a": ' * 50_000, "recursion"),
    (b"\xff\xfe", "utf-8"), ({"a": GOOD | {"dtype": "F33"}}, "unknown dtype 'F33'"),
    ({"a": GOOD | {"dtype": ["F32"]}}, "unknown dtype"), ({"a": GOOD | {"shape": [3]}}, "are not those of"),
    ({"a": GOOD | {"shape": [-2]}}, "shape is no list"),
    ({"a": GOOD | {"shape": [True, 2]}}, "shape is no list"),
    ({"a": GOOD | {"shape": [10**30, 0, 2]}}, "are not those of"),
    ({"a": GOOD | {"data_offsets": [0, 800]}}, "are not those of"),
    ({"a": GOOD | {"data_offsets": [8, 16]}}, "begins at byte"),
    ({"a": GOOD | {"data_offsets": [0]}}, "are not those of"),
    ({"a": GOOD | {"shape": 2}}, "shape is no list"), ({"a": GOOD, "b": GOOD}, "begins at byte"),
    ({"a": GOOD | {"more": 1}}, "expected dtype"),
    ({"a": GOOD, "__metadata__": {"x": 1}}, "no object of strings"), ({}, "the file has"),
    (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}', "occurs twice"),
    (b'{"a": ' + b"9" * 5000 + b"}", "digits")], ids=lambda value: str(value)[:40])
def test_hostile_headers(tmp_path, header, message):
    path = raw(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(ValueError,
                       match=f"a.safetensors: not a .safetensors file, or a damaged one .*{message}"):
        io.load_safetensors(path)


@pytest.mark.parametrize("length", [9, 2**31, 2**63, 2**64 - 1])
def test_headers_that_claim_more_than_there_is(tmp_path, length):
    with pytest.raises(ValueError, match=f"a header of {length} bytes is claimed"):
        TensorFile(raw(tmp_path / "a.safetensors", b"{}", length=length))


def test_headers_longer_than_any(tmp_path):
    """Not even read: the file is sparse."""
    path = tmp_path / "a.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(path, 100_000_100)
    with pytest.raises(ValueError, match="a header of 100000001 bytes is claimed"):
        TensorFile(path)


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path):
    path = write(tmp_path / "a.safetensors", {"a": np.ones(1000)})
    file = TensorFile(path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(ValueError, match="a ends early; the file was cut off while it was read"):
        file.read_bytes("a", 0, 8000)


def refused_by_name(path):
    """Whether a file is refused by an error that names it; otherwise all its tensors must be readable."""
    try:
        found = io.load_safetensors(path, raw=True)
    except ValueError as error:
        return str(path) in str(error)
    return not sum(len(value.tobytes()) for value in found.values())


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1500), marks=pytest.mark.full)], ids=str)
def test_flips_and_truncations(tmp_path, seeds):
    """A ValueError that names the file, or tensors that lie within it."""
    path = write(tmp_path / "a.safetensors",
                 {"w": CODES, "w_scale_inv": np.ones((2, 3), np.float32), "b": np.ones(3)})
    good, refused = path.read_bytes(), 0
    for seed in seeds:
        rng, data = random.Random(seed), bytearray(good)
        for _ in range(rng.choice((1, 4))):
            data[rng.randrange(400)] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data if rng.random() < 0.7 else data[:rng.randrange(len(data))]))
        refused += refused_by_name(path)
    assert refused > len(seeds) / 2


# ---- scales ----
@pytest.mark.parametrize(("scale", "name", "block"), [
    (np.full((2, 3), 0.5, np.float32), "weight_scale_inv", (128, 128)),
    (powers(2, 3), "weight_scale_inv", (128, 128)),
    (powers(2, 3).view(fp8.float8_e8m0fnu), "scale", (128, 128)),
    (np.full((256, 3), 0.5, np.float32), "weight_scale_inv", (1, 128)),
    (powers(256, 10), "weight_scale_inv", (1, 32)),
    (powers(256, 10).view(fp8.float8_e8m0fnu), "weight_scale", (1, 32)),
    (np.full((256, 1), 0.5, fp8.bfloat16), "weight_scale", (1, None)),
    (np.full(256, 0.5, np.float32), "weight_scale", (1, None)),
    (np.full((), 0.5, np.float32), "weight_scale", None),
    (np.full(1, 0.5, fp8.bfloat16), "weight_scale_inv", None),
    (np.full((1, 1), 0.5, np.float16), "weight_scale", None)], ids=str)
def test_scales_are_found_by_facts(tmp_path, scale, name, block):
    path = write(tmp_path / "a.safetensors",
                 {"p.weight": CODES, f"p.{name}": scale, "p.input_scale": np.ones(1, np.float32)})
    loaded = io.load_safetensors(path)
    assert loaded.keys() == {"p.weight", "p.input_scale"}
    w = loaded["p.weight"]
    assert (w.block, w.scale_layout) == (block, None if block is None else "compact")
    down, across = (256, 320) if block is None else (block[0], block[1] or 320)
    factors = scale.view(fp8.float8_e8m0fnu) if scale.dtype == np.uint8 else scale
    factors = factors.astype(np.float32).reshape(-(-256 // down), -(-320 // across))
    wanted = CODES.astype(np.float32) * np.repeat(np.repeat(factors, down, 0)[:256], across, 1)[:, :320]
    np.testing.assert_array_equal(w.dequantize(), wanted)


def test_blocks_of_another_size_are_told_by_the_config(tmp_path):
    write(tmp_path / "model.safetensors", {"w": CODES, "w_scale_inv": np.ones((4, 5), np.float32)})
    with pytest.raises(ValueError,
                       match=r"these scales fit no block that is known; pass block=\(rows, columns\)"):
        io.load_safetensors(tmp_path)
    assert io.load_safetensors(tmp_path, block=(64, 64))["w"].block == (64, 64)
    assert io.load_safetensors(tmp_path, block={"w": (64, 64)})["w"].block == (64, 64)
    (tmp_path / "config.json").write_text(json.dumps(
        {"quantization_config": {"weight_block_size": [64, 64]}}))
    assert io.load_safetensors(tmp_path)["w"].block == (64, 64)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("block", "message"), [
    ((1,), r"block: expected \(1, B\), .* got \(1,\)"), ((True, 32), "block: expected"),
    ({"w": 64}, r"block\['w'\]: expected .* got 64; write \(1, 64\)"),
    ({"v": (64, 64)}, "block: .* has no FP8 tensor 'v'"),
    ({"w_scale_inv": (64, 64)}, "block: .* has no FP8 tensor 'w_scale_inv'"), ({3: (1, 32)}, "block: .* 3$")],
    ids=str)
def test_blocks_that_are_none(tmp_path, block, message, raw):
    path = write(tmp_path / "a.safetensors", {"w": CODES, "w_scale_inv": np.ones((4, 5), np.float32)})
    with pytest.raises(ValueError, match=f"^{message}"):
        io.load_safetensors(path, block=block, raw=raw)


@pytest.mark.parametrize(("tensors", "message"), [
    ({"w": CODES, "w_scale": np.ones(1, np.float32), "w_scale_inv": np.ones(1, np.float32)},
     "expected one tensor of scales"),
    ({"w": CODES, "w_scale": np.ones((7, 7), np.float32)}, "fit no block that is known"),
    ({"w": CODES, "w_scale": np.ones(256, np.uint8)}, "fit no block that is known"),
    ({"w": CODES, "w_scale": np.ones(1, np.float64)}, "expected scales of type F32"),
    ({"w": CODES[:, :128], "w_scale_inv": np.ones((2, 4), np.float32)}, "fit no block that is known")])
def test_scales_that_are_not_clear(tmp_path, tensors, message):
    path = write(tmp_path / "a.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        io.load_safetensors(path)
    assert io.load_safetensors(path, raw=True).keys() == tensors.keys()


def test_experts_in_one_tensor(tmp_path):
    codes, scale = np.stack([CODES, CODES[::-1]]), np.arange(1, 13, dtype=np.float32).reshape(2, 2, 3)
    w = io.load_safetensors(write(tmp_path / "a.safetensors", {"w": codes, "w_scale_inv": scale}))["w"]
    assert w.block == (128, 128)
    assert w.dequantize()[1, 200, 310] == codes[1, 200, 310].astype(np.float32) * scale[1, 1, 2]


@pytest.mark.parametrize("recipe", [
    fp8.CurrentScaling(), fp8.MXScaling(), fp8.MXScaling(scale_layout="swizzled"), fp8.BlockScaling(),
    fp8.BlockScaling((128, 128)), fp8.BlockScaling((1, None))], ids=repr)
def test_results_there_and_back(tmp_path, recipe):
    q = recipe.quantize(RNG.standard_normal((200, 320), np.float32))
    w = io.load_safetensors(write(tmp_path / "a.safetensors", {"w": q, "n": q.rowwise}))["w"]
    assert w.data.tobytes() == q.data.tobytes()
    np.testing.assert_array_equal(w.dequantize(), q.dequantize())


@pytest.mark.parametrize(("tensors", "error", "message"), [
    ({"w": fp8.quantize_tensor(np.ones((2, 3), np.float32), 1.0, rowwise=False, columnwise=True)}, ValueError,
     "a row-wise part"),
    ({"w": fp8.quantize_tensor(np.ones((2, 3), np.float32), 1.0).T.columnwise}, ValueError,
     "expected row-wise data"),
    ({"w": fp8.quantize_tensor(np.ones(3, np.float32), 1.0), "w_scale": np.ones(1)}, ValueError,
     "w_scale is taken"),
    ({"w": fp8.quantize_mx(np.ones((2, 32), np.float32)), "w_scale": np.ones(1)}, ValueError,
     "w: expected one tensor of scales, got w_scale_inv and w_scale"),
    ({"w": [1]}, TypeError, "w: expected a numpy"), ({3: np.ones(1)}, TypeError, "expected names as keys"),
    ({"w": np.ones(1, np.complex128)}, TypeError, "have no dtype complex128"),
    ({"__metadata__": np.ones(1)}, ValueError, "no name of a tensor")], ids=str)
def test_save_refuses(tmp_path, tensors, error, message):
    with pytest.raises(error, match=message):
        io.save_safetensors(tmp_path / "a.safetensors", tensors)
    assert not list(tmp_path.iterdir())


# ---- folders ----
def shards(folder, index=True):
    write(folder / "model-1.safetensors", {"w": CODES, "b": np.ones(3, np.float32)})
    write(folder / "model-2.safetensors",
          {"w_scale_inv": np.ones((2, 3), np.float32), "layers.0.x": np.zeros(2)})
    if index:
        (folder / INDEX).write_text(json.dumps({"weight_map": {
            "w": "model-1.safetensors", "b": "model-1.safetensors", "w_scale_inv": "model-2.safetensors",
            "layers.0.x": "model-2.safetensors"}}))


@pytest.mark.parametrize("index", [True, False])
def test_scales_in_another_shard(tmp_path, index):
    shards(tmp_path, index)
    loaded = io.load_safetensors(tmp_path)
    assert loaded.keys() == {"w", "b", "layers.0.x"}
    assert loaded["w"].block == (128, 128)
    assert io.load_safetensors(tmp_path, names=["layers.*", "b"]).keys() == {"b", "layers.0.x"}
    with pytest.raises(ValueError, match=r"has no tensor 'layer\.0\.x'; did you mean 'layers\.0\.x'"):
        io.load_safetensors(tmp_path, names=["layer.0.x"])


@pytest.mark.parametrize(("weight_map", "message"), [
    ({"w": "../model-1.safetensors"}, "of this folder"), ({"w": 3}, "of this folder"),
    ({"w": "/etc/passwd"}, "of this folder"),
    ({"w": "model-2.safetensors"}, "w is not in model-2.safetensors"),
    ({"gone": "model-1.safetensors"}, "gone is not in"), ("text", "expected a weight_map")], ids=str)
def test_an_index_that_does_not_fit(tmp_path, weight_map, message):
    shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"no \.safetensors files in this folder"):
        io.load_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError):
        io.load_safetensors(tmp_path / "none")
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {"w": np.ones(3)})
    with pytest.raises(ValueError, match=r"w is in a\.safetensors and in b\.safetensors"):
        io.load_safetensors(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        io.load_safetensors(tmp_path)
