"""Cases and tests find faults in kernels and in Python modules, planted one at a time (mutations.py)."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mutations
import pytest
from background import Background
from mutations import EQUIVALENT, FAULTS, FOUND_BY_SANITIZER, SURVIVED, chosen, fault_of

import cupy_fp8
from cupy_fp8 import hostexec

pytestmark = [pytest.mark.full,
              pytest.mark.skipif(hostexec.available() is not None, reason=str(hostexec.available()))]
HAS_SHORT_JOBS = True
#: Seconds for a child, which takes a tenth of them. A fault may overwrite what launches on the CPU wait for.
PATIENCE = 400
#: Signals that end a process after an invalid access, or an error of the executor.
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


def child(name: str, cache: Path, background: Background) -> str:
    """Return what found the fault, or SURVIVED and what was tried."""
    mode = fault_of(name).mode
    package = str(Path(cupy_fp8.__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    env = os.environ | {"PYTHONPATH": path, "CUPY_FP8_CACHE_DIR": str(cache), "CUPY_FP8_HOST_MODE": mode}
    command = [sys.executable, mutations.__file__, name]
    if mode != "fast":
        env |= hostexec.sanitizer_env(mode)
        command = hostexec.sanitizer_command(mode, command)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        try:
            done = background.run([*command, folder], env, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return f"no end within {PATIENCE} s"
    if done.returncode == FOUND_BY_SANITIZER or done.returncode in CRASHES:
        return done.stderr[:2000] or f"exit code {done.returncode}"
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    return str(json.loads(done.stdout))


@functools.cache
def cache_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder where the session's children put what they compile: faulty kernels are never
    reused."""
    return tempfile.TemporaryDirectory(prefix="cupy-fp8-mutations-")


def background_jobs(items: list[Any], background: Background) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the children of the selected tests."""
    for item in items:
        if hasattr(item, "callspec") and "name" in item.callspec.params:
            name = item.callspec.params["name"]
            yield name, partial(child, name, Path(cache_folder().name), background)


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found(name, background_result):
    fault, found = FAULTS[name], background_result(name)
    advice = f"add an assertion to {fault.test}" if fault.test else (
        f"add a case of {fault.op} that one of these programs serves, or name another program by `define=`")
    assert not found.startswith(SURVIVED), f"{fault.new!r} in {name} {found}: {advice}"


@pytest.mark.parametrize("name", EQUIVALENT)
def test_a_change_of_nothing_survives(name, background_result):
    """So faults are found by bytes and tests, not by the harness."""
    assert re.match(rf"{SURVIVED} \d\d+ (cases of compute_amax|tests of )", background_result(name))


def test_a_child_that_does_not_end_has_found_the_fault(tmp_path):
    class Hanging(Background):
        def run(self, command, env, timeout):
            raise subprocess.TimeoutExpired(command, timeout)

    assert child("moe/permute.cu", tmp_path, Hanging()) == f"no end within {PATIENCE} s"


def test_a_fault_that_nothing_launches_is_an_error():
    """It does not count as a survivor."""
    with pytest.raises(LookupError, match=r"no case of quantize_tensor launches .* OUT=e3m4"):
        next(chosen(FAULTS["quantize/tensor_current.cu"]._replace(define="OUT=e3m4")))
