"""Faults planted in copies of the CUDA sources, or in Python modules as they are imported, one at a time, to
check that cases or tests find them.

This file is also the child process that plants one: `python mutations.py KEY FOLDER` runs cases of an op on
the CPU, or tests, with the fault, and has the folder to itself. The child prints what found the fault: the
first case whose bytes differ, an error of the executor, or the first test that failed. A sanitizer ends the
child.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults import REPOSITORY, Fault
from faults_in_files import FILE_FAULTS
from faults_in_fused import FUSED_FAULTS
from faults_in_kernels import KERNEL_FAULTS
from faults_in_layers import LAYER_FAULTS
from faults_in_modules import MODULE_FAULTS
from faults_in_norms import NORM_FAULTS

if TYPE_CHECKING:
    from cupy_fp8.cases.covering import Recorded

SURVIVED = "survived"        # begins the outcome if nothing has found the fault
FOUND_BY_SANITIZER = 66

_ALL = (*KERNEL_FAULTS, *FUSED_FAULTS, *NORM_FAULTS, *LAYER_FAULTS, *MODULE_FAULTS, *FILE_FAULTS)
FAULTS = {fault.key: fault for fault in _ALL}
assert len(FAULTS) == len(_ALL), "two faults have the same file and name"
#: The order of these operands changes no byte, nor anything else.
EQUIVALENT = {
    "equivalent kernel": Fault("scales/amax.cu", "blockIdx.x * kBlock;", "kBlock * blockIdx.x;",
                               "compute_amax"),
    "equivalent module": Fault("calls/memory.py", "max(read_end, end)", "max(end, read_end)",
                               test="tests/contract/test_ranges.py tests/contract/test_same_memory.py"),
}


def fault_of(key: str) -> Fault:
    return EQUIVALENT[key] if key in EQUIVALENT else FAULTS[key]


# ---- planting ----
class Planted(MetaPathFinder):
    """Imports the module with the fault, which must not have been imported before."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        assert fault.module not in sys.modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._fault.module:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        spec.loader.fault = self._fault
        return spec


class _Loader(SourceFileLoader):
    fault: Fault

    def get_code(self, fullname: str) -> Any:
        """Compile the text; the cached bytecode is the original's."""
        text = self.fault.planted_in(Path(self.path).read_text(encoding="utf-8"))
        return compile(text, self.path, "exec", dont_inherit=True)


@contextmanager
def planted_kernels(fault: Fault, folder: Path) -> Iterator[None]:
    """Use the kernels of a copy of kernels_cu in the folder, with the fault."""
    import shutil
    from unittest import mock

    from cupy_fp8.kernels import sources

    root = folder / "kernels_cu"
    shutil.copytree(sources.root(), root)
    file = fault.path(root)
    file.write_text(fault.planted_in(file.read_text(encoding="utf-8")), encoding="utf-8")
    with mock.patch.object(sources, "root", return_value=root):
        yield


# ---- what finds the fault ----
def chosen(fault: Fault) -> Iterator[Recorded]:
    """Return the cases that cover what the op launches of the source, small ones first; then all other cases
    that need no other program. Cases that a faulty module refuses come before those. LookupError if no case
    launches a program with the fault."""
    from cupy_fp8.cases import OPS
    from cupy_fp8.cases.covering import covering_of, record, served_by

    cases = [case for case in OPS[fault.op].cases() if fault.case in str(case)]
    recorded = [one for one in record(OPS[fault.op], cases=cases) if one.size]
    if fault.module:
        yield from (one for one in recorded if one.raised)
    recorded = [one for one in recorded if not one.raised and any(map(fault.in_program, one.variants))]
    if not recorded:
        raise LookupError(f"{fault.file}: no case of {fault.op} launches a program of "
                          f"{fault.source or 'any kernel'} {fault.define}: name another op, kernel or define"
                          f"{fault.case and f', or cases without {fault.case}'}")
    covers = sorted(covering_of(recorded), key=lambda one: (len(one.variants), one.size))
    yield from covers
    yield from (one for one in served_by(covers, recorded) if one not in covers)


def found_by_cases(fault: Fault) -> str:
    """Return which case finds the planted fault, and how; or SURVIVED, with the programs with the fault and
    the number of cases."""
    from cupy_fp8 import testing
    from cupy_fp8.cases import OPS
    from cupy_fp8.cli.selftest import check

    tried, programs = 0, set()
    with testing.executor("host") as run:
        for one in chosen(fault):
            tried += 1
            programs |= {_shown(variant) for variant in one.variants if fault.in_program(variant)}
            for variant in one.variants:
                variant.compile(None)               # a compile error is no finding
            try:
                check(OPS[fault.op], one.case, run)
            except Exception as error:              # a fault in a module may raise anything
                return f"{one.case}: {error}"
    return f"{SURVIVED} {tried} cases of {'; '.join(sorted(programs))}"


def _shown(variant: Any) -> str:
    return " ".join((variant.kernel.entry, *(f"{name}={value}" for name, value in variant.defines)))


class _Seen:
    """A plugin that counts the passed tests and keeps the message of the first failure. case: only tests with
    it in their names run."""

    def __init__(self, case: str) -> None:
        self.passed, self.failed, self._case = 0, "", case

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self._case in item.name]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.passed and report.when == "call"
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid}: {report.longreprtext[-2000:]}"


def found_by_tests(fault: Fault) -> str:
    """Return which test finds the planted fault, and how; or SURVIVED, and how many did not. RuntimeError if
    they cannot be collected, which is no finding."""
    import pytest

    seen = _Seen(fault.case)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-q", "-x", "-p", "no:cacheprovider", "--processes", "1", "--rootdir", str(REPOSITORY),
               "-c", str(REPOSITORY / "pyproject.toml")]
    with redirect_stdout(sys.stderr):
        code = pytest.main([*options, *(f"{REPOSITORY}/{test}" for test in fault.test.split())], [seen])
    if code == pytest.ExitCode.TESTS_FAILED and seen.failed:
        return seen.failed
    if code != pytest.ExitCode.OK or not seen.passed:
        raise RuntimeError(f"{fault.test}: pytest ended with {code!r}, and {seen.passed} tests passed")
    return f"{SURVIVED} {seen.passed} tests of {fault.test}"


def finding(fault: Fault, folder: Path) -> str:
    """Plant a fault and return what finds it; or SURVIVED, and what was tried."""
    if fault.module:
        sys.meta_path.insert(0, Planted(fault))
    with nullcontext() if fault.module else planted_kernels(fault, folder):
        return found_by_tests(fault) if fault.test else found_by_cases(fault)


def main(key: str, folder: str) -> None:
    print(json.dumps(finding(fault_of(key), Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
