"""A conversion keeps nothing of the old form that no longer holds, and names what it drops."""

import json
from typing import Any

import numpy as np
import pytest
from checkpoints import bf16, codes, config_of, convert, factors, header, read, write

Q = "model.layers.0.self_attn.q_proj"
ACTIVATIONS = [
    "input_scale",
    "activation_scale",
    "act_scale",
    "scale_input",
    "qscale_act",
    "input_scale_ub",
    "activation_scaling_factor",
    "input_scale_inv",
    "in_scale",
    "input_amax",
    "input_offset",
    "input_zero_point",
    "input_global_scale",
    "input_quantizer._amax",
    "output_quantizer._amax",
]


@pytest.mark.parametrize("end", ACTIVATIONS)
@pytest.mark.parametrize("recipe", ["bf16", "row"])
def test_scales_of_activations_go_with_their_weights(tmp_path, end, recipe, capsys):
    """Those of a weight that keeps its form stay, and so does a parameter of that name without a weight."""
    write(
        tmp_path / "a.safetensors",
        {
            f"{Q}.weight": codes(32, 64),
            f"{Q}.weight_scale": factors(1),
            f"{Q}.{end}": factors(1),
            "experts.up": codes(2, 32, 64),
            "experts.up_scale": factors(2),
            f"experts.up_{end}": factors(1),
            "kept.weight": codes(32, 64),
            "kept.weight_scale": factors(1),
            f"kept.{end}": factors(1),
            f"alone.{end}": factors(1),
        },
    )
    report = tmp_path / "report.json"
    assert (
        convert(
            tmp_path / "a.safetensors",
            tmp_path / "b.safetensors",
            "--recipe",
            recipe,
            "--exclude",
            "kept.*",
            "--report",
            report,
        )
        == 0
    )
    left = {name for name in read(tmp_path / "b.safetensors") if name.endswith(end)}
    assert left == {f"kept.{end}", f"alone.{end}"}
    assert f"2 go (scales of activations): {Q}.{end}, experts.up_{end}" in capsys.readouterr().out
    assert json.loads(report.read_text())["removed"] == dict.fromkeys(
        [f"{Q}.{end}", f"experts.up_{end}"], "scales of activations"
    )


def test_what_is_excluded_never_goes(tmp_path):
    write(
        tmp_path / "a.safetensors",
        {f"{Q}.weight": codes(32, 64), f"{Q}.weight_scale": factors(1), f"{Q}.input_scale": factors(1)},
    )
    assert (
        convert(
            tmp_path / "a.safetensors",
            tmp_path / "b.safetensors",
            "--recipe",
            "bf16",
            "--exclude",
            "*.input_scale",
        )
        == 0
    )
    assert f"{Q}.input_scale" in read(tmp_path / "b.safetensors")


def test_scales_of_quanto_go(tmp_path):
    write(
        tmp_path / "a.safetensors",
        {
            "m.weight._data": codes(8, 32),
            "m.weight._scale": factors(8, 1),
            "m.input_scale": factors(1),
            "m.output_scale": factors(1),
        },
    )
    assert convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "bf16") == 0
    assert read(tmp_path / "b.safetensors").keys() == {"m.weight"}


def test_markers_and_headers(tmp_path):
    """ComfyUI's tensors and header, and torchao's header, describe only weights that keep their form."""
    marker = np.frombuffer(b'{"format": "float8_e4m3fn"}', np.uint8)
    tensors = {
        f"{m}.{end}": a
        for m in ("a", "b")
        for end, a in (("weight", codes(8, 32)), ("weight_scale", factors(1)), ("comfy_quant", marker))
    }
    comfy = {"layers": {"a": {"format": "float8_e4m3fn"}, "b": {"format": "float8_e4m3fn"}}}
    torchao = {
        "c.weight": '{"_type": "Float8Tensor"}',
        "d.weight": '{"_type": "Tensor"}',
        "tensor_names": '["c.weight", "d.weight"]',
    }
    write(
        tmp_path / "a.safetensors",
        {
            **tensors,
            "c._weight_qdata": codes(8, 32),
            "c._weight_scale": factors(8, 1),
            "d.weight": bf16(np.ones((8, 32))),
        },
        {"_quantization_metadata": json.dumps(comfy), "title": "kept", **torchao},
    )
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "bf16", "--exclude", "b.*")
    about = header(tmp_path / "b.safetensors")["__metadata__"]
    assert json.loads(about["_quantization_metadata"])["layers"].keys() == {"b"}
    assert "a.comfy_quant" not in read(tmp_path / "b.safetensors")
    assert "b.comfy_quant" in read(tmp_path / "b.safetensors")
    assert {"c.weight", "d.weight", "tensor_names"}.isdisjoint(about)
    assert about["title"] == "kept"
    convert(tmp_path / "a.safetensors", tmp_path / "c.safetensors", "--recipe", "bf16", "--exclude", "c.*")
    about = header(tmp_path / "c.safetensors")["__metadata__"]
    assert "_quantization_metadata" not in about
    assert json.loads(about["tensor_names"]) == ["c.weight", "d.weight"]


