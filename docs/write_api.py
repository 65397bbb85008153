"""Writes docs/api/ from the docstrings: `python docs/write_api.py`, with griffe, which the extras `docs` and
`test` install.

griffe reads the sources without importing them. Each public name gets a heading, its signature and its
docstring, on the page of the family or module that it comes from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from itertools import takewhile
from pathlib import Path
from textwrap import dedent, wrap
from typing import Any

import griffe

from cupy_fp8.cli.written import write

ROOT = Path(__file__).resolve().parents[1]
#: For each page its title, the modules whose public names it has, and what it is about.
PAGES = {
    "quantize": ("Quantisation", ("ops.quantize",), """
        From bfloat16, float16 or float32 to FP8 with scales: per tensor, in blocks, MX, SwiGLU, groups of
        rows, and lists of tensors. [recipes](recipes.md) describe the same work as objects, and
        [results](results.md) are what these functions return."""),
    "convert": ("Conversion", ("ops.convert",), """
        From one number format to another, from FP8 back to values, and from one direction or block of scales
        to another."""),
    "scales": ("Scales", ("ops.scales",), """
        Maxima, the scales that follow from them, and the layouts in which the scales of blocks are stored
        (docs/layouts.md)."""),
    "moe": ("Tokens of expert layers", ("ops.moe",), """
        The gate and its losses, routing, permutation, padding and offsets. Group sizes may be on the device
        alone: nothing waits for them."""),
    "experts": ("The expert layer", ("moe",), """
        ``fp8.moe``: the experts of a mixture of experts in FP8, forward and backward (docs/experts.md).
        [The gate, routing, permutation and padding](moe.md) are functions of their own."""),
    "distributed": ("Several GPUs", ("distributed",), """
        ``fp8.distributed``: experts over the GPUs of one or more hosts, a rank for each
        (docs/several-gpus.md). `ExpertParallel` sends tokens to the ranks that have their experts, and
        results back; what the experts compute between is [the expert layer](experts.md)."""),
    "matmul": ("Matrix products", ("ops.matmul",), """
        Products of FP8 matrices with their scales, dense and for groups of rows. They are the only functions
        that have an error bound instead of exact bytes (docs/numerics.md, section 10)."""),
    "recipes": ("Recipes, state and weight cache", ("recipes", "state", "cache"), """
        A recipe is a frozen description of how to quantise. It fits wherever a function takes `recipe`, and
        can be called by itself: ``fp8.MXScaling().quantize(x)``."""),
    "results": ("Results", ("results", "grouped", "routing", "gate"), """
        What the functions return: frozen containers of arrays. `scale_inv` always belongs to the data beside
        it, so that value = data * scale_inv."""),
    "arrays": ("Arrays and number formats", ("arrays", "formats", "dlpack"), """
        Typed arrays of both kinds, NumPy and CuPy, and their exchange with other libraries. ``fp8.xp`` is the
        module of new arrays: CuPy where there is a GPU, else NumPy. The dtypes ``fp8.float8_e4m3fn``,
        ``fp8.float8_e5m2``, ``fp8.float8_e8m0fnu``, ``fp8.bfloat16``, ``fp8.float16`` and ``fp8.float32`` are
        NumPy dtypes, the first four those of ml_dtypes."""),
    "io": ("Files", ("io",), """
        Archives of arrays and results, and .safetensors checkpoints with FP8 tensors. docs/files.md has
        examples, and the command that converts whole checkpoints."""),
    "diagnostics": ("Diagnostics", ("diagnostics",), """
        What quantisation changed: in a tensor, in each of its blocks, and between directions."""),
    "plot": ("Pictures", ("plot",), """
        Pictures of number formats and quantisation errors, with matplotlib (extra `plot`). Every function
        draws into `ax` (a new figure without it), returns the Axes, takes NumPy and CuPy arrays, and changes
        no global setting of matplotlib."""),
    "testing": ("Helpers for tests", ("testing",), """
        A comparison of bytes that shows the first difference, the choice of where kernels run (one of
        ``fp8.testing.EXECUTORS``), and Hypothesis strategies. ``fp8.reference`` has the definition of every
        op in NumPy, under the op's own name."""),
    "errors": ("Errors", ("backend", "kernels"), """
        Arguments are checked before anything is written: TypeError, ValueError and DeviceError say what was
        expected, what came, and what to do. What only the device knows, such as the sizes of groups, is read
        by kernels alone. They treat wrong values in a harmless way and note the error, which `device_errors`
        reports, or `check=True` raises."""),
}
#: Public modules, whose other names users write with the module's.
NAMESPACES = ("diagnostics", "distributed", "io", "moe", "plot", "testing")
#: Classes that calls make, and users do not.
_MADE = ("distributed.Local", "distributed.RankRouting", "distributed.World", "moe.Buffers", "moe.Saved")
#: An entry of a list: `name : what it is`, or a name and two spaces in a table.
_ITEM = re.compile(r"([*\w.=-]+(?:, [*\w.=-]+)*)(?: :|  ) *(\S.*)")
_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_DOC = re.compile(r"docs/([\w-]+)\.md(,?\ssection\s(\d+))?")
#: The space before what would be markup at the beginning of a line.
_MARKUP = re.compile(r" (?=([-+*#>|=]+|\d+[.)])( |$))")
_NOTE = "<!-- Written from the docstrings: python docs/write_api.py -->"


