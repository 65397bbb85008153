"""Cases find a fault in every kernel file: in copies of the sources, planted one at a time (mutations.py)."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mutations
import pytest
from background import Background
from mutations import FAULTS, FOUND_BY_SANITIZER, SURVIVED, chosen, fault_of
from programs import WITHOUT_OP

import cupy_fp8
from cupy_fp8 import hostexec
from cupy_fp8.kernels import sources

pytestmark = [pytest.mark.full,
              pytest.mark.skipif(hostexec.available() is not None, reason=str(hostexec.available()))]
HAS_SHORT_JOBS = True
#: A process dies of these signals after an access to an address that is not its own, or an error of the
#: executor.
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


def child(name: str, cache: Path, background: Background) -> str:
    """What found the fault, or SURVIVED and what was tried."""
    mode = fault_of(name).mode
    package = str(Path(cupy_fp8.__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    env = os.environ | {"PYTHONPATH": path, "CUPY_FP8_CACHE_DIR": str(cache), "CUPY_FP8_HOST_MODE": mode}
    command = [sys.executable, mutations.__file__, name]
    if mode != "fast":
        env |= hostexec.sanitizer_env(mode)
        command = hostexec.sanitizer_command(mode, command)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        done = background.run([*command, folder], env, timeout=600)
    if done.returncode == FOUND_BY_SANITIZER or done.returncode in CRASHES:
        return done.stderr[:2000] or f"exit code {done.returncode}"
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    return str(json.loads(done.stdout))


@functools.cache
def cache_folder() -> tempfile.TemporaryDirectory[str]:
    """The folder where the session's children put what they compile: nobody needs a faulty kernel again."""
    return tempfile.TemporaryDirectory(prefix="cupy-fp8-mutations-")


def background_jobs(items: list[Any], background: Background) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The children of the selected tests."""
    for item in items:
        if hasattr(item, "callspec") and "name" in item.callspec.params:
            name = item.callspec.params["name"]
            yield name, partial(child, name, Path(cache_folder().name), background)


@pytest.mark.parametrize("name", FAULTS)
def test_cases_find_the_fault(name, background_result):
    found = background_result(name)
    assert not found.startswith(SURVIVED), (
        f"{FAULTS[name].new!r} in {name} {found}: add a case of {FAULTS[name].op} that one of these programs "
        f"serves, or name another program by `define=`")


@pytest.mark.parametrize("name", ["equivalent"])
def test_a_change_of_no_byte_survives(name, background_result):
    """So the bytes find faults, not the harness."""
    assert re.fullmatch(rf"{SURVIVED} \d\d+ cases of compute_amax .*", background_result(name))


def test_a_fault_that_nothing_launches_is_an_error():
    """It does not count as one that survived."""
    with pytest.raises(LookupError, match=r"no case of quantize_tensor launches .* OUT=e3m4"):
        next(chosen(FAULTS["quantize/tensor_current.cu"]._replace(define="OUT=e3m4")))


def test_every_kernel_file_has_a_fault():
    """Files that no op launches have none, since cases of ops find the faults."""
    kernels = {name.removesuffix(".cu") for name in FAULTS if name.endswith(".cu")}
    lacking = set(sources.names()) - WITHOUT_OP - kernels
    assert not lacking, f"{sorted(lacking)}: add a Fault to tests/support/mutations.py"
    assert kernels == set(sources.names()) - WITHOUT_OP
    assert {file for file in FAULTS if file.endswith(".cuh")} <= {
        path.relative_to(sources.root()).as_posix() for path in sources.files()}
