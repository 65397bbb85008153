"""Docstrings as sections of the site's API pages: an extension of griffe, which mkdocstrings runs.

Docstrings are plain text. Lines indented by four spaces are formulas, `name : what it is` is an entry of a
list (a name and two spaces in tables), a line above dashes is a heading, and lines that begin with `>>>` are
an example. Names in backticks become links if a page of docs/api describes them, and so do mentions of pages,
such as docs/numerics.md section 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe

DOCS = Path(__file__).resolve().parents[1]
_ITEM = re.compile(r"([*\w.=-]+(?:, [*\w.=-]+)*)(?: :|  ) *(\S.*)")
_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_PAGE = re.compile(r"docs/([\w-]+)\.md(,?\ssection\s(\d+))?")
#: What would be a list or a heading at the beginning of a line.
_MARKUP = re.compile(r"(?m)^(?=([-+#>|=]|\d+[.)])\s)")
_TITLE = '<p><span class="doc-section-title">{}:</span></p>'

Section = griffe.DocstringSection
Item = tuple[tuple[str, ...], str]


class PlainText(griffe.Extension):
    """Parses docstrings, and shows signatures as users write them."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        described = described_names()
        for owner in _objects(pkg):
            if isinstance(owner, griffe.Function):
                _simplify(owner)
        for owner in _objects(pkg):
            if owner.docstring:
                owner.docstring.__dict__["parsed"] = sections(owner, described)


