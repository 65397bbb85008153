"""`save_safetensors` writes files and folders that are read back unchanged, here and by other libraries."""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from checkpoints import bf16, codes, config_of, convert, factors, header, write

import cupy_fp8 as fp8
from cupy_fp8 import io

X = np.random.default_rng(0).standard_normal((256, 384)).astype(np.float32)
FORMS: dict[str, Any] = {
    "tensor": fp8.quantize_tensor(X, 64.0),
    "rows": fp8.quantize_block(X, block=(1, None), pow2_scale=False),
    "128×128": fp8.quantize_block(X, block=(128, 128)),
    "1×128": fp8.quantize_block(X, block=(1, 128)),
    "mx": fp8.quantize_mx(X),
    "mx swizzled": fp8.quantize_mx(X, scale_layout="swizzled"),
    "e5m2": fp8.quantize_tensor(X, 64.0, dtype=fp8.float8_e5m2),
    "64×64": fp8.Scaled(codes(256, 384), factors(4, 6), (256, 384), False, (64, 64), "compact"),
    "columns": fp8.Scaled(codes(256, 384), factors(1, 384), (256, 384), False, (None, 1), "compact"),
    "experts": fp8.Scaled(codes(2, 256, 384), factors(2, 256, 1), (2, 256, 384), False, (1, None), "compact"),
}
OTHERS = {"norm.weight": np.ones(384, np.float32), "lm_head.weight": bf16(X)}


def row_wise(value: Any) -> fp8.Scaled:
    found: fp8.Scaled = value.rowwise if isinstance(value, fp8.Quantized) else value
    return found if found.block is None else found.to_layout("compact")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("folder", [False, True])
def test_there_and_back(tmp_path, form, folder):
    """Everything that is saved can be read again, whatever its blocks."""
    path = tmp_path / ("model" if folder else "a.safetensors")
    io.save_safetensors(path, {"m.weight": FORMS[form], **OTHERS})
    for found in (io.load_safetensors(path), io.load_safetensors(path, names="*.weight")):
        assert found.keys() == {"m.weight", *OTHERS}
        assert found["m.weight"] == row_wise(FORMS[form])
        assert all(found[name].tobytes() == a.tobytes() for name, a in OTHERS.items())
    assert convert(path, tmp_path / "out" if folder else tmp_path / "b.safetensors", "--recipe", "mxfp8") == 0


