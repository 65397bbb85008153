"""What shares a scale, by shapes, by the checkpoint's configuration, or as given by the caller; every form is
read as its values and converted from them."""

import itertools
import json
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import BF16, E8M0, bf16, codes, convert, factors, read, values, write

import cupy_fp8 as fp8
from cupy_fp8 import io
from cupy_fp8.__main__ import main
from cupy_fp8.io import scale_forms, weights

E5M2 = np.dtype(ml_dtypes.float8_e5m2)
POWERS = np.random.default_rng(3).integers(115, 125, 1000).astype(np.uint8)


def powers(*shape: int) -> np.ndarray:
    return np.resize(POWERS, shape)


def check(path, w, wanted, recipes=("bf16",), **options):
    """Check that tensor "w" has these values when loaded, and their bfloat16 values when converted."""
    found = io.load_safetensors(path, **options)["w"]
    np.testing.assert_array_equal(found.dequantize() if isinstance(found, fp8.Scaled) else found, wanted)
    if isinstance(found, fp8.Scaled):
        assert found.data.tobytes() == w.tobytes()
    flags = [
        flag
        for a, b in options.get("block", {}).items()
        for flag in ("--block", f"{a}={b[0] or 'all'},{b[1] or 'all'}")
    ]
    for recipe in recipes:
        out = path.parent / "out" / f"{recipe}.safetensors"
        assert convert(path, out, "--recipe", recipe, "--verify", *flags) == 0
        if recipe == "bf16":
            assert read(out)["w"].tobytes() == bf16(wanted).tobytes()
        else:
            again = io.load_safetensors(out)["w"].dequantize()
            assert np.abs(again - wanted).max() <= np.abs(wanted).max() / 16
    return found


FORMS: dict[str, Any] = {
    "number": ((160, 96), (), (None, None)),
    "[1]": ((160, 96), (1,), (None, None)),
    "[1, 1]": ((160, 96), (1, 1), (None, None)),
    "rows": ((160, 96), (160, 1), (1, None)),
    "rows [M]": ((160, 96), (160,), (1, None)),
    "columns": ((96, 160), (1, 160), (None, 1)),
    "columns of a square": ((96, 96), (1, 96), (None, 1)),
    "blocks": ((200, 300), (2, 3), (128, 128)),
    "1×128": ((200, 300), (200, 3), (1, 128)),
    "ModelOpt": ((256, 384), (2, 1, 3, 1), (128, 128)),
    "ModelOpt, tails": ((200, 300), (2, 1, 3, 1), (128, 128)),
    "experts [E]": ((4, 160, 96), (4,), (None, None)),
    "experts [E, 1]": ((4, 160, 96), (4, 1), (None, None)),
    "experts [E, 1, 1]": ((4, 160, 96), (4, 1, 1), (None, None)),
    "experts' rows": ((3, 160, 96), (3, 160, 1), (1, None)),
    "experts' rows [E, M]": ((3, 160, 96), (3, 160), (1, None)),
    "experts' columns": ((3, 96, 160), (3, 1, 160), (None, 1)),
    "experts' blocks": ((3, 200, 300), (3, 2, 3), (128, 128)),
    "one for all experts": ((3, 160, 96), (1,), "whole"),
    "two batches": ((2, 3, 64, 96), (2, 3, 1, 1), (None, None)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, E8M0], ids=["f32", "bf16", "f16", "e8m0"])
def test_by_shape(tmp_path, form, dtype):
    shape, scale_shape, share = FORMS[form]
    w = codes(*shape)
    scale = powers(*scale_shape).view(E8M0) if dtype == E8M0 else factors(*scale_shape, dtype=dtype)
    path = write(tmp_path / "a.safetensors", {"w": w, "w_scale": scale})
    if share == "whole":
        wanted = w.astype(np.float32) * scale.astype(np.float32).reshape(())
    else:
        wanted = values(w, np.asarray(scale), *share)
    found = check(path, w, wanted, ("bf16", "row") if dtype == np.float32 else ("bf16",))
    assert isinstance(found, fp8.Scaled)


