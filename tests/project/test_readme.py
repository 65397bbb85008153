"""What the README says is so: its code prints what it shows, its table is the table of ops, its links lead somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from cupy_fp8 import backend
from cupy_fp8.cases import OPS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.skipif(backend.gpu_problem() is None, reason="the README shows what a machine without a GPU prints")
def test_code_prints_what_it_shows():
    failed, attempted = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert (failed, attempted) == (0, 6)


def test_table_lists_every_op():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", README, re.MULTILINE)
    assert dict(rows) == {op.name: op.summary for op in OPS.values()}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if "://" not in link:
            assert (ROOT / page).parent.joinpath(link).exists(), link


def test_ci_runs_the_readme_test_command():
    command = "pip install -e '.[test]' && pytest"
    assert command in README
    assert command in (ROOT / ".ci" / "run").read_text()
