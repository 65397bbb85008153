"""Conversions of checkpoints: results equal what the ops make of the source, whatever happens in between."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import io
from cupy_fp8.__main__ import main
from cupy_fp8.io import convert, weights
from cupy_fp8.io.checkpoint import INDEX

RECIPES: dict[str, Any] = {
    "block128": fp8.BlockScaling((128, 128), pow2_scale=False, scale_layout="compact"),
    "mxfp8": fp8.MXScaling(),
    "row": fp8.BlockScaling((1, None), pow2_scale=False, scale_layout="compact"),
    "tensor": fp8.CurrentScaling(),
}
CHILD = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
LINEAR = "model.layers.0.mlp.up_proj.weight"


def model(dtype=fp8.bfloat16, layers=2, width=200, rows=300):
    """Return a transformer's tensors, by name."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return fp8.astype(rng.standard_normal(shape, np.float32), dtype)

    found = {
        "model.embed_tokens.weight": normal(64, width),
        "model.norm.weight": normal(width),
        "lm_head.weight": normal(64, width),
    }
    for i in range(layers):
        found[f"model.layers.{i}.self_attn.q_proj.weight"] = normal(width, width)
        found[f"model.layers.{i}.mlp.up_proj.weight"] = normal(rows, width)
        found[f"model.layers.{i}.mlp.gate.weight"] = normal(8, width)
        found[f"model.layers.{i}.mlp.experts.up"] = normal(3, 130, width)
        found[f"model.layers.{i}.mlp.up_proj.bias"] = normal(rows)
        found[f"model.layers.{i}.positions"] = np.arange(5)
    return found


