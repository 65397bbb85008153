"""The built archives hold the source tree, and the package works from a wheel and from editable installs.

Each installation has a virtual environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from tiers import needs_host

import cupy_fp8
from cupy_fp8.kernels import sources

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "SECURITY.md")
INPUTS = ("pyproject.toml", "build_kernels.py", "MANIFEST.in", *PAGES, "cupy_fp8", "kernels_cu")
TEST_COMMAND = "pip install -e '.[test]' && pytest"

# Runs in the new environment, as if without CuPy. Its arguments are the folder where the kernels should be
# found, and their digest.
USE = r"""
import sys
from pathlib import Path
sys.modules["cupy"] = None
import numpy as np
import cupy_fp8 as fp8
from cupy_fp8.kernels import sources
q = fp8.quantize_tensor(np.array([[0.5, 300.0]], np.float32), 2.0)
assert q.data.view(np.uint8).tolist() == [[0x38, 0x7E]], q.data
assert sources.root() == Path(sys.argv[1]).resolve(), sources.root()
assert sources.digest() == sys.argv[2]
print(Path(fp8.__file__).parent)
"""


def run(*command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    environment = {k: v for k, v in os.environ.items()
                   if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_REQUIRE_VIRTUALENV")} | dict(env or {})
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, f"{command[:4]}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    return copy_sources(tmp_path / "source")


def copy_sources(to: Path) -> Path:
    to.mkdir()
    for name in INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    return to


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (sdist, wheel), the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("archives")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist",
        copy_sources(folder / "source"))
    (sdist,), (wheel,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    return sdist, wheel


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the Python of a new environment that sees this one's packages, but not the project if installed
    editable here, since the .pth files of a folder that a .pth file names are not read."""
    folder = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    outer = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    Path(paths["purelib"], "outer.pth").write_text("\n".join(outer))
    return folder / "bin" / "python"


def install(python: Path, *what: object) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index",
        "--no-build-isolation", "--ignore-installed", *what)


def source_files() -> set[str]:
    """Return every file of the package, named as in a wheel."""
    kernels = {f"cupy_fp8/kernels_cu/{path.relative_to(ROOT / 'kernels_cu').as_posix()}"
               for path in (ROOT / "kernels_cu").rglob("*.cu*")}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cupy_fp8").rglob("*")
               if path.is_file() and "__pycache__" not in path.parts}
    return kernels | package


def test_wheel_holds_every_source(archives):
    assert len({Path(name).suffix for name in source_files()} & {".cu", ".cuh", ".cpp", ".h", ".py"}) == 5
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == source_files()


