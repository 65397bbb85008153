"""Text generated from the registered ops: the table of docs/ops.md, and the imports that make ops public."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path

from ..cases import OPS
from ..cases.registry import family_modules

_PACKAGE = Path(__file__).resolve().parents[1]
PAGE = _PACKAGE.parent / "docs/ops.md"
_WIDTH = 110
TITLES = {"matmul": "Matrix products", "quantize": "Quantisation", "convert": "Conversion",
           "scales": "Scales", "moe": "Tokens of expert layers"}


def files() -> dict[Path, str]:
    """Return the files with such parts, and their correct content."""
    parts = re.compile(r"(<!-- ops: [^>]*-->\n).*(?=<!-- end of ops -->)", re.DOTALL)
    found = {PAGE: parts.sub(lambda match: match[1] + table(), PAGE.read_text("utf-8"))}
    for path, where in ((_PACKAGE / "__init__.py", "ops."), (_PACKAGE / "reference/__init__.py", "")):
        found[path] = _with_names(path.read_text("utf-8"), where)
    return found


def write(texts: dict[Path, str]) -> Iterator[Path]:
    """Write the files whose content differs, and yield their paths."""
    for path, text in texts.items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            yield path


def table() -> str:
    """Return the ops as a table in Markdown, grouped by family."""
    lines = ["| op | what it does |", "|---|---|"]
    for family, ops in groupby(OPS.values(), key=lambda op: op.family):
        lines.append(f"| **{TITLES.get(family, family)}** | |")
        lines += [f"| {_linked(op.name, family)} | {op.summary} |" for op in ops]
    return "\n".join(lines) + "\n"


def _linked(name: str, family: str) -> str:
    """Return the op's name, as a link to its description if docs/api has a page of the family."""
    page = f"api/{family}.md"
    return f"[`{name}`]({page}#{name})" if (PAGE.parent / page).exists() else f"`{name}`"


def _with_names(text: str, where: str) -> str:
    """Return the text of an `__init__.py`, with imports of all ops from the families in `where`, and
    `__all__`."""
    homes = dict(_homes(where))
    imports = "".join(f"from .{where}{module} import {', '.join(names)}\n"
                      for module, names in sorted(homes.items()))
    names = ", ".join(f'"{name}"' for name in sorted(chain(*homes.values())))
    names = textwrap.fill(names, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    families = "|".join({module.partition(".")[0] for module in homes})
    text = re.sub(rf"(?m)(^from \.{re.escape(where)}(?:{families})\..*\n)+", lambda _: imports, text, count=1)
    listed = re.compile(r"(--write` writes .*\n__all__ \+?= \[\n).*?(?=\n\])", re.DOTALL)
    return listed.sub(lambda match: f"{match[1]}{names},", text)


def _homes(where: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that define ops of the package, and the names of these ops."""
    package = f"cupy_fp8.{where or 'reference.'}".removesuffix(".")
    for module in family_modules(package):
        names = sorted(name for name in OPS if _home(vars(module).get(name)) == module.__name__)
        if names:
            yield module.__name__.removeprefix(f"{package}."), names


def _home(function: object) -> str:
    return getattr(function, "__module__", "")
