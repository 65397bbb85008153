"""The parameter structs and constants of the kernels, read from the CUDA sources, so that Python and CUDA
cannot drift apart.

A kernel takes one struct: ``entry(const __grid_constant__ SomeParams p)``. Its members are pointers,
integers, floats, other structs of these (templates too), and arrays of structs, which are passed as packed
bytes. Methods and constants are ignored.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import sources

#: Code in the `struct` module, and size, of each type of a member.
_SCALARS = {
    "i64": ("q", 8),
    "u64": ("Q", 8),
    "unsigned long long": ("Q", 8),
    "long long": ("q", 8),
    "u32": ("I", 4),
    "i32": ("i", 4),
    "int": ("i", 4),
    "float": ("f", 4),
    "u8": ("B", 1),
}
_POINTER = ("P", 8)
_TEMPLATE = 100             # characters before a struct that contain its `template <class …>`


class Member(NamedTuple):
    """A member of a struct: a scalar or an array, with its code in the `struct` module, or a struct with
    layout `inner`."""

    name: str
    offset: int
    code: str
    inner: StructLayout | None


class _Declared(NamedTuple):
    """A member whose offset is not known yet."""

    name: str
    code: str
    size: int
    align: int
    inner: StructLayout | None


class StructLayout:
    """Placement of a struct's members in memory, as in C++."""

    def __init__(self, name: str, declared: list[_Declared], align: int) -> None:
        """align: the struct's own `alignas`."""
        self.name, self.members, end = name, [], 0
        for member in declared:
            align, at = max(align, member.align), -(-end // member.align) * member.align
            self.members.append(Member(member.name, at, member.code, member.inner))
            end = at + member.size
        self.align, self.size = align, -(-end // align) * align

    def scalars(self, base: int = 0) -> Iterator[tuple[int, str]]:
        """Yield (offset, code) of every scalar, in order."""
        for member in self.members:
            if member.inner:
                yield from member.inner.scalars(base + member.offset)
            else:
                yield base + member.offset, member.code

    def offset(self, name: str) -> int:
        """Return the offset of a member."""
        return next(member.offset for member in self.members if member.name == name)

    @functools.cached_property
    def packer(self) -> struct.Struct:
        """Packer of all scalars, in order."""
        text, end = "=", 0
        for offset, code in self.scalars():
            text += "x" * (offset - end) + ("Q" if code == "P" else code)
            end = offset + struct.calcsize("=" + ("Q" if code == "P" else code))
        return struct.Struct(text + "x" * (self.size - end))

    def pack(self, **members: Any) -> bytes:
        """Return the struct's bytes, from members by name (see `values`)."""
        return self.packer.pack(*self.values(members))

    def values(self, given: Mapping[str, Any]) -> list[Any]:
        """Return all scalars in order, from members by name; the others are 0. A nested struct is a mapping
        of its own members. TypeError for values without names, and for a name that the struct does not
        have."""
        if not isinstance(given, (dict, Mapping)):
            raise TypeError(f"{self.name}: expected members by name, got {type(given).__name__}")
        found: list[Any] = []
        known = 0
        for name, _, code, inner in self.members:
            value = given.get(name)
            known += value is not None
            if inner is not None:
                found += inner.values({} if value is None else value)
            else:
                found.append(value if value is not None else b"" if code.endswith("s") else 0)
        if known < len(given) and (unknown := given.keys() - {member.name for member in self.members}):
            known_names = ", ".join(member.name for member in self.members)
            raise TypeError(f"{self.name} has no members {sorted(unknown)}; it has {known_names}")
        return found

    @functools.cached_property
    def pointers(self) -> list[int]:
        """Indices of the scalars that are pointers."""
        return [i for i, (_, code) in enumerate(self.scalars()) if code == "P"]


@functools.cache
def of_entry(source: str, entry: str) -> StructLayout:
    """Return the parameter struct of an entry point of kernels_cu/<source>.cu."""
    text = _all_text(f"{source}.cu")
    found = re.search(rf"\b{entry}\(\s*const __grid_constant__ (\w+) p\)", text)
    assert found, f"{source}.cu: no entry point {entry} with one parameter struct"
    return _layout(found[1], text)


@functools.cache
def named(source: str, name: str) -> StructLayout:
    """Return another struct that kernels_cu/<source>.cu or its headers declare: a record of a table in
    memory."""
    return _layout(name, _all_text(f"{source}.cu"))


@functools.cache
def constant(source: str, name: str) -> int:
    """Return the number that kernels_cu/<source>.cu or its headers declare as ``constexpr … name =
    number``."""
    found = set(re.findall(rf"\b{name} = (\d+)\s*[,;]", _all_text(f"{source}.cu")))
    assert len(found) == 1, f"{source}.cu declares {name} as {sorted(found) or 'no number'}"
    return int(*found)


@functools.cache
def _all_text(path: str) -> str:
    """Return a source and everything it includes, once, without comments."""
    seen: set[str] = set()

    def expand(path: str) -> str:
        if path in seen:
            return ""
        seen.add(path)
        text = (sources.root() / path).read_text(encoding="utf-8")
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        return re.sub(r'#include "([^"]+)"', lambda m: expand(f"include/{m[1]}"), text)

    return expand(path)


def _layout(name: str, text: str) -> StructLayout:
    template, _, argument = name.removesuffix(">").partition("<")
    found = re.search(rf"\bstruct (?:alignas\((\d+)\) )?{template} \{{", text)
    assert found, f"struct {template} is not declared"
    parameter = re.search(r"\btemplate <class (\w+)>\s*$", text[:found.start()][-_TEMPLATE:])
    declared: list[_Declared] = []
    for statement in _statements(text, found.end()):
        if parameter and argument:
            statement = re.sub(rf"\b{parameter[1]}\b", argument, statement)
        declared += _members(statement, text)
    return StructLayout(name, declared, int(found[1] or 1))


def _statements(text: str, start: int) -> Iterator[str]:
    """Yield the member declarations of a struct whose body begins at `start`: no methods, constants or nested
    types."""
    depth, begin, i = 0, start, start
    while True:
        c = text[i]
        if c == "{":
            depth += 1
        elif c == "}":
            if depth == 0:
                return
            depth -= 1
            if depth == 0 and text[i + 1] != ";":           # end of a method's body
                begin = i + 1
        elif c == ";" and depth == 0:
            statement = " ".join(text[begin:i].split())
            declares = not statement.startswith(("static", "using", "template", "struct", "}"))
            if "(" not in statement and declares:
                yield statement
            begin = i + 1
        i += 1


def _members(statement: str, text: str) -> Iterator[_Declared]:
    """Yield the members of one declaration: ``u8 *data, *data_t`` are two."""
    first, *more = statement.removeprefix("const ").split(",")
    head = re.match(r"(.*?)(\**\s*\w+(?:\[\w+\])?)$", first.strip())
    assert head, statement
    kind = head[1].strip()
    for declarator in (head[2], *more):
        found = re.match(r"(\**)\s*(?:const )?(\w+)(?:\[(\w+)\])?$", declarator.strip())
        assert found, statement
        stars, name, count = found.groups()
        if stars or kind.endswith("*"):
            member = _Declared(name, *_POINTER, _POINTER[1], None)
        elif kind in _SCALARS:
            code, size = _SCALARS[kind]
            member = _Declared(name, code, size, size, None)
        else:
            inner = _layout(kind, text)
            member = _Declared(name, "", inner.size, inner.align, inner)
        if count:
            size = member.size * _constant(count, text)
            member = _Declared(name, f"{size}s", size, member.align, None)
        yield member


def _constant(name: str, text: str) -> int:
    """Return the value of ``constexpr int name = …``."""
    if name.isdigit():
        return int(name)
    found = re.search(rf"\b{name} = (\d+)\b", text)
    assert found, f"constexpr {name} is not declared"
    return int(found[1])
