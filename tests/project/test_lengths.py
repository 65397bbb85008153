"""Functions have at most 40 lines of code, without docstrings and comments, and files at most 400 lines."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES_OF_FUNCTION, LINES_OF_FILE = 40, 400
FOLDERS = ("cupy_fp8", "kernels_cu", "tests", "docs", "benchmarks", "examples")
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}
SIGNATURE = re.compile(r"(operator.{1,2}|\w+(?:<[\w:]+>)?)\((?:[^(){};]|\([^()]*\))*\)\s*(?:const\b)?\s*"
                       r"(?::(?!:)[^{};]*)?\{")


def of_python(text):
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            end = first.end_lineno if ast.get_docstring(node) is not None else first.lineno - 1
            yield node.name, lines[node.lineno - 1:first.lineno - 1] + lines[end:node.end_lineno]


def of_cpp(text):
    """Yield functions from their names to the braces that end them. A lambda is part of its function."""
    text, at = re.sub(r'//.*|"(?:\\.|[^"\\\n])*"', "", text), 0
    while found := SIGNATURE.search(text, at):
        depth, at = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        yield found[1], text[found.start():at].splitlines()


def texts():
    """Yield the name and contents of every file with code."""
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix in SUFFIXES:
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")


def lengths_of_functions(name, text):
    for function, lines in (of_python if name.endswith(".py") else of_cpp)(text):
        yield function, sum(bool(line.strip()) and line.lstrip()[0] != "#" for line in lines)


def test_functions_are_short():
    found = [f"{name}: {function}" for name, text in texts()
             for function, length in lengths_of_functions(name, text) if length > LINES_OF_FUNCTION]
    assert not found, f"more than {LINES_OF_FUNCTION} lines: {', '.join(found)}"


def test_files_are_short():
    found = [f"{name}: {length}" for name, text in texts()
             if (length := len(text.splitlines())) > LINES_OF_FILE]
    assert not found, f"more than {LINES_OF_FILE} lines: {', '.join(found)}"
