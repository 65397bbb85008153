"""Imports inside the package go one way: a module imports only from LAYERS below its own."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from cupy_fp8 import methods

PACKAGE = Path(__file__).resolve().parents[2] / "cupy_fp8"

#: The modules and subpackages of cupy_fp8 from the bottom up. Parts of one layer do not import each other.
LAYERS = (
    {"advice", "typed_array"},
    {"backend", "formats", "hostexec", "methods"},
    {"arrays", "layouts"},
    {"dlpack", "kernels", "options", "scaled_parts"},
    {"results"},
    {"directions", "grouped", "routing"},
    {"gate"},
    {"calls", "recipes"},
    {"reference"},
    {"ops"},
    {"state", "cache", "distributed"},
    {"cases", "testing", "diagnostics", "io", "moe"},
    {"distributed"},
    {"bench", "plot"},
    {"__init__"},
    {"cli"},
    {"__main__"},
)
#: only these tools may import test helpers
TESTING_USERS = {"bench", "cli", "__main__"}


class Import(NamedTuple):
    """`where` is a module or a function in it, `target` a module; both relative to the package."""

    where: str
    target: str
    in_function: bool

    @property
    def parts(self) -> tuple[str, str]:
        return self.where.split(".")[0], self.target.split(".")[0]


@functools.cache
def modules() -> dict[str, Path]:
    """Return dotted name inside the package -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imports_of(module: str, path: Path, source: str) -> Iterator[Import]:
    """Yield every import of something in the package, except those only for type checkers."""
    package = ("cupy_fp8", *path.relative_to(PACKAGE).parent.parts)
    known = modules()

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        start = ".".join(package[:len(package) + 1 - node.level]) if node.level else None
        base = ".".join(filter(None, (start, node.module)))
        for alias in node.names:
            name = f"{base}.{alias.name}"
            yield name if name.removeprefix("cupy_fp8.") in known else base

    def visit(node: ast.AST, scope: tuple[str, ...], in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                for target in targets(child):
                    root, _, inside = target.partition(".")
                    if root == "cupy_fp8":
                        yield Import(".".join((module, *scope)), inside or "__init__", in_function)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                deeper = in_function or not isinstance(child, ast.ClassDef)
                yield from visit(child, (*scope, child.name), deeper)
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                yield from visit(ast.Module(child.orelse, []), scope, in_function)
            else:
                yield from visit(child, scope, in_function)

    yield from visit(ast.parse(source), (), False)


@functools.cache
def all_imports() -> list[Import]:
    return [i for module, path in modules().items() for i in imports_of(module, path, path.read_text())]


def layer(part: str) -> int:
    found = [level for level, parts in enumerate(LAYERS) if part in parts]
    assert found, f"cupy_fp8.{part} is in no layer: add it to LAYERS"
    return found[0]


def is_downward(i: Import) -> bool:
    source, target = i.parts
    return source == target or layer(target) < layer(source)


def test_every_part_has_a_layer():
    assert {module.split(".")[0] for module in modules()} == set().union(*LAYERS)


def test_imports_go_down():
    """Imports inside functions go down too: a method that is an op finds it in cupy_fp8/methods.py."""
    assert not [i for i in all_imports() if not is_downward(i)]


def test_no_circle_of_modules():
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for i in all_imports():
        module = max((m for m in graph if f"{i.where}.".startswith(f"{m}.")), key=len)
        if i.target != module:
            graph[module].add(i.target)
    TopologicalSorter(graph).prepare()          # CycleError names the modules


def test_every_method_has_its_op():
    assert set(vars(methods.ops)) == set(methods.ops.__annotations__)


def test_only_tools_import_testing():
    for i in all_imports():
        source, target = i.parts
        assert target != "testing" or source in {"testing", *TESTING_USERS}, i


def test_hostexec_stands_alone():
    assert not [i for i in all_imports() if i.parts[0] == "hostexec" != i.parts[1]]


@pytest.mark.parametrize(("module", "source", "expected"), [
    ("arrays", "from . import backend", Import("arrays", "backend", False)),
    ("arrays", "if TYPE_CHECKING:\n    from . import testing\nelse:\n    from . import backend",
     Import("arrays", "backend", False)),
    ("arrays", "def f():\n    from .ops.convert.astype import astype",
     Import("arrays.f", "ops.convert.astype", True)),
    ("ops.scales.amax", "from ... import reference", Import("ops.scales.amax", "reference", False)),
    ("ops.scales.amax", "from . import scale", Import("ops.scales.amax", "ops.scales.scale", False)),
    ("ops.scales.amax", "class A:\n    import cupy_fp8.moe", Import("ops.scales.amax.A", "moe", False)),
    ("ops.scales.amax", "if True:\n    import cupy_fp8 as fp8", Import("ops.scales.amax", "__init__", False)),
    ("ops.scales", "from .amax import compute_amax", Import("ops.scales", "ops.scales.amax", False)),
])
def test_imports_are_found(module, source, expected):
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert list(imports_of(module, path, source)) == [expected]


def test_upward_imports_are_seen():
    assert not is_downward(Import("arrays", "ops.convert.astype", False))
    assert not is_downward(Import("kernels.kernel", "reference.numerics", False))
    assert not is_downward(Import("ops.scales.amax", "__init__", False))
    assert not is_downward(Import("diagnostics.text", "io", False))
    assert is_downward(Import("ops.scales.amax", "kernels", False))