@pytest.mark.parametrize("name", ["F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
@pytest.mark.parametrize("form", ["[1]", "rows", "blocks", "experts [E, 1, 1]", "experts' columns"])
def test_other_types(tmp_path, name, form):
    """FNUZ data are read as float32 values, since no scale puts them into E4M3 (a code of FNUZ is half of
    E4M3's, and 0x80 is NaN); they convert to every recipe."""
    shape, scale_shape, share = FORMS[form]
    w = codes(
        *shape,
        dtype={
            "F8_E5M2": E5M2,
            "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
            "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        }[name],
    )
    scale = factors(*scale_shape)
    path = write(tmp_path / "a.safetensors", {"w": w, "w_scale": scale})
    found = check(path, w, values(w, scale, *share), weights.RECIPES)
    assert isinstance(found, fp8.Scaled) == (name == "F8_E5M2")
    if name != "F8_E5M2":
        assert found.dtype == np.float32


BLOCKS = [
    (64, 64),
    (64, 128),
    (32, 32),
    (256, 256),
    (512, 32),
    (96, 96),
    (96, 1),
    (1, 96),
    (100, 64),
    (64, 100),
    (100, 100),
    (1, 1),
    (3, None),
    (None, 48),
    (128, None),
    (None, None),
]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(300, 200), (2, 300, 200)], ids=str)
def test_any_block(tmp_path, shape, block):
    """As given by the caller, with tails; if no Scaled has such blocks, scales repeat in finer ones, or
    values are returned instead."""
    w = codes(*shape)
    grid = [-(-n // (b or n)) for n, b in zip(shape[-2:], block, strict=True)]
    scale = factors(*shape[:-2], *grid)
    path = write(tmp_path / "a.safetensors", {"w": w, "w_scale_inv": scale})
    check(path, w, values(w, scale, *block), ("bf16", "block128"), block={"w": block})
    whole = io.load_safetensors(path, block=block)["w"]
    np.testing.assert_array_equal(
        whole.dequantize() if isinstance(whole, fp8.Scaled) else whole, values(w, scale, *block)
    )


@pytest.mark.parametrize(
    "block", [(256, 256), (512, 32), (96, 96), (100, 100), (None, 48), (1, 128), (128, 128)], ids=str
)
def test_more_than_one_chunk(tmp_path, block, monkeypatch):
    """Chunks of rows never divide a block of the source, and each has its own scales."""
    monkeypatch.setattr(weights, "_CHUNK", 384 * 96)        # rows that no block of 256 rows divides
    w = codes(2, 1100, 96)
    scale = factors(2, *(-(-n // (b or n)) for n, b in zip((1100, 96), block, strict=True)))
    path = write(tmp_path / "a.safetensors", {"w": w, "w_scale_inv": scale})
    check(path, w, values(w, scale, *block), ("bf16", "block128", "mxfp8"), block={"w": block})


EXTENTS = (1, 2, 3, 4, 31, 32, 33, 64, 127, 128, 129, 256, 300)


@pytest.mark.parametrize("dimensions", [2, pytest.param(3, marks=pytest.mark.full)])
def test_shapes_that_fit_several_readings_mean_the_same(dimensions):
    """Then one is that of blocks that extend past the tensor."""
    for shape in itertools.product(EXTENTS, repeat=dimensions):
        meanings: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for share in scale_forms._usual(shape):
            extent = shape if share is None else (1,) * (dimensions - 2) + tuple(
                min(b or n, n) for n, b in zip(shape[-2:], share, strict=True)
            )
            for scales in scale_forms._shapes(shape, share):
                meanings.setdefault(scales, set()).add(extent)
        assert all(len(one) == 1 for one in meanings.values()), shape


CONFIGS: dict[str, Any] = {
    "weight_block_size": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
    "block_structure": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"strategy": "block", "block_structure": [64, 64]},
                }
            },
        }
    },
    "a string": {
        "quantization_config": {
            "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": "64x64"}}}
        }
    },
    "nested": {
        "text_config": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    },
    "nested twice": {
        "thinker_config": {"text_config": {"quantization_config": {"weight_block_size": [64, 64]}}}
    },
    "compression_config": {"compression_config": {"weight_block_size": [64, 64]}},
    "the group of a name": {
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"strategy": "block", "block_structure": [128, 128]},
                },
                "group_1": {
                    "targets": ["re:.*layers.1.*"],
                    "weights": {"strategy": "block", "block_structure": [64, 64]},
                },
            }
        }
    },
}


