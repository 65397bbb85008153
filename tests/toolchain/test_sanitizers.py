"""Every op under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, on the CPU, in child
processes.

This file is also the child: called with the name of a JOB it runs the cases of that job and prints how many
it executed. ASan and UBSan run every case with buffers that end exactly where their memory does; TSan, whose
cost grows with every thread, a few blocks of every entry point. Planted errors, run through the same harness,
show that both would report them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import covering
import numpy as np
import pytest
from background import Background
from programs import WITHOUT_OP
from tiers import quick_if

import cupy_fp8 as fp8
from cupy_fp8 import cases, hostexec, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import DIRECTIONS, OPS, Case
from cupy_fp8.cli.selftest import assert_agrees, check
from cupy_fp8.formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from cupy_fp8.gate import SCORES
from cupy_fp8.kernels import sources
from cupy_fp8.ops.moe.gate import row_shape
from cupy_fp8.ops.quantize import tensor
from cupy_fp8.recipes import CurrentScaling
from cupy_fp8.results import Quantized, Scaled

pytestmark = pytest.mark.skipif(hostexec.available() is not None, reason=str(hostexec.available()))

Check = Callable[[testing.Executor], None]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
# exit code of a child in which a sanitizer found something
FOUND = 66
#: Orders of threads; other tests use ("random", 0). Wrong addresses depend on the order only where threads
#: race.
SCHEDULES = {"asan": (("desc", 0),), "tsan": (("random", 0), ("random", 1), ("desc", 0))}


# ---- what a child runs ----
#: Types that jobs of `widths` leave out: accesses depend on the width of types, and bfloat16 and
#: float8_e4m3fn have the same.
ALIKE = (float16, float8_e5m2)


def case_checks(ops: tuple[str, ...], *, widths: bool = False) -> Iterator[Check]:
    """Yield checks of cases. widths: one type of each width for inputs and results. (Conversions are those of
    `astype`, which runs under sanitizers for every type.)"""
    for name in ops:
        for case in OPS[name].cases():
            if not widths or not {case.dtype, np.dtype(case.options.get("dtype", float32))} & set(ALIKE):
                yield partial(check, OPS[case.op], case)


def gate_checks() -> Iterator[Check]:
    """Yield one type of logits for each score and number of experts of a lane."""
    for name in GATES:
        for case in OPS[name].cases():
            _, score, of_lane = gate_program(case)
            turn = SCORES.index(score) + of_lane.bit_length()
            if case.dtype == INPUT_DTYPES[turn % len(INPUT_DTYPES)]:
                yield partial(check, OPS[case.op], case)


def gate_program(case: Case) -> tuple[str, str, int]:
    """Return what identifies a program of the gate, apart from the type of the logits."""
    return case.op, case.options.get("score", "softmax"), row_shape(case.shape).of_lane


def flush_with_the_end(shape: tuple[int, ...], dtype: np.dtype, lead: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (array, its buffer): the array starts `lead` bytes into memory that ends exactly where it
    does."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    buffer = np.full(lead + nbytes, 0xAA, np.uint8)
    return buffer[lead:].view(dtype).reshape(shape), buffer


def edge_check(case: Case, lead: int, run: testing.Executor) -> None:
    """Run a case with arrays at odd addresses that end with their memory: bytes are right, and those before
    the arrays unchanged."""
    op, before = OPS[case.op], []

    def moved(a: Any, elements: bool) -> Any:
        if isinstance(a, Quantized):
            return Quantized(**{name: moved(part, elements) for name, part in a.parts.items()})
        if isinstance(a, Scaled):
            return Scaled._of(moved(a.data, elements), a.scale_inv, a.shape, a.transposed, None, None)
        there, buffer = flush_with_the_end(a.shape, a.dtype, lead * a.itemsize if elements else lead)
        bits(there)[...] = bits(a)
        before.append(buffer[:-a.nbytes])
        return there

    args, kwargs = op.inputs(case)
    # elements of two and four bytes are misaligned for an odd lead
    args = (moved(args[0], elements=False), *args[1:])
    out = moved(op.function(*args, **kwargs), elements=True)
    desired = cases.outputs(op.reference(*args, **kwargs), kwargs)
    for a in cases.outputs(out, kwargs).values():
        cases.poison(a)
    assert op.function(*args, **kwargs, out=out) is out
    assert_agrees(op, cases.outputs(out, kwargs), desired, (args, kwargs))
    assert all((memory == 0xAA).all() for memory in before), "bytes before an array were written"


EDGE_OPS: dict[str, tuple[np.dtype, dict[str, Any]]] = {
    "quantize_tensor": (bfloat16, {}), "cast_transpose": (bfloat16, {}), "transpose": (float8_e5m2, {}),
    "dequantize": (float8_e5m2, {"dtype": bfloat16, "transposed": True}), "compute_amax": (bfloat16, {}),
    "astype": (float32, {"to": float8_e4m3fn})}


def edge_checks() -> Iterator[Check]:
    for op, (dtype, options) in EDGE_OPS.items():
        # Flat kernels give a block 1024 elements (f32) or 2048: one element less makes the last chunk a
        # partial one.
        for shape in ((1, 1), (17, 24), (130, 144), (3, 64, 40), (1, 1023), (1, 2047)):
            for lead in (0, 1, 3, 8):
                yield partial(edge_check, Case(op, dtype, shape, "bits", options=options), lead)


def few_blocks() -> Iterator[Case]:
    """Yield every entry point and direction, on at most a handful of blocks. For ops without chosen cases
    here, their first ones."""
    chosen = list(chosen_blocks())
    yield from chosen
    for name in OPS.keys() - {case.op for case in chosen}:
        few = {"group_quantize": 11, "multi_quantize": 9}.get(name, 8)
        yield from islice((case for case in OPS[name].cases() if np.prod(case.shape) < 30000), few)
    # Both blocks of a cluster have rows of several warpgroups, and columns. Results are stored in boxes,
    # 32-bit ones in two steps.
    for shape, options in (((260, 136, 144), {}), ((260, 136, 144), {"dtype": float32}),
                           ((300, 72, 272), {"accumulate": True}), ((288, 208, 144), {}),
                           ((288, 24, 208), {"accumulate": True})):
        yield next(case for case in OPS["grouped_matmul_nt"].cases()
                   if case.shape == shape and case.options | options == case.options)
    for name in ("norm_quantize", "norm_backward_quantize"):
        yield from two_parts(name)


def two_parts(op: str) -> Iterator[Case]:
    """Yield a case of each program in which a block finds statistics of two parts (norm/ahead.cuh)."""
    met: set[object] = {CurrentScaling}                     # launches what delayed scaling does
    for case in OPS[op].cases():
        options, recipe = case.options, type(case.options["recipe"])
        program = recipe, options.get("kind"), "return_normed" in options
        if case.shape == (150, 272) and options.get("columnwise") and not {recipe, program} & met:
            met.add(program)
            yield case


def chosen_blocks() -> Iterator[Case]:
    # four tiles of 128 x 128, and five blocks of 2048 elements
    tiles, flat = (130, 136), (17, 500)
    for directions in DIRECTIONS:
        for dtype in (bfloat16, float32) if directions["columnwise"] else INPUT_DTYPES:
            shape = tiles if directions["columnwise"] and directions.get("transposed", True) else flat
            yield Case("quantize_tensor", dtype, shape, "normal", options={"amax": 0.0, **directions})
    yield Case("cast_transpose", float16, (2, 72, 129), "normal", "offset", {"amax": 0.0})
    for directions in DIRECTIONS[:3]:
        yield Case("quantize_tensor", bfloat16, (260, 136), "normal",
                   options={"amax": 0.0, "dbias": True, **directions})
    # two blocks that meet
    yield Case("quantize_tensor", float16, (150, 100), "normal", options={"amax": 0.0, "scale": None})
    for transposed, shape in ((False, flat), (True, tiles)):
        yield Case("dequantize", float8_e5m2, shape, options={"dtype": float16, "transposed": transposed})
        for block, layout in (((1, 32), "compact"), ((32, 1), "swizzled")):
            options = {"dtype": bfloat16, "block": block, "scale_layout": layout, "transposed": transposed}
            yield Case("dequantize", float8_e4m3fn, shape, options=options)
    yield Case("astype", float32, (17, 255), options={"to": float8_e4m3fn})
    yield Case("astype", float8_e4m3fn, flat, "bits", "offset", {"to": bfloat16})
    yield Case("transpose", float8_e4m3fn, tiles)
    yield Case("transpose", float8_e5m2, (144, 133))
    for dtype in INPUT_DTYPES:
        yield Case("compute_amax", dtype, (70, 257), "normal", options={"nan": "ignore"})
    yield Case("compute_amax", bfloat16, (70, 257), "bits", options={"nan": "propagate"})


def few_block_checks() -> Iterator[Check]:
    for case in few_blocks():
        yield partial(check, OPS[case.op], case)


def entry_checks() -> Iterator[Check]:
    for one in covering.entry_cases():
        yield partial(check, OPS[one.case.op], one.case)


def few_block_entry_checks() -> Iterator[Check]:
    """Yield cases with few blocks, which ThreadSanitizer can run, at least one for every entry point."""
    candidates = covering.observe(few_blocks())
    for one in covering.cover(candidates, covering.launched_entries):
        yield partial(check, OPS[one.case.op], one.case)


SWIGLU = ("swiglu_quantize", "swiglu_backward_quantize")
PRODUCTS = ("matmul_nt", "grouped_matmul_nt")
GATES = ("topk_gate", "topk_gate_backward", "z_loss")
#: ops with many kernels or cases, which get separate jobs
BIG = ("astype", "quantize_tensor", "dequantize", "quantize_mx", "quantize_block", "group_quantize",
       "multi_quantize", *SWIGLU, *PRODUCTS, *GATES)

#: Jobs of the quick tier, with at least one case of every entry point. Choosing them takes seconds, and much
#: longer under ASan, so a child gets their names.
QUICK_JOBS = ("asan-entries", "tsan-entries")
#: A job is a sanitizer and its checks. Except in the quick tier, no two jobs of a sanitizer compile the same.
JOBS: dict[str, tuple[str, Callable[[], Iterator[Check]]]] = {           # longest jobs first
    "asan-entries": ("asan", entry_checks),
    "tsan-entries": ("tsan", few_block_entry_checks),
    "asan-others": ("asan", lambda: case_checks(tuple(name for name in OPS if name not in BIG), widths=True)),
    "asan-gates": ("asan", gate_checks),
    "asan-products": ("asan", lambda: case_checks(PRODUCTS)),
    "asan-swiglu": ("asan", lambda: case_checks(SWIGLU, widths=True)),
    "tsan-blocks": ("tsan", few_block_checks),
    "asan-groups": ("asan", lambda: case_checks(("group_quantize", "multi_quantize"), widths=True)),
    "asan-blocks": ("asan", lambda: case_checks(("quantize_block",), widths=True)),
    "asan-mx": ("asan", lambda: case_checks(("quantize_mx",), widths=True)),
    "asan-tensors": ("asan", lambda: case_checks(("quantize_tensor", "dequantize"), widths=True)),
    "asan-convert": ("asan", lambda: case_checks(("astype",))),
    "asan-edges": ("asan", edge_checks),
}


def case_names(job: str) -> list[str]:
    """Return the cases of a quick job."""
    names = [str(one.args[1]) for one in JOBS[job][1]() if isinstance(one, partial)]
    assert len(set(names)) == len(names)
    return names


def named_checks(names: list[str]) -> list[Check]:
    known = {str(case): case for case in (*cases.all_cases(), *few_blocks())}
    return [partial(check, OPS[known[name].op], known[name]) for name in names]


def schedules(job: str) -> tuple[tuple[str, int], ...]:
    """Return a job's orders. Quick jobs have one: the cases of `tsan-entries` are also in `tsan-blocks`."""
    found = SCHEDULES[JOBS[job][0]]
    return found[:1] if job in QUICK_JOBS else found