SIDECARS: dict[str, Any] = {
    "hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
    "quantize_config.json": {"quant_method": "fp8"},
    "quant_config.json": {"quant_method": "fp8"},
    "quantization_config.json": {"quant_method": "fp8"},
    "quanto_qmap.json": {"q": {"weights": "qfloat8"}},
    "quant_model_description.json": {"model_quant_type": "W8A8"},
}


@pytest.mark.parametrize("name", SIDECARS)
@pytest.mark.parametrize("recipe", ["bf16", "row"])
def test_files_that_describe_the_old_form_go(tmp_path, name, recipe, capsys):
    write(
        tmp_path / "model.safetensors",
        {f"{Q}.weight": codes(32, 64), f"{Q}.weight_scale": factors(1)},
        config={"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
    )
    (tmp_path / name).write_text(json.dumps(SIDECARS[name]))
    (tmp_path / "generation_config.json").write_text('{"quantization": "of no weights"}')
    assert convert(tmp_path, tmp_path / "out", "--recipe", recipe) == 0
    assert not (tmp_path / "out" / name).exists()
    assert f"{name} is removed" in capsys.readouterr().out
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"quantization": "of no weights"}'
    assert config_of(tmp_path / "out").get("quantization_config", {}).get("quant_method") in (
        None,
        "compressed-tensors",
    )


def test_files_that_still_describe_what_stays_are_rewritten(tmp_path):
    """ModelOpt's file of a mixed checkpoint describes FP4 layers: it still does so."""
    up = "model.layers.0.mlp.up_proj"
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {up: {"quant_algo": "NVFP4"}, Q: {"quant_algo": "FP8"}},
        "exclude_modules": ["lm_head"],
    }
    write(
        tmp_path / "model.safetensors",
        {
            f"{up}.weight": np.zeros((32, 32), np.uint8),
            f"{up}.weight_scale": codes(32, 4),
            f"{up}.weight_scale_2": factors(1),
            f"{Q}.weight": codes(32, 64),
            f"{Q}.weight_scale": factors(1),
        },
        config={"quantization_config": {"quant_method": "modelopt", **quantization}},
    )
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 0
    for found in (
        json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"],
        config_of(tmp_path / "out")["quantization_config"],
    ):
        assert found["quantized_layers"] == {up: {"quant_algo": "NVFP4"}}
        assert found["exclude_modules"] == ["lm_head", Q]


def test_params_of_mistral(tmp_path):
    write(
        tmp_path / "consolidated.safetensors",
        {
            "layers.0.wq.weight": codes(32, 64),
            "layers.0.wq.qscale_weight": factors(1).reshape(()),
            "layers.0.wq.qscale_act": factors(1).reshape(()),
        },
    )
    (tmp_path / "params.json").write_text(
        json.dumps({"dim": 64, "quantization": {"qformat_weight": "fp8_e4m3"}})
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 0
    assert json.loads((tmp_path / "out" / "params.json").read_text()) == {"dim": 64}
    assert read(tmp_path / "out").keys() == {"layers.0.wq.weight"}


@pytest.mark.parametrize(
    "index",
    [
        "diffusion_pytorch_model.safetensors.index.json",
        "consolidated.safetensors.index.json",
        "model.safetensors.index.json",
    ],
)
def test_an_index_of_any_name_is_read_and_written_anew(tmp_path, index):
    write(tmp_path / "part-1.safetensors", {"a.weight": codes(32, 64), "a.weight_scale": factors(1)})
    write(tmp_path / "stranger.safetensors", {"a.weight": codes(32, 64)})
    (tmp_path / index).write_text(
        json.dumps({"weight_map": dict.fromkeys(("a.weight", "a.weight_scale"), "part-1.safetensors")})
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 0
    found = json.loads((tmp_path / "out" / index).read_text())
    assert found == {
        "metadata": {"total_size": 32 * 64 * 2},
        "weight_map": {"a.weight": "part-1.safetensors"},
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([index, "part-1.safetensors"])
    assert convert(tmp_path / index, tmp_path / "again", "--recipe", "bf16") == 0
