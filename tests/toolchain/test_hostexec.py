"""The host executor finds the errors that it is designed to find.

Every kernel in planted/ exists with and without a bug: the mode meant to catch the bug must catch it, and
name the line; without the bug it must compute the right bytes in every mode and order.
"""

import json
import os
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

PLANTED = Path(__file__).resolve().parent / "planted"
sys.path.insert(0, str(PLANTED))
import planted_cases  # noqa: E402
from planted_cases import CASES  # noqa: E402

from cupy_fp8 import hostexec  # noqa: E402
from cupy_fp8.hostexec import executor  # noqa: E402

pytestmark = pytest.mark.skipif(hostexec.available() is not None, reason=str(hostexec.available()))

MODES = ("fast", "asan", "tsan")
# thread order in which the fast mode computes wrong bytes, by bug
WRONG_BYTES = {
    "uninitialised_shared": "random", "missing_syncthreads": "random", "missing_second_syncthreads": "random",
    "missing_syncwarp": "random", "cp_async": "random", "refilled_buffer": "desc", "cluster_store": "asc"}
# text of the fast mode's error, and whether it names the planted line, by bug
ERRORS = {
    "dynamic_shared": ("outside dynamic shared memory", False),
    "misaligned_load": ("access of 16 bytes: address 0x.* is not a multiple of 16", True),
    "misaligned_store": ("access of 16 bytes: address 0x.* is not a multiple of 16", True),
    "divergent_shuffle": ("deadlock.*16 thread.* wait in __shfl_sync|deadlock.*32 thread.* wait in "
                          "__shfl_sync", True),
    "shuffle_from_exited": ("takes no part in it", True),
    "divergent_barrier": ("36 thread.*wait in __syncthreads.*28 thread.*have returned", True),
    "named_barrier": ("threads expected here|deadlock", True),
    "mbarrier_wait": ("bulk load into shared memory was never waited for", False),
    "bulk_bytes": ("mbarrier with 16 announced bytes not copied", True),
    "bulk_store": ("1 bulk store.* not waited for", False), "look_back": ("deadlock.*poll", True),
    "cluster_begin": ("block [01] has not begun", True),
    "cluster_end": ("block 1 has not begun or has ended", True)}
# report of this mode's sanitizer, by bug
REPORTS = {
    "global_read": ("asan", "heap-buffer-overflow"), "global_write": ("asan", "heap-buffer-overflow"),
    "static_shared": ("asan", "global-buffer-overflow|insufficient space"),
    "dynamic_shared": ("asan", "heap-buffer-overflow"),
    "local_array": ("asan", "out of bounds|stack-buffer-overflow"),
    "misaligned": ("asan", "misaligned address"), "int_overflow": ("asan", "signed integer overflow"),
    "bad_shift": ("asan", "shift exponent 32 is too large"), "stack_overflow": ("asan", "stack-overflow"),
    "float_to_int": ("asan", "outside the range of representable values"),
    "missing_syncthreads": ("tsan", "data race"), "missing_second_syncthreads": ("tsan", "data race"),
    "missing_syncwarp": ("tsan", "data race"), "shuffle_as_barrier": ("tsan", "data race"),
    "unordered_blocks": ("tsan", "data race"), "last_block": ("tsan", "data race"),
    "grid_barrier": ("tsan", "data race"), "cluster_store": ("tsan", "data race")}


def planted_lines(name):
    """Return file:line of every line marked "planted" in the kernel or in the helpers right before it."""
    path = planted_cases.source(name)
    found, kernel = [], None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if entry := re.search(r"(\w+)\(const __grid_constant__", line):
            kernel = entry[1]
        if "// planted" in line:
            found.append(f"{path.name}:{number}")
        if line == "}" and kernel:
            if kernel == name:
                return found
            found, kernel = [], None
    raise AssertionError(f"no kernel {name} in {path}")


def names_planted_line(text, name):
    return any(re.search(re.escape(place) + r"\b", text) for place in planted_lines(name))


