"""Faults found while trying to break conversions, each with the right outcome."""

import json
from typing import Any

import ml_dtypes
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
    header,
    read,
    values,
    write,
)

import cupy_fp8 as fp8
from cupy_fp8 import io
from cupy_fp8.__main__ import main
from cupy_fp8.io import weights

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def normal(*shape):
    return bf16(np.random.default_rng(0).standard_normal(shape))


def said(folder) -> dict[str, Any]:
    found: dict[str, Any] = config_of(folder).get("quantization_config", {})
    return found


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e4m3fn])
def test_one_scale_of_a_tensor_of_several_chunks(tmp_path, dtype, monkeypatch):
    """From another FP8 type to one scale, shared by all chunks."""
    monkeypatch.setattr(weights, "_CHUNK", 1 << 12)
    w = np.ones((600, 64), np.float32)
    w[:300] = 200
    write(tmp_path / "a.safetensors", {"w": w.astype(dtype), "w_scale": np.ones(1, np.float32)})
    assert (
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "tensor", "--verify") == 0
    )
    found = io.load_safetensors(tmp_path / "b.safetensors")["w"].dequantize()
    np.testing.assert_allclose(found, w, rtol=1 / 16)


@pytest.mark.parametrize("name", ["bias", "gamma", "norm", "weight_zero_point", "k_scale", "input_scale"])
def test_vectors_that_are_no_scales_are_not_advised(tmp_path, name):
    path = write(tmp_path / "a.safetensors", {"l.weight": codes(64, 96), f"l.{name}": factors(64)})
    with pytest.raises(ValueError, match=r"FP8 codes; pass scales='none'"):
        io.load_safetensors(path)


def test_the_likely_scales_are_advised_beside_a_bias(tmp_path):
    path = write(tmp_path / "a.safetensors", {"w": codes(64, 96), "b": factors(64), "wscl": factors(64)})
    with pytest.raises(ValueError, match=r"scales=\{'w': 'wscl'\}"):
        io.load_safetensors(path)


def test_stacked_experts_of_modelopt(tmp_path):
    w, s = codes(2, 64, 96), factors(2)
    path = write(tmp_path / "a.safetensors", {"e.gate_up_proj": w, "e.gate_up_proj_weight_scale": s})
    np.testing.assert_array_equal(io.load_safetensors(path)["e.gate_up_proj"].dequantize(), values(w, s))


def test_names_that_collide_across_shards(tmp_path, capsys):
    """Refused before anything is written."""
    write(
        tmp_path / "model-1.safetensors", {"a._weight_qdata": codes(8, 8), "a._weight_scale": factors(8, 1)}
    )
    write(tmp_path / "model-2.safetensors", {"a.weight": normal(8, 8)})
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 1
    assert "is taken by another tensor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}),
        ("diffusion_pytorch_model.safetensors.index.json", {"weight_map": {}}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
        ("params.json", {"quantization": {"qformat_weight": "fp8_e4m3"}}),
        ("config.json", FP8),
    ],
)
def test_stale_descriptions_in_the_destination(tmp_path, name, content, capsys):
    """They would be read as parts of the result; without them it is written."""
    write(tmp_path / "in" / "model.safetensors", {"a.weight": normal(64, 64)})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(json.dumps(content))
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "bf16") == 1
    assert f"has {name}, which is not of this checkpoint; delete it" in capsys.readouterr().err
    saved = {"a.weight": fp8.quantize_mx(np.ones((64, 64), np.float32))}
    if name not in ("config.json", "model.safetensors.index.json"):  # those are written anew
        with pytest.raises(ValueError, match=f"has {name}"):
            io.save_safetensors(tmp_path / "out", saved)
    (tmp_path / "out" / name).unlink()
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "bf16") == 0
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "bf16") == 0
    assert io.load_safetensors(tmp_path / "out").keys() == {"a.weight"}


def test_save_refuses_a_description_in_any_part_of_a_config(tmp_path):
    with pytest.raises(ValueError, match="is written from the tensors"):
        io.save_safetensors(tmp_path / "model", {}, config={"text_config": FP8})