@pytest.mark.parametrize("said", CONFIGS)
def test_by_the_configuration(tmp_path, said):
    name, w, scale = "model.layers.1.up.weight", codes(192, 256), factors(3, 4)
    path = write(tmp_path / "model.safetensors", {name: w, f"{name}_scale_inv": scale}, config=CONFIGS[said])
    wanted = values(w, scale, 64, 64)
    for where in (tmp_path, path):
        np.testing.assert_array_equal(io.load_safetensors(where)[name].dequantize(), wanted)
    assert convert(tmp_path, tmp_path / "out", "--recipe", "bf16") == 0
    assert read(tmp_path / "out")[name].tobytes() == bf16(wanted).tobytes()


def test_groups_along_rows_by_the_configuration(tmp_path):
    """compressed-tensors' `group`: blocks of 1×48 here, which shapes alone do not determine."""
    w, scale = codes(32, 96), factors(32, 2)
    config = {
        "quantization_config": {"config_groups": {"g": {"weights": {"strategy": "group", "group_size": 48}}}}
    }
    path = write(tmp_path / "model.safetensors", {"w": w, "w_scale": scale}, config=config)
    np.testing.assert_array_equal(io.load_safetensors(path)["w"], values(w, scale, 1, 48))


def test_unknown_blocks_are_refused_with_advice_that_works(tmp_path):
    """The message names blocks that would fit, for both kinds of readings."""
    w, scale = codes(192, 256), factors(3, 4)
    path = write(tmp_path / "a.safetensors", {"w": w, "w_scale_inv": scale})
    with pytest.raises(ValueError, match="these scales fit no block that is known") as caught:
        io.load_safetensors(path)
    block = re.search(
        r"such as block=\{'w': \((\d+), (\d+)\)\} \(convert: --block w=(\d+),(\d+)\)", str(caught.value)
    )
    assert block
    down, across, *again = map(int, block.groups())
    assert again == [down, across]
    wanted = values(w, scale, down, across)
    found = io.load_safetensors(path, block={"w": (down, across)})["w"]
    np.testing.assert_array_equal(found.dequantize(), wanted)
    assert convert(path, tmp_path / "b.safetensors", "--recipe", "bf16", "--block", f"w={down},{across}") == 0
    assert read(tmp_path / "b.safetensors")["w"].tobytes() == bf16(wanted).tobytes()


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        ((2, 2), ValueError, "not the scales of blocks of 2×2"),
        ((0, 2), ValueError, "block: expected"),
        (((1, 2), (3, 4)), ValueError, "block: expected"),
        ({"x": (1, 32)}, ValueError, "no FP8 tensor 'x'"),
    ],
    ids=str,
)
def test_blocks_that_do_not_fit(tmp_path, block, error, message):
    path = write(tmp_path / "a.safetensors", {"w": codes(64, 64), "w_scale": factors(64, 1)})
    with pytest.raises(error, match=message):
        io.load_safetensors(path, block=block)


@pytest.mark.parametrize("given", ["", "1", "a,b", "0,1", "1,2,3", "=1,2"])
def test_blocks_on_the_command_line_that_are_none(tmp_path, given, capsys):
    with pytest.raises(SystemExit):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "bf16", "--block", given)
    assert "expected ROWS,COLUMNS such as 128,128" in capsys.readouterr().err


# ---- swizzled scales ----
def swizzled(scale: np.ndarray) -> np.ndarray:
    """Store tiles of 128×4 (swizzled in docs/layouts.md), by the formula."""
    rows, columns = scale.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 4) * 4), np.uint8)
    padded[:rows, :columns] = scale
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(padded.shape)


