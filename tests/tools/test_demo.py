"""The demo's figures are those of the recipes it names, and its output contains them all."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_in_arithmetic
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import diagnostics
from cupy_fp8.cli import demo, demo_data, demo_rows
from cupy_fp8.diagnostics import comparison
from cupy_fp8.kernels import Launch, Variant

NAMES = [row.name for row in diagnostics.compare(np.ones((1, 1), np.float32))]


@pytest.fixture(autouse=True)
def _room_for_all_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys, *arguments):
    code = demo.main(["--array", "numpy", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def matrices(tmp_path):
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "layer.0.weight": rng.standard_normal((6, 160), np.float32),
        "layer.1.weight": (rng.standard_normal((4, 160)) * np.geomspace(1, 1e5, 160)).astype(np.float32),
        "bias": np.ones(3, np.float32), "ids": np.ones((2, 2), np.int64), "scale": np.ones(3, np.float32)}
    path = tmp_path / "model.npz"
    np.savez(path, **tensors)
    return path, tensors


def tables_of(out):
    """{the name in the title: {recipe: the other cells}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for block in out.split("\n\n"):
        title, *lines = block.splitlines() or [""]
        if lines and lines[0].startswith("recipe "):
            cells = [re.split(r"\s{2,}", line) for line in lines[2:]]
            found[title.split("  ")[0]] = {row[0]: row[1:] for row in cells if len(row) > 5}
    return found


def test_rows_are_what_the_recipes_do(matrices, tmp_path, capsys):
    path, tensors = matrices
    code, out, err = run(capsys, path, "--json", tmp_path / "report.json")
    assert (code, err) == (0, "")
    assert out.startswith("NumPy reference on the CPU.\n")
    report = json.loads((tmp_path / "report.json").read_text())
    names = ("layer.0.weight", "layer.1.weight")
    assert [(r["tensor"], r["recipe"]) for r in report["rows"]] == list(itertools.product(names, NAMES))
    shown = tables_of(out)
    for row in report["rows"]:
        found = diagnostics.compare(tensors[row["tensor"]])
        want = found[row["recipe"]]
        figures = vars(want.error)
        assert {name: row[name] for name in figures} == figures
        assert row["bytes_per_element"] == want.bytes_per_element
        assert (row["local_sqnr_db"], row["kind"]) == (want.local_sqnr_db, "weights")
        assert row["same_as"] == found.same.get(want.name)
        assert row["microseconds"] > 0
        cells = shown[row["tensor"]].get(want.name)
        assert cells == (None if want.name in found.same else [
            *want.cells()[1:], demo_rows.duration(row["microseconds"])])
    assert report["left_out"] == {"vectors and numbers are not multiplied in FP8": ["bias", "scale"],
                                  "int64, not a float type": ["ids"]}
    assert "Left out: bias and 1 more (vectors and numbers are not multiplied in FP8).\n" in out
    assert " ".join(out.split()).endswith(report["verdict"])
    assert "normal error  relative error of the values" in out


def test_made_up_tensors(monkeypatch, capsys):
    monkeypatch.setitem(demo.SIZES, "numpy", ((64, 32), (96, 32)))
    _, first, _ = run(capsys)
    assert first.startswith("NumPy reference on the CPU. These tensors are made up: ")
    assert "weight  64×32  bfloat16\n" in first
    assert "activation  96×32  bfloat16\n" in first
    assert without_times(run(capsys)[1]) == without_times(first)
    assert without_times(run(capsys, "--seed", 1)[1]) != without_times(first)


def without_times(out):
    found = tables_of(out)
    assert found.keys() == {"weight", "activation"}
    return {name: {recipe: cells[:-1] for recipe, cells in rows.items()} for name, rows in found.items()}


def test_rows_appear_as_they_are_made(matrices, monkeypatch):
    """Each is written, and flushed, before the next recipe is tried."""
    written: list[str] = []

    class Pipe(io.StringIO):
        def flush(self):
            written.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Pipe())
    seen: list[str] = []

    def watched(*args, **options):
        for row in comparison.each(*args, **options):
            seen.append(written[-1])
            yield row

    monkeypatch.setattr(demo_rows, "each", watched)
    assert demo.main(["--array", "numpy", str(matrices[0])]) == 0
    first, _, third = (text.splitlines() for text in seen[:3])
    assert first[-2].startswith("recipe ")
    assert third[-1].startswith("tensor E4M3 ")