# ---- what a config says of FP8 tensors that stay ----
@pytest.mark.parametrize("recipe", ["row", "mxfp8", "block128"])
@pytest.mark.parametrize("kind", ["odd", "codes", "torchao", "swizzled", "a name of the user's", "shared"])
def test_fp8_that_stays_is_told(tmp_path, kind, recipe):
    """Described as not of the main form, and never as a module that is a tensor of scales."""
    more: list[str] = []
    if kind == "odd":
        kept: dict[str, Any] = {"a.weight": codes(1696, 256), "a.weight_scale_inv": factors(16, 2)}
    elif kind == "codes":
        kept, more = {"a.weight": codes(64, 64)}, ["--scales", "none"]
    elif kind == "torchao":
        kept = {"a._weight_qdata": codes(64, 64), "a._weight_scale": factors(64, 1)}
    elif kind == "swizzled":
        kept = {
            "a.weight": codes(128, 128),
            "a.weight_scale": np.full((128, 4), 120, np.uint8),
            "a.comfy_quant": np.frombuffer(b'{"format": "mxfp8"}', np.uint8),
        }
    else:
        kept = {"a.weight": codes(64, 64), "a.my_s": factors(64)}
        more = ["--scale-name", "a.weight=a.my_s"]
    write(tmp_path / "model.safetensors", {**kept, "b.weight": normal(128, 128)}, config={})
    assert convert(tmp_path, tmp_path / "out", "--recipe", recipe, "--exclude", "a.*", *more) == 0
    after, config = read(tmp_path / "out"), said(tmp_path / "out")
    assert all(after[name].tobytes() == np.asarray(a).tobytes() for name, a in kept.items())
    left = config["ignore" if "ignore" in config else "modules_to_not_convert"]
    assert left == ["a"]
    entry = config["quantized_layers"]["a"]
    wanted = {"odd": None, "codes": None, "torchao": "a._weight_scale", "swizzled": "_scale"}
    assert entry["scales"] == wanted.get(kind, "a.my_s")
    assert entry.get("scale_layout") == ("swizzled" if kind == "swizzled" else None)
    if kind not in ("odd", "codes"):
        name = "a._weight_qdata" if kind == "torchao" else "a.weight"
        found = io.load_safetensors(tmp_path / "out")[name]
        assert isinstance(found, fp8.Scaled)
        scales: dict[str, Any] = {} if kind in ("torchao", "swizzled") else {"scales": {"a.weight": "a.my_s"}}
        assert found == io.load_safetensors(tmp_path / "model.safetensors", **scales)[name]


@pytest.mark.parametrize("config", [FP8, {}, {"quantization_config": {"quant_method": "modelopt"}}], ids=str)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "row"])
def test_a_block_of_the_users_is_told_of_what_stays(tmp_path, config, single, recipe):
    w, s = codes(192, 256), factors(3, 4)
    write(
        tmp_path / "model.safetensors",
        {f"{m}.weight{end}": a for m in "ab" for end, a in (("", w), ("_scale_inv", s))},
        config=config,
    )
    out = tmp_path / ("out.safetensors" if single else "out")
    source = tmp_path / "model.safetensors" if single else tmp_path
    assert convert(source, out, "--recipe", recipe, "--block", "64,64", "--exclude", "a.*") == 0
    if single:
        out = out.rename(tmp_path.parent / f"{tmp_path.name}.safetensors")  # away from config.json
    np.testing.assert_array_equal(io.load_safetensors(out)["a.weight"].dequantize(), values(w, s, 64, 64))


def test_a_description_elsewhere_stays_there(tmp_path):
    """config.json gets nothing from ModelOpt's file, which still describes what stays."""
    write(
        tmp_path / "model.safetensors",
        {f"{m}.weight{end}": a for m in "qk" for end, a in (("", codes(64, 64)), ("_scale", factors(1)))},
        config={"model_type": "toy"},
    )
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16", "--exclude", "k.*") == 0
    assert config_of(tmp_path / "out") == {"model_type": "toy"}
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text()) == {
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["q"]}
    }