def test_sdist_holds_every_source(archives):
    with tarfile.open(archives[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name.replace("cupy_fp8/kernels_cu/", "kernels_cu/") for name in source_files()} <= names
    assert {"pyproject.toml", "build_kernels.py", *PAGES} <= names


def test_a_wheel_of_the_checkout_equals_that_of_the_sdist(archives, source_tree, tmp_path):
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, source_tree)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == archives[1].name
    assert contents(wheel) == contents(archives[1])


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_metadata(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata: Message = Parser().parsestr(wheel.read(name).decode())
        assert any(name.endswith("/LICENSE") for name in wheel.namelist())
    assert metadata["Version"] == cupy_fp8.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[^\w]", line)[0] for line in required) == ["ml_dtypes", "numpy"]


def test_wheel_works(archives, python):
    install(python, archives[1])
    site = python.parent.parent
    (kernels,) = site.rglob("cupy_fp8/kernels_cu")
    package = Path(run(python, "-c", USE, kernels, sources.digest(), cwd=site).strip())
    assert site in package.parents
    assert "selftest" in run(python.parent / "cupy-fp8", "--help")
    assert "quantize_tensor" in run(python.parent / "cupy-fp8", "list")


@pytest.mark.full
@needs_host
def test_a_wheel_tests_itself_in_an_empty_folder(archives, python, tmp_path):
    """With kernels of the wheel, one of each family, compiled anew."""
    install(python, archives[1])
    (tmp_path / "empty").mkdir()
    cache = {"CUPY_FP8_CACHE_DIR": str(tmp_path / "cache")}
    out = run(python, "-m", "cupy_fp8", "selftest", "compute_amax", "transpose", "splits_to_offsets",
              "quantize_tensor", "--executor", "host", cwd=tmp_path / "empty", env=cache)
    assert out.count("PASS") == 4
    assert "all bytes equal the reference's" in out
    assert any(tmp_path.glob("cache/host/*.so"))
    assert not any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("mode", ["lenient", pytest.param("strict", marks=pytest.mark.full)])
def test_editable_works(mode, source_tree, python):
    install(python, "--config-settings", f"editable_mode={mode}", "--editable", source_tree)
    run(python, "-c", USE, source_tree / "kernels_cu", sources.digest(), cwd=python.parent)


#: a user's file without mistakes, and one in which mypy finds the error that each line's comment names
RIGHT = """
import numpy as np

import cupy_fp8 as fp8
from cupy_fp8.recipes import BlockScaling

x, sizes = np.ones((256, 128), np.float32), [128, 128]
recipes = [fp8.CurrentScaling(), fp8.DelayedScaling("e5m2", algo="most_recent"), BlockScaling((1, None)),
           fp8.MXScaling(mode="floor", scale_layout="swizzled", profile="torchao")]
q = fp8.quantize_block(x, block=(128, 128), scale_layout="gemm_ready", dtype=np.dtype(fp8.float8_e4m3fn))
y = fp8.matmul_nt(q, q.to_layout("compact"), dtype="float32")
y = (y + 1).astype(np.float32).reshape(-1, 256)
host: np.ndarray = fp8.asnumpy(y)
print(y.shape[0], y.get() if fp8.xp is not np else y, np.abs(y).max(), q.rowwise.data.nbytes, fp8.xp.ones(3))
routing = fp8.route(np.zeros((256, 2), np.int64), num_experts=4)
rows, probs = fp8.permute(x, routing, probs=np.ones((256, 2), np.float32))
print(fp8.permute(fp8.quantize_block(x), routing).scale_inv, rows.T, probs.sum())
grouped = fp8.group_quantize(x, sizes, fp8.BlockScaling(), columnwise=True)
print(fp8.grouped_matmul_nt(grouped, grouped, sizes, group="k").dtype, grouped.dequantize().nbytes)
print(fp8.pad_groups(fp8.quantize_mx(x).rowwise, sizes, align=64).T, fp8.pad_groups(x, sizes, align=64).sum())
print(fp8.diagnostics.compare(x, kind="weights").verdict, fp8.diagnostics.error(x, q).sqnr_db, fp8.io.load)
with fp8.testing.executor("reference") as run:
    fp8.testing.assert_bytes_equal(run.array(q), q)
"""
WRONG = """
import numpy as np

import cupy_fp8 as fp8

x = np.ones((128, 128), np.float32)
q = fp8.quantize_blok(x)  # attr-defined
q = fp8.quantize_block(x)
fp8.quantize_block(x, scale_layout="gemm_redy")  # arg-type
fp8.quantize_block(x, profile="tee")  # arg-type
fp8.quantize_block(x, dtype="float9")  # arg-type
fp8.quantize_mx(x, mode="rciel")  # arg-type
fp8.MXScaling(mode="rciel")  # arg-type
fp8.MXScaling(scale_layout="gemm_ready")  # arg-type
fp8.BlockScaling(pow2=True)  # call-arg
fp8.DelayedScaling(algo="last")  # arg-type
fp8.group_quantize(x, [64, 64], "MX")  # arg-type
fp8.group_quantize(x, [64, 64], fp8.MXScaling)  # arg-type
fp8.swiglu_quantize(x, fp8.MXScaling(), form="silu")  # arg-type
fp8.compute_amax(x, nan="raise")  # arg-type
fp8.grouped_matmul_nt(q, q, [64, 64], group="n")  # arg-type
fp8.scaling_aware_transpose(q, target="row")  # arg-type
q.to_layout("swizled")  # arg-type
q.rowwise.to_block((1, 128), scale_layout="gemm")  # arg-type
fp8.Scaled(x, x, (128, 128), block=(1, 128), scale_layout="rows")  # arg-type
n: int = fp8.matmul_nt(q, q)  # assignment
fp8.matmul_nt(q, q, dtype="float33")  # arg-type
fp8.astype(x, "e4m4")  # arg-type
fp8.finfo("e4m4")  # arg-type
fp8.CurrentScaling(dtype="e4m4")  # arg-type
fp8.BlockScaling(dtype="e4m4")  # arg-type
fp8.MXScaling("rceil")  # arg-type
fp8.MXScaling("e4m3", "rceil")  # call-arg
name: str = fp8.MXScaling().dtype  # assignment
name = fp8.group_quantize(x, [64, 64], fp8.BlockScaling()).splits  # assignment
name = fp8.route(np.zeros((4, 1), np.int32)).row_map  # assignment
name = fp8.DelayedScalingState(2, fp8.DelayedScaling()).scale  # assignment
name = fp8.testing.Executor("host").array(q)  # assignment
name = fp8.testing.Executor("host").numpy(x)  # assignment
fp8.matmul_nt(q, q).shapee  # attr-defined
q.dequantize().get().nowhere  # attr-defined
q.rowwise.scale_inf  # attr-defined
fp8.permute(x, fp8.route(x, num_experts=2)).block  # attr-defined
fp8.diagnostics.erorr(x, q)  # attr-defined
fp8.diagnostics.compare(x, kind="weight")  # arg-type
fp8.plot.histogramm(x)  # attr-defined
fp8.plot.loss_map(fp8.diagnostics.blocks(x, q), "lost")  # arg-type
fp8.io.lod("a")  # attr-defined
fp8.testing.executor("gpu")  # arg-type
fp8.testing.assert_equal(x, x)  # attr-defined
fp8.reference.quantize_blok(x)  # attr-defined
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["editable", "wheel"])
def test_mypy_finds_the_package_and_the_mistakes_of_its_users(how, request, python, tmp_path):
    """In an installation as `pip install -e .` and `pip install .` make it."""
    pytest.importorskip("mypy")
    source = request.getfixturevalue("source_tree") if how == "editable" else None
    install(python, *(["--editable", source] if source else [request.getfixturevalue("archives")[1]]))
    for name, text in (("right.py", RIGHT), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--warn-unreachable", "--cache-dir",
                           "cache", "--python-executable", python, "right.py", "wrong.py"], cwd=tmp_path,
                          capture_output=True, text=True,
                          env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")})
    found = re.findall(r"^(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    expected = [("wrong.py", str(number), line.split("# ")[1])
                for number, line in enumerate(WRONG.splitlines(), 1) if "  # " in line]
    assert found == expected, done.stdout + done.stderr
    run(python, "right.py", cwd=tmp_path)


@pytest.mark.parametrize("module", ["cupy_fp8", "cupy_fp8.cases", "cupy_fp8.testing", "cupy_fp8.__main__"])
def test_importing_is_light(module, tmp_path):
    """No optional dependency is imported, above all not CuPy: with it, importing takes seconds and starts
    CUDA. Without CuPy an empty module stands in for it."""
    (tmp_path / "cupy.py").touch()
    heavy = "cupy", "matplotlib", "safetensors", "hypothesis", "pytest"
    out = run(sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); import {module}; "
              f"print([m for m in {heavy} if m in sys.modules])", cwd=ROOT)
    assert out.strip() == "[]"


def test_importing_reads_no_cuda_source():
    """Reading three parameter structs took a sixth of the package's import time. A call reads those of its
    kernels."""
    out = run(sys.executable, "-c", """
import sys
read = []
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).endswith((".cu", ".cuh")) and
                 read.append(args[0]))
import cupy_fp8.cases
print(read)
from cupy_fp8.kernels import structs
structs.of_entry("convert/astype", "convert")
print(len(read) > 1)""", cwd=ROOT)
    assert out.split() == ["[]", "True"]


def test_ci_runs_the_readmes_command_and_then_the_rest():
    assert TEST_COMMAND in (ROOT / "README.md").read_text()
    """On separate lines: `set -e` would go on after `pip` failed in `pip … && pytest`."""
    *first, rest = (ROOT / ".ci" / "run").read_text().splitlines()[-3:]
    assert (" && ".join(first), rest.split(" #")[0].strip()) == (TEST_COMMAND, "pytest -m full")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
