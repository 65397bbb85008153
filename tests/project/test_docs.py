"""The snippets of docs/*.md print what they show.

A page with code before its first heading `##` consists of independent sections, each of which begins with
that code; any other page is one section. A snippet whose first line is a comment such as "Needs: torch, GPU
of compute capability 9.0" runs only if the modules and the GPU are available. A test runs the snippets of a
section whose needs are all among those of one of them.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cupy_fp8 import backend

ROOT = Path(__file__).resolve().parents[2]
#: layouts.md is run by tests/ops/scales/test_convert_scales.py
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "layouts.md"]

_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r">>> # Needs: (.+)")
_CAPABILITY = re.compile(r"GPU of compute capability (\d+)\.(\d)( or later)?")


class Snippet(NamedTuple):
    """Code of a page, the index of its first line, and what it needs."""

    code: str
    line: int
    needs: frozenset[str]


def snippets(text: str) -> list[Snippet]:
    found = []
    for match in _SNIPPET.finditer(text):
        needs = _NEEDS.match(match[1])
        names = needs[1].split(", ") if needs else []
        found.append(Snippet(match[1], text.count("\n", 0, match.start(1)), frozenset(names)))
    return found


def sections(text: str) -> Iterator[tuple[str, list[Snippet]]]:
    """Yield the title and all snippets of every section."""
    heads = [match.start() for match in re.finditer(r"^## ", text, re.MULTILINE)]
    every = snippets(text)
    if not heads or not snippets(text[:heads[0]]):
        yield "whole page", every
        return
    lines = [text.count("\n", 0, head) for head in heads]
    first = [s for s in every if s.line < lines[0]]
    for head, begin, end in zip(heads, lines, [*lines[1:], text.count("\n") + 1], strict=True):
        yield text[head + 3:].partition("\n")[0], [*first, *(s for s in every if begin <= s.line < end)]


def cases() -> Iterator[Any]:
    for page in PAGES:
        for title, found in sections(page.read_text(encoding="utf-8")):
            for needs in sorted({s.needs for s in found if s.needs} | {frozenset()}, key=sorted):
                if not found:
                    continue
                chosen = [s for s in found if s.needs <= needs]
                marks = [pytest.mark.gpu] if any(need.startswith("GPU") for need in needs) else []
                label = " + ".join([f"{page.name} {title}", *sorted(needs)])
                yield pytest.param(page, chosen, needs, marks=marks, id=label)


def missing(need: str) -> bool:
    """Whether this machine lacks a module, or the GPU."""
    if not need.startswith("GPU"):
        return importlib.util.find_spec(need) is None
    if backend.gpu_problem() is not None:
        return True
    if need == "GPU":
        return False
    wanted = _CAPABILITY.fullmatch(need)
    assert wanted, f"not understood: {need}"
    there, needed = int(backend.cupy().cuda.Device().compute_capability), int(wanted[1] + wanted[2])
    return there < needed if wanted[3] else there != needed


@pytest.mark.parametrize(("page", "chosen", "needs"), cases())
def test_snippets_print_what_they_show(page, chosen, needs):
    if absent := [need for need in sorted(needs) if missing(need)]:
        pytest.skip(f"needs {', '.join(absent)}")
    namespace: dict[str, Any] = {}
    report: list[str] = []
    # without verbose=False every example would be reported under `pytest -v`
    runner = doctest.DocTestRunner(verbose=False,
                                   optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for code, line, _ in chosen:
        test = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
        assert test.examples, f"{page.name}:{line}: no example"
        runner.run(test, out=report.append, clear_globs=False)
        namespace = test.globs
    assert not report, "".join(report)


COMING_FROM = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
#: the cells *here* of the tables: the second ones
CALLS = re.findall(r"^\| (?:.*?)(?<!\\) \| `(.+?)` \|", COMING_FROM, re.MULTILINE)


@pytest.fixture(scope="module")
def names_of_the_page() -> dict[str, Any]:
    code = doctest.DocTestParser().get_examples(snippets(COMING_FROM)[0].code)
    names: dict[str, Any] = {}
    for example in code:
        exec(example.source, names)
    return names


@pytest.mark.parametrize("call", dict.fromkeys(CALLS))
def test_calls_of_tables_run(call, names_of_the_page):
    assert eval(call, dict(names_of_the_page)) is not None


def test_every_row_has_a_call():
    rows = [line for line in COMING_FROM.splitlines() if line.startswith("| ") and " | here | " not in line]
    assert len(rows) == len(CALLS) > 40
    assert all(call.startswith("fp8.") for call in CALLS)


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("draw_pictures")


@pytest.mark.parametrize("name", ["scale.svg", "recipes.svg", "experts.svg"])
def test_pictures_are_up_to_date(name, pictures):
    drawn = str(pictures.PICTURES[name]())
    assert (ROOT / "docs/pictures" / name).read_text(encoding="utf-8") == drawn, "run: docs/draw_pictures.py"


@pytest.mark.full
def test_the_picture_of_losses_is_drawn(pictures, tmp_path):
    pictures.losses(tmp_path / "losses.png")
    drawn = (tmp_path / "losses.png").read_bytes()
    committed = (ROOT / "docs/pictures/losses.png").read_bytes()
    assert drawn[:24] == committed[:24]                     # the signature and the size


def test_sections_begin_with_the_first_code_of_their_page():
    text = "```python\n>>> a = 1\n```\n## One\n```python\n>>> # Needs: torch, GPU\n>>> a\n1\n```\n## Two\n"
    (one, first), (two, second) = sections(text)
    assert (one, two) == ("One", "Two")
    assert [(s.line, s.needs) for s in first] == [(1, frozenset()), (5, {"torch", "GPU"})]
    assert second == first[:1]


def test_a_page_without_such_code_is_one_section():
    (title, found), = sections("## One\n```python\n>>> a = 1\n```\n## Two\n```python\n>>> a\n1\n```\n")
    assert (title, [s.line for s in found]) == ("whole page", [2, 6])


def test_a_wrong_output_is_noticed():
    wrong = Snippet(">>> 1 + 1\n3\n", 0, frozenset())
    with pytest.raises(AssertionError, match="Expected"):
        test_snippets_print_what_they_show(PAGES[0], [wrong], frozenset())