@dataclass(frozen=True)
class Place:
    """Where a public name is described, and the class or function that griffe has found."""

    page: str
    anchor: str
    target: Any


Places = dict[str, Place]
Inline = Callable[[str], str]


def files() -> dict[Path, str]:
    """The pages, and what they should hold."""
    places = find_places(griffe.load("cupy_fp8", search_paths=[ROOT], resolve_aliases=True))
    found = {page: _page(page, places) for page in PAGES} | {"README": _index(places)}
    return {ROOT / f"docs/api/{page}.md": "\n\n".join([_NOTE, *map(_filled, blocks)]) + "\n"
            for page, blocks in found.items()}


def _filled(block: str) -> str:
    """A paragraph, or the entries of a list, in lines of at most 110 columns."""
    if block.startswith(("```", "#")):
        return block
    if block.startswith("- "):
        return "\n".join(_lines_of(entry, "  ") for entry in block.splitlines())
    return _lines_of(block, "")


def _lines_of(text: str, indent: str) -> str:
    together = _MARKUP.sub("\0", " ".join(text.splitlines()))
    return "\n".join(wrap(together, 110, subsequent_indent=indent, break_on_hyphens=False,
                          break_long_words=False)).replace("\0", " ")


def find_places(package: Any) -> Places:
    """Each public class and function, by the name that users write after `fp8.`."""
    places: Places = {}
    for prefix, owner in [("", package), *((f"{name}.", package[name]) for name in NAMESPACES)]:
        for name in owner.exports:
            target = owner[name].final_target if owner[name].is_alias else owner[name]
            known = [place.target for place in places.values()]
            if (target.is_class or target.is_function) and target not in known:
                page = _page_of(target.path.removeprefix("cupy_fp8."))
                places[prefix + name] = Place(page, _new_anchor(name, page, places), target)
    return places


def _page_of(path: str) -> str:
    return next(page for page, (_, modules, _) in PAGES.items()
                if path.startswith(tuple(f"{module}." for module in modules)))


def _new_anchor(heading: str, page: str, places: Places) -> str:
    """The anchor that code hosts give to a heading; a number tells equal ones of a page apart."""
    anchor = slug(heading)
    earlier = sum(place.page == page and slug(place.target.name) == anchor for place in places.values())
    return f"{anchor}-{earlier}" if earlier else anchor


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _index(places: Places) -> Iterator[str]:
    yield "# Reference of all public names"
    yield ("The pages are written from the docstrings, which `help(fp8.quantize_mx)` shows too. `fp8` is the "
           "package: `import cupy_fp8 as fp8`.")
    for page, (title, _, _) in PAGES.items():
        names = (f"[`{name}`]({page}.md#{place.anchor})" for name, place in places.items()
                 if place.page == page)
        yield f"**[{title}]({page}.md)**: {', '.join(names)}"


def _page(page: str, places: Places) -> Iterator[str]:
    title, _, about = PAGES[page]
    mine = {name: place for name, place in places.items() if place.page == page}

    def inline_in(owner: Any) -> Inline:
        return lambda text: _inline(text, page, places, owner)

    yield f"# {title}"
    yield from _markdown(about, inline_in(None))
    yield "\n".join(f"- [`{name}`](#{place.anchor}): {_summary(place.target)}"
                    for name, place in mine.items())
    for name, place in mine.items():
        inline = inline_in(place.target if place.target.is_class else None)
        yield from _entry(f"## {place.target.name}", f"fp8.{name}", place.target, inline)
        if place.target.is_class:
            yield from _members(place.target, inline)


def _summary(target: Any) -> str:
    return _in_one_line([next(_markdown(target.docstring.value, _escaped))])


def _in_one_line(blocks: Iterable[str]) -> str:
    return " ".join(" ".join(blocks).split())


def _entry(heading: str, name: str, target: Any, inline: Inline) -> Iterator[str]:
    yield heading
    if target.is_function or (target.parameters and name.removeprefix("fp8.") not in _MADE):
        yield f"```python\n{_call(name, target)}\n```"
    yield from _markdown(target.docstring.value, inline)


def _members(target: Any, inline: Inline) -> Iterator[str]:
    """What a class has, inherited members too: properties as a list, methods with headings of their own."""
    shown = [member for name, member in target.all_members.items()
             if not name.startswith("_") and member.has_docstring]
    properties = [member for member in shown if member.is_attribute]
    if properties:
        yield "**Properties**"
        yield "\n".join(f"- `{member.name}`: {_in_one_line(_markdown(member.docstring.value, inline))}"
                        for member in properties)
    for member in shown:
        if member.is_function:
            name = f"{target.name}.{member.name}"
            yield from _entry(f"### {name}", name, member, inline)


