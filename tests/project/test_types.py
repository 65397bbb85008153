"""Types that type checkers infer for calls: no public result is Any, and users' lines get useful types.

tests/project/test_packaging.py checks what mypy says of users' mistakes.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import cupy_fp8 as fp8

MODULES = (fp8, fp8.diagnostics, fp8.distributed, fp8.io, fp8.moe, fp8.plot, fp8.testing)
#: Functions whose result is known only once a file or a line of JSON is read, like json.load and numpy.load:
#: with unions every use of a value by its name would need an isinstance.
KNOWN_WHEN_READ = {"load", "load_safetensors", "log_step"}
#: any dtype, or an array of any dtype
_FINE = re.compile(r"np\.ndarray\[Any, np\.dtype\[Any\]\]|np\.dtype\[Any\]")


def public() -> dict[str, set[str]]:
    """Return the source file of each public class and function, with their names."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType) or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            for each in value.__mro__ if inspect.isclass(value) else (inspect.unwrap(value),):
                if each.__module__.startswith("cupy_fp8."):
                    path = sys.modules[each.__module__].__file__
                    assert path is not None
                    found.setdefault(path, set()).add(each.__name__)
    return found


def anys(source: str, names: set[str]) -> Iterator[str]:
    """Yield results and attributes that are or contain Any, for these functions and classes: overloads,
    public methods and properties, fields."""
    def unclear(annotation: ast.expr | None) -> bool:
        return annotation is None or bool(re.search(r"\bAny\b", _FINE.sub("", ast.unparse(annotation))))

    def of_function(node: ast.FunctionDef, name: str) -> Iterator[str]:
        if unclear(node.returns):
            yield f"{name}, line {node.lineno}"

    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield from of_function(node, node.name)
        if isinstance(node, ast.ClassDef) and node.name in names:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and (not each.name.startswith("_")
                                                          or each.name in ("__getitem__", "__iter__")):
                    yield from of_function(each, f"{node.name}.{each.name}")
                if (isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                        and not each.target.id.startswith("_") and unclear(each.annotation)):
                    yield f"{node.name}.{each.target.id}, line {each.lineno}"


def test_no_public_result_is_any():
    files = public()
    assert len(files) > 40
    found = [f"{path}: {place}" for path, names in files.items()
             for place in anys(Path(path).read_text("utf-8"), names)]
    wrong = [each for each in found if each.split(": ")[1].split(",")[0] not in KNOWN_WHEN_READ]
    assert not wrong, "\n".join(wrong)
    assert len(found) == len(KNOWN_WHEN_READ), "an exception is none any more"


def test_what_is_any_is_found():
    assert [place.partition(",")[0] for place in anys("""
def result() -> Any: ...
def inside() -> tuple[Any, TypedArray | None]: ...
def missing(): ...
@overload
def one(x: Scaled) -> Scaled: ...
@overload
def one(x: Array) -> Any: ...
def fine(x: Any) -> np.ndarray[Any, np.dtype[Any]]: ...
def private() -> Any: ...
class Result:
    kind: np.dtype[Any]
    rows: Any = None
    _own: Any
    @property
    def shape(self) -> Any: ...
    def _hidden(self) -> Any: ...
    def __getitem__(self, index: int) -> Any: ...
class Other:
    rows: Any
""", {"result", "inside", "missing", "one", "fine", "Result"})] == [
        "result", "inside", "missing", "one", "Result.rows", "Result.shape",
        "Result.__getitem__"]


