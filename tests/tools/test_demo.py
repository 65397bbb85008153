"""The demo's figures are those of the recipes it names, and its output holds them all."""

import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import diagnostics
from cupy_fp8.cli import demo, demo_data, demo_table


def run(capsys, *arguments):
    code = demo.main(["--array", "numpy", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def matrices(tmp_path):
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "layer.0.weight": rng.standard_normal((6, 8), np.float32),
        "layer.1.weight": rng.standard_normal((4, 8), np.float32),
        "bias": np.ones(3, np.float32), "empty": np.zeros((0, 4), np.float32)}
    path = tmp_path / "model.npz"
    np.savez(path, **tensors)
    return path, tensors


def test_rows_are_what_the_recipes_do(matrices, tmp_path, capsys):
    path, tensors = matrices
    report_file = tmp_path / "report.json"
    code, out, _ = run(capsys, path, "--json", report_file)
    assert code == 0
    assert "NumPy reference on the CPU" in out
    report = json.loads(report_file.read_text())
    rows = report["rows"]
    names = ("layer.0.weight", "layer.1.weight")
    assert [(r["tensor"], r["recipe"]) for r in rows] == list(itertools.product(names, demo.RECIPES))
    for row in rows:
        x, dtype = tensors[row["tensor"]], fp8.float8_e5m2 if "e5m2" in row["recipe"] else fp8.float8_e4m3fn
        if row["recipe"].startswith("MX"):
            q, bytes_of_scales = fp8.quantize_mx(x, dtype=dtype, columnwise=True), x.shape[0] + x.shape[1]
        else:
            scale = np.float32(fp8.finfo(dtype).max) / np.abs(x).max()
            q, bytes_of_scales = fp8.cast_transpose(x, scale, dtype=dtype), 4
        want = diagnostics.error(x, q)
        assert (row["sqnr_db"], row["max_relative_error"]) == (want.sqnr_db, want.max_relative_error)
        assert (row["saturated"], row["underflowed"], row["nan"]) == (want.saturated, want.underflowed, 0)
        assert row["bytes_per_element"] == q.nbytes / x.size == 2 + bytes_of_scales / x.size
        assert row["microseconds"] > 0
        assert f"{want.sqnr_db:.2f}" in out
    assert len(out.strip().splitlines()) == 2 + 2 + len(rows)


def test_made_up_matrices(monkeypatch, capsys):
    monkeypatch.setitem(demo.SIZES, "numpy", ((64, 32), (96, 32)))
    _, first, _ = run(capsys)
    assert "64×32" in first
    assert "96×32" in first
    assert without_times(run(capsys)[1]) == without_times(first)
    assert without_times(run(capsys, "--seed", 1)[1]) != without_times(first)


def without_times(out):
    """All cells of the table's rows but the last, which is the time."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()
            if line.startswith(("weight", "activation"))]
    assert len(rows) == 2 * len(demo.RECIPES)
    return [row[:-1] for row in rows]


def test_markdown_and_summary(matrices, capsys):
    code, out, _ = run(capsys, matrices[0], "--markdown", "--summary")
    assert code == 0
    assert "### By kind of tensor" in out
    assert "| layer.\\*.weight | 2 | 80 | delayed, e4m3fn |" in out
    tables = [block.splitlines() for block in out.split("\n\n") if block.startswith("|")]
    assert [len(t) for t in tables] == [2 + len(demo.RECIPES), 2 + 2 * len(demo.RECIPES)]
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_summary_adds_up():
    row = demo_table.Row("a.0.w", (2, 4), "float32", "r", 30.0, 0.5, 1, 2, 0, 2.5, 10.0, None)
    other = demo_table.Row("a.1.w", (2, 12), "float32", "r", 20.0, 0.25, 2, 0, 0, 2.1, 30.0, None)
    head, body = demo_table._summary([row, other])
    assert dict(zip(head, body[0], strict=True)) == {
        "kind": "a.*.w", "tensors": "2", "elements": "32", "recipe": "r",
        "SQNR dB (lowest … highest)": "20.00 … 30.00", "max rel. error": "0.5000", "saturated": "3",
        "underflowed": "2 (0.062 of all)", "bytes/element": "2.200", "time": "40.0 µs"}


def test_a_tensor_without_error_has_no_sqnr(tmp_path, capsys):
    np.save(tmp_path / "zeros.npy", np.zeros((4, 4), np.float32))
    code, out, _ = run(capsys, tmp_path / "zeros.npy", "--json", tmp_path / "r.json", "--summary")
    assert code == 0
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["sqnr_db"] is None
    assert "–" in out


@pytest.mark.parametrize(("name", "content", "message"), [
    ("none.npz", None, "no such file"),
    ("a.txt", b"", "expected a file ending in"),
    ("b.npy", b"junk", r"not an .npy file"),
])
def test_bad_files(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = run(capsys, tmp_path / name)
    assert (code, out) == (1, "")
    assert message in err


def test_file_without_matrices(tmp_path, capsys):
    np.save(tmp_path / "v.npy", np.zeros(3, np.float32))
    code, _, err = run(capsys, tmp_path / "v.npy")
    assert code == 1
    assert "no 2-D tensor" in err


def test_compiling_is_announced_only_while_it_runs(capsys):
    from cupy_fp8.kernels import kernel

    run(capsys, "missing.npy")
    assert kernel._announce is None


def test_data():
    w, x = demo_data.weight(256, 128, seed=3), demo_data.activation(64, 128, seed=3)
    assert (w.dtype, w.shape, x.dtype, x.shape) == (fp8.bfloat16, (256, 128), fp8.bfloat16, (64, 128))
    assert w.tobytes() == demo_data.weight(256, 128, seed=3).tobytes()
    assert w.tobytes() != demo_data.weight(256, 128, seed=4).tobytes()
    f = w.astype(np.float64)
    assert 0.5 < f.std() * math.sqrt(128) < 2
    assert np.abs(f).max() > 6 * f.std()                    # a normal distribution of this size has less
    per_channel = np.abs(x.astype(np.float64))[1:].mean(axis=0)
    assert (per_channel > 6 * np.median(per_channel)).sum() >= 4     # outlier channels


def test_kinds():
    assert demo_table.kind_of("model.layers.10.mlp.w2.weight") == "model.layers.*.mlp.w2.weight"
    assert demo_table.kind_of("h.3") == "h.*"


@pytest.mark.gpu
def test_on_a_gpu(matrices, tmp_path, capsys):
    assert demo.main([str(matrices[0]), "--json", str(tmp_path / "gpu.json")]) == 0
    out = capsys.readouterr().out
    assert "CUDA kernels on" in out
    assert "of copy speed" in out
    run(capsys, matrices[0], "--json", tmp_path / "cpu.json")
    gpu, cpu = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("gpu", "cpu"))
    for there, here in zip(gpu, cpu, strict=True):
        assert there["copy_share"] > 0
        assert (there["saturated"], there["underflowed"]) == (here["saturated"], here["underflowed"])
        assert there["sqnr_db"] == pytest.approx(here["sqnr_db"], rel=1e-12)