def write(folder, tensors, number=3):
    """Write the tensors in shards, with an index and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(number):
        shard = f"model-{i + 1:05}-of-{number:05}.safetensors"
        weight_map |= dict.fromkeys(names[i::number], shard)
        io.save_safetensors(folder / shard, {name: tensors[name] for name in names[i::number]},
                            metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "toy", "quantization_config": {"quant_method": "old"}}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "weights.bin").write_bytes(b"not ours")
    return folder


def run(*arguments, status=0):
    assert main(["convert", *map(str, arguments)]) == status


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source"), model())


@pytest.mark.parametrize("recipe", weights.RECIPES)
@pytest.mark.parametrize("dtype", [fp8.bfloat16, *(pytest.param(dtype, marks=pytest.mark.full) for dtype in (
    fp8.float16, fp8.float32, np.dtype(np.float64)))], ids=str)
def test_from_floats(tmp_path, recipe, dtype):
    tensors = model(fp8.float32, layers=1) if dtype == np.float64 else model(dtype, layers=1)
    if dtype == np.float64:
        tensors = {name: a.astype(dtype) for name, a in tensors.items()}
    write(tmp_path / "in", tensors)
    run(tmp_path / "in", tmp_path / "out", "--recipe", recipe, "--verify", "--array", "numpy")
    found = io.load_safetensors(tmp_path / "out")
    assert found.keys() == tensors.keys()
    for name, a in tensors.items():
        if not any(part in name for part in ("q_proj", "up_proj.weight", "experts")):
            assert found[name].tobytes() == a.tobytes(), name
            continue
        values = a.astype(np.float32) if dtype == np.float64 else a
        if recipe == "bf16":
            assert found[name].tobytes() == (
                a if dtype == fp8.bfloat16 else fp8.astype(values, fp8.bfloat16)).tobytes()
        else:
            q = RECIPES[recipe].quantize(values).rowwise
            assert (found[name].data.tobytes(),
                    found[name].scale_inv.tobytes()) == (q.data.tobytes(), q.scale_inv.tobytes())
            assert found[name].block == q.block


FORMATS = {"block128": [], "block128 e8m0": ["--scale-format", "e8m0"], "mxfp8": [], "row": [], "tensor": [],
           "bf16": []}


@pytest.mark.parametrize("after", FORMATS)
@pytest.mark.parametrize("before", ["mxfp8", *(pytest.param(name, marks=pytest.mark.full) for name in FORMATS
                                                 if name not in ("mxfp8", "bf16"))])
def test_between_formats(tmp_path, source, before, after):
    """From powers of two to powers of two, values change only if the new scale cannot represent them. With
    the same blocks nothing changes. Everything else is what the op makes of the float32 values."""
    first, second = tmp_path / "first", tmp_path / "second"
    run(source, first, "--recipe", before.split()[0], *FORMATS[before])
    run(first, second, "--recipe", after.split()[0], *FORMATS[after], "--verify", "--report",
        tmp_path / "report.json")
    old, new = io.load_safetensors(first)[LINEAR], io.load_safetensors(second)[LINEAR]
    exponents = ("block128 e8m0", "mxfp8")
    values = old.dequantize()
    if before == after:
        assert contents(first).keys() == contents(second).keys()
        assert old == new
    elif (before, after) == ("block128 e8m0", "block128"):
        assert old.data.tobytes() == new.data.tobytes()
        assert old.scale_inv.astype(np.float32).tobytes() == new.scale_inv.tobytes()
    elif after == "bf16":
        assert new.tobytes() == old.dequantize(fp8.bfloat16).tobytes()
    elif before in exponents and after in exponents:
        changed = new.dequantize() != values
        assert changed.sum() < values.size / 100
        assert np.abs(values[changed]).max(initial=0) <= np.abs(values).max() * 2.0**-9
        assert not changed.any() or after != "mxfp8"
    else:
        powers = fp8.BlockScaling((128, 128), pow2_scale=True, scale_layout="compact")
        recipe: Any = powers if after == exponents[0] else RECIPES[after]
        q = recipe.quantize(values).rowwise
        assert new.data.tobytes() == q.data.tobytes()
        np.testing.assert_array_equal(new.dequantize(), q.dequantize())
    tensors = json.loads((tmp_path / "report.json").read_text())["tensors"]
    report = {one["name"]: one for one in tensors}[LINEAR]
    after_values = new.astype(np.float32) if after == "bf16" else new.dequantize()
    assert report["changed"] == np.count_nonzero(after_values != values)


def test_extreme_blocks_are_rebased_exactly(tmp_path):
    """Blocks of zeros, of NaN, of the largest and the smallest scales."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (128, 1)).view(fp8.float8_e4m3fn)
    scales = np.resize(np.array([0, 1, 126, 127, 128, 253, 254], np.uint8), (128, 8))
    io.save_safetensors(tmp_path / "a.safetensors", {"w": codes, "w_scale": scales})
    run(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "block128", "--scale-format",
        "e8m0", "--verify")
    w = io.load_safetensors(tmp_path / "b.safetensors")["w"]
    assert w.scale_inv.view(np.uint8).tolist() == [[254, 254]]
    values = codes.astype(np.float64) * np.repeat(2.0 ** (scales.astype(float) - 127), 32, 1)
    kept = np.abs(values) >= 2.0 ** (127 - 6)
    np.testing.assert_array_equal(w.data.astype(np.float64)[kept] * 2.0**127, values[kept])
    assert np.isnan(w.data.astype(np.float32)).sum() == np.isnan(values).sum()


def test_e5m2_is_quantised_from_its_values():
    """Re-basing keeps a dtype, so data of another one are converted through float32."""
    q = fp8.quantize_mx(np.random.default_rng(0).standard_normal((256, 512), np.float32),
                        dtype=fp8.float8_e5m2).rowwise
    assert q is not None
    stored = weights.stored_weight("block128", "e8m0", q.shape)
    data, scales, changes = weights.make_rows(q, stored, None)
    want = fp8.quantize_block(q.dequantize(), block=(128, 128), pow2_scale=True,
                              scale_layout="compact").rowwise
    assert want is not None
    assert scales is not None
    assert data.tobytes() == want.data.tobytes()
    assert scales.astype(np.float32).tobytes() == want.scale_inv.tobytes()
    assert changes.changed == np.count_nonzero(want.dequantize() != q.dequantize())


