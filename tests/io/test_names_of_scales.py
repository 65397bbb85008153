"""An FP8 tensor is read with the scales that belong to it, whatever their name, or is refused by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import E4M3, bf16, codes, convert, factors, read, values, write

import cupy_fp8 as fp8
from cupy_fp8 import io

ONE = np.float32(0.00195)
#: names of data and scales by project, and the data's name after a conversion to bfloat16
NAMES = {
    "DeepSeek-V3": ("m.q.weight", "m.q.weight_scale_inv", "m.q.weight"),
    "compressed-tensors, ModelOpt": ("m.q.weight", "m.q.weight_scale", "m.q.weight"),
    "DeepSeek-V4": ("m.q.weight", "m.q.scale", "m.q.weight"),
    "ComfyUI": ("m.q.weight", "m.q.scale_weight", "m.q.weight"),
    "Mistral": ("m.q.weight", "m.q.qscale_weight", "m.q.weight"),
    "TensorRT-LLM": ("m.q.weight", "m.q.weights_scaling_factor", "m.q.weight"),
    "torchao": ("m.q._weight_qdata", "m.q._weight_scale", "m.q.weight"),
    "torchao, earlier": ("m.q.weight:qdata", "m.q.weight:scale", "m.q.weight"),
    "optimum-quanto": ("m.q.weight._data", "m.q.weight._scale", "m.q.weight"),
    "stacked experts": ("m.experts.up_proj", "m.experts.up_proj_scale", "m.experts.up_proj"),
    "stacked experts, inv": ("m.experts.up_proj", "m.experts.up_proj_scale_inv", "m.experts.up_proj"),
}


@pytest.mark.parametrize("who", NAMES)
@pytest.mark.parametrize(
    "scale", [ONE.reshape(()), ONE.reshape(1), factors(64, 1)], ids=["()", "(1,)", "rows"]
)
def test_known_names(tmp_path, who, scale):
    data, scale_name, plain = NAMES[who]
    w = codes(64, 96)
    path = write(tmp_path / "a.safetensors", {data: w, scale_name: scale, "n": np.ones(3, np.float32)})
    wanted = values(w, scale, 1 if scale.ndim == 2 else None)
    found = io.load_safetensors(path)
    assert found.keys() == {data, "n"}
    assert isinstance(found[data], fp8.Scaled)
    np.testing.assert_array_equal(found[data].dequantize(), wanted)
    assert convert(path, tmp_path / "b.safetensors", "--recipe", "bf16") == 0
    after = read(tmp_path / "b.safetensors")
    assert after.keys() == {plain, "n"}
    assert after[plain].tobytes() == bf16(wanted).tobytes()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ"])
@pytest.mark.parametrize("shape", [(64, 96), (96,), (2, 32, 64)], ids=str)
def test_codes_without_scales_are_refused(tmp_path, dtype, shape, capsys):
    """Also if scales are stored under an unknown name; both ways out given in the message work."""
    kind = {"F8_E4M3": E4M3, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz}[
        dtype
    ]
    w = codes(*shape, dtype=kind)
    path = write(
        tmp_path / "a.safetensors",
        {"m.weight": w, "m.my_factor": ONE.reshape(()), "m.bias": bf16(np.ones(3))},
    )
    with pytest.raises(
        ValueError,
        match=r"m\.weight: no scales are known .* they may be m\.my_factor F32 \[\]: "
        r"pass scales=\{'m\.weight': 'm\.my_factor'\} .* or scales='none'",
    ):
        io.load_safetensors(path)
    assert convert(path, tmp_path / "b.safetensors", "--recipe", "bf16") == 1
    assert (
        "--scale-name m.weight=m.my_factor), or scales='none' (convert: --scales none)"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "b.safetensors").exists()
    # exactly what the message says
    named = io.load_safetensors(path, scales={"m.weight": "m.my_factor"})["m.weight"]
    wanted = w.astype(np.float32) * ONE
    np.testing.assert_array_equal(named.dequantize() if isinstance(named, fp8.Scaled) else named, wanted)
    assert io.load_safetensors(path, scales="none")["m.weight"].tobytes() == w.tobytes()
    for option, out, right in (
        (("--scale-name", "m.weight=m.my_factor"), "c", wanted),
        (("--scales", "none"), "d", w.astype(np.float32)),
    ):
        assert convert(path, tmp_path / f"{out}.safetensors", "--recipe", "bf16", *option) == 0
        assert read(tmp_path / f"{out}.safetensors")["m.weight"].tobytes() == bf16(right).tobytes()


def test_patterns_of_names(tmp_path):
    """Each * is the same text; data without a match keep their known scales; None: no scales."""
    w, s = codes(4, 8), factors(4)
    path = write(
        tmp_path / "a.safetensors",
        {
            **{f"a.{i}.w": w for i in range(4)},
            **{f"a.{i}.factor": s[i : i + 1] for i in range(4)},
            "b.w": w,
            "b.w_scale": s[:1],
            "c.bias": codes(8),
        },
    )
    found = io.load_safetensors(path, scales={"*.w": "*.factor", "c.*": None})
    for i in range(4):
        np.testing.assert_array_equal(found[f"a.{i}.w"].dequantize(), w.astype(np.float32) * s[i])
    np.testing.assert_array_equal(found["b.w"].dequantize(), w.astype(np.float32) * s[0])
    assert found["c.bias"].dtype == E4M3
    assert (
        convert(
            path,
            tmp_path / "b.safetensors",
            "--recipe",
            "bf16",
            "--scale-name",
            "*.w=*.factor",
            "--scale-name",
            "c.*=none",
        )
        == 0
    )
    after = read(tmp_path / "b.safetensors")
    assert after["c.bias"].tobytes() == bf16(codes(8).astype(np.float32)).tobytes()
    assert after["a.3.w"].tobytes() == bf16(w.astype(np.float32) * s[3]).tobytes()


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        ("all", ValueError, "scales: expected 'none' or a dict"),
        (["w"], TypeError, "scales: expected 'none'"),
        ({"w": 3}, TypeError, "scales: expected names"),
        ({3: "w"}, TypeError, "scales: expected names"),
        ({"x*": "x"}, ValueError, r"scales: no FP8 tensor is called 'x\*'"),
        ({"w": "gone"}, ValueError, "scales: 'w': 'gone' means 'gone', which is not there"),
        ({"w": "*_s"}, ValueError, r"scales: '\*_s' has more \*"),
        ({"w": "b"}, ValueError, r"b F32 \[3\] beside w"),
    ],
    ids=str,
)
def test_patterns_that_are_none(tmp_path, scales, error, message):
    path = write(tmp_path / "a.safetensors", {"w": codes(4, 8), "w_scale": factors(1), "b": factors(3)})
    with pytest.raises(error, match=message):
        io.load_safetensors(path, scales=scales)


def test_scales_that_tensors_share(tmp_path):
    path = write(
        tmp_path / "a.safetensors", {"a.w": codes(8, 32), "b.w": codes(8, 32, seed=2), "s": factors(1)}
    )
    given = ["--recipe", "bf16", "--scale-name", "*.w=s"]
    assert convert(path, tmp_path / "b.safetensors", *given, "--exclude", "b.*") == 0
    assert convert(path, tmp_path / "c.safetensors", *given, "--exclude", "*") == 0
    after = read(tmp_path / "b.safetensors")
    assert after["a.w"].tobytes() == bf16(codes(8, 32).astype(np.float32) * factors(1)).tobytes()
    assert {name: a.tobytes() for name, a in read(tmp_path / "c.safetensors").items()} == {
        name: a.tobytes() for name, a in read(path).items()
    }


def test_two_tensors_of_scales(tmp_path):
    """The one that fits is used; if both do, the message asks, and its advice works."""
    w = codes(64, 96)
    path = write(
        tmp_path / "a.safetensors", {"m.weight": w, "m.weight_scale": factors(64, 1), "m.scale": factors(96)}
    )
    assert io.load_safetensors(path)["m.weight"].block == (1, None)
    both = write(
        tmp_path / "b.safetensors", {"m.weight": w, "m.weight_scale": factors(1), "m.scale": factors(64)}
    )
    with pytest.raises(ValueError, match=r"such as scales=\{'m\.weight': 'm\.weight_scale'\}"):
        io.load_safetensors(both)
    found = io.load_safetensors(both, scales={"m.weight": "m.weight_scale"})
    assert found["m.weight"].block is None


def test_an_index_or_a_name_that_leaves_scales_out(tmp_path):
    """Scales in another file of the folder are named, not ignored."""
    write(tmp_path / "model-1.safetensors", {"m.weight": codes(4, 8)})
    write(tmp_path / "model-2.safetensors", {"m.weight_scale": factors(4, 1)})
    where = r"m\.weight_scale is in model-2\.safetensors, which the path or the index leaves out: read both"
    with pytest.raises(ValueError, match=where):
        io.load_safetensors(tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"m.weight": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match=where):
        io.load_safetensors(tmp_path)
    index.unlink()
    assert io.load_safetensors(tmp_path)["m.weight"].block == (1, None)


@pytest.mark.parametrize("recipe", ["block128", "mxfp8", "row", "tensor"])
def test_codes_that_are_values_become_weights(tmp_path, recipe):
    """Plain FP8 files: weights get scales; what stays is stored in 16 bits, so that no codes are left
    bare."""
    w = codes(128, 128)
    path = write(tmp_path / "a.safetensors", {"m.weight": w, "m.bias": codes(128), "norm.weight": codes(128)})
    assert convert(path, tmp_path / "b.safetensors", "--recipe", recipe, "--scales", "none", "--verify") == 0
    found = io.load_safetensors(tmp_path / "b.safetensors")
    assert isinstance(found["m.weight"], fp8.Scaled)
    error = np.abs(found["m.weight"].dequantize() - w.astype(np.float32)).max() / w.astype(np.float32).max()
    assert error < 2**-4
    for name in ("m.bias", "norm.weight"):
        assert found[name].tobytes() == bf16(codes(128).astype(np.float32)).tobytes()


def test_scales_beside_weights_in_16_bits_go(tmp_path, capsys):
    """ComfyUI's files have dummy scales beside weights that were not quantised; a parameter called `scale`
    stays."""
    path = write(
        tmp_path / "a.safetensors",
        {
            "a.weight": codes(8, 16),
            "a.scale_weight": factors(1),
            "b.weight": bf16(np.ones((8, 16))),
            "b.scale_weight": factors(1),
            "b.scale": factors(16),
            "scaled_fp8": codes(2),
        },
    )
    assert convert(path, tmp_path / "b.safetensors", "--recipe", "bf16") == 0
    assert read(tmp_path / "b.safetensors").keys() == {"a.weight", "b.weight", "b.scale"}
    out = capsys.readouterr().out
    assert "1 go (scales of weights in 16 or 32 bits): b.scale_weight" in out
    assert "1 go (markers): scaled_fp8" in out