def test_quantization_in_config_json(tmp_path):
    """TensorRT-LLM's key is read and dropped; MLX's packed weights keep theirs."""
    write(
        tmp_path / "rank0.safetensors",
        {"q.weight": codes(64, 64), "q.weights_scaling_factor": factors(1), "a.k.weight": normal(64, 64)},
        config={"quantization": {"quant_algo": "FP8", "exclude_modules": ["*.k"]}},
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", "mxfp8") == 0
    assert config_of(tmp_path / "out").keys() == {"quantization_config"}
    assert read(tmp_path / "out")["a.k.weight"].dtype == BF16
    mlx = {"quantization": {"group_size": 32, "bits": 4}}
    write(
        tmp_path / "mlx" / "model.safetensors",
        {"u.weight": np.zeros((8, 8), np.int32), "u.scales": factors(8, 2), "u.biases": factors(8, 2)},
        config=mlx,
    )
    assert convert(tmp_path / "mlx", tmp_path / "same", "--recipe", "bf16") == 0
    assert config_of(tmp_path / "same")["quantization"].items() >= mlx["quantization"].items()
    assert read(tmp_path / "same")["u.biases"].tobytes() == factors(8, 2).tobytes()


# ---- advice ----
def test_advice_on_blocks_is_for_one_tensor(tmp_path):
    """Each tensor has its own advice, which works beside tensors of other forms."""
    a, b = factors(3, 4), factors(6, 8)
    path = write(
        tmp_path / "a.safetensors",
        {
            "a.weight": codes(192, 256),
            "a.weight_scale_inv": a,
            "b.weight": codes(192, 256),
            "b.weight_scale_inv": b,
            "c.weight": codes(64, 64),
            "c.weight_scale": factors(1),
        },
    )
    with pytest.raises(
        ValueError, match=r"block=\{'a\.weight': \(64, 64\)\}[^$]*block=\{'b\.weight': \(32, 32\)\}"
    ):
        io.load_safetensors(path)
    found = io.load_safetensors(path, block={"a.weight": (64, 64), "b.weight": (32, 32)})
    np.testing.assert_array_equal(found["b.weight"].dequantize(), values(codes(192, 256), b, 32, 32))
    assert (
        convert(
            path,
            tmp_path / "b.safetensors",
            "--recipe",
            "bf16",
            "--block",
            "a.weight=64,64",
            "--block",
            "b.weight=32,32",
        )
        == 0
    )
    assert convert(path, tmp_path / "c.safetensors", "--recipe", "bf16", "--block", "x=64,64") == 1


@pytest.mark.parametrize("recipe", ["bf16", "row"])
def test_the_other_scales_go(tmp_path, recipe):
    w, s = codes(256, 256), factors(2, 2)
    path = write(
        tmp_path / "a.safetensors", {"l.weight": w, "l.weight_scale_inv": s, "l.weight_scale": 1 / s}
    )
    out = tmp_path / "b.safetensors"
    assert convert(path, out, "--recipe", recipe, "--scale-name", "l.weight=l.weight_scale_inv") == 0
    found = io.load_safetensors(out)["l.weight"]
    wanted = values(w, s, 128, 128)
    if recipe == "bf16":
        assert found.tobytes() == bf16(wanted).tobytes()
        assert read(out).keys() == {"l.weight"}
    else:
        np.testing.assert_allclose(found.dequantize(), wanted, rtol=1 / 16, atol=1e-4)


def test_zero_points_beside_scales(tmp_path):
    """Refused, and read if the caller says that they change nothing."""
    path = write(
        tmp_path / "a.safetensors", {"w": codes(4, 8), "w_scale": factors(1), "w_zero_point": codes(1)}
    )
    with pytest.raises(ValueError, match=r"has w_zero_point too.* pass scales=\{'w': 'w_scale'\}"):
        io.load_safetensors(path)
    assert isinstance(io.load_safetensors(path, scales={"w": "w_scale"})["w"], fp8.Scaled)


def test_scales_alone_are_not_loaded_without_a_word(tmp_path):
    path = write(tmp_path / "a.safetensors", {"w": codes(4, 8), "w_scale": factors(1)})
    for names in ("w_scale", "*_scale"):
        with pytest.raises(ValueError, match=r"means scales alone, which come with w; pass raw=True"):
            io.load_safetensors(path, names=names)
        assert io.load_safetensors(path, names=names, raw=True).keys() == {"w_scale"}


def test_patterns_that_mean_nothing_are_named(tmp_path, capsys):
    write(tmp_path / "a.safetensors", {"w": normal(64, 64)})
    assert (
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "row", "--exclude", "x.*")
        == 0
    )
    assert "no tensor is called 'x.*'" in capsys.readouterr().out


