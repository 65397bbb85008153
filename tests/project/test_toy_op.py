"""One registration is enough: the op of tests/support/toy_op.py, which no table names, appears everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import nvrtc
import pytest
import toy_op
from programs import all_programs, programs
from ptx import check_instructions
from tiers import needs_host

from cupy_fp8 import bench, cases, hostexec
from cupy_fp8.__main__ import main
from cupy_fp8.cases.covering import record
from cupy_fp8.cli import written

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def op() -> Iterator[cases.Registration]:
    """Register the toy op for the length of a test."""
    cases.register(toy_op.SCALE_ROWS)
    yield toy_op.SCALE_ROWS
    del cases.OPS["scale_rows"]


def test_list_and_readme(op, capsys):
    assert main(["list"]) == 0
    width = max(map(len, cases.OPS))
    assert f"\nother\n  {op.name:{width}}  {op.summary}\n" in capsys.readouterr().out
    assert main(["list", "--markdown"]) == 0
    rows = "| **other** | |\n| `scale_rows` | each row times its scale, as FP8 |\n"
    assert capsys.readouterr().out.endswith(rows)
    package = ROOT / "cupy_fp8" / "__init__.py"
    assert written.files()[package] == package.read_text(), "an op from outside is no name of the package"


@needs_host
@pytest.mark.parametrize("arguments", [[], ["--full"]], ids=str)
def test_selftest(op, arguments, capsys):
    assert main(["selftest", "scale_rows", "--executor", "host", *arguments]) == 0
    count = re.search(r"^PASS scale_rows +(\d+) cases", capsys.readouterr().out, re.MULTILINE)
    assert count
    assert int(count[1]) == len(list(op.cases())) or not arguments


def test_its_programs_are_those_that_it_launches(op):
    launched = {variant for one in record(op) for variant in one.variants}
    assert launched == op.variants().keys()
    assert programs(op).keys() <= set(all_programs())


@pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's wheels are for Linux")
def test_it_compiles_for_gpus(op):
    program = next(iter(programs(op)))
    compiled = nvrtc.compile_variant(*program, "sm_90", 13)
    assert (compiled.stack, compiled.spill_stores, compiled.spill_loads) == (0, 0, 0)
    check_instructions(compiled.ptx)


def test_rows_of_the_benchmark(op):
    rows = [spec for spec in bench.specs() if spec.op == "scale_rows"]
    expected = [("bf16→e4m3", (n, n), 3 * n * n + 4 * n) for n in (4096, 16384)]
    assert [(row.label, row.shape, row.traffic) for row in rows] == expected


def test_a_name_is_registered_once(op):
    with pytest.raises(ValueError, match="scale_rows: an op of this name is registered already"):
        cases.register(op)


def test_its_arguments_are_validated():
    x, scale = np.ones((2, 3), np.float32), np.ones(2, np.float32)
    for wrong, message in (((x[0], scale), "x: expected an array of two dimensions"),
                           ((x, scale[:1]), r"scale: expected shape \(2,\), got \(1,\)")):
        with pytest.raises(ValueError, match=message):
            toy_op.scale_rows(*wrong)


def in_a_process(*command: str, **env: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = os.environ | {"PYTHONPATH": path} | env
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@needs_host
def test_under_the_address_sanitizer():
    command = hostexec.sanitizer_command("asan", [sys.executable, toy_op.__file__])
    out = in_a_process(*command, **hostexec.sanitizer_env("asan"))
    assert "PASS scale_rows" in out


def passed(*arguments: str) -> list[str]:
    """Return the tests of a session that has the op, all of which must pass. `pytest -p toy_op` registers it
    before tests are collected."""
    out = in_a_process(sys.executable, "-m", "pytest", "-p", "toy_op", "-p", "no:cacheprovider", "--full",
                       "-v", *arguments)
    return [line for line in out.splitlines() if "PASSED" in line]


@pytest.mark.full
@needs_host
def test_the_generic_tests_walk_over_it(op):
    files = ("ops/test_cases.py", "toolchain/test_compile.py", "toolchain/test_structs.py",
             "tools/test_selftest.py")
    ran = passed("-k", op.name, *(f"tests/{name}" for name in files))
    assert sum("test_equals_reference[reference" in line for line in ran) == len(list(op.cases()))
    for name in files:
        assert any(name in line for line in ran), f"no test of {name} ran"


#: what a session with the op leaves out, and why
_LEFT_OUT = {
    "--deselect=tests/project/test_readme.py::test_what_is_written_from_the_ops_is_up_to_date[docs/ops.md]":
        "docs/ops.md has the package's ops alone",
    "--deselect=tests/project/test_readme.py::test_every_op_is_in_the_table_once": "the same",
    "--ignore=tests/project/test_toy_op.py": "registers the op itself",
    "--ignore=tests/project/test_notebooks.py": "runs in processes that do not know the op",
    "--ignore=tests/project/test_packaging.py": "so does this",
}


@pytest.mark.full
@needs_host
def test_what_holds_for_all_ops_holds_with_it(op):
    """Tests of one other op are left out."""
    others = " or ".join(cases.OPS.keys() - {op.name})
    ran = passed("-k", f"{op.name} or not ({others})", *_LEFT_OUT, "tests/contract", "tests/project",
                 "tests/tools/test_cli.py::test_list")
    for name in ("test_list", "test_every_op_has_a_far_call", "test_every_kernel_has_a_far_call",
                 "test_both_ends_and_the_middle_equal_the_reference[scale_rows]"):
        assert any(f"::{name} " in line for line in ran), f"{name} did not run"
