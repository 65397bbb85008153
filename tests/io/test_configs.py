"""Written configurations describe each tensor: layer by layer for mixed forms, keeping exclusions, key-value
scales and packed layers."""

import json
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    BF16,
    E4M3,
    bf16,
    codes,
    config_of,
    convert,
    factors,
    read,
    values,
    write,
)

from cupy_fp8 import io
from cupy_fp8.io.layer_patterns import matches

UP, Q = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def normal(*shape: int) -> np.ndarray:
    return bf16(np.random.default_rng(0).standard_normal(shape) / 50)


def said(folder) -> dict[str, Any]:
    found: dict[str, Any] = config_of(folder).get("quantization_config", {})
    return found


# ---- tensors of other forms than the target's ----
@pytest.mark.parametrize("recipe", ["mxfp8", "row", "tensor", "block128", "bf16"])
def test_excluded_fp8_travels_with_its_scales(tmp_path, recipe):
    w, s = codes(256, 256), factors(2, 2)
    write(
        tmp_path / "model.safetensors",
        {f"{m}.weight{end}": a for m in (UP, "mtp.up_proj") for end, a in (("", w), ("_scale_inv", s))},
        config=BLOCKS,
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", recipe, "--exclude", "mtp.*", "--verify") == 0
    after = read(tmp_path / "out")
    assert after["mtp.up_proj.weight"].tobytes() == w.tobytes()
    assert after["mtp.up_proj.weight_scale_inv"].tobytes() == s.tobytes()
    np.testing.assert_array_equal(
        io.load_safetensors(tmp_path / "out")["mtp.up_proj.weight"].dequantize(), values(w, s, 128, 128)
    )
    config = said(tmp_path / "out")
    if recipe in ("block128", "bf16"):  # the only form, or the source's own description
        assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
        assert ("mtp.up_proj" in config["modules_to_not_convert"]) is False
        assert (UP in config["modules_to_not_convert"]) == (recipe == "bf16")
    else:
        left = config["modules_to_not_convert" if recipe == "mxfp8" else "ignore"]
        assert left == ["mtp.up_proj"]
        assert config["quantized_layers"]["mtp.up_proj"]["weight_block_size"] == [128, 128]


def test_blocks_that_only_a_mixed_config_tells(tmp_path):
    """`quantized_layers` is read back."""
    w, s = codes(192, 192), factors(3, 3)
    write(
        tmp_path / "model.safetensors",
        {f"{m}.weight{end}": a for m in (UP, "mtp.up_proj") for end, a in (("", w), ("_scale_inv", s))},
        config={"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", "mxfp8", "--exclude", "mtp.*") == 0
    np.testing.assert_array_equal(
        io.load_safetensors(tmp_path / "out")["mtp.up_proj.weight"].dequantize(), values(w, s, 64, 64)
    )


def test_mixed_forms_of_compressed_tensors_have_groups(tmp_path):
    write(
        tmp_path / "model.safetensors",
        {
            f"{UP}.weight": codes(256, 256),
            f"{UP}.weight_scale": factors(2, 2),
            f"{Q}.weight": codes(128, 128),
            f"{Q}.weight_scale": factors(128, 1, dtype=BF16),
            "model.embed.weight": normal(64, 128),
        },
    )
    (tmp_path / "config.json").write_text("{}")
    assert convert(tmp_path, tmp_path / "out", "--recipe", "tensor", "--exclude", f"{UP}*") == 0
    config = said(tmp_path / "out")
    groups = config["config_groups"]
    assert groups["group_0"]["weights"]["strategy"] == "tensor"
    assert groups["group_1"]["targets"] == [UP]
    assert (
        groups["group_1"]["weights"] | {"strategy": "block", "block_structure": [128, 128]}
        == groups["group_1"]["weights"]
    )
    assert config["ignore"] == ["model.embed"]


# ---- exclusions ----
EXCLUDED = ["model.layers.0.linear_attn.in_proj", "model.layers.7.mlp.down_proj"]
LISTS: dict[str, Any] = {
    "modules_to_not_convert": {"quant_method": "fp8", "modules_to_not_convert": EXCLUDED},
    "ignored_layers": {"quant_method": "fp8", "ignored_layers": EXCLUDED},
    "ignore": {"quant_method": "compressed-tensors", "ignore": EXCLUDED},
    "regular expressions": {
        "quant_method": "compressed-tensors",
        "ignore": ["re:.*in_proj$", "re:.*layers.7.*"],
    },
    "ModelOpt's patterns": {"quant_method": "modelopt", "exclude_modules": ["*in_proj", "model.layers.7*"]},
    "parts of names": {"quant_method": "fp8", "modules_to_not_convert": ["in_proj", "layers.7"]},
    "Quark": {"quant_method": "quark", "exclude": EXCLUDED},
}


@pytest.mark.parametrize("where", LISTS)
@pytest.mark.parametrize("recipe", ["mxfp8", "row"])
def test_what_the_source_excludes_stays(tmp_path, where, recipe):
    x = normal(128, 128)
    write(
        tmp_path / "model.safetensors",
        {
            **{f"{module}.weight": x for module in EXCLUDED},
            "model.layers.17.mlp.down_proj.weight": x,
            f"{UP}.weight": codes(128, 128),
            f"{UP}.weight_scale": factors(1),
        },
        config={"quantization_config": LISTS[where]},
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", recipe) == 0
    after = read(tmp_path / "out")
    assert [module for module in EXCLUDED if after[f"{module}.weight"].tobytes() != x.tobytes()] == []
    assert after["model.layers.17.mlp.down_proj.weight"].dtype == E4M3
    left = said(tmp_path / "out")["modules_to_not_convert" if recipe == "mxfp8" else "ignore"]
    assert left == EXCLUDED
    assert convert(tmp_path, tmp_path / "all", "--recipe", recipe, "--include", "*in_proj*") == 0
    assert read(tmp_path / "all")[f"{EXCLUDED[0]}.weight"].dtype == E4M3


def test_exclusions_of_hf_quant_config_and_of_modules_elsewhere(tmp_path):
    """ModelOpt's file is used if config.json has no description; a name that no tensor here has is kept."""
    write(
        tmp_path / "model.safetensors",
        {"a.weight": normal(128, 128), "b.weight": normal(128, 128)},
        config={},
    )
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["a", "lm_head"]}})
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", "block128") == 0
    assert read(tmp_path / "out")["a.weight"].dtype == BF16
    assert said(tmp_path / "out")["modules_to_not_convert"] == ["a", "lm_head"]
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("pattern", "module", "is_meant"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("mlp.gate", "layers.0.mlp.gate", True),
        ("mlp.gate", "layers.0.mlp.gate_proj", False),
        ("layers.1", "layers.11.q", False),
        ("", "a", False),
        ("re:.*gate$", "a.gate", True),
        ("re:gate", "a.gate", False),
        ("*gate", "a.gate", True),
        ("model.layers.0*", "model.layers.0.q", True),
        ("a[0]", "a0", True),
    ],
)
def test_matches(pattern, module, is_meant):
    assert matches(pattern, module) == is_meant


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ignore": "lm_head"}, "ignore: expected a list of names"),
        ({"ignore": [3]}, "ignore: expected a list"),
        ({"ignore": ["re:("]}, "no regular expression"),
        ({"ignore": ["re:(a+)+$"]}, "repeats a group"),
        ({"ignore": ["re:" + ".*" * 9]}, "repeats a group, or has too many"),
    ],
    ids=str,
)
def test_hostile_lists(tmp_path, config, message):
    write(
        tmp_path / "model.safetensors",
        {"w": codes(4, 8), "w_scale": factors(1)},
        config={"quantization_config": config},
    )
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        io.load_safetensors(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": 3},
        {"quantization_config": {"config_groups": [1]}},
        {"quantization_config": {"config_groups": {"a": 1, "b": {"targets": 3, "weights": [1]}}}},
        {"quantization_config": {"weight_block_size": [0, 128]}},
        {"quantization_config": {"weight_block_size": "x"}},
        {"quantization_config": {"quantized_layers": 3, "kv_cache_scheme": 3, "quant_method": ["x"]}},
        {"text_config": [1], "a": {"b": {"c": None}}},
    ],
    ids=str,
)
def test_configurations_of_other_types(tmp_path, config):
    """An unknown description is ignored, and conversions go on."""
    w, s = codes(64, 64), factors(1)
    write(tmp_path / "model.safetensors", {"w": w, "w_scale": s}, config=config)
    np.testing.assert_array_equal(io.load_safetensors(tmp_path)["w"].dequantize(), w.astype(np.float32) * s)
    for recipe in ("row", "bf16"):
        assert convert(tmp_path, tmp_path / recipe, "--recipe", recipe) == 0