def described_names() -> dict[str, str]:
    """The anchor of every name that a page of docs/api describes, by what follows `fp8.`."""
    text = "\n".join(page.read_text("utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    return {name: f"cupy_fp8.{name}" for name in re.findall(r"(?m)^::: cupy_fp8\.(\S+)$", text)}


def _objects(owner: Any) -> Iterator[Any]:
    yield owner
    for member in owner.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _simplify(function: griffe.Function) -> None:
    """Leaves out parameters that only answer misplaced arguments, and shows the values of constants."""
    for parameter in list(function.parameters):
        if str(parameter.annotation) == "NoReturn":
            del function.parameters[parameter.name]
        elif isinstance(parameter.default, griffe.ExprName) and parameter.default.name.isupper():
            constant = function.module.members.get(parameter.default.name)
            if constant is not None:
                parameter.default = (constant.final_target if constant.is_alias else constant).value


def sections(owner: Any, described: dict[str, str]) -> list[Section]:
    text = owner.docstring.value
    return list(_sections(cleandoc(text).splitlines(), owner, lambda part: _inline(part, owner, described)))


def _sections(lines: list[str], owner: Any, inline: Callable[[str], str]) -> Iterator[Section]:
    title = ""
    while lines:
        if not lines[0].strip():
            lines.pop(0)
        elif len(lines) > 1 and re.fullmatch("-{3,}", lines[1]):
            title = lines[0]
            del lines[:2]
            if title not in ("Parameters", "Attributes"):
                yield _text(_TITLE.format(title))
        elif lines[0].startswith(">>>"):
            example = "\n".join(_take(lines, bool))
            yield _text("```pycon\n" + re.sub(r" +# doctest: .*", "", example) + "\n```")
        elif lines[0].startswith("    "):
            formula = _take(lines, lambda line: not line or line.startswith(" "))
            yield _text("```text\n" + dedent("\n".join(formula)).strip("\n") + "\n```")
        elif _ITEM.match(lines[0]):
            yield _listed(title, list(_items(lines, inline)), owner)
            title = ""
        else:
            paragraph = [lines.pop(0), *_take(lines, lambda line: bool(line) and not _ITEM.match(line))]
            yield _text(_MARKUP.sub(r"\\", inline("\n".join(paragraph))))


def _text(text: str) -> Section:
    return griffe.DocstringSectionText(text)


def _take(lines: list[str], wanted: Callable[[str], bool]) -> list[str]:
    taken = list(takewhile(wanted, lines))
    del lines[:len(taken)]
    return taken


def _items(lines: list[str], inline: Callable[[str], str]) -> Iterator[Item]:
    while lines and (found := _ITEM.match(lines[0])):
        lines.pop(0)
        rest = _take(lines, lambda line: line.startswith(" "))
        yield tuple(found[1].split(", ")), inline(" ".join([found[2], *map(str.strip, rest)]))


def _listed(title: str, items: Sequence[Item], owner: Any) -> Section:
    """Entries with the types that annotations give: parameters, attributes, or a list of anything else."""
    parameters = _parameters(owner)
    names = {name.lstrip("*") for names, _ in items for name in names}
    if title == "Parameters" or (not title and owner.is_function and names <= parameters.keys()):
        return griffe.DocstringSectionParameters([
            griffe.DocstringParameter(", ".join(names), annotation=_shared(names, parameters, "annotation"),
                                      value=_shared(names, parameters, "default"), description=text)
            for names, text in items])
    if title == "Attributes" or (owner.is_class and names <= owner.all_members.keys()):
        return griffe.DocstringSectionAttributes([
            griffe.DocstringAttribute(", ".join(names), description=text,
                                      annotation=_shared(names, owner.all_members, "annotation"))
            for names, text in items])
    return _text("\n".join(f"- {', '.join(f'`{name}`' for name in names)}: {text}" for names, text in items))


def _parameters(owner: Any) -> dict[str, Any]:
    init = owner.all_members.get("__init__") if owner.is_class else owner
    found = getattr(init, "parameters", None)
    return {parameter.name: parameter for parameter in found or ()}


def _shared(names: Sequence[str], owners: dict[str, Any], what: str) -> Any:
    """The annotation or default of several names, if it is one."""
    found = [getattr(owners.get(name.lstrip("*")), what, None) for name in names]
    return found[0] if all(str(value) == str(found[0]) for value in found) else None


def _inline(text: str, owner: Any, described: dict[str, str]) -> str:
    """Text whose stars and brackets are no markup, with links."""
    parts = _CODE.split(text)
    parts[0::2] = [_PAGE.sub(_page_link, re.sub(r"([*_<\[\]])", r"\\\1", part)) for part in parts[0::2]]
    parts[1::2] = [_linked(part, owner, described) for part in parts[1::2]]
    return "".join(parts)


def _page_link(found: re.Match[str]) -> str:
    name = f"{found[1]}.md"
    heading = re.search(rf"(?m)^## ({found[3]}\. .*)", (DOCS / name).read_text("utf-8"))
    if found[3] and not heading:
        raise ValueError(f"a docstring mentions {found[0]!r}, which {name} does not have")
    anchor = "#" + re.sub(r"[^\w -]", "", heading[1].lower()).replace(" ", "-") if heading else ""
    return f"[{found[0]}](../{name}{anchor})"


def _linked(code: str, owner: Any, described: dict[str, str]) -> str:
    """A name in backticks, as a link if it is one that a page describes, or a method of such a class."""
    name = code.strip("`").removeprefix("cupy_fp8.").removeprefix("fp8.")
    if not re.fullmatch(r"\w+(\.\w+)*", name) or name in _parameters(owner):
        return code
    described_class = owner if owner.is_class else owner.parent
    if described_class is not None and described_class.is_class:
        own = described_class.all_members.get(name.removeprefix(f"{described_class.name}."))
        if own and own.is_function and own.has_docstring:
            target = next((anchor for anchor in described.values()
                           if anchor.rpartition(".")[2] == described_class.name), None)
            return f"[{code}][{target}.{own.name}]" if target else code
    namespace = owner.path.split(".")[1] if owner.path.count(".") else ""
    for candidate in (name, f"{namespace}.{name}"):
        if candidate in described:
            return f"[{code}][{described[candidate]}]"
        of, _, method = candidate.rpartition(".")
        if of in described and method in (members := owner.package[of].all_members):
            return f"[{code}][{described[of]}{'.' + method if members[method].is_function else ''}]"
    return code