USES = """
import numpy as np

import cupy_fp8 as fp8

x, sizes, w = np.ones((256, 128), np.float32), [100, 156], np.ones((2, 64, 128), np.float32)
recipe = fp8.BlockScaling()
routing = fp8.route(np.zeros((256, 2), np.int64), num_experts=2)
probs = np.ones((256, 2), np.float32)
q = fp8.quantize(x, recipe)
reveal_type(q)  # Quantized
reveal_type(fp8.permute(x, routing))  # TypedArray
reveal_type(fp8.permute(q, routing))  # Scaled
reveal_type(fp8.permute(q.rowwise, routing, probs=probs))  # tuple[Scaled, TypedArray]
reveal_type(fp8.permute_transpose(q, routing))  # Quantized
reveal_type(fp8.permute_transpose(q, routing, probs=probs))  # tuple[Quantized, TypedArray]
reveal_type(fp8.quantize_permute(x, routing))  # Scaled
reveal_type(fp8.unpermute(fp8.permute(x, routing), routing))  # TypedArray
reveal_type(fp8.permute_backward(fp8.permute(x, routing), routing))  # TypedArray
reveal_type(fp8.pad_groups(x, sizes, align=16))  # TypedArray
reveal_type(fp8.pad_groups(q, sizes, align=16))  # Scaled
reveal_type(fp8.unpad_groups(fp8.pad_groups(q, sizes, align=16), sizes, align=16))  # Scaled
reveal_type(fp8.sort_chunks(x, sizes, [1, 0]))  # TypedArray
reveal_type(fp8.sort_chunks(q.rowwise, sizes, [1, 0]))  # Scaled
reveal_type(fp8.norm_quantize(x, x[0], recipe))  # Quantized
reveal_type(fp8.norm_quantize(x, x[0], recipe, return_rstd=True))  # tuple[Quantized, TypedArray]
normed = fp8.norm_quantize(x, x[0], recipe, residual=x, return_residual=True, return_rstd=True)
reveal_type(normed)  # tuple[Quantized, TypedArray, TypedArray]
reveal_type(fp8.norm_backward_quantize(x, x, x[0], recipe))  # tuple[Quantized, TypedArray]
reveal_type(fp8.norm_backward_quantize(x, x, x[0], None))  # tuple[TypedArray, TypedArray]
of_layer = fp8.norm_backward_quantize(x, x, x[0], recipe, kind="layer")
reveal_type(of_layer)  # tuple[Quantized, TypedArray, TypedArray]
reveal_type(fp8.activation_backward_quantize(x, x, recipe))  # Quantized
layer = fp8.moe.Experts(w, np.ones((2, 128, 32), np.float32))
y, saved = layer.forward(x, routing, probs)
reveal_type(y)  # TypedArray
dx, dprobs, d_up, d_down = layer.backward(x, saved)
reveal_type(dprobs)  # TypedArray | None
biased = fp8.moe.Experts(w, w, bias=(x, x)).backward(x, saved)
reveal_type(biased[4])  # tuple[TypedArray | None, TypedArray | None]
reveal_type(fp8.matmul_nt(q, q))  # TypedArray
grouped = fp8.group_quantize(x, sizes, recipe)
reveal_type(grouped[0])  # Quantized
reveal_type(next(iter(fp8.Grouped.wrap(x, sizes))))  # TypedArray
def of_any_group(given: fp8.Grouped) -> int:
    return len(given)
of_any_group(grouped)
def of_any_layer(given: fp8.moe.Experts) -> fp8.Quantized:
    return given.up
of_any_layer(layer)
"""


@pytest.mark.full
def test_mypy_infers_what_calls_return(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "uses.py").write_text(USES)
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "uses.py"],
                          cwd=tmp_path, capture_output=True, text=True)
    revealed = re.findall(r'^uses\.py:(\d+): note: Revealed type is "(.*)"$', done.stdout, re.MULTILINE)
    found = [(int(line), re.sub(r"\b(?:\w+\.)+(?=\w)|builtins\.", "", kind)) for line, kind in revealed]
    wanted = [(number, line.split("  # ")[1]) for number, line in enumerate(USES.splitlines(), 1)
              if line.startswith("reveal_type")]
    assert found == wanted, done.stdout
    assert "error" not in done.stdout, done.stdout