def test_several_files_and_names(tmp_path, capsys):
    """All files are read, unreadable ones do not stop the others; titles are short, whatever the names."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        named: dict[str, Any] = {"long." * 60 + "weight": np.ones((3, 5), np.float32)}
        np.savez(tmp_path / folder / "model.npz", **named)
    np.save(tmp_path / "other.npy", np.ones((2, 3, 4), np.float16))
    (tmp_path / "broken.npz").write_bytes(b"junk")
    files = (tmp_path / name for name in ("a/model.npz", "broken.npz", "other.npy", "b/model.npz"))
    code, out, err = run(capsys, *files)
    assert code == 1
    assert err == f"demo: {tmp_path}/broken.npz: not an .npz file (File is not a zip file)\n"
    assert "other.npy: other  2×3×4  float16\n" in out
    assert {title[:19] for title in tables_of(out)} == {"a/model.npz: long.l", "b/model.npz: long.l",
                                                        "other.npy: other"}
    assert max(map(len, out.splitlines())) <= 100


def test_worst(matrices, capsys):
    code, out, _ = run(capsys, matrices[0], "--worst", 1)
    assert code == 0
    found = {name: diagnostics.compare(matrices[1][name]) for name in ("layer.0.weight", "layer.1.weight")}
    (shown,) = tables_of(out)
    recipe = re.search(r"^Take (.*?) for weights:", out, re.MULTILINE)
    assert recipe
    assert shown == min(found, key=lambda name: found[name][recipe[1]].local_sqnr_db)


@pytest.mark.parametrize("arguments", [["--worst", "0"], ["--worst", "-1"], ["--worst", "1", "--summary"]],
                         ids=str)
def test_wrong_options(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        run(capsys, *arguments)
    assert leaving.value.code == 2


def test_markdown(matrices, capsys):
    code, out, _ = run(capsys, matrices[0], "--markdown")
    assert code == 0
    assert "### layer.0.weight  6×160  float32\n\n| recipe | SQNR dB | " in out
    assert "\n- to zero: " in out
    blocks = [block.splitlines() for block in out.split("\n\n") if block.startswith("|")]
    for block in blocks:
        assert len({line.replace("\\|", "").count("|") for line in block}) == 1
    assert [len(block) for block in blocks] == [2 + len(rows) for rows in (
        diagnostics.compare(matrices[1][f"layer.{i}.weight"]).distinct for i in (0, 1))]


def test_summary_adds_up(matrices, capsys):
    code, out, _ = run(capsys, matrices[0], "--summary")
    assert code == 0
    assert "layer.*.weight  2 tensors  1,600 elements\n" in out
    one, other = (diagnostics.compare(matrices[1][f"layer.{i}.weight"])["tensor E4M3"] for i in (0, 1))
    cells = tables_of(out)["layer.*.weight"]["tensor E4M3"]
    low, high = sorted((one.error.sqnr_db, other.error.sqnr_db))
    normal = sum(row.error.normal or 0 for row in (one, other))
    squares = sum((row.error.normal_error or 0) ** 2 * (row.error.normal or 0) for row in (one, other))
    worst = max(one.error.max_normal_error or 0, other.error.max_normal_error or 0)
    counts = (str(sum(getattr(row.error, field) for row in (one, other)))
              for field in ("saturated", "underflowed"))
    beside = sorted((one.local_sqnr_db, other.local_sqnr_db))
    held = (one.bytes_per_element * 960 + other.bytes_per_element * 640) / 1600
    assert cells[:-1] == [f"{low:.2f} … {high:.2f}", f"{beside[0]:.2f} … {beside[1]:.2f}",
                          f"{math.sqrt(squares / normal) * 100:.1f} / {worst:.1%}", *counts, f"{held:.3f}"]


@pytest.mark.parametrize(("arguments", "kinds"), [
    ([], ["weights", "activations"]), (["--kind", "activations"], ["activations"])], ids=str)
def test_advice_names_kinds_of_tensors(tmp_path, capsys, arguments, kinds):
    np.save(tmp_path / "x.npy", demo_data.activation(256, 256))
    _, out, _ = run(capsys, tmp_path / "x.npy", *arguments)
    assert re.findall(r"Take\s\S+\sE4M3\sfor\s(\w+)", out) == kinds
    assert "Take 1×128 E4M3 for activations:" in " ".join(out.split())


def test_made_up_tensors_take_what_start_md_says(monkeypatch, capsys):
    monkeypatch.setitem(demo.SIZES, "numpy", ((256, 256), (256, 256)))
    out = " ".join(run(capsys)[1].split())
    assert "Take 128×128 E4M3 for weights: " in out
    assert "Take 1×128 E4M3 for activations: " in out


def test_kinds():
    assert demo_rows.kind_of("model.layers.10.mlp.w2.weight") == "model.layers.*.mlp.w2.weight"
    assert demo_rows.kind_of("h.3") == "h.*"


def test_plot(matrices, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    picture = tmp_path / "a.png"
    code, out, _ = run(capsys, matrices[0], "--plot", picture)
    assert code == 0
    assert out.endswith(f"Picture: {picture}\n")
    assert picture.read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--plot", "a.xyz"], "--plot a.xyz: expected a name that ends in .png"),
    (["--plot", "no/such/a.png"], "no such folder"),
    (["--json", "no/a.json"], "no such folder"),
], ids=str)
def test_files_that_could_not_be_written(arguments, message, capsys):
    """Reported before anything is compared."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert message in err


