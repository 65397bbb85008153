"""python -m cupy_fp8 selftest: compares every op with its reference on this machine, byte for byte (matrix
products within their error bound).

The quick pass, which is the default, launches every kernel entry point that an op's cases launch. It checks
the few cases that cover them, and some that need no other kernel. Kernels are compiled in parallel, ahead of
the checks. An op is checked as soon as its kernels are ready.

Without a GPU and without g++ no kernel can run: the calls on NumPy arrays are checked, and what is left out
is said.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import Any

from .. import backend, cases, testing
from ..cases.covering import Recorded, covering_of, record, served_by, spread
from . import names
from .compilers import Compilers, compilers
from .launch import number_of_ranks
from .progress import Progress
from .selftest_ranks import run as run_ranks

#: cases of an op in the quick pass beside those that cover its entry points
_MOST_OTHERS = 40


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 selftest", description=__doc__)
    names.add_ops(parser)
    parser.add_argument("--full", action="store_true",
                        help="check all cases of each op (minutes, most of them spent compiling)")
    parser.add_argument("--executor", choices=testing.EXECUTORS,
                        help="where to run the kernels (default: the GPU where there is one, else the CPU; "
                        "without g++ the reference, which has none)")
    parser.add_argument("--ranks", type=number_of_ranks, metavar="N",
                        help="check exchanges of N ranks instead: a process each on GPUs, threads on the CPU")
    return parser


def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    ops = [cases.OPS[name] for name in names.chosen_ops(parser, options.ops)]
    name: testing.ExecutorName = options.executor or _first_that_runs()
    problem = testing.executor_problem(name)
    if problem:
        print(f"the {name} executor cannot run here: {problem}")
        return 1
    print(f"executor: {name}", flush=True)
    if options.ranks is not None:
        return run_ranks(options.ranks, name)
    if name == "reference":
        _say_left_out()
    progress = Progress()
    device = backend.cupy().cuda.runtime.getDevice() if name == "cuda" else None
    with testing.executor(name) as run, compilers(device) as compiling:
        try:
            work = [_Work(op, _selected(op, run, options.full, progress), compiling, name != "reference")
                    for op in _products_last(ops)]
            failed = sum([_check_cases(one, run, progress)
                          for one in _when_compiled(work, compiling, progress)])
        finally:
            progress.clear()
    same = "all bytes equal the reference's" if all(op.agrees is None for op in ops) else (
        "all bytes equal the reference's, and all products are within their bound")
    print(f"{failed} of {sum(len(one.cases) for one in work)} cases failed" if failed else same)
    if name == "reference":
        entries = {entry for one in work for recorded in one.recorded for entry in recorded.entries}
        print(f"These were calls on NumPy arrays. Kernel entry points left out: {len(entries)}.")
    elif not options.full:
        print("This was the quick pass, over all kernel entry points of these ops. --full checks every case.")
    return 1 if failed else 0


def _first_that_runs() -> testing.ExecutorName:
    return next(name for name in reversed(testing.EXECUTORS) if testing.executor_problem(name) is None)


def _say_left_out() -> None:
    """Print why no kernel runs, unless that was requested."""
    if problem := testing.executor_problem("host"):
        print(f"Kernels are left out: {problem}. (A GPU cannot run them either: "
              f"{testing.executor_problem('cuda')}.)", flush=True)


class _Work:
    """An op, the cases to check, and the compilers that work for them: none for the reference."""

    def __init__(self, op: cases.Registration, selected: list[Recorded], compilers: Compilers,
                 has_kernels: bool) -> None:
        variants = dict.fromkeys(variant for one in selected for variant in one.variants if has_kernels)
        self.op, self.cases, self.recorded = op, [one.case for one in selected], selected
        self.compilers = compilers
        self.futures = compilers.start(variants)


def _products_last(ops: list[cases.Registration]) -> list[cases.Registration]:
    """Return the order in which kernels are compiled. Those of matrix products take longest."""
    return sorted(ops, key=lambda op: op.family == "matmul")


def _when_compiled(work: Iterable[_Work], compilers: Compilers, progress: Progress) -> Iterator[_Work]:
    """Yield each op's work once its kernels are compiled: the first in the list that is ready."""
    left = list(work)
    while left:
        ready = next((one for one in left if all(future.done() for future in one.futures)), None)
        if ready is None:
            progress.show(f"{compilers}; next: {left[0].op.name}")
            compilers.wait()
        else:
            left.remove(ready)
            yield ready


def _selected(op: cases.Registration, run: testing.Executor, full: bool,
              progress: Progress) -> list[Recorded]:
    progress.show(f"looking for the kernels of {op.name}")
    recorded = record(op, run.array_arguments)
    if full:
        return recorded
    chosen = covering_of(recorded)
    return spread(chosen, served_by(chosen, recorded), _MOST_OTHERS)


def _check_cases(work: _Work, run: testing.Executor, progress: Progress) -> int:
    """Check an op's cases and print its line. Returns how many failed."""
    start, failed, first_error = time.perf_counter(), 0, ""
    for done, case in enumerate(work.cases):
        progress.show(f"{work.op.name}: {done} of {len(work.cases)} cases; {work.compilers}")
        try:
            check(work.op, case, run)
        except Exception as error:          # one broken op must not hide the others' results
            failed += 1
            first_error = first_error or f"\n     {case}: {type(error).__name__}: {error}"
    progress.clear()
    verdict, seconds = "FAIL" if failed else "PASS", time.perf_counter() - start
    print(f"{verdict} {work.op.name:24} {len(work.cases):4} cases {seconds:6.1f} s{first_error}", flush=True)
    return failed


def check(op: cases.Registration, case: cases.Case, run: testing.Executor) -> None:
    """Raise AssertionError unless the op gives the reference's bytes (or agrees with them by the op's own
    rule): freshly allocated, and again into the poisoned result. An op that updates its arguments must write
    the bytes there, and must return them; so must a call that returns an argument."""
    reference_arguments = args, kwargs = op.inputs(case)
    desired = cases.outputs(op.reference(*args, **kwargs), kwargs, op.updates)
    out: dict[str, object] = {}
    for _ in range(2):
        args, kwargs = run.array_arguments(*op.inputs(case))
        result = op.function(*args, **kwargs, **out)
        actual = cases.outputs(result, kwargs, op.updates)
        assert_agrees(op, actual, desired, reference_arguments)
        if any(result is given for given in kwargs.values()):
            return
        if op.updates:
            for name, given, returned in zip(op.updates, args, result, strict=False):
                assert returned is given, f"{name} was not returned"
            return
        assert out.get("out", result) is result, "out= was not returned"
        for array in cases.outputs(result, {}).values():
            cases.poison(array)
        out = {"out": result}


def assert_agrees(op: cases.Registration, actual: dict[str, Any], desired: dict[str, Any],
                  arguments: cases.Arguments) -> None:
    """Raise AssertionError unless the arrays that a call wrote equal the reference's, byte for byte or by the
    op's own rule. arguments: those of the reference."""
    assert actual.keys() == desired.keys(), f"wrote {sorted(actual)}, expected {sorted(desired)}"
    if op.agrees is not None:
        op.agrees(actual, desired, arguments)
        return
    for name, array in actual.items():
        try:
            testing.assert_bytes_equal(array, desired[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
