"""Every fault of tests/support/faults_in_*.py has its place, and every module that needs one has a fault.

The tests that plant faults are full ones. These quick ones fail when a fault must be adapted to an edit of
its source, or of the test that finds it.
"""

import ast

import pytest
from faults import REPOSITORY
from mutations import EQUIVALENT, FAULTS
from programs import WITHOUT_OP

from cupy_fp8.kernels import sources

#: folders in which every module has a fault
PACKAGES = "calls", "kernels", "ops/matmul", "io"


@pytest.mark.parametrize("fault", [*FAULTS.values(), *EQUIVALENT.values()], ids=lambda fault: fault.key)
def test_the_text_occurs_once(fault):
    text = fault.path(sources.root()).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, "choose another text in tests/support/faults_in_*.py"
    assert bool(fault.op) != bool(fault.test), "name an op whose cases find it, or tests"
    for test in fault.test.split():
        file, _, name = test.partition("::")
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name.partition("[")[0] in functions, f"{test}: there is no such test"


def test_every_kernel_file_has_a_fault():
    """Files that no op launches need none, since cases of ops find the faults."""
    kernels = {fault.file.removesuffix(".cu") for fault in FAULTS.values() if fault.file.endswith(".cu")}
    lacking = set(sources.names()) - WITHOUT_OP - kernels
    assert not lacking, f"{sorted(lacking)}: add a Fault to tests/support/faults_in_kernels.py"
    assert kernels <= set(sources.names())


def test_there_are_faults_enough():
    """A fault that an edit makes pointless is exchanged for another."""
    assert len(FAULTS) >= 120


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_fault(package):
    root = REPOSITORY / "cupy_fp8"
    modules = {path.relative_to(root).as_posix() for path in root.glob(f"{package}/*.py")}
    lacking = modules - {f"{package}/__init__.py"} - {fault.file for fault in FAULTS.values()}
    assert not lacking, f"{sorted(lacking)}: add a Fault to tests/support/faults_in_modules.py"
