"""One error names all tensors that cannot be read, and the others can be read without them."""

import numpy as np
import pytest
from checkpoints import codes, convert, factors, read, values, write

from cupy_fp8 import io

SCALES = factors(1, 2)


def checkpoint(folder, odd=1):
    tensors = {
        "a.q.weight": codes(128, 256),
        "a.q.weight_scale_inv": SCALES,
        "n.weight": np.ones(4, np.float32),
    }
    for i in range(odd):
        tensors |= {f"a.{i}.qkv.weight": codes(1696, 256), f"a.{i}.qkv.weight_scale_inv": factors(16, 2)}
    return write(folder / "model.safetensors", {**tensors, "z.weight": codes(4, 8)})


def test_one_error_names_them_all(tmp_path):
    path = checkpoint(tmp_path, 3)
    with pytest.raises(ValueError, match="4 tensors cannot be read") as caught:
        io.load_safetensors(path)
    for name in ("a.0.qkv.weight", "a.1.qkv.weight", "a.2.qkv.weight", "z.weight"):
        assert name in str(caught.value)


def test_very_many_are_named_by_patterns(tmp_path):
    path = checkpoint(tmp_path, 40)
    with pytest.raises(ValueError, match=r"a\.\*\.qkv\.weight \(39\)"):
        io.load_safetensors(path)


@pytest.mark.parametrize(
    "names", ["n.weight", ["n.weight"], "a.q.*", ["a.q.weight", "n.*"], ("n.weight",)], ids=str
)
def test_the_others_can_be_read(tmp_path, names):
    found = io.load_safetensors(checkpoint(tmp_path), names=names)
    assert found.keys() <= {"a.q.weight", "n.weight"}
    if "a.q.weight" in found:
        np.testing.assert_array_equal(
            found["a.q.weight"].dequantize(), values(codes(128, 256), SCALES, 128, 128)
        )


@pytest.mark.parametrize("names", ["a.0.qkv.weight", ["n.weight", "z.*"]], ids=str)
def test_those_asked_for_are_refused(tmp_path, names):
    with pytest.raises(ValueError, match=r"qkv\.weight_scale_inv F32|z\.weight: no scales"):
        io.load_safetensors(checkpoint(tmp_path), names=names)


def test_what_the_message_advises_works(tmp_path, capsys):
    """names=, raw=True and --exclude, exactly as it says."""
    path = checkpoint(tmp_path)
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 1
    assert "--exclude" in capsys.readouterr().err
    assert io.load_safetensors(path, names=["n.weight"]).keys() == {"n.weight"}
    assert "a.0.qkv.weight_scale_inv" in io.load_safetensors(path, raw=True)
    for recipe in ("bf16", "row"):
        assert (
            convert(
                tmp_path,
                tmp_path / recipe,
                "--recipe",
                recipe,
                "--exclude",
                "a.0.qkv.weight",
                "--exclude",
                "z.*",
            )
            == 0
        )
        before, after = read(tmp_path), read(tmp_path / recipe)
        for name in ("a.0.qkv.weight", "a.0.qkv.weight_scale_inv", "z.weight"):
            assert (after[name].dtype, after[name].tobytes()) == (before[name].dtype, before[name].tobytes())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {
                "w": codes(4, 8),
                "w_scale": np.ones(1),
            },
            "w_scale F64 .* expected scales of type F32",
        ),
        ({"w": codes(4, 8), "w_scale": codes(4, 1)}, "w_scale F8_E4M3"),
        ({"w": codes(4, 8), "w_scale": factors(0)}, r"w_scale F32 \[0\]"),
        ({"w": codes(4, 8), "w_scale": factors(1), "w_zero_point": codes(1)}, "has w_zero_point too"),
        ({"w": codes(4, 200), "w_scale": np.ones(4, np.uint8)}, "w_scale U8 .*fit no block"),
        ({"w": codes(4, 8), "w_scale": np.ones((), np.uint8)}, "w_scale U8 .*fit no block"),
    ],
    ids=["f64", "fp8", "empty", "zero points", "exponents of rows", "an exponent"],
)
def test_scales_that_cannot_be_read(tmp_path, tensors, message):
    path = write(tmp_path / "a.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        io.load_safetensors(path)
    assert io.load_safetensors(path, raw=True).keys() == tensors.keys()


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (3, TypeError),
        ([3], TypeError),
        (b"n", TypeError),
        ("gone", ValueError),
        (["n.weight", "gone*"], ValueError),
    ],
    ids=str,
)
def test_names_that_are_none(tmp_path, names, error):
    with pytest.raises(error, match="names: "):
        io.load_safetensors(checkpoint(tmp_path), names=names)


def test_what_is_loaded_is_shown_by_its_forms(tmp_path):
    """Not as a screenful of numbers."""
    found = io.load_safetensors(checkpoint(tmp_path, 0), scales="none")
    assert isinstance(found, dict)
    lines = repr(found).splitlines()
    assert lines[0] == "3 tensors, 32.8 kB"
    assert [line.split() for line in lines[1:]] == [
        ["1", "float8_e4m3fn,", "block", "128×128", "(float32)", "32.8", "kB"],
        ["1", "float8_e4m3fn", "32", "B"],
        ["1", "float32", "16", "B"],
    ]
    assert str(found) == repr(found)
