"""Every notebook runs afresh without an error, and is committed with the pictures that web pages show.

After a change, execute in place with: python tests/project/test_notebooks.py notebooks/*.ipynb
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from tiers import first_of_each

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_BYTES = 600_000


def execute_in_place(path):
    """Run all cells in a fresh kernel of this Python, from the root, so that they import this checkout."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
    with tempfile.TemporaryDirectory() as sockets:          # files: an open port would bring a warning
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        NotebookClient(notebook, kernel_name="python3", timeout=300, record_timing=False, config=config,
                       resources={"metadata": {"path": str(ROOT)}}).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                         "language_info": {"name": "python"}}
    nbformat.write(notebook, path)


def run(path):
    """execute_in_place in a process of its own: the kernel client leaves sockets and an event loop behind."""
    support = Path(__file__).resolve().parents[1] / "support"
    path_of_imports = os.pathsep.join(filter(None, (str(support), os.environ.get("PYTHONPATH"))))
    return subprocess.run([sys.executable, __file__, path], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": path_of_imports})


def outputs(notebook, kind):
    return [o for cell in notebook.cells for o in cell.get("outputs", []) if kind in o.get("data", {})]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", first_of_each(lambda path: path.suffix, NOTEBOOKS), ids=lambda p: p.name)
def test_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    pictures = len(outputs(notebook, "image/png"))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    copy = tmp_path / path.name
    nbformat.write(notebook, copy)
    process = run(copy)
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


def test_an_error_is_noticed(tmp_path):
    wrong = nbformat.v4.new_code_cell("import cupy_fp8\nassert cupy_fp8.finfo('float16').max == 1")
    nbformat.write(nbformat.v4.new_notebook(cells=[wrong]), tmp_path / "wrong.ipynb")
    process = run(tmp_path / "wrong.ipynb")
    assert process.returncode != 0
    assert "AssertionError" in process.stderr


if __name__ == "__main__":
    for given in sys.argv[1:]:
        execute_in_place(given)