def _call(name: str, target: Any) -> str:
    """The signature without annotations, whose types the docstrings say in words."""
    shown: list[str] = []
    for parameter in target.parameters:
        kind = parameter.kind.value
        if str(parameter.annotation) == "NoReturn":             # it answers misplaced arguments alone
            continue
        if kind == "keyword-only" and not any(text.startswith("*") for text in shown):
            shown.append("*")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        given = parameter.default is not None and not stars
        default = f"={_value(parameter.default, target)}" if given else ""
        if parameter.name not in ("self", "cls"):
            shown.append(f"{stars}{parameter.name}{default}")
    text = ", ".join(entry.replace(" ", "\0") for entry in shown)            # lines break between arguments
    lines = wrap(f"{name}({text})", 100, subsequent_indent=" " * len(f"{name}("), break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _value(default: Any, target: Any) -> str:
    """What a signature shows: of a constant in capitals its value."""
    if isinstance(default, griffe.ExprName) and default.name.isupper():
        constant = target.module[default.name]
        return str((constant.final_target if constant.is_alias else constant).value)
    return str(default)


def _markdown(docstring: str, inline: Inline) -> Iterator[str]:
    """The blocks of a docstring: headings with a dashed line below, formulas (indented), examples, lists of
    `name : what it is`, and paragraphs."""
    lines = cleandoc(docstring).splitlines()
    while lines:
        if not lines[0].strip():
            lines.pop(0)
        elif len(lines) > 1 and re.fullmatch("-{3,}", lines[1]):
            yield f"**{lines[0]}**"
            del lines[:2]
        elif lines[0].startswith(">>>"):
            example = "\n".join(_take(lines, bool))
            yield "```pycon\n" + re.sub(r" +# doctest: .*", "", example) + "\n```"
        elif lines[0].startswith("    "):
            formula = _take(lines, lambda line: not line or line.startswith(" "))
            yield "```text\n" + dedent("\n".join(formula)).strip("\n") + "\n```"
        elif _ITEM.match(lines[0]):
            yield "\n".join(_items(lines, inline))
        else:
            paragraph = [lines.pop(0), *_take(lines, lambda line: bool(line) and not _ITEM.match(line))]
            yield inline("\n".join(paragraph))


def _take(lines: list[str], wanted: Callable[[str], bool]) -> list[str]:
    taken = list(takewhile(wanted, lines))
    del lines[:len(taken)]
    return taken


def _items(lines: list[str], inline: Inline) -> Iterator[str]:
    while lines and (found := _ITEM.match(lines[0])):
        lines.pop(0)
        rest = _take(lines, lambda line: line.startswith(" "))
        names = ", ".join(f"`{name}`" for name in found[1].split(", "))
        yield f"- {names}: {inline(' '.join([found[2], *map(str.strip, rest)]))}"


def _escaped(text: str) -> str:
    """Text whose stars and brackets are no markup."""
    parts = _CODE.split(text)
    parts[0::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[0::2]]
    return "".join(parts)


def _inline(text: str, page: str, places: Places, owner: Any) -> str:
    """Escaped text with links to public names, to methods of the class it describes, and to pages of docs/.
    """
    parts = _CODE.split(text)
    parts[0::2] = [_DOC.sub(_doc_link, _escaped(part)) for part in parts[0::2]]
    parts[1::2] = [_linked(part, page, places, owner) for part in parts[1::2]]
    return "".join(parts)


def _doc_link(found: re.Match[str]) -> str:
    name = f"{found[1]}.md"
    heading = re.search(rf"(?m)^## ({found[3]}\. .*)", (ROOT / "docs" / name).read_text("utf-8"))
    return f"[{found[0]}](../{name}{'#' + slug(heading[1]) if heading else ''})"


def _linked(code: str, page: str, places: Places, described: Any) -> str:
    """A name in backticks, as a link if it is a public one or a method."""
    written = code.strip("`")
    name = written.removeprefix("cupy_fp8.").removeprefix("fp8.")
    own = described and described.all_members.get(written.removeprefix(f"{described.name}."))
    if own and own.is_function and own.has_docstring:
        return f"[{code}](#{slug(f'{described.name}.{own.name}')})"
    owner, _, method = name.rpartition(".")
    known = places.get(name) or places.get(f"{page}.{name}")
    if known:
        return f"[{code}]({known.page}.md#{known.anchor})"
    if owner in places and method in (members := places[owner].target.all_members):
        anchor = slug(name) if members[method].is_function else places[owner].anchor
        return f"[{code}]({places[owner].page}.md#{anchor})"
    return code


if __name__ == "__main__":
    for path in write(files()):
        print(f"written: {path}")