def test_a_tensor_without_error_has_no_sqnr(tmp_path, capsys):
    np.save(tmp_path / "zeros.npy", np.zeros((4, 4), np.float32))
    code, out, _ = run(capsys, tmp_path / "zeros.npy", "--json", tmp_path / "r.json")
    assert code == 0
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["sqnr_db"] is None
    assert "exact" in out


@pytest.mark.parametrize(("name", "content", "message"), [
    ("none.npz", None, "no such file"),
    ("a.txt", b"", "expected a file ending in"),
    ("b.npy", b"junk", r"not an .npy file"),
    ("c.npz", b"", "it is empty"),
])
def test_bad_files(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = run(capsys, tmp_path / name)
    assert (code, out) == (1, "")
    assert message in err


def test_file_without_matrices(tmp_path, capsys):
    np.save(tmp_path / "v.npy", np.zeros(3, np.float32))
    code, out, err = run(capsys, tmp_path / "v.npy")
    assert code == 1
    assert "no float tensor of two or three dimensions" in err
    assert "Left out: v (vectors and numbers are not multiplied in FP8)." in out


def test_damage_that_is_found_late(matrices, capsys):
    """The tensors before it are shown."""
    path = matrices[0]
    data = bytearray(path.read_bytes())
    at = data.index(matrices[1]["layer.1.weight"].tobytes()[:64])
    data[at] ^= 1
    path.write_bytes(data)
    code, out, err = run(capsys, path)
    assert code == 1
    assert "layer.0.weight" in tables_of(out)
    assert err.startswith("demo: ")
    assert "layer.1.weight" in err


def test_compiling_is_announced_only_while_it_runs(capsys):
    from cupy_fp8.kernels import kernel

    run(capsys, "missing.npy")
    assert kernel._announce is None


# ---- data, GPUs ----
@pytest.mark.parametrize("part", [1 << 22, 3000])
def test_data(part, monkeypatch):
    """part: elements per thread."""
    monkeypatch.setattr(demo_data, "_PART", part)
    w, x = demo_data.weight(256, 128, seed=3), demo_data.activation(64, 128, seed=3)
    assert (w.dtype.name, w.shape, x.dtype.name, x.shape) == ("float32", (256, 128), "float32", (64, 128))
    assert len(np.unique(w[:, 0])) == 256, "parts repeat"
    assert w.tobytes() == demo_data.weight(256, 128, seed=3).tobytes()
    assert w.tobytes() != demo_data.weight(256, 128, seed=4).tobytes()
    f = w.astype(np.float64)
    assert 0.5 < f.std() * math.sqrt(128) < 2
    assert np.abs(f).max() > 6 * f.std()                    # a normal distribution of this size has less
    per_channel = np.abs(x.astype(np.float64))[1:].mean(axis=0)
    assert (per_channel > 6 * np.median(per_channel)).sum() >= 4     # outlier channels


@needs_host
def test_where_cupy_is(matrices, tmp_path, monkeypatch, capsys):
    """Tensors go to the device, and times are the benchmark's."""
    recipes = (fp8.CurrentScaling(), fp8.MXScaling())
    stand_in_arithmetic.install(monkeypatch)
    traffic: list[int] = []

    def measure(make, nbytes):
        call, _ = make()
        assert isinstance(call(), fp8.Quantized)
        traffic.append(nbytes)
        return SimpleNamespace(us=12.0, share=0.5)

    monkeypatch.setattr(import_module("cupy_fp8.bench.measure"), "measure", measure)
    monkeypatch.setattr(demo_rows, "RECIPES", recipes)
    monkeypatch.setattr(comparison, "RECIPES", recipes)
    monkeypatch.setattr(demo, "_executor_name", lambda xp: f"CUDA kernels on {xp.__name__}")
    ahead: list[Variant] = []
    monkeypatch.setattr(Variant, "compile", lambda variant, device: ahead.append(variant))
    launched: list[Variant] = []
    start: Any = Launch.start

    def noted(launch: Launch, *values: Any) -> None:
        launched.append(launch.variant)
        start(launch, *values)

    monkeypatch.setattr(Launch, "start", noted)
    assert demo.main([str(matrices[0]), "--array", "cupy"]) == 0
    assert launched
    assert set(launched) <= set(ahead), "the demo waits for compilers that could have begun before"
    assert len(ahead) == len(set(ahead))
    out = capsys.readouterr().out
    assert out.startswith("CUDA kernels on cupy.\n")
    assert "copy          the time of a device copy" in out
    for name in ("layer.0.weight", "layer.1.weight"):
        found = diagnostics.compare(matrices[1][name], recipes)
        assert list(tables_of(out)[name].values()) == [[*row.cells()[1:], "12.0 µs", "50%"] for row in found]
    first = matrices[1]["layer.0.weight"]
    assert traffic[0] == first.nbytes + fp8.quantize_tensor(first).nbytes


@pytest.mark.gpu
def test_on_a_gpu(matrices, tmp_path, capsys):
    assert demo.main([str(matrices[0]), "--json", str(tmp_path / "gpu.json")]) == 0
    out = capsys.readouterr().out
    assert "CUDA kernels on" in out
    assert "the time of a device copy" in out
    run(capsys, matrices[0], "--json", tmp_path / "cpu.json")
    gpu, cpu = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("gpu", "cpu"))
    for there, here in zip(gpu, cpu, strict=True):
        assert there["copy_share"] > 0
        assert (there["saturated"], there["underflowed"]) == (here["saturated"], here["underflowed"])
        assert there["sqnr_db"] == pytest.approx(here["sqnr_db"], rel=1e-12)
