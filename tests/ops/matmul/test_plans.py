"""Plans of cuBLASLt's products: which calls share one, its algorithm, its workspace, and captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from product_machine import M, Machine, N, machine

import cupy_fp8 as fp8
from cupy_fp8 import Scaled
from cupy_fp8.formats import bfloat16
from cupy_fp8.ops.matmul import cublaslt, library


@pytest.fixture
def there() -> Iterator[Machine]:
    with machine() as found:
        yield found


def test_a_plan_is_made_once(there):
    a, b = there.both(("vector", "block"))
    for _ in range(3):
        there.checked(a, b)
    there.checked(*there.both(("vector", "block")), out=there.array(np.zeros((M, N), bfloat16)))
    assert len(there.fake.preferences) == 1
    there.checked(*there.both(("vector", "block"), m=M + 4))
    assert len(there.fake.preferences) == 2


def promised(there: Machine) -> list[int]:
    """The alignments for which algorithms were asked."""
    return [given[8] for given in there.fake.preferences]


def shifted(there: Machine, s: Scaled) -> Scaled:
    """The same with its data at a multiple of 32 bytes that is none of 256."""
    memory = there.array(np.zeros(s.data.size + 32, np.uint8)).view(s.data.dtype)
    memory[32:].reshape(s.shape)[...] = s.data
    return Scaled(memory[32:].reshape(s.shape), s.scale_inv, s.shape, s.transposed, s.block, s.scale_layout)


@pytest.mark.parametrize("aligned_first", [False, True])
def test_a_plan_serves_operands_of_its_alignment(aligned_first, there):
    """A remembered call, too, never promises more than its operands have, and makes use of what they have."""
    a, b = there.both(("vector", "block"))
    order = [(256, a), (16, shifted(there, a))][:: 1 if aligned_first else -1]
    for _ in range(3):
        for _, operand in order:
            there.checked(operand, b)
    assert promised(there) == [alignment for alignment, _ in order]


def test_a_plan_serves_results_of_its_alignment(there):
    a, b = there.both(("vector", "block"))
    rows = there.array(np.zeros((M + 1, N), bfloat16))              # The second one is at 144 bytes.
    for out in (rows[:-1], rows[1:]):
        there.checked(a, b, out=out)
    assert promised(there) == [256, 16]


def test_descriptions_go_with_their_calls(there):
    from cupy_fp8.calls import remembered

    a, b = there.both(("vector", "block"))
    for _ in range(2):
        out = there.array(np.zeros((M, N), bfloat16))
        there.checked(a, b, out=out)
        there.checked(a, b, out=out)
    made = len(there.fake.objects)
    remembered.forget()
    assert len(there.fake.objects) < made


def test_the_first_algorithm_that_runs_is_taken(there):
    there.fake.refuses = {1}
    there.checked(*there.both(("tensor", "tensor")))
    assert [p.algorithm for p in there.fake.products] == [1, 2, 2]


def test_autotune_takes_the_fastest(there, monkeypatch):
    times = iter([3.0, 1.0, 2.0])

    def microseconds(run: Any) -> float:
        assert run() == library.SUCCESS
        return next(times)

    monkeypatch.setattr(cublaslt, "_microseconds", microseconds)
    a, b = there.both(("vector", "vector"))
    into = there.array(np.zeros((M, N), np.float32))
    there.checked(a, b, accumulate=into, autotune=True)
    assert there.fake.products[-1].algorithm == 2
    there.checked(a, b, accumulate=into, autotune=True)
    there.checked(a, b, accumulate=into)
    assert there.fake.products[-1].algorithm == 1


def test_workspaces():
    """With out= they belong to it; of other calls to the stream. Plans share sizes."""
    with machine(workspace_bytes=5000) as there:
        a, b = there.both(("vector", "block"))
        out = there.array(np.zeros((M, N), bfloat16))
        for options in ({"out": out}, {"out": out}, {}, {}):
            there.checked(a, b, **options)
            assert there.fake.products[-1].workspace_bytes == 5000
        of_out, of_stream = (there.fake.products[i].pointers["workspace"] for i in (1, -1))
        assert len({0, of_out, of_stream}) == 3
        assert [p.pointers["workspace"] for p in there.fake.products[1:]] == [
            of_out, of_out, of_stream, of_stream]


def test_a_capture_of_a_product_that_is_new(there):
    a, b = there.both(("tensor", "tensor"))
    out = there.array(np.zeros((M, N), bfloat16))
    with there.place.cupy.cuda.Stream() as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"^out: .*call once before the capture$"):
            fp8.matmul_nt(a, b, out=out)
        stream.end_capture()
        fp8.matmul_nt(a, b, out=out)
        stream.begin_capture()
        fp8.matmul_nt(a, b, out=out, autotune=True)                     # is not tuned now, but may be later
        stream.end_capture()
    assert not [key for key in cublaslt._plans if key.autotune]


@pytest.mark.parametrize("warm", [0, 1])
def test_a_capture_with_another_alignment(warm, there):
    """What was made for 16 bytes serves 256 as well, but not the other way round."""
    a, b = there.both(("tensor", "tensor"))
    rows = there.array(np.zeros((M + 1, N), bfloat16))
    outs = rows[:-1], rows[1:]
    there.checked(a, b, out=outs[warm])
    with there.place.cupy.cuda.Stream() as stream:
        stream.begin_capture()
        if warm == 0:
            with pytest.raises(ValueError, match="shapes, dtypes and alignment is called for the first time"):
                fp8.matmul_nt(a, b, out=outs[1])
        else:
            fp8.matmul_nt(a, b, out=outs[0])
        stream.end_capture()
    assert len(there.fake.preferences) == 1
    there.checked(a, b, out=outs[1 - warm])
    assert sorted(promised(there)) == [16, 256]

