"""ruff and mypy are clean with the settings of pyproject.toml, and no line is too long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 110
#: ruff checks only Python and notebooks
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".md"}
FOLDERS = ("cupy_fp8", "kernels_cu", "tests", "docs", "benchmarks", "examples")
#: patterns of files outside these folders
OTHERS = ("*.md", "*.toml", ".*.yaml", ".ci/*", ".github/**/*.yml")


@pytest.mark.parametrize("command", [
    ["ruff", "check", "cupy_fp8", "tests", "notebooks", "examples"],
    pytest.param(["mypy"], marks=pytest.mark.full)], ids=" ".join)
def test_clean(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def files() -> Iterator[Path]:
    for pattern in OTHERS:
        yield from ROOT.glob(pattern)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix in SUFFIXES:
            yield path


def too_long(path: Path) -> Iterator[str]:
    """Yield the places of lines that are too long. Rows of tables cannot be wrapped."""
    in_markdown = path.suffix == ".md"
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(line) > COLUMNS and not (in_markdown and line.startswith("|")):
            yield f"{path.relative_to(ROOT)}:{number}"


def test_no_line_is_too_long():
    found = [place for path in files() for place in too_long(path)]
    assert not found, f"more than {COLUMNS} characters: {', '.join(found)}"
