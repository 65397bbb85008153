"""`inspect` shows every tensor of a checkpoint: dtype, shape, form and range of its scales, size, and
anything unusual."""

import json

import numpy as np
import pytest
from checkpoints import Packed, codes, factors, write

from cupy_fp8.__main__ import main

SCALES = np.array([[0.25, 0.5, 4]], np.float32)


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path / "model.safetensors",
        {
            "a.weight": codes(128, 384),
            "a.weight_scale_inv": SCALES,
            "b.weight": codes(64, 96),
            "b.weight_scale": factors(64, 1),
            "c.weight": codes(4, 8),
            "c.factor": factors(1),
            "d.weight_packed": np.zeros((8, 8), np.uint8),
            "d.weight_scale": codes(8, 1),
            "e.weight": codes(4, 8),
            "e.weight_scale": np.array([np.nan, 0, -1, 2], np.float32),
            "f.weight": Packed("F6_E2M3", (4, 8), bytes(24)),
            "n.weight": np.ones(8, np.float32),
        },
        config={"quantization_config": {"quant_method": "fp8"}},
    )
    return tmp_path


def test_as_text(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "  9 tensors  " in out.splitlines()[0]
    rows = {line.split()[0]: line for line in out.splitlines() if line and not line.startswith(" ")}
    assert "128×384  F8_E4M3, a scale for blocks of 128×128 (F32)" in rows["a.weight"]
    assert "0.25 … 4" in rows["a.weight"]
    assert "49.2 kB" in rows["a.weight"]
    assert "a scale for each row" in rows["b.weight"]
    assert "unreadable" in rows["c.weight"]
    assert "U8, packed" in rows["d.weight_packed"]
    assert "F8_E4M3, of packed data" in rows["d.weight_scale"]
    assert "a.weight_scale_inv" not in rows
    assert "by form" in out
    assert "quantization: fp8" in out
    odd = out.partition(" odd\n")
    assert odd[0].endswith("\n3")
    assert "they may be c.factor F32 [1]" in " ".join(odd[2].split())
    assert "e.weight: 1 scales are NaN or Inf, 1 scales are 0, 1 scales are negative" in odd[2]
    assert "f.weight: a type that NumPy does not have" in odd[2]


def test_as_json(folder, capsys):
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tensors = {one["name"]: one for one in found["tensors"]}
    assert tensors["a.weight"] == {
        "name": "a.weight",
        "dtype": "F8_E4M3",
        "shape": [128, 384],
        "scales": [0.25, 4.0],
        "odd": "",
        "form": "F8_E4M3, a scale for blocks of 128×128 (F32)",
        "nbytes": 128 * 384 + 12,
    }
    assert found["by_form"]["F32"] == {"tensors": 2, "bytes": 36}
    assert found["odd"].keys() == {"c.weight", "e.weight", "f.weight"}
    assert found["quantization_config"] == {"quant_method": "fp8"}
    assert sum(one["nbytes"] for one in found["tensors"]) == sum(
        total["bytes"] for total in found["by_form"].values()
    )


def test_patterns_and_what_is_said_of_scales(folder, capsys):
    assert main(["inspect", str(folder), "c.*", "b.*", "--scale-name", "c.weight=c.factor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["tensors"]] == ["b.weight", "c.weight"]
    assert not found["odd"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "no such file"),
        (["model.safetensors", "--scale-name", "x=y"], "no FP8 tensor is called 'x'"),
    ],
)
def test_errors(folder, arguments, message, capsys):
    assert main(["inspect", str(folder / arguments[0]), *arguments[1:]]) == 1
    assert message in capsys.readouterr().err


def test_a_checkpoint_without_anything_odd(tmp_path, capsys):
    write(tmp_path / "a.safetensors", {"n": np.ones(3, np.float32), "s": np.float32(1).reshape(())})
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "Nothing is odd." in out
    assert "number" in out
