"""python -m cupy_fp8 selftest: every op against its reference on this machine, byte for byte; a PASS or FAIL line each."""

from __future__ import annotations

import argparse
import time

from .. import cases, testing


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 selftest", description=__doc__)
    parser.add_argument("--executor", choices=testing.EXECUTORS[1:],
                        help="where to run the kernels (default: the GPU where there is one, else the CPU)")
    options = parser.parse_args(argv)
    name = options.executor or ("cuda" if testing.executor_problem("cuda") is None else "host")
    problem = testing.executor_problem(name)
    if problem:
        print(f"the {name} executor cannot run here: {problem}")
        return 1
    print(f"executor: {name}")
    failed = 0
    with testing.executor(name) as run:
        for op in cases.OPS.values():
            start, count, first_error = time.perf_counter(), 0, ""
            for case in op.cases():
                count += 1
                try:
                    check(op, case, run)
                except Exception as error:      # one broken op must not hide the others' results
                    failed += 1
                    first_error = first_error or f"\n     {case}: {type(error).__name__}: {error}"
            print(f"{'FAIL' if first_error else 'PASS'} {op.name:20} {count:4} cases {time.perf_counter() - start:6.1f} s{first_error}")
    print(f"{failed} of all cases failed" if failed else "all bytes equal the reference's")
    return 1 if failed else 0


def check(op: cases.Op, case: cases.Case, run: testing.Executor) -> None:
    """AssertionError unless the op gives the reference's bytes: freshly allocated, and again into the poisoned result (an op that
    updates its arguments: in those, which it returns)."""
    args, kwargs = op.inputs(case)
    desired = cases.outputs(op.reference(*args, **kwargs), kwargs, op.updates)
    out: dict[str, object] = {}
    for _ in range(2):
        args, kwargs = run.array_arguments(*op.inputs(case))
        result = op.function(*args, **kwargs, **out)
        actual = cases.outputs(result, kwargs, op.updates)
        assert actual.keys() == desired.keys(), f"wrote {sorted(actual)}, expected {sorted(desired)}"
        for name, array in actual.items():
            try:
                testing.assert_bytes_equal(array, desired[name])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
        if op.updates:
            for name, given, returned in zip(op.updates, args, result, strict=False):
                assert returned is given, f"{name} was not returned"
            return
        assert out.get("out", result) is result, "out= was not returned"
        for array in cases.outputs(result, {}).values():
            cases.poison(array)
        out = {"out": result}
