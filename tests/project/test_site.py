"""The documentation as a site: it builds, its links work, and it loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", ROOT / "notebooks/README.md",
         *sorted((ROOT / "docs").rglob("*.md"))]
#: in notebooks: comments in the copy button's source
_NO_LOADS = ("https://github.com/umdjs/", "https://github.com/nodejs/")


class Page(HTMLParser):
    """The anchors of a page, and (tag, address) of everything that it links to or loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.anchors.append(given["id"] or "")
        self.links += [(tag, given[name] or "") for name in ("href", "src") if name in given]


def problems(site: Path) -> Iterator[str]:
    """Yield broken links, invalid addresses, and what pages load from elsewhere."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site)
        for tag, link in page.links:
            address = urlsplit(link)
            if address.scheme == "data":
                continue
            if address.scheme or address.netloc:
                if tag != "a":
                    yield f"{name}: loads {link}"
                elif not re.fullmatch(r"https://[\w.-]+\.\w+(/\S*)?", link):
                    yield f"{name}: no address: {link}"
                continue
            start = site if address.path.startswith("/") else path.parent
            target = (start / unquote(address.path).lstrip("/")).resolve() if address.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{name}: leads nowhere: {link}"
            elif address.fragment and target in pages and address.fragment not in pages[target].anchors:
                yield f"{name}: no such heading: {link}"
        loaded = re.findall(r"https?://[^\s\"'`<>()]+\.(?:m?js|css|woff2?)\b", path.read_text("utf-8"))
        yield from (f"{name}: loads {link}" for link in loaded if not link.startswith(_NO_LOADS))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, with a Python that may be another one: the extra `docs` brings many packages."""
    python = os.environ.get("CUPY_FP8_DOCS_PYTHON", sys.executable)
    needed = "import material, mike, mkdocs, mkdocs_jupyter, mkdocstrings_handlers.python, ruff"
    if subprocess.run([python, "-c", needed], capture_output=True).returncode:
        pytest.skip("needs the packages of the extra `docs` (CUPY_FP8_DOCS_PYTHON)")
    folder = tmp_path_factory.mktemp("site")
    local = {"CUPY_FP8_SITE_URL": "", "CUPY_FP8_REPOSITORY_URL": "", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
                          env=os.environ | local, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.full
def test_the_site_builds_and_every_link_leads_somewhere(site):
    assert not [*problems(site)]
    assert len([*site.rglob("index.html")]) >= len(PAGES) + len([*ROOT.glob("notebooks/*.ipynb")])
    described = {path: Page(path) for path in site.glob("api/*/index.html")}
    for source in (ROOT / "docs/api").glob("[a-z]*.md"):
        anchors = Counter(described[site / "api" / source.stem / "index.html"].anchors)
        names = re.findall(r"(?m)^::: (\S+)$", source.read_text("utf-8"))
        assert names, source
        assert [name for name in names if anchors[name] != 1] == [], source
    text = (site / "api/quantize/index.html").read_text("utf-8")
    assert "FP8DType" in text                                       # types of signatures
    assert 'href="../../numerics/#2-mx-blocks-of-32-elements-with-e8m0-scales"' in text
    assert "image/png;base64" in (site / "notebooks/01_formats/index.html").read_text("utf-8")


@pytest.mark.parametrize(("body", "said"), [
    ('<a href="other/">', "leads nowhere"),
    ('<a href="#absent">', "no such heading"),
    ('<a href="http://example">', "no address"),
    ('<script src="https://cdn.example.com/a.js">', "loads"),
    ('<img src="https://example.com/a.png">', "loads"),
    ("<script>import('https://cdn.example.com/a.mjs')</script>", "loads"),
    ('<h1 id="here"></h1><a href="#here"><a href="https://example.com/x"><a href="./">', None),
])
def test_a_wrong_link_is_noticed(body, said, tmp_path):
    (tmp_path / "index.html").write_text(body)
    found = {*problems(tmp_path)}
    assert len(found) == (said is not None)
    assert all(said in problem for problem in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paragraphs_in_lists_are_indented_by_four_spaces(page):
    """Python-Markdown ends a list at a paragraph or table with less indentation, code hosts do not."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text("utf-8"))
    assert not re.findall(r"\n\n {1,3}\S.*", text)


def test_the_navigation_has_every_notebook():
    text = (ROOT / "mkdocs.yml").read_text("utf-8") + (ROOT / "notebooks/README.md").read_text("utf-8")
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert text.count(f"{notebook.name}") == 2, notebook.name