# ---- planted errors ----
def planted(kind: str) -> None:
    """Launch the real `cast` kernel with one wrong parameter."""
    n = 4096                                            # two blocks
    x = np.zeros(n - (kind == "short-input"), bfloat16)
    if kind == "misaligned":
        x = np.zeros(2 * n + 16, np.uint8)[2:].view(bfloat16)[:n]
    data = np.zeros(n - (kind == "short-output"), float8_e4m3fn)
    scale_inv = np.zeros(1, np.float32)
    # an overlapping scale_inv is among the data of the second block
    address = scale_inv.ctypes.data if kind != "overlapping" else data.ctypes.data + 3000
    variant = tensor._CAST.variant(IN=x.dtype, OUT=data.dtype)
    variant.bind(x, 2, x=x.ctypes.data, data=data.ctypes.data, scale_inv=address, n=n, scale_value=1.0,
                 vector=int(kind == "misaligned")).run()


#: Kind: (sanitizer, its report, where, the child's exit code). For a misaligned vector the executor itself
#: reports first.
PLANTED = {
    "short-output": ("asan", "heap-buffer-overflow", "store_partial", FOUND),
    "short-input": ("asan", "heap-buffer-overflow", "load_partial", FOUND),
    "misaligned": ("asan", "is not a multiple of 16", "elementwise.cuh", 1),
    "overlapping": ("tsan", "data race", "write_scale_inv", FOUND),
    "none-asan": ("asan", "", "", 0),
    "none-tsan": ("tsan", "", "", 0),
}