def test_mixed_forms_there_and_back(tmp_path):
    tensors = {f"{i}.weight": value for i, value in enumerate(FORMS.values())}
    io.save_safetensors(tmp_path / "model", tensors)
    found = io.load_safetensors(tmp_path / "model")
    assert all(found[name] == row_wise(value) for name, value in tensors.items())
    layers = config_of(tmp_path / "model")["quantization_config"]["quantized_layers"]
    assert len(layers) + 1 >= len(FORMS) - 2


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        (
            ["128×128"],
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        ),
        (["64×64"], {"quant_method": "fp8", "weight_block_size": [64, 64]}),
        (["mx"], {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}),
        (
            ["rows"],
            {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
        ),
        (["tensor"], {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        (["rows", "128×128"], {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        (["rows", "mx"], {"quant_method": "compressed-tensors", "format": "mixed-precision"}),
        (["columns"], {"quant_method": "cupy_fp8"}),
    ],
    ids=str,
)
def test_what_config_json_says(tmp_path, forms, expected):
    io.save_safetensors(
        tmp_path,
        {**{f"{i}.weight": FORMS[form] for i, form in enumerate(forms)}, **OTHERS},
        config={"model_type": "toy"},
    )
    config = config_of(tmp_path)
    assert config["model_type"] == "toy"
    assert expected.items() <= config["quantization_config"].items()
    if forms == ["rows", "128×128"]:
        groups = config["quantization_config"]["config_groups"]
        assert [group["targets"] for group in groups.values()] in ([["Linear"], ["1"]], [["Linear"], ["0"]])
        assert header(tmp_path / "model.safetensors").keys() >= {"0.weight_scale", "1.weight_scale"}


def test_shards_and_index(tmp_path):
    io.save_safetensors(
        tmp_path, {"a.weight": FORMS["mx"], "b.weight": FORMS["rows"], **OTHERS}, max_shard_size=150_000
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert names == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert index["weight_map"]["a.weight"] == index["weight_map"]["a.weight_scale"]
    assert index["metadata"]["total_size"] == sum(
        about["data_offsets"][1] - about["data_offsets"][0]
        for name in names
        for key, about in header(tmp_path / name).items()
        if key != "__metadata__"
    )
    assert io.load_safetensors(tmp_path)["b.weight"] == row_wise(FORMS["rows"])


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    io.save_safetensors(tmp_path, {"a.weight": FORMS["mx"]}, config={"model_type": "toy"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_bytes = os.fsync

    def fails(descriptor):
        if os.fstat(descriptor).st_size > 10_000:
            raise OSError(28, "No space left on device")
        write_bytes(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        io.save_safetensors(tmp_path, {"a.weight": FORMS["rows"]})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    io.save_safetensors(tmp_path, {"a.weight": FORMS["rows"]})
    assert io.load_safetensors(tmp_path)["a.weight"] == row_wise(FORMS["rows"])
    assert config_of(tmp_path)["model_type"] == "toy"
    assert config_of(tmp_path)["quantization_config"]["quant_method"] == "compressed-tensors"


def test_a_folder_of_another_checkpoint_is_left_alone(tmp_path):
    write(tmp_path / "model-00001-of-00002.safetensors", {"w": np.ones(3, np.float32)})
    with pytest.raises(
        ValueError, match=r"has model-00001-of-00002\.safetensors, which is not of this checkpoint"
    ):
        io.save_safetensors(tmp_path, {"a.weight": FORMS["mx"]})
    assert os.listdir(tmp_path) == ["model-00001-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config": 3}, TypeError, "config: expected a dict"),
        ({"config": {"a": {1, 2}}}, TypeError, "what JSON holds"),
        ({"config": {"quantization_config": {}}}, ValueError, "is written from the tensors"),
        ({"max_shard_size": 0}, ValueError, "max_shard_size: expected"),
        ({"max_shard_size": True}, ValueError, "max_shard_size: expected"),
    ],
    ids=str,
)
def test_options_that_are_none(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        io.save_safetensors(tmp_path / "model", {"a.weight": FORMS["mx"]}, **options)
    assert not (tmp_path / "model").exists()


# ---- other libraries ----
_PARSE = """
import json, sys
from transformers.quantizers.auto import AutoQuantizationConfig
from compressed_tensors.quantization import QuantizationConfig

for line in sys.stdin:
    name, config = json.loads(line)
    found = AutoQuantizationConfig.from_dict(dict(config))
    if config["quant_method"] == "compressed-tensors":
        groups = QuantizationConfig.model_validate(config).config_groups
        assert groups.keys() == config["config_groups"].keys(), name
        for key, group in groups.items():
            given = config["config_groups"][key]["weights"]
            assert group.weights.strategy == given["strategy"], name
            assert group.weights.block_structure == given.get("block_structure"), name
            assert group.weights.group_size == given.get("group_size"), name
    else:
        assert list(found.weight_block_size) == config["weight_block_size"], name
        assert found.modules_to_not_convert == config["modules_to_not_convert"], name
print("parsed")
"""


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ROWS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
SAVED = (["128×128"], ["64×64"], ["mx"], ["rows"], ["tensor"], ["rows", "128×128"], ["rows", "mx", "tensor"],
         ["1×128", "rows"])


def written_configs(folder):
    """Yield what `save_safetensors` and `convert` write, by what was written."""
    for i, forms in enumerate(SAVED):
        weights = {f"{j}.weight": FORMS[form] for j, form in enumerate(forms)}
        io.save_safetensors(folder / f"s{i}", {**weights, **OTHERS})
        yield f"saved {forms}", config_of(folder / f"s{i}")["quantization_config"]
    write(
        folder / "in" / "model.safetensors",
        {"a.weight": codes(256, 256), "a.weight_scale": factors(256, 1), "b.weight": codes(256, 256),
         "b.weight_scale": factors(2, 2), "a.k_scale": factors(1), **OTHERS},
        config={"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": KV,
                                        "config_groups": {"group_0": ROWS}}},
    )
    for recipe in ("block128", "mxfp8", "row", "tensor", "bf16"):
        for exclude in ([], ["--exclude", "b.*"]):
            out = folder / f"{recipe}{len(exclude)}"
            assert convert(folder / "in", out, "--recipe", recipe, *exclude) == 0
            yield f"{recipe} {exclude}", config_of(out)["quantization_config"]


@pytest.mark.full
def test_other_libraries_parse_what_is_written(tmp_path):
    """transformers' and compressed-tensors' own classes, in a Python that may be another one: they bring
    PyTorch."""
    python = os.environ.get("CUPY_FP8_ECOSYSTEM_PYTHON", sys.executable)
    there = subprocess.run([python, "-c", "import transformers, compressed_tensors"], capture_output=True)
    if there.returncode:
        pytest.skip("needs transformers and compressed-tensors (CUPY_FP8_ECOSYSTEM_PYTHON)")
    given = "\n".join(map(json.dumps, written_configs(tmp_path)))
    done = subprocess.run([python, "-c", _PARSE], input=given, text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "parsed\n"), done.stderr[-2000:]