MARKED: dict[str, Any] = {
    "ComfyUI's tensor": (
        {"m.comfy_quant": np.frombuffer(b'{"format": "mxfp8"}', np.uint8)},
        None,
        "m.weight",
        "m.weight_scale",
    ),
    "ComfyUI's header": (
        {},
        {"_quantization_metadata": '{"layers": {"m": {"format": "mxfp8"}}}'},
        "m.weight",
        "m.weight_scale",
    ),
    "torchao": (
        {},
        {"m.weight": '{"_type": "MXTensor", "_data": {"is_swizzled_scales": true}}'},
        "m._weight_qdata",
        "m._weight_scale",
    ),
}


@pytest.mark.parametrize("marked", MARKED)
@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (160, 96)], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_swizzled_scales(tmp_path, marked, shape, flat):
    """Their shape may equal that of compact ones: then only a marker distinguishes them."""
    more, metadata, name, scale_name = MARKED[marked]
    w, scale = codes(*shape), powers(shape[0], shape[1] // 32)
    stored = swizzled(scale).reshape(-1) if flat else swizzled(scale)
    path = write(tmp_path / "a.safetensors", {name: w, scale_name: stored, **more}, metadata)
    wanted = values(w, scale.view(E8M0), 1, 32)
    np.testing.assert_array_equal(io.load_safetensors(path)[name].dequantize(), wanted)
    assert convert(path, tmp_path / "b.safetensors", "--recipe", "bf16") == 0
    after = read(tmp_path / "b.safetensors")
    assert after.keys() == {"m.weight"}
    assert after["m.weight"].tobytes() == bf16(wanted).tobytes()


def test_swizzled_scales_by_their_padding(tmp_path):
    """Without a marker, by a shape that only swizzled scales have."""
    w, scale = codes(160, 96), powers(160, 3)
    path = write(tmp_path / "a.safetensors", {"w": w, "w_scale": swizzled(scale)})
    np.testing.assert_array_equal(
        io.load_safetensors(path)["w"].dequantize(), values(w, scale.view(E8M0), 1, 32)
    )


def test_a_marker_that_is_none(tmp_path):
    """Markers may be anything: what is not JSON is ignored."""
    for i, text in enumerate((b"\xff", b"[1]", b'{"format": 3}', b"[" * 100_000)):
        marker = np.frombuffer(text, np.uint8)
        path = write(
            tmp_path / f"{i}.safetensors",
            {"m.weight": codes(4, 32), "m.weight_scale": powers(4, 1), "m.comfy_quant": marker},
            {"_quantization_metadata": json.dumps({"layers": [1]}), "m.weight": "{"},
        )
        assert io.load_safetensors(path)["m.weight"].block == (1, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_on_the_gpu(tmp_path, form):
    """Every form loads onto the GPU with its values, and kernels compute the references' bytes from it."""
    shape, scale_shape, share = FORMS[form]
    w, scale = codes(*shape), factors(*scale_shape)
    path = write(tmp_path / "a.safetensors", {"w": w, "w_scale": scale})
    wanted = w.astype(np.float32) * scale.reshape(()) if share == "whole" else values(w, scale, *share)
    found = io.load_safetensors(path, like="cupy")["w"]
    np.testing.assert_array_equal(found.dequantize().get(), wanted)
    for recipe in weights.RECIPES:
        made = []
        for array in ("numpy", "cupy"):
            out = tmp_path / array / f"{recipe}.safetensors"
            assert main(["convert", str(path), str(out), "--recipe", recipe, "--array", array,
                         "--verify"]) == 0
            made.append(out.read_bytes())
        assert made[0] == made[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fnuz, E5M2], ids=str)
@pytest.mark.parametrize("block", [(96, 96), (100, 100), (None, 48)], ids=str)
def test_other_blocks_and_types_on_the_gpu(tmp_path, dtype, block):
    w = codes(300, 200, dtype=dtype)
    scale = factors(*(-(-n // (b or n)) for n, b in zip((300, 200), block, strict=True)))
    path = write(tmp_path / "a.safetensors", {"w": w, "w_scale": scale})
    found = io.load_safetensors(path, like="cupy", block=block)["w"]
    got = found.dequantize() if isinstance(found, fp8.Scaled) else found
    np.testing.assert_array_equal(got.get(), values(w, scale, *block))
