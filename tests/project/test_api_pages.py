"""docs/api: every public name has one place there, below a heading that other pages can link to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cupy_fp8 as fp8

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("diagnostics", "distributed", "io", "moe", "plot", "testing")
PAGES = {page.name: page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.md")}


def public_names() -> dict[str, object]:
    """Return the names as users write them after `fp8.`; also with the package's name for what a module
    exports."""
    names = {name: getattr(fp8, name) for name in [*fp8.__all__, "xp", "reference"] if name not in MODULES}
    for module in MODULES:
        exported = {f"{module}.{name}": getattr(getattr(fp8, module), name)
                    for name in getattr(fp8, module).__all__}
        known = [*names.values()]
        names |= {name: value for name, value in exported.items() if all(value is not v for v in known)}
    return names


def entry(name: str) -> str:
    """Return the entry of a function or class on a page: its heading, and where mkdocstrings puts its
    docstring."""
    return f"## {name.rpartition('.')[2]}\n\n::: cupy_fp8.{name}\n"


def problems(pages: dict[str, str]) -> Iterator[str]:
    """Yield public names that are not on exactly one page, and entries of anything else."""
    wanted = {name: inspect.isfunction(value) or inspect.isclass(value)
              for name, value in public_names().items()}
    for name, has_entry in wanted.items():
        text = entry(name) if has_entry else f"``fp8.{name}``"
        where = [page for page, content in pages.items() for _ in range(f"{content}\n".count(text))]
        if len(where) != 1:
            yield f"{name} is on {where or 'no page'}; its page of docs/api has once:\n{text}"
    for page, content in pages.items():
        for name in re.findall(r"(?m)^::: (?:cupy_fp8\.)?(.*)$", content):
            if not wanted.get(name):
                yield f"{page}: {name} is no public function or class"


def test_every_public_name_has_one_place():
    assert not [*problems(PAGES)]


def test_an_index_lists_the_pages():
    listed = re.findall(r"(?m)^\| \[[^]]+\]\((\w+\.md)\) \|", PAGES["README.md"])
    assert sorted(listed) == sorted(set(PAGES) - {"README.md"})


@pytest.mark.parametrize(("old", "new", "said"), [
    ("## matmul_nt\n\n::: cupy_fp8.matmul_nt\n", "", "matmul_nt is on no page"),
    ("::: cupy_fp8.matmul_nt\n", "::: cupy_fp8.matmul\n", "matmul.md: matmul is no public function"),
    ("## matmul_nt\n", "## product\n", "matmul_nt is on no page"),
    ("# Matrix products\n", f"# Matrix products\n\n{entry('amax_history')}", "amax_history is no public"),
    ("# Matrix products\n", f"# Matrix products\n\n{entry('quantize_mx')}", "quantize_mx is on ['"),
], ids=["left out", "misnamed", "other heading", "not public", "twice"])
def test_a_mistake_is_noticed(old, new, said):
    wrong = PAGES | {"matmul.md": PAGES["matmul.md"].replace(old, new, 1)}
    assert wrong != PAGES
    assert any(said in problem for problem in problems(wrong))
