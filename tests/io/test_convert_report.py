"""What a conversion prints and reports: bytes that add up, sizes, and the signal-to-noise ratio."""

import json
import re

import numpy as np
import pytest
from checkpoints import bf16, codes, convert, factors, read, values, write

from cupy_fp8.io import chunks, weights
from cupy_fp8.io.convert import Conversion, Settings
from cupy_fp8.io.summary import size_text

RNG = np.random.default_rng(0)
A = bf16(RNG.standard_normal((700, 256)))
B = bf16(RNG.standard_normal((300, 256)) * 1e-3)


@pytest.fixture
def source(tmp_path):
    write(
        tmp_path / "in" / "model-1.safetensors",
        {"a.weight": A, "norm.weight": bf16(RNG.standard_normal(3000)), "c.weight": codes(256, 384)},
        config={},
    )
    write(
        tmp_path / "in" / "model-2.safetensors",
        {"b.weight": B, "c.weight_scale_inv": factors(2, 3), "c.input_scale": factors(1)},
    )
    return tmp_path / "in"


@pytest.mark.parametrize("recipe", weights.RECIPES)
def test_progress_ends_at_the_total(tmp_path, source, recipe, monkeypatch):
    """Chunks, copies, and scales, also those of another shard, are all counted."""
    monkeypatch.setattr(weights, "_CHUNK", 1 << 14)
    monkeypatch.setattr(chunks, "COPY_BYTES", 1000)
    monkeypatch.setattr("cupy_fp8.io.convert.COPY_BYTES", 1000)
    with Conversion(source, tmp_path / "out", Settings(recipe)) as conversion:
        totals = []
        for shard in conversion.shards:
            counts: list[int] = []
            conversion.convert(shard, counts.append)
            assert sum(counts) == conversion.nbytes(shard)
            totals.append(sum(counts))
    assert sum(totals) == sum(a.nbytes for a in read(source).values()) - 4      # except c.input_scale
    assert read(tmp_path / "out")["norm.weight"].tobytes() == read(source)["norm.weight"].tobytes()


def test_tensors_that_stay_are_copied_whole(tmp_path):
    """More than one piece of 8 MB."""
    large = RNG.integers(0, 256, 9_000_001).astype(np.uint8)
    write(tmp_path / "a.safetensors", {"ids": large, "w": A})
    assert convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "row", "--verify") == 0
    assert read(tmp_path / "b.safetensors")["ids"].tobytes() == large.tobytes()


def decibels(before, after):
    before, after = before.astype(np.float64), after.astype(np.float64)
    return 10 * np.log10((before**2).sum() / ((after - before) ** 2).sum())


def test_what_is_printed_and_reported(tmp_path, source, capsys):
    report = tmp_path / "report.json"
    assert convert(source, tmp_path / "out", "--recipe", "block128", "--report", report) == 0
    out, after = capsys.readouterr().out, read(tmp_path / "out")
    got = {name: values(after[name], after[f"{name}_scale_inv"], 128, 128)
           for name in ("a.weight", "b.weight")}
    each = {"a.weight": decibels(A, got["a.weight"]), "b.weight": decibels(B, got["b.weight"])}
    found = json.loads(report.read_text())
    for one in found["tensors"]:
        assert one["sqnr_db"] == pytest.approx(each[one["name"]], abs=1e-6) if one["name"] in each else (
            one["sqnr_db"] is None)
    both = decibels(*(np.concatenate([x, y]) for x, y in ((A, B), got.values())))
    assert found["sqnr_db"] == pytest.approx(both, abs=1e-6)
    worst = min(each, key=lambda name: each[name])
    assert (f"SQNR {both:.1f} dB over the values that were rounded; least {each[worst]:.1f} dB: {worst}; "
            "1 of 3 tensors keep every value\n") in out
    before_size, after_size = (sum(a.nbytes for a in read(path).values())
                               for path in (source, tmp_path / "out"))
    assert f"{size_text(before_size)} before, {size_text(after_size)} after" in out
    assert (found["bytes_before"], found["bytes_after"]) == (before_size, after_size)
    assert "1 go (scales of activations): c.input_scale" in out
    assert "values changed" not in out
    for size, total in re.findall(r"; ([\d.,]+ \w+) of ([\d.,]+ \w+) in", out):
        assert size == total


def test_nothing_changes(tmp_path, source, capsys):
    assert convert(source, tmp_path / "out", "--recipe", "block128", "--exclude", "[ab].*") == 0
    assert "No value changed." in capsys.readouterr().out


def test_values_that_are_not_finite_are_left_out(tmp_path):
    x = A.copy()
    x[0, :3] = [np.nan, np.inf, -np.inf]
    write(tmp_path / "a.safetensors", {"w": x})
    report = tmp_path / "report.json"
    assert convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "row", "--report",
                   report) == 0
    found = json.loads(report.read_text())["tensors"][0]["sqnr_db"]
    after = read(tmp_path / "b.safetensors")
    rows = np.arange(700) > 0
    assert found == pytest.approx(decibels(x[rows], values(after["w"], after["w_scale"], 1)[rows]), abs=0.1)


@pytest.mark.parametrize("factor", [1e-25, 1e25])
def test_very_small_and_very_large_values_have_a_ratio(tmp_path, factor):
    write(tmp_path / "a.safetensors", {"w": A.astype(np.float32) * np.float32(factor)})
    report = tmp_path / "report.json"
    assert convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "row", "--report",
                   report) == 0
    assert 25 < json.loads(report.read_text())["tensors"][0]["sqnr_db"] < 40