def child(mode, *arguments):
    command = [sys.executable, str(PLANTED / "planted_cases.py"), *arguments]
    env = dict(os.environ, CUPY_FP8_HOST_MODE=mode)
    if mode != "fast":
        env |= hostexec.sanitizer_env(mode)
    return subprocess.run(hostexec.sanitizer_command(mode, command), env=env, capture_output=True, text=True,
                          timeout=120)


@pytest.fixture(scope="module")
def children():
    """Run all child processes, as many at a time as there are processors: (mode, bug or "no bug") -> finished
    process."""
    bugs = [(mode, name) for name, (mode, _) in REPORTS.items()] + [("asan", "bulk_bounds")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {(mode, "no bug"): pool.submit(child, mode, "--seeds=3") for mode in MODES}
        jobs |= {(mode, name): pool.submit(child, mode, "--bug", "--order=random", name)
                 for mode, name in bugs}
    return {key: job.result() for key, job in jobs.items()}


def test_every_bug_has_a_mode_that_must_find_it():
    others = {"bulk_bounds", "shared_starts_filled"}
    assert set(WRONG_BYTES) | set(ERRORS) | set(REPORTS) | others == set(CASES)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_correct_kernels_pass(children, mode):
    done = children[mode, "no bug"]
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == 5 * len(CASES)
    assert [run for run in runs if run["outcome"] != "right"] == []


@pytest.mark.parametrize("name", WRONG_BYTES)
def test_wrong_bytes(name):
    assert planted_cases.run(name, bug=True, order=WRONG_BYTES[name], seed=0)["outcome"] == "wrong"


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("order", ["asc", "random"])
def test_error(name, order):
    pattern, has_line = ERRORS[name]
    result = planted_cases.run(name, bug=True, order=order, seed=0)
    assert result["outcome"] == "error"
    assert re.search(pattern, result["text"]), result["text"]
    assert not has_line or names_planted_line(result["text"], name), result["text"]
    # an aborted run leaves nothing behind
    assert planted_cases.run(name, bug=False, order=order, seed=0)["outcome"] == "right"


@pytest.mark.full
@pytest.mark.parametrize("name", REPORTS)
def test_sanitizer_report(children, name):
    mode, pattern = REPORTS[name]
    done = children[mode, name]
    assert done.returncode == 66, (done.returncode, done.stdout, done.stderr[-3000:])
    assert re.search(pattern, done.stderr), done.stderr[-3000:]
    assert names_planted_line(done.stderr, name), done.stderr[-3000:]


@pytest.mark.full
def test_bulk_copy_past_the_end_is_named_where_it_is_issued(children):
    done = children["asan", "bulk_bounds"]
    result = json.loads(done.stdout)
    assert "leave the array" in result["text"], result
    assert names_planted_line(result["text"], "bulk_bounds"), result


def test_waiting_blocks_need_a_resident_grid():
    result = planted_cases.run("grid_barrier", bug=False, order="asc", seed=0, resident=False)
    assert "resident=True" in result["text"]
    assert planted_cases.run("grid_barrier", bug=False, order="asc", seed=0)["outcome"] == "right"


@pytest.mark.parametrize(("cluster", "message"), [(1, "a cluster of 2 blocks needs cluster=2"),
                                                  (4, "a grid of clusters needs a multiple of their blocks")])
def test_clusters_have_their_size(cluster, message):
    result = planted_cases.run("cluster_store", bug=False, order="asc", seed=0, cluster=cluster)
    assert message in result["text"]


def test_no_block_of_a_resident_grid_is_left_out():
    with hostexec.blocks_of_grid(first=1, last=0):
        result = planted_cases.run("grid_barrier", bug=False, order="asc", seed=0)
    assert "blocks of a resident grid wait for each other" in result["text"]


# ---- the interface ----
KERNEL = """
struct Params { unsigned* out; int value; };
#include "add.cuh"
__global__ void helper_is_not_exported(Params) {}
extern "C" __global__ void __launch_bounds__(32) store(const __grid_constant__ Params p) {
    const unsigned i = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    p.out[i * blockDim.x * blockDim.y * blockDim.z + t] = add(p.value, (int)(1000 * i + t));
}
extern "C" __global__ void two_parameters(int a, int b) {}
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include"
     / "add.cuh").write_text("__device__ __forceinline__ int add(int a, int b) { return a + b; }\n")
    (tmp_path / "store.cu").write_text(KERNEL)
    return tmp_path / "store.cu"


def compile_store(source, entry="store", **options):
    return hostexec.compile_kernel(source, entry, include_dirs=[source.parent / "include"], mode="fast",
                                   **options)


def test_launch_dimensions(source):
    out = np.zeros(2 * 3 * 2 * 24, np.uint32)
    compile_store(source)((2, 3, 2), (4, 3, 2), struct.pack("Qi4x", out.ctypes.data, 7))
    expected = 7 + 1000 * np.repeat(np.arange(12), 24) + np.tile(np.arange(24), 12)
    np.testing.assert_array_equal(out, expected)


def test_parameter_size_is_checked(source):
    kernel = compile_store(source)
    assert kernel.param_bytes == 16
    with pytest.raises(hostexec.HostError, match="12 bytes of parameters given, the kernel's struct has 16"):
        kernel((1,), (32,), b"\0" * 12)


@pytest.mark.parametrize(("grid", "block", "shared_mem"), [
    ((0,), (32,), 0), ((1, 65536), (32,), 0), ((1,), (1025,), 0), ((1,), (32,), 232449), ((), (1,), 0)])
def test_impossible_launches_are_refused(source, grid, block, shared_mem):
    with pytest.raises(hostexec.HostError):
        compile_store(source)(grid, block, b"\0" * 16, shared_mem=shared_mem)


def test_compile_errors_name_the_real_file(source):
    source.write_text(KERNEL.replace("threadIdx.z *", "threadIdx.q *"))
    with pytest.raises(hostexec.HostError, match=re.escape(f"{source}:7:")):
        compile_store(source)


def test_dynamic_shared_memory_outside_a_function_is_refused(source):
    source.write_text("extern __shared__ int words[];\n" + KERNEL)
    with pytest.raises(hostexec.HostError, match=r"store.cu:1:.*outside functions"):
        compile_store(source)


def test_one_parameter_is_demanded(source):
    with pytest.raises(hostexec.HostError, match="exactly one parameter, a struct by value"):
        compile_store(source, "two_parameters")


def test_included_files_are_part_of_the_cache_key(source, monkeypatch):
    monkeypatch.setattr(executor, "SECONDS_BETWEEN_LOOKS", 0)
    out = np.zeros(32, np.uint32)
    params = struct.pack("Qi4x", out.ctypes.data, 7)
    first = compile_store(source)
    assert compile_store(source) is first
    (source.parent / "include"
     / "add.cuh").write_text("__device__ __forceinline__ int add(int a, int b) { return a + 2 * b; }\n")
    compile_store(source)((1,), (32,), params)
    np.testing.assert_array_equal(out, 7 + 2 * np.arange(32))


def test_sanitizer_modes_need_their_environment(source):
    with pytest.raises(hostexec.HostError, match="sanitizer_env"):
        hostexec.compile_kernel(source, "store", include_dirs=[source.parent / "include"], mode="asan")


@pytest.mark.full
def test_portable_context_switch():
    """The context switch of processors other than x86-64, forced by an environment variable."""
    env = dict(os.environ, CUPY_FP8_HOST_UCONTEXT="1", CUPY_FP8_HOST_MODE="fast")
    command = [sys.executable, str(PLANTED / "planted_cases.py"), "missing_syncthreads", "grid_barrier",
               "divergent_shuffle"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["outcome"] for line in done.stdout.splitlines()] == ["right"] * 9