def main(job: str, *names: str) -> None:
    executed = 0
    if job in PLANTED:
        planted(job)
        executed = 1
    else:
        with testing.executor("host") as run:
            for order, seed in schedules(job):
                os.environ |= {"CUPY_FP8_HOST_ORDER": order, "CUPY_FP8_HOST_SEED": str(seed)}
                for one in named_checks(list(names)) if names else JOBS[job][1]():
                    one(run)
                    executed += 1
    print(json.dumps({"job": job, "executed": executed}))


# ---- the tests ----
def child(job: str, names: list[str], background: Background) -> subprocess.CompletedProcess[str]:
    mode = (PLANTED[job] if job in PLANTED else JOBS[job])[0]
    package = str(Path(fp8.__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (package, str(SUPPORT), os.environ.get("PYTHONPATH")) if p)
    env = os.environ | {"CUPY_FP8_HOST_MODE": mode, "PYTHONPATH": path} | hostexec.sanitizer_env(mode)
    command = hostexec.sanitizer_command(mode, [sys.executable, __file__, job, *names])
    return background.run(command, env, timeout=2400)       # beside other tests it gets less than a processor


def background_jobs(items: list[Any], background: Background) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the children of the selected tests."""
    for item in items:
        if hasattr(item, "callspec") and "job" in item.callspec.params:
            job = item.callspec.params["job"]
            names = case_names(job) if job in QUICK_JOBS else []  # launches must not be recorded in a thread
            yield job, partial(child, job, names, background)


def executed(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[:6000]}"
    return int(json.loads(done.stdout)["executed"])


@pytest.mark.parametrize("job", quick_if(lambda job: job in QUICK_JOBS, JOBS))
def test_no_sanitizer_finds_anything(job, background_result):
    _, checks = JOBS[job]
    assert executed(background_result(job)) == len(list(checks())) * len(schedules(job))


def test_quick_jobs_are_of_every_family():
    """Kernels that no op launches have no jobs."""
    reached = {source for one in covering.entry_cases() for source, _ in covering.launched_entries(one)}
    assert reached == set(sources.names()) - WITHOUT_OP


def test_every_case_is_in_a_job():
    jobs = [checks() for job, (mode, checks) in JOBS.items() if mode == "asan" and job != "asan-edges"]
    ran = {(one.args[1].op, str(one.args[1])) for checks in jobs for one in checks
           if isinstance(one, partial)}
    left_out = {(case.op, str(case)) for case in cases.all_cases()} - ran
    assert not {op for op, _ in left_out} & {"astype", *PRODUCTS}
    of_gates = [case for case in cases.all_cases() if case.op in GATES]
    assert {gate_program(case) for case in of_gates if (case.op, str(case)) in ran} == \
        set(map(gate_program, of_gates))
    assert all("float16-" in name.replace("bfloat16", "") or "float8_e5m2" in name
               for op, name in left_out if op not in GATES)
    assert len(ran) > 2000
    assert {case.op for case in few_blocks()} == set(OPS)
    assert {case.op for case in chosen_blocks()} == set(EDGE_OPS)


@pytest.mark.parametrize("job", PLANTED)
def test_planted_error_is_found(job, background_result):
    _, finding, place, code = PLANTED[job]
    done = background_result(job)
    if not finding:
        assert executed(done) == 1
        return
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr[-3000:])
    assert finding in done.stderr, done.stderr[-3000:]
    assert place in done.stderr, done.stderr[-3000:]
    assert done.stdout == "", "the launch came back"


if __name__ == "__main__":
    main(*sys.argv[1:])
