"""docs/api: every public name has one place there, and the pages are what the docstrings say."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest

import cupy_fp8 as fp8

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("diagnostics", "distributed", "io", "moe", "plot", "testing")
PAGES = {page.name: page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.md")}


def public_names() -> dict[str, object]:
    """The names as users write them after `fp8.`; the package's name for what a module exports too."""
    names = {name: getattr(fp8, name) for name in [*fp8.__all__, "xp", "reference"] if name not in MODULES}
    for module in MODULES:
        exported = {f"{module}.{name}": getattr(getattr(fp8, module), name)
                    for name in getattr(fp8, module).__all__}
        known = [*names.values()]
        names |= {name: value for name, value in exported.items() if all(value is not v for v in known)}
    return names


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_one_place(name):
    value, short = public_names()[name], name.rpartition(".")[2]
    if inspect.isfunction(value) or inspect.isclass(value):
        where = [page for page, text in PAGES.items()
                 if f"\n## {short}\n" in text and f"\n- [`{name}`](#" in text]
    else:
        where = [page for page, text in PAGES.items() if f"``fp8.{name}``" in text]
    assert len(where) == 1, f"{name} is on {where or 'no page'}: run python docs/write_api.py"


def test_no_page_is_about_what_is_not_public():
    headings = [heading for text in PAGES.values() for heading in re.findall(r"(?m)^## (\w+)$", text)]
    assert sorted(headings) == sorted(
        name.rpartition(".")[2] for name, value in public_names().items()
        if inspect.isfunction(value) or inspect.isclass(value))


def test_pages_are_up_to_date():
    pytest.importorskip("griffe", reason="griffe, which reads the docstrings, is not installed")
    files = runpy.run_path(str(ROOT / "docs/write_api.py"))["files"]()
    assert {path.name for path in files} == set(PAGES)
    for path, text in files.items():
        assert PAGES[path.name] == text, f"{path.name}: run python docs/write_api.py"
