"""Packed layers (FP4, INT4, INT8) are not read: they are copied byte for byte, together with their
description, or a recipe is refused by name. FNUZ data are dequantised."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import E8M0, Packed, bf16, codes, config_of, convert, factors, read, write

import cupy_fp8 as fp8
from cupy_fp8 import io
from cupy_fp8.io.found import tensors

UP, Q = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"


def said(folder) -> dict[str, Any]:
    found: dict[str, Any] = config_of(folder).get("quantization_config", {})
    return found


def nvfp4(module: str) -> dict[str, Any]:
    return {
        f"{module}.weight_packed": np.arange(32 * 32, dtype=np.uint8).reshape(32, 32),
        f"{module}.weight_scale": codes(32, 4),
        f"{module}.weight_global_scale": np.array([300.0], np.float32),
        f"{module}.input_global_scale": np.array([1.0], np.float32),
    }


PACKED: dict[str, Any] = {
    "compressed-tensors NVFP4": (
        nvfp4(UP),
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {
                    "format": "nvfp4-pack-quantized",
                    "targets": ["re:.*mlp.*"],
                    "weights": {"num_bits": 4},
                },
                "group_1": {
                    "format": "float-quantized",
                    "targets": ["re:.*attn.*"],
                    "weights": {"num_bits": 8},
                },
            },
        },
        ("bf16", "row", "tensor"),
    ),
    "ModelOpt NVFP4": (
        {
            f"{UP}.weight": np.zeros((32, 32), np.uint8),
            f"{UP}.weight_scale": codes(32, 4),
            f"{UP}.weight_scale_2": np.float32(2).reshape(()),
            f"{UP}.input_scale": factors(1),
        },
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {UP: {"quant_algo": "NVFP4"}, Q: {"quant_algo": "FP8"}},
        },
        ("bf16",),
    ),
    "DeepSeek-V4": (
        {
            f"{UP}.weight": np.ones((64, 64), np.int8),
            f"{UP}.scale": np.full((64, 4), 120, np.uint8).view(E8M0),
        },
        {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
        ("bf16", "block128"),
    ),
    "F4": (
        {f"{UP}.weight": Packed("F4", (32, 64), bytes(1024)), f"{UP}.weight_scale": codes(32, 4)},
        {"quant_method": "modelopt"},
        ("bf16",),
    ),
    "gpt-oss": (
        {
            "m.up_proj_blocks": np.zeros((2, 8, 2, 16), np.uint8),
            "m.up_proj_scales": np.zeros((2, 8, 2), np.uint8),
        },
        {"quant_method": "mxfp4"},
        ("bf16",),
    ),
    "GPTQ": (
        {
            f"{UP}.qweight": np.zeros((8, 64), np.int32),
            f"{UP}.scales": factors(1, 64, dtype=np.float16),
            f"{UP}.qzeros": np.zeros((1, 8), np.int32),
            f"{UP}.g_idx": np.zeros(64, np.int32),
        },
        {"quant_method": "gptq", "bits": 4},
        ("bf16",),
    ),
    "NVFP4 of stacked experts": (
        {
            "m.experts.up_proj": np.zeros((2, 32, 32), np.uint8),
            "m.experts.up_proj_weight_scale": codes(2, 32, 4),
            "m.experts.up_proj_weight_scale_2": factors(2),
            "m.experts.up_proj_input_scale": factors(1),
        },
        {"quant_method": "modelopt"},
        ("bf16",),
    ),
    "bitsandbytes": (
        {f"{UP}.weight": np.ones((64, 64), np.int8), f"{UP}.SCB": factors(64)},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        ("bf16",),
    ),
    "EETQ": (
        {f"{UP}.weight": np.ones((64, 64), np.int8), f"{UP}.weight_scales": factors(64)},
        {"quant_method": "eetq"},
        ("bf16",),
    ),
    "HQQ": (
        {
            f"{UP}.W_q": np.ones((32, 64), np.uint8),
            f"{UP}.scale": factors(64, 1),
            f"{UP}.zero": factors(64, 1),
        },
        {"quant_method": "hqq"},
        ("bf16",),
    ),
    "AQLM": (
        {
            f"{UP}.codes": np.ones((64, 8, 1), np.int8),
            f"{UP}.codebooks": factors(1, 256, 1, 8),
            f"{UP}.scales": factors(64, 1, 1, 1),
        },
        {"quant_method": "aqlm"},
        ("bf16",),
    ),
    "Marlin": (
        {f"{UP}.B": np.ones((4, 128), np.int32), f"{UP}.s": factors(4, 64)},
        {"quant_method": "marlin"},
        ("bf16",),
    ),
    "INT8": (
        {
            f"{UP}.weight": np.zeros((64, 64), np.int8),
            f"{UP}.weight_scale": factors(64, 1),
            f"{UP}.input_scale": factors(1),
        },
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "type": "int"}}},
        },
        ("bf16", "row", "tensor"),
    ),
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("recipe", ["bf16", "row", "tensor", "block128", "mxfp8"])
def test_packed_layers_pass_with_what_describes_them(tmp_path, kind, recipe, capsys):
    """Byte for byte, together with a configuration that describes them, or the recipe is refused by name and
    the advice of the message works."""
    packed, config, possible = PACKED[kind]
    w, s = codes(128, 128), factors(1)
    write(
        tmp_path / "model.safetensors",
        {**packed, f"{Q}.weight": w, f"{Q}.weight_scale": s},
        config={"quantization_config": config},
    )
    status = convert(tmp_path, tmp_path / "out", "--recipe", recipe)
    if recipe not in possible:
        assert status == 1
        name, printed = next(iter(packed)), capsys.readouterr().err
        assert re.split(r"\.q?weight|_blocks|\.W_q|\.codes|\.B$", name)[0] in printed
        advised = re.search("take --recipe (.*)", printed)
        assert advised
        assert sorted(re.split(", | or ", advised[1])) == sorted(possible)
        assert not (tmp_path / "out").exists()
        return
    assert status == 0
    after, new = read(tmp_path / "out"), said(tmp_path / "out")
    assert_same(read(tmp_path / "model.safetensors"), after, packed)
    if recipe == "bf16":
        assert after[f"{Q}.weight"].tobytes() == bf16(w.astype(np.float32) * s).tobytes()
        assert new["quant_method"] == config["quant_method"]
        assert Q in next(new[key] for key in ("ignore", "modules_to_not_convert") if key in new)
        assert Q not in new.get("quantized_layers", {})
    if kind.startswith("compressed"):
        group = next(g for g in new["config_groups"].values() if g["format"] == "nvfp4-pack-quantized")
        assert recipe == "bf16" or group["targets"] == [UP]
        assert new["format"] == "mixed-precision"
    if kind == "INT8" and recipe != "bf16":
        assert new["config_groups"]["group_1"]["targets"] == [UP]
    assert (new.get("expert_dtype") == "fp4") == (kind == "DeepSeek-V4")


def assert_same(before, after, names):
    for name in names:
        old, new = before[name], after[name]
        assert old.dtype == new.dtype, name
        assert (old.data if isinstance(old, Packed) else old.tobytes()) == (
            new.data if isinstance(new, Packed) else new.tobytes()
        ), name


@pytest.mark.parametrize("kind", PACKED)
def test_packed_layers_are_loaded_as_they_are_stored(tmp_path, kind):
    """F4, which NumPy does not have, as the bytes of its rows."""
    packed, config, _ = PACKED[kind]
    path = write(
        tmp_path / "model.safetensors",
        {**packed, "w": codes(4, 8), "w_scale": factors(1)},
        config={"quantization_config": config},
    )
    found = io.load_safetensors(path)
    assert found.keys() == {*packed, "w"}
    for name, a in packed.items():
        if isinstance(a, Packed):
            assert (found[name].dtype, found[name].shape) == (np.uint8, (32, 32))
            assert found[name].tobytes() == a.data
        else:
            assert (found[name].dtype, found[name].tobytes()) == (a.dtype, a.tobytes())


def test_packed_layers_of_a_file_that_says_nothing(tmp_path):
    """Then the new configuration describes them only as excluded."""
    write(
        tmp_path / "model.safetensors",
        {**nvfp4(UP), f"{Q}.weight": codes(32, 32), f"{Q}.weight_scale": factors(1)},
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", "row") == 0
    assert said(tmp_path / "out")["ignore"] == [UP]


def test_fnuz_never_is_a_scaled(tmp_path):
    w, s = codes(32, 64, dtype=ml_dtypes.float8_e4m3fnuz), factors(1)
    config = {"quantization_config": {"quant_method": "fp8"}}
    write(tmp_path / "model.safetensors", {"w": w, "w_scale": s}, config=config)
    found = io.load_safetensors(tmp_path)["w"]
    assert not isinstance(found, fp8.Scaled)
    np.testing.assert_array_equal(found, w.astype(np.float32) * s)
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 0
    assert read(tmp_path / "out")["w"].tobytes() == bf16(w.astype(np.float32) * s).tobytes()
    assert said(tmp_path / "out") == {}


def test_packed_layers_are_not_drawn(tmp_path):
    """They and their scales are not matrices, and the reason is given."""
    path = write(tmp_path / "model.safetensors", {**nvfp4(UP), "w": codes(4, 8), "w_scale": factors(1)})
    assert [name for name, _ in io.read_matrices(path)] == ["w"]
    found = {one.name: one.what for one in tensors(path) if one.values is None}
    assert found.keys() == set(nvfp4(UP))
    assert "packed data of a form that is not read" in found[f"{UP}.weight_packed"]
