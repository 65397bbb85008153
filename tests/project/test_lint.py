"""ruff and mypy have nothing to say, with the settings of pyproject.toml, and no line is too long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 110
#: ruff checks Python alone.
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".md"}
FOLDERS = ("cupy_fp8", "kernels_cu", "tests", "docs", "benchmarks")


@pytest.mark.parametrize("command", [
    ["ruff", "check", "cupy_fp8", "tests"], pytest.param(["mypy"], marks=pytest.mark.full)], ids=" ".join)
def test_clean(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def files() -> Iterator[Path]:
    for path in (*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))):
        if path.suffix in SUFFIXES:
            yield path


def too_long(path: Path) -> int:
    """How many lines are too long. Rows of tables cannot be wrapped, nor the links of docs/api."""
    if path.is_relative_to(ROOT / "docs/api"):
        return 0
    in_markdown = path.suffix == ".md"
    return sum(len(line) > COLUMNS and not (in_markdown and line.startswith("|"))
               for line in path.read_text(encoding="utf-8").splitlines())


def test_no_line_is_too_long():
    found = {str(path.relative_to(ROOT)): n for path in files() if (n := too_long(path))}
    assert not found, f"{sum(found.values())} lines in {len(found)} files"
