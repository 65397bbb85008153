"""Functions have at most 40 lines of code, as CONTRIBUTING.md says. Docstrings and comments do not count."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIGNATURE = re.compile(r"(operator.{1,2}|\w+(?:<[\w:]+>)?)\((?:[^(){};]|\([^()]*\))*\)\s*(?:const\b)?\s*"
                       r"(?::(?!:)[^{};]*)?\{")


def of_python(text):
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            end = first.end_lineno if ast.get_docstring(node) is not None else first.lineno - 1
            yield node.name, lines[node.lineno - 1:first.lineno - 1] + lines[end:node.end_lineno]


def of_cuda(text):
    """Functions from their names to the braces that end them. A lambda is part of its function."""
    text, at = re.sub(r'//.*|"(?:\\.|[^"\\\n])*"', "", text), 0
    while found := SIGNATURE.search(text, at):
        depth, at = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        yield found[1], text[found.start():at].splitlines()


def test_functions_are_short():
    paths = [path for folder in ("cupy_fp8", "kernels_cu", "tests", "docs", "benchmarks")
             for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".cu", ".cuh"}]
    found = [f"{path.relative_to(ROOT)}: {name}" for path in paths
             for name, lines in (of_python if path.suffix == ".py" else of_cuda)(path.read_text("utf-8"))
             if sum(bool(line.strip()) and line.lstrip()[0] != "#" for line in lines) > 40]
    assert not found, f"more than 40 lines: {', '.join(found)}"
