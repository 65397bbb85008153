"""Plans of cuBLASLt's products: which calls share one, its algorithm, its workspace, and captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from product_machine import K, M, Machine, N, machine

import cupy_fp8 as fp8
from cupy_fp8 import Scaled
from cupy_fp8.formats import bfloat16
from cupy_fp8.ops.matmul import cublaslt, library


@pytest.fixture
def gpu_stand_in() -> Iterator[Machine]:
    with machine() as found:
        yield found


def test_a_plan_is_made_once(gpu_stand_in):
    a, b = gpu_stand_in.both(("vector", "block"))
    for _ in range(3):
        gpu_stand_in.checked(a, b)
    out = gpu_stand_in.array(np.zeros((M, N), bfloat16))
    gpu_stand_in.checked(*gpu_stand_in.both(("vector", "block")), out=out)
    assert len(gpu_stand_in.fake.preferences) == 1
    gpu_stand_in.checked(*gpu_stand_in.both(("vector", "block"), m=M + 4))
    assert len(gpu_stand_in.fake.preferences) == 2


def promised(gpu_stand_in: Machine) -> list[int]:
    """Record the alignments for which algorithms were requested."""
    return [given[8] for given in gpu_stand_in.fake.preferences]


def shifted(gpu_stand_in: Machine, s: Scaled) -> Scaled:
    """Return the same with its data at a multiple of 32 bytes but not of 256."""
    memory = gpu_stand_in.array(np.zeros(s.data.size + 32, np.uint8)).view(s.data.dtype)
    memory[32:].reshape(s.shape)[...] = s.data
    return Scaled(memory[32:].reshape(s.shape), s.scale_inv, s.shape, s.transposed, s.block, s.scale_layout)


@pytest.mark.parametrize("aligned_first", [False, True])
def test_a_plan_serves_operands_of_its_alignment(aligned_first, gpu_stand_in):
    """A remembered call, too, never promises more than its operands have, and uses what they have."""
    a, b = gpu_stand_in.both(("vector", "block"))
    order = [(256, a), (16, shifted(gpu_stand_in, a))][:: 1 if aligned_first else -1]
    for _ in range(3):
        for _, operand in order:
            gpu_stand_in.checked(operand, b)
    assert promised(gpu_stand_in) == [alignment for alignment, _ in order]


def test_a_plan_serves_results_of_its_alignment(gpu_stand_in):
    a, b = gpu_stand_in.both(("vector", "block"))
    rows = gpu_stand_in.array(np.zeros((M + 1, N), bfloat16))              # the second row is at 144 bytes
    for out in (rows[:-1], rows[1:]):
        gpu_stand_in.checked(a, b, out=out)
    assert promised(gpu_stand_in) == [256, 16]


def test_descriptions_go_with_their_calls(gpu_stand_in):
    from cupy_fp8.calls import remembered

    a, b = gpu_stand_in.both(("vector", "block"))
    for _ in range(2):
        out = gpu_stand_in.array(np.zeros((M, N), bfloat16))
        gpu_stand_in.checked(a, b, out=out)
        gpu_stand_in.checked(a, b, out=out)
    made = len(gpu_stand_in.fake.objects)
    remembered.forget()
    assert len(gpu_stand_in.fake.objects) < made


def test_the_first_algorithm_that_runs_is_taken(gpu_stand_in):
    gpu_stand_in.fake.refuses = {1}
    gpu_stand_in.checked(*gpu_stand_in.both(("tensor", "tensor")))
    assert [p.algorithm for p in gpu_stand_in.fake.products] == [1, 2, 2]


def test_an_algorithm_that_the_heuristic_itself_doubts_is_not_tried(gpu_stand_in):
    gpu_stand_in.fake.proposes_in_vain = {1, 3}
    gpu_stand_in.checked(*gpu_stand_in.both(("tensor", "tensor")))
    assert [p.algorithm for p in gpu_stand_in.fake.products] == [2, 2]


def test_a_plan_serves_every_matrix_of_a_batch(gpu_stand_in):
    """The first one is at a multiple of 256 bytes, the second one is not."""
    assert N * K % 256
    a, b = gpu_stand_in.both(("vector", "block"), batch=(2,))
    gpu_stand_in.checked(a, b)
    assert promised(gpu_stand_in) == [16]


def test_autotune_takes_the_fastest(gpu_stand_in, monkeypatch):
    times = iter([3.0, 1.0, 2.0])

    def microseconds(run: Any) -> float:
        assert run() == library.SUCCESS
        return next(times)

    monkeypatch.setattr(cublaslt, "_microseconds", microseconds)
    a, b = gpu_stand_in.both(("vector", "vector"))
    into = gpu_stand_in.array(np.zeros((M, N), np.float32))
    gpu_stand_in.checked(a, b, accumulate=into, autotune=True)
    assert gpu_stand_in.fake.products[-1].algorithm == 2
    gpu_stand_in.checked(a, b, accumulate=into, autotune=True)
    gpu_stand_in.checked(a, b, accumulate=into)
    assert gpu_stand_in.fake.products[-1].algorithm == 1


def test_workspaces():
    """With out= they belong to it; those of other calls belong to the stream. Plans share sizes."""
    with machine(workspace_bytes=5000) as gpu_stand_in:
        a, b = gpu_stand_in.both(("vector", "block"))
        out = gpu_stand_in.array(np.zeros((M, N), bfloat16))
        for options in ({"out": out}, {"out": out}, {}, {}):
            gpu_stand_in.checked(a, b, **options)
            assert gpu_stand_in.fake.products[-1].workspace_bytes == 5000
        of_out, of_stream = (gpu_stand_in.fake.products[i].pointers["workspace"] for i in (1, -1))
        assert len({0, of_out, of_stream}) == 3
        assert [p.pointers["workspace"] for p in gpu_stand_in.fake.products[1:]] == [
            of_out, of_out, of_stream, of_stream]


def test_a_capture_of_a_product_that_is_new(gpu_stand_in):
    a, b = gpu_stand_in.both(("tensor", "tensor"))
    out = gpu_stand_in.array(np.zeros((M, N), bfloat16))
    with gpu_stand_in.place.cupy.cuda.Stream() as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"^out: .*call once before the capture$"):
            fp8.matmul_nt(a, b, out=out)
        stream.end_capture()
        fp8.matmul_nt(a, b, out=out)
        stream.begin_capture()
        fp8.matmul_nt(a, b, out=out, autotune=True)  # not tuned now, but may be later
        stream.end_capture()
    assert not [key for key in cublaslt._plans if key.autotune]


@pytest.mark.parametrize("warm", [0, 1])
def test_a_capture_with_another_alignment(warm, gpu_stand_in):
    """A plan for 16 bytes serves 256 as well, but not the other way round."""
    a, b = gpu_stand_in.both(("tensor", "tensor"))
    rows = gpu_stand_in.array(np.zeros((M + 1, N), bfloat16))
    outs = rows[:-1], rows[1:]
    gpu_stand_in.checked(a, b, out=outs[warm])
    with gpu_stand_in.place.cupy.cuda.Stream() as stream:
        stream.begin_capture()
        if warm == 0:
            with pytest.raises(ValueError, match="shapes, dtypes and alignment is called for the first time"):
                fp8.matmul_nt(a, b, out=outs[1])
        else:
            fp8.matmul_nt(a, b, out=outs[0])
        stream.end_capture()
    assert len(gpu_stand_in.fake.preferences) == 1
    gpu_stand_in.checked(a, b, out=outs[1 - warm])
    assert sorted(promised(gpu_stand_in)) == [16, 256]