def test_scales_of_what_is_excluded_stay(tmp_path):
    scales = factors(4, 2)
    write(
        tmp_path / "a.safetensors",
        {"a.weight": codes(512, 256), "a.wscl": scales, "b.weight": normal(64, 64)},
    )
    for recipe in ("bf16", "row"):
        out = tmp_path / f"{recipe}.safetensors"
        assert convert(tmp_path / "a.safetensors", out, "--recipe", recipe, "--exclude", "a.weight") == 0
        assert read(out)["a.wscl"].tobytes() == scales.tobytes()


# ---- exclusions, key-value scales ----
@pytest.mark.parametrize(
    "config",
    [
        {"modules_to_not_convert": ["a.weight"]},
        {"skip_modules": ["a"]},
        {"llm_int8_skip_modules": ["a"]},
        {"extra_config": {"a": {"bits": 16}}},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"b": {}}},
        {"config_groups": {"g": {"targets": ["re:.*b$"], "weights": {"num_bits": 8, "type": "float"}}}},
    ],
    ids=str,
)
def test_other_ways_to_exclude(tmp_path, config):
    write(
        tmp_path / "model.safetensors",
        {"a.weight": normal(64, 64), "b.weight": normal(64, 64)},
        config={"quantization_config": config},
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", "row") == 0
    after = read(tmp_path / "out")
    assert (after["a.weight"].dtype, after["b.weight"].dtype) == (BF16, E4M3)


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.k_proj.output_scale",
        "self_attn.k_cache_scale",
        "self_attn.attention.k_fake_quantizer.qscale_act",
    ],
)
def test_other_names_of_key_value_scales(tmp_path, name):
    write(
        tmp_path / "model.safetensors",
        {"q.weight": codes(64, 64), "q.weight_scale": factors(1), name: factors(1)},
        config={"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
    )
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 0
    assert name in read(tmp_path / "out")
    assert said(tmp_path / "out")["kv_cache_scheme"]["num_bits"] == 8


# ---- hostile files ----
@pytest.mark.parametrize("size", [[10**30, 10**30], [10**30, 64], ["1", "2"]], ids=str)
def test_huge_blocks(tmp_path, size):
    write(
        tmp_path / "model.safetensors",
        {"w": codes(64, 64), "w_scale_inv": factors(1, 1)},
        config={"quantization_config": {"weight_block_size": size}},
    )
    assert isinstance(io.load_safetensors(tmp_path)["w"], fp8.Scaled)
    assert isinstance(io.load_safetensors(tmp_path, block=(10**30, 10**30))["w"], fp8.Scaled)


@pytest.mark.parametrize("pattern", ["re:(?:.|.)*#", "re:((.*))*#", "re:(?:a|b|.|[a-z])*#", "re:(a|a){9}"])
def test_regular_expressions_that_would_take_for_ever(tmp_path, pattern):
    write(
        tmp_path / "model.safetensors",
        {"w": normal(8, 8)},
        config={"quantization_config": {"ignore": [pattern]}},
    )
    with pytest.raises(ValueError, match="repeats a group"):
        io.load_safetensors(tmp_path)


def test_deep_configs(tmp_path):
    """Refused before shards are written."""
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"a": deep}
    write(tmp_path / "model.safetensors", {"w": normal(8, 8)}, config=deep)
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("about", [{"name": "\ud800"}, {"shape": [2**64, 0]}, {"shape": [1] * 70}], ids=str)
def test_names_and_shapes_that_are_none(tmp_path, about):
    name, shape = about.get("name", "w"), about.get("shape", [1])
    size = 0 if 0 in shape else 4
    text = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ValueError, match=r"a\.safetensors: not a \.safetensors file, or a damaged one"):
        io.load_safetensors(path)


def test_names_do_not_control_the_terminal(tmp_path, capsys):
    write(tmp_path / "a.safetensors", {"w\x1b[31m": normal(8, 8), "n\x1b]0;x\x07.norm": normal(8)})
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    assert convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "row") == 0
    assert "\x1b" not in capsys.readouterr().out
    assert header(tmp_path / "b.safetensors").keys() >= {"w\x1b[31m"}
