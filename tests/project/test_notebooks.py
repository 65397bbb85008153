"""Every notebook runs without an error, and is committed with the pictures that web pages show.

After a change: PYTHONPATH=tests/support python tests/project/test_notebooks.py notebooks/*.ipynb
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
import small_minilm
from tiers import quick_if

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_BYTES = 600_000
MOST_LINES = 16                 # of a cell
QUICK = "08_check_your_kernel.ipynb"            # the shortest to execute


def execute_in_place(path):
    """Run all cells in a new kernel of this Python, from the root, so that they import this checkout."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    os.environ.pop("MPLBACKEND", None)          # another backend than the kernel's shows no pictures
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
    with tempfile.TemporaryDirectory() as sockets:  # files, since an open port would bring a warning
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        NotebookClient(notebook, kernel_name="python3", timeout=300, record_timing=False, config=config,
                       resources={"metadata": {"path": str(ROOT)}}).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                         "language_info": {"name": "python"}}
    nbformat.write(notebook, path)


def run(path, *packages):
    """Call execute_in_place in a separate process: the kernel client leaves sockets and an event loop behind.
    `packages` are folders for its PYTHONPATH."""
    support = Path(__file__).resolve().parents[1] / "support"
    path_of_imports = os.pathsep.join(filter(None, (str(support), *map(str, packages),
                                                    os.environ.get("PYTHONPATH"))))
    return subprocess.run([sys.executable, __file__, path], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": path_of_imports})


@pytest.fixture
def packages(path, tmp_path):
    """Return folders with a small model in place of that of 07, if it is absent."""
    if small_minilm.PACKAGE not in path.read_text("utf-8") or importlib.util.find_spec(small_minilm.PACKAGE):
        return []
    small_minilm.install(tmp_path / "packages")
    return [tmp_path / "packages"]


def outputs(notebook, kind):
    return [o for cell in notebook.cells for o in cell.get("outputs", []) if kind in o.get("data", {})]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", quick_if(lambda p: p.name == QUICK, NOTEBOOKS), ids=lambda p: p.name)
def test_runs(path, packages, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    pictures = len(outputs(notebook, "image/png"))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    copy = tmp_path / path.name
    nbformat.write(notebook, copy)
    process = run(copy, *packages)
    assert process.returncode == 0, process.stderr[-3000:]
    fresh = nbformat.read(copy, as_version=4)
    assert len(outputs(fresh, "image/png")) == pictures
    errors = [o for cell in fresh.cells for o in cell.get("outputs", []) if o.get("name") == "stderr"]
    assert not errors, "a cell wrote to stderr"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_is_committed_executed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "not executed from top to bottom"
    assert outputs(notebook, "image/png")
    assert path.stat().st_size < LIMIT_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_person_can_follow(path):
    """The first cell says what one will learn and how long it takes, and links to its neighbours and to a
    page of docs; code cells are short; links lead to files."""
    notebook = nbformat.read(path, as_version=4)
    first, at = notebook.cells[0].source, NOTEBOOKS.index(path)
    assert "**You will learn**" in first
    assert "minutes to read" in first
    assert "](../docs/" in first
    for neighbour in NOTEBOOKS[max(at - 1, 0):at + 2]:
        assert neighbour == path or f"]({neighbour.name})" in first, f"no link to {neighbour.name}"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= MOST_LINES, cell.source
        else:
            for link in re.findall(r"\]\((?!https?:)([^)#]+)", cell.source):
                assert (path.parent / link).exists(), link


def test_an_error_is_noticed(tmp_path):
    wrong = nbformat.v4.new_code_cell("import cupy_fp8\nassert cupy_fp8.finfo('float16').max == 1")
    nbformat.write(nbformat.v4.new_notebook(cells=[wrong]), tmp_path / "wrong.ipynb")
    process = run(tmp_path / "wrong.ipynb")
    assert process.returncode != 0
    assert "AssertionError" in process.stderr


if __name__ == "__main__":
    for given in sys.argv[1:]:
        execute_in_place(given)