# ---- key-value caches ----
@pytest.mark.parametrize(
    "scheme",
    [{"kv_cache_scheme": KV}, {"kv_cache_scheme": "static"}, {"kv_cache_quant_algo": "FP8"}],
    ids=str,
)
@pytest.mark.parametrize("recipe", ["tensor", "row", "block128", "mxfp8", "bf16"])
def test_scales_of_key_value_caches_stay(tmp_path, recipe, scheme):
    attention = "model.layers.0.self_attn."
    write(
        tmp_path / "model.safetensors",
        {
            f"{Q}.weight": codes(128, 128),
            f"{Q}.weight_scale": factors(128, 1),
            f"{attention}k_scale": factors(1),
            f"{attention}v_scale": factors(1),
            f"{Q}.input_scale": factors(1),
        },
        config={"quantization_config": {"quant_method": "compressed-tensors", **scheme}},
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", recipe) == 0
    after = read(tmp_path / "out")
    assert {f"{attention}k_scale", f"{attention}v_scale"} < after.keys()
    assert f"{Q}.input_scale" not in after
    assert said(tmp_path / "out")["kv_cache_scheme"] == KV


def test_a_block_that_is_no_square_is_told(tmp_path):
    """Rows before columns, in `quantized_layers` too."""
    w, s = codes(192, 192), factors(3, 6)
    write(tmp_path / "model.safetensors", {f"{m}.weight{end}": a for m in (UP, "mtp.up_proj")
                                           for end, a in (("", w), ("_scale_inv", s))},
          config={"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}})
    assert convert(tmp_path, tmp_path / "out", "--recipe", "mxfp8", "--exclude", "mtp.*") == 0
    found = io.load_safetensors(tmp_path / "out")["mtp.up_proj.weight"]
    np.testing.assert_array_equal(found.dequantize(), values(w, s, 64, 32))
