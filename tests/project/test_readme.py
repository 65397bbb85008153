"""README and docs: code prints what it shows, links work, and the table of ops is up to date."""

from __future__ import annotations

import doctest
import functools
import re
from pathlib import Path

import pytest

from cupy_fp8 import backend
from cupy_fp8.cases import OPS
from cupy_fp8.cli import written

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md",
         *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.skipif(backend.gpu_problem() is None, reason="the README shows what is printed without a GPU")
def test_code_prints_what_it_shows():
    failed, attempted = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert (failed, attempted) == (0, 8)


@pytest.mark.parametrize("path", written.files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_written_from_the_ops_is_up_to_date(path):
    assert path.read_text() == written.files()[path], "run: python -m cupy_fp8 list --write"


def test_every_op_is_in_the_table_once():
    page = (ROOT / "docs/ops.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\(api/\w+\.md#\w+\) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(op.name, op.summary) for op in OPS.values()]
    families = re.findall(r"^\| \*\*(.+)\*\* \| \|$", page, re.MULTILINE)
    assert families == ["Matrix products", "Quantisation", "Conversion", "Scales", "Tokens of expert layers"]


def test_gpp_is_named_where_it_is_first_needed():
    """Before the first command that compiles kernels on a machine without a GPU."""
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        needed = min(at for what in ("-m cupy_fp8 selftest", "&& pytest") if (at := text.find(what)) >= 0)
        assert 0 <= text.find("g++") < needed, name


def test_every_extra_and_every_notebook_is_named():
    page, index = ((ROOT / name).read_text() for name in ("docs/install.md", "notebooks/README.md"))
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    for extra in re.findall(r"^(\w+) = \[", extras.partition("\n[")[0], re.MULTILINE):
        assert re.search(rf"`{extra}`|[\[,]{extra}[\],]", page), extra
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"[{notebook.stem}]({notebook.name})" in index


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", (ROOT / page).read_text()):
        if "://" not in link:
            target = (ROOT / page).parent.joinpath(link) if link else ROOT / page
            assert target.exists(), link
            assert not heading or target.suffix != ".md" or heading in anchors(target), f"{link}#{heading}"


@pytest.mark.parametrize("index", ["docs/README.md", "docs/lab-notes/README.md"])
def test_an_index_lists_the_pages_beside_it(index):
    listed = set(re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / index).read_text()))
    assert {page.name for page in (ROOT / index).parent.glob("*.md")} - {"README.md"} <= listed


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that code hosts give the headings of a page: repeated ones get a number."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    names = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
             for heading in re.findall(r"(?m)^#+ +(.*)$", text)]
    return {f"{name}-{names[:i].count(name)}".removesuffix("-0") for i, name in enumerate(names)}