def test_what_stays_and_what_does_not(tmp_path, source, capsys):
    run(source, tmp_path / "out", "--recipe", "row", "--include", "lm_head.weight", "--exclude",
        "*layers.1.*")
    assert "stay (*norm*), such as model.norm.weight" in capsys.readouterr().out
    found = io.load_safetensors(tmp_path / "out")
    assert {name for name, value in found.items() if isinstance(value, fp8.Scaled)} == {
        "lm_head.weight", "model.layers.0.self_attn.q_proj.weight", LINEAR, "model.layers.0.mlp.experts.up"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "toy"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "model.layers.1.mlp.up_proj" in config["quantization_config"]["ignore"]


@pytest.mark.parametrize(("recipe", "more", "expected"), [
    ("block128", [], {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ("block128", ["--scale-format", "e8m0"], {"quant_method": "fp8", "scale_fmt": "ue8m0"}),
    ("mxfp8", [], {"quant_method": "mxfp8", "weight_block_size": [1, 32]}), ("bf16", [], None)])
def test_what_readers_find(tmp_path, source, recipe, more, expected):
    run(source, tmp_path / "out", "--recipe", recipe, *more)
    names = set(os.listdir(tmp_path / "out"))
    assert {INDEX, "config.json", "tokenizer.json"} < names
    assert "weights.bin" not in names
    config = json.loads((tmp_path / "out" / "config.json").read_text()).get("quantization_config")
    assert config is None if expected is None else expected.items() <= config.items()
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    raw = io.load_safetensors(tmp_path / "out", raw=True)
    assert index["weight_map"].keys() == raw.keys()
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in raw.values())


def test_parts_in_any_order(tmp_path, source):
    run(source, tmp_path / "whole", "--recipe", "mxfp8")
    for part in (3, 1, 2):
        run(source, tmp_path / "parts", "--recipe", "mxfp8", "--part", f"{part}/3")
        assert (tmp_path / "parts" / INDEX).exists() == (part == 2)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_another_conversion_is_not_mixed_in(tmp_path, source, capsys):
    run(source, tmp_path / "out", "--recipe", "mxfp8", "--part", "1/3")
    before = contents(tmp_path / "out")
    run(source, tmp_path / "out", "--recipe", "row", status=1)
    assert "is there already, and not of this conversion" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(("arguments", "message"), [
    (["--recipe", "row", "--scale-format", "e8m0"], "scale_format: row has f32 scales, got 'e8m0'"),
    (["--recipe", "mxfp8", "--scale-format", "f32"], "scale_format: mxfp8 has e8m0 scales, got 'f32'"),
    (["--recipe", "mxfp8", "--part", "4/3"], "part: expected"),
    (["--recipe", "mxfp8", "same"], "another place than the source"),
    (["--recipe", "mxfp8", "one.safetensors"], "expected a folder")])
def test_refused(tmp_path, source, capsys, arguments, message):
    out = tmp_path / "out"
    if not arguments[-1].startswith("-") and arguments[-1] in ("same", "one.safetensors"):
        out = source if arguments.pop() == "same" else tmp_path / "one.safetensors"
    before = contents(source)
    run(source, out, *arguments, status=1)
    assert message in capsys.readouterr().err
    assert contents(source) == before
    assert out == source or not out.exists()


def test_a_full_disk(tmp_path, source, capsys, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    run(source, tmp_path / "out", "--recipe", "mxfp8", status=1)
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.undo()
    run(source, tmp_path / "out", "--recipe", "mxfp8", "--verify")


def test_a_source_that_is_cut_off(tmp_path, source, capsys):
    write(tmp_path / "in", model())
    shard = next((tmp_path / "in").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    run(tmp_path / "in", tmp_path / "out", "--recipe", "mxfp8", status=1)
    assert f"convert: {shard}: not a .safetensors file, or a damaged one" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verify_sees_a_wrong_byte(tmp_path, source, capsys):
    run(source, tmp_path / "out", "--recipe", "mxfp8")
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    run(source, tmp_path / "out", "--recipe", "mxfp8", "--verify", status=1)
    assert "is not what the source gives" in capsys.readouterr().err


def test_report_of_shards_that_are_there(tmp_path, source, capsys):
    """The same as of a whole conversion. A place where it cannot be written is found before the work."""
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    run(source, tmp_path / "out", "--recipe", "block128", "--report", first)
    run(source, tmp_path / "out", "--recipe", "block128", "--report", again)
    assert json.loads(again.read_text()) == json.loads(first.read_text())
    assert json.loads(first.read_text())["tensors"]
    run(source, tmp_path / "other", "--recipe", "block128", "--report", tmp_path / "no" / "r.json", status=1)
    assert "no such folder" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def killed(source, out, seconds):
    """Kill a conversion after this many seconds; whether it had not ended before."""
    child = subprocess.Popen(
        [sys.executable, "-m", "cupy_fp8", "convert", source, out, "--recipe", "block128"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=CHILD)
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        child.wait()
        return True
    return False


@pytest.mark.parametrize("kills", [pytest.param(1), pytest.param(6, marks=pytest.mark.full)])
def test_kills(tmp_path, kills):
    """A conversion may be killed at any moment: a shard is complete or absent, and the same command continues
    to the same bytes."""
    source = write(tmp_path / "in", model(layers=4, width=640, rows=2560), number=5)
    start = time.perf_counter()
    run(source, tmp_path / "whole", "--recipe", "block128")
    length = time.perf_counter() - start + 1                # a child has to import the package first
    rng, wanted = np.random.default_rng(0), contents(tmp_path / "whole")
    for i in range(kills):
        out = tmp_path / f"out{i}"
        while killed(source, out, rng.uniform(0.3, length)):
            for name, data in (contents(out) if out.exists() else {}).items():
                assert name.endswith(".partial") or data == wanted[name]
        run(source, out, "--recipe", "block128")
        assert contents(out) == wanted


@pytest.mark.parametrize("name", [INDEX, "config.json", "tokenizer.json"])
def test_killed_at_a_file_that_goes_with_the_shards(tmp_path, source, name):
    """What a killed writer of any file leaves behind is gone after the next run."""
    out = tmp_path / "out"
    out.mkdir()
    (out / f".{name}.00.partial").write_bytes(b"half")
    run(source, out, "--recipe", "bf16")
    assert not list(out.glob(".*"))


@pytest.mark.full
def test_memory_is_bounded(tmp_path):
    """The largest tensor is never in memory as a whole, only a few chunks."""
    rows = 24 * 1024
    io.save_safetensors(tmp_path / "a.safetensors", {"w": np.ones((rows, 4096), fp8.bfloat16)})
    code = ("import resource, sys; from cupy_fp8.__main__ import main\n"
            "import cupy_fp8.io.convert, cupy_fp8.cli.convert\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "assert main(['convert', *sys.argv[1:], '--recipe', 'block128', '--workers', '2']) == 0\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)")
    out = subprocess.run([sys.executable, "-c", code, tmp_path / "a.safetensors", tmp_path / "b.safetensors"],
                         check=True, capture_output=True, text=True, env=CHILD).stdout
    assert int(out.split()[-1]) * 1024 < 150e6 < rows * 4096 * 2 - 40e6
    assert Path(tmp_path / "b.safetensors").stat().st_size > rows * 4096


@pytest.mark.gpu
def test_on_the_gpu(tmp_path, source):
    for recipe in weights.RECIPES:
        for array in ("numpy", "cupy"):
            run(source, tmp_path / array / recipe, "--recipe", recipe, "--array", array, "--verify")
        assert contents(tmp_path / "numpy" / recipe) == contents(tmp_path / "cupy" / recipe)


def test_settings():
    with pytest.raises(ValueError, match="recipe: expected one of block128"):
        convert.Settings("fp8")
    for recipe, has in (("block128", "f32 or e8m0"), ("row", "f32"), ("bf16", "no")):
        with pytest.raises(ValueError, match=f"scale_format: {recipe} has {has} scales, got 'f16'"):
            convert.Settings(recipe, "f16")
    assert convert.Settings("block128") == convert.Settings("block128", "f32")
