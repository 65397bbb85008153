"""diagnostics.log_step: the contents of a line, read with plain json, against the reports and counts by
hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import stand_in_arithmetic

import cupy_fp8 as fp8
from cupy_fp8 import Scaled
from cupy_fp8.arrays import bits
from cupy_fp8.diagnostics import blocks, error, log_step, scales

quiet = pytest.mark.filterwarnings("ignore::cupy_fp8.diagnostics.ScaleWarning")


def sample(shape: tuple[int, ...] = (40, 300)) -> np.ndarray:
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32) * 100
    x.reshape(-1)[:8] = [0, -0.0, 1e-30, -1e-30, 5e4, 3, -1e-3, 7]
    return x


def strict(text: str) -> Any:
    """Parse JSON strictly by the standard."""
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")
    return json.loads(text, parse_constant=refuse)


def lines(path: Any) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text().splitlines()]


KINDS = {
    "mx": lambda x: fp8.quantize_mx(x).rowwise,
    "mx columns": lambda x: fp8.quantize_mx(x, rowwise=False, columnwise=True).columnwise,
    "1x128": lambda x: fp8.quantize_block(x).rowwise,
    "128x128": lambda x: fp8.quantize_block(x, block=(128, 128)).rowwise,
    "rows": lambda x: fp8.quantize_block(x, block=(1, None), pow2_scale=False).rowwise,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_says_what_the_reports_say(tmp_path, kind):
    x, path = sample(), tmp_path / "log.jsonl"
    s: Any = KINDS[kind](x)
    (line,) = log_step(path, 7, {"layers.0.w": (x, s)}, rank=3)
    assert lines(path) == [line]
    assert {k: line[k] for k in ("step", "tensor", "rank", "dtype", "shape", "block", "elements")} == {
        "step": 7, "tensor": "layers.0.w", "rank": 3, "dtype": "float8_e4m3fn", "shape": [40, 300],
        "block": list(s.block), "elements": 12000}
    whole, per_block, spread = error(x, s), blocks(x, s), scales(s)
    for name in ("sqnr_db", "max_relative_error", "saturated", "underflowed", "nan", "nonfinite"):
        assert line[name] == getattr(whole, name)
    assert line["negative_zeros"] == int((bits(s.data) == 0x80).sum()) > 0
    assert (line["scales"], line["scale_histogram"], line["scale_first_exponent"]) == (
        spread.scales, list(spread.histogram), spread.first_exponent)
    assert sum(line["scale_histogram"]) == line["scales"]
    for name in ("minimum", "maximum", "mean", "std", "log2_mean", "log2_std", "zero", "negative", "infinite",
                 "nan"):
        assert line[f"scale_{name}"] == getattr(spread, name)
    for name in ("saturated", "underflowed", "nan", "negative_zeros"):
        assert line[f"blocks_{name}"] == int((getattr(per_block, name) > 0).sum())
    for name in ("saturated", "underflowed"):
        counts = getattr(per_block, name)
        assert line[f"most_{name}"] == counts.max()
        at = line[f"most_{name}_at"]
        assert at is None if counts.max() == 0 else counts[tuple(at)] == counts.max()


def test_one_scale(tmp_path):
    x, path = sample(), tmp_path / "log.jsonl"
    q = fp8.quantize_tensor(x, 30.0)
    (line,) = log_step(path, 0, {"x": (x, q)})
    report = error(x, q)
    assert (line["block"], line["scales"], line["scale_std"], line["blocks_saturated"]) == (None, 1, 0, None)
    assert (line["saturated"], line["most_saturated"]) == (report.saturated, None)
    assert line["saturated"] > 0
    assert line["negative_zeros"] == int((bits(q.data) == 0x80).sum()) == 2
    x = x.reshape(4, 10, 300)
    (cube,) = log_step(path, 0, {"x": (x, fp8.quantize_tensor(x, 30.0))})
    assert cube | {"shape": line["shape"]} == line


@quiet
def test_without_an_original(tmp_path):
    """Weights stored in FP8."""
    x = sample()
    x[3, 5] = np.nan
    s = fp8.quantize_mx(x).rowwise
    with_x, without = log_step(tmp_path / "a", 0, {"w": (x, s), "v": s})
    unknown = {key for key, value in without.items() if value is None and with_x[key] is not None}
    assert unknown == {"sqnr_db", "max_relative_error", "saturated", "underflowed", "nonfinite",
                       "blocks_saturated", "blocks_underflowed", "most_saturated", "most_underflowed",
                       "most_underflowed_at",
                       *(key for key in with_x if "normal" in key)}
    known = with_x.keys() - unknown - {"tensor"}
    assert {key: without[key] for key in known} == {key: with_x[key] for key in known}
    assert with_x["nan"] > 0
    assert list(with_x) == list(without)


def test_steps_are_appended(tmp_path):
    path = tmp_path / "log.jsonl"
    x = sample()
    tensors = {"a": (x, fp8.quantize_mx(x)), "b": (x, fp8.quantize_tensor(x, 1.0))}
    for step in range(3):
        log_step(str(path), step, tensors)
    assert [(line["step"], line["tensor"]) for line in lines(path)] == [
        (step, name) for step in range(3) for name in "ab"]
    assert len({tuple(line) for line in lines(path)}) == 1      # tables need one set of keys
    assert log_step(path, 3, {}) == []
    assert len(lines(path)) == 6


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
    path, x = tmp_path / "log.jsonl", sample()
    log_step(path, 0, {"a": (x, fp8.quantize_mx(x))})
    with open(path, "ab") as file:
        file.write(b'{"step": 1, "ten')
    log_step(path, 2, {"a": (x, fp8.quantize_mx(x))})
    first, cut, last = path.read_text().splitlines()
    assert (strict(first)["step"], cut, strict(last)["step"]) == (0, '{"step": 1, "ten', 2)


@quiet
@pytest.mark.parametrize(("x", "scale", "sqnr", "largest"), [
    ([1.0, 2.0], 1.0, None, 0.0),                       # no error: inf dB
    ([np.nan, np.inf], 1.0, None, 0.0), ([1.0, 2.0], math.nan, None, None), ([1.0, 2.0], math.inf, 0.0, 1.0)])
def test_no_line_has_nan_or_infinities(tmp_path, x, scale, sqnr, largest):
    x, path = np.array([x], np.float32), tmp_path / "a"
    (line,) = log_step(path, 0, {"x": (x, fp8.quantize_tensor(x, scale))}, loss=math.nan, lr=np.float32(0.5))
    assert lines(path) == [line]
    assert (line["sqnr_db"], line["max_relative_error"]) == (sqnr, largest)
    assert (line["loss"], line["lr"]) == (None, 0.5)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (4, 0)], ids=str)
def test_nothing(tmp_path, shape):
    x = np.zeros(shape, np.float32)
    log_step(tmp_path / "a", 0, {"mx": (x, fp8.quantize_mx(x)), "tensor": (x, fp8.quantize_tensor(x, 1.0))})
    for line in lines(tmp_path / "a"):
        assert (line["elements"], line["negative_zeros"], line["saturated"]) == (0, 0, 0)
        assert line["most_saturated_at"] is None


@pytest.mark.parametrize(("step", "tensors", "labels", "kind", "message"), [
    (1.5, {}, {}, TypeError, "step: expected an integer, got 1.5"),
    (0, [], {}, TypeError, "tensors: expected a mapping of names"),
    (0, {3: None}, {}, TypeError, "tensors: expected strings as names, got 3"),
    (0, {"a": np.zeros(3)}, {}, TypeError, r"tensors\['a'\]: expected \(x, q\) or q, a Scaled or Quantized"),
    (0, {"a": (np.zeros((2, 2), np.int8), fp8.quantize_mx(sample()))}, {}, TypeError, "x: expected dtype"),
    (0, {"a": (np.zeros((2, 2), np.float32), fp8.quantize_mx(sample()))}, {}, ValueError,
     "q: expected the shape of x"),
    (0, {"a": fp8.quantize_mx(sample())}, {"nan": 3}, ValueError, "nan: a line has this key of its own"),
    (0, {"a": fp8.quantize_mx(sample())}, {"loss": np.zeros(3)}, TypeError,
     "loss: expected a string, a number"),
])
def test_errors_write_nothing(tmp_path, step, tensors, labels, kind, message):
    good = {"good": fp8.quantize_mx(sample())}
    tensors = good | tensors if isinstance(tensors, dict) else tensors
    with pytest.raises(kind, match=message):
        log_step(tmp_path / "a", step, tensors, **labels)
    assert not (tmp_path / "a").exists()


def test_the_way_of_cupy(tmp_path, monkeypatch):
    x = sample()
    host = {"mx": (x, fp8.quantize_mx(x).rowwise), "one": (x, fp8.quantize_tensor(x, 3.0).rowwise),
            "alone": fp8.quantize_block(x).rowwise}
    want = log_step(tmp_path / "a", 0, host)
    module, copied = stand_in_arithmetic.install(monkeypatch)

    def moved(a: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(map(moved, a))
        if not isinstance(a, Scaled):
            return module.asarray(a)
        data, scale_inv = (module.asarray(bits(b)).view(b.dtype) for b in a)
        return Scaled(data, scale_inv, a.shape, a.transposed, a.block, a.scale_layout)

    found = log_step(tmp_path / "b", 0, {name: moved(a) for name, a in host.items()})
    for here, there in zip(want, found, strict=True):
        sums = [key for key in ("sqnr_db", "normal_error") if here.get(key) is not None]
        assert [there.pop(key) for key in sums] == pytest.approx([here.pop(key) for key in sums], rel=1e-12)
    assert found == want
    assert sum(copied) < x.nbytes
    assert max(copied) < 4096


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cupy_equals_numpy(tmp_path, kind):
    x = sample()
    device = fp8.asarray(x, like="cupy")
    (here,), (there,) = (log_step(tmp_path / "a", 0, {"x": (a, KINDS[kind](a))}) for a in (x, device))
    assert here.keys() == there.keys()
    for key, value in here.items():
        assert there[key] == (pytest.approx(value, rel=1e-10) if isinstance(value, float) else value), key
