"""Current scaling in one launch: the same bytes as in two, whatever was launched before on the same
memory."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, testing
from cupy_fp8.cases import poison, values
from cupy_fp8.formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float16, float32
from cupy_fp8.ops.quantize import single_read, tensor_current

#: one element, less and more than a chunk, one round, rounds in registers, rounds in shared memory (of the
#: CPU's machine), and too many
SIZES = (1, 7, 8, 9, 2048, 8192, 65536, 65543, 81920, 81921, 90007)


@pytest.fixture
def launches(monkeypatch):
    """Record whether each call of the op took one launch."""
    seen: list[bool] = []

    def launch(*args, **places):
        found = original(*args, **places)
        seen.append(found is not None)
        return found

    original = tensor_current.launch
    monkeypatch.setattr(tensor_current, "launch", launch)
    return seen


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("to", FP8_DTYPES, ids=str)
def test_every_size(dtype, to, run, launches):
    for size in SIZES:
        x = values("normal", (size,), dtype, size)
        x[-1] = 1e4                                         # the last element decides the scale
        buffer = np.array([3.0], np.float32)
        want = reference.quantize_tensor(x, dtype=to, amax=buffer)
        amax = run.array(np.array([3.0], np.float32))
        q = fp8.quantize_tensor(run.array(x), dtype=to, amax=amax)
        testing.assert_bytes_equal(q, want)
        testing.assert_bytes_equal(amax, buffer)
    if run.name == "host":
        assert launches == [size * dtype.itemsize <= 163840 + 15 for size in SIZES]
    if run.name == "cuda":
        assert all(launches)


def test_misaligned_memory_takes_two_launches(run, launches):
    for shift, dtype in ((1, bfloat16), (4, float32)):
        buffer = values("normal", (5000,), dtype)
        moved = run.array(buffer)[shift:] if run.name == "cuda" else buffer[shift:]
        q = fp8.quantize_tensor(moved)
        testing.assert_bytes_equal(q, reference.quantize_tensor(buffer[shift:]))
    if run.name != "reference":
        assert launches == [False, True]


def test_memory_between_blocks_serves_any_sequence_of_calls(run):
    """Sizes of one block and of all of them in turn, odd and even numbers of launches too, with noop between
    them, and with and without out=."""
    rng = np.random.default_rng(0)
    xs = {size: values("normal", (size,), float16, size) for size in (100, 3000, 20000)}
    outs = {size: fp8.quantize_tensor(run.array(x)) for size, x in xs.items()}
    for step in range(24):
        size = int(rng.choice(list(xs)))
        x = xs[size] * np.float16(2.0 ** -(step % 7))
        want = reference.quantize_tensor(x)
        moved = run.array(x)
        if step % 3 == 0:
            got = fp8.quantize_tensor(moved)
        else:
            for array in cases.outputs(outs[size], {}).values():
                poison(array)
            if step % 5 == 0:
                fp8.quantize_tensor(moved, noop=run.array(np.ones(1, np.float32)), out=outs[size])
            got = fp8.quantize_tensor(moved, out=outs[size])
        testing.assert_bytes_equal(got, want)
        # this op has words of its own
        testing.assert_bytes_equal(fp8.compute_amax(moved), reference.compute_amax(x))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 0.0, 2.0**-140])
def test_edges_of_the_scale(special, run):
    x = np.zeros(70000, np.float32)
    x[[0, 40000, 69999]] = special
    for options in ({}, {"pow2_scale": True}, {"eps": 1e-3, "dtype": float8_e5m2}):
        testing.assert_bytes_equal(fp8.quantize_tensor(run.array(x), **options),
                                   reference.quantize_tensor(x, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [False, True])
def test_launches_of_several_streams_do_not_block_each_other(listed, monkeypatch):
    """Each needs every multiprocessor at once: the driver must not start two of them halfway. listed: those
    that read many matrices once, including small lists here."""
    gpu, cp = single_read._gpu, backend.cupy()
    monkeypatch.setattr(single_read, "_gpu", lambda device: gpu(device)._replace(fewest=0))
    x = fp8.asarray(values("normal", (4096, 2048), bfloat16), like="cupy")
    xs = [x[i::4].copy() for i in range(4)] if listed else [x]
    want = [reference.quantize_tensor(fp8.asnumpy(a), columnwise=listed) for a in xs]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
    outs = [[fp8.CurrentScaling().empty(a.shape, columnwise=listed, like=a) for a in xs] for _ in streams]
    cp.cuda.get_current_stream().synchronize()
    for _ in range(50):
        for stream, out in zip(streams, outs, strict=True):
            with stream:
                if listed:
                    fp8.multi_quantize(xs, fp8.CurrentScaling(), columnwise=True, out=out)
                else:
                    fp8.quantize_tensor(x, out=out[0])
    for stream, out in zip(streams, outs, strict=True):
        stream.synchronize()
        testing.assert_bytes_equal(out, want)


def test_every_case_of_the_table_that_fits_is_one_launch(launches):
    """The table has both kinds."""
    with testing.executor("host"):
        for case in cases.OPS["quantize_tensor"].cases():
            if case.options.get("scale", 1) is None and not case.options.get("columnwise"):
                args, kwargs = cases.OPS["quantize_tensor"].inputs(case)
                fp8.quantize_tensor(*args, **kwargs)
    assert {True, False} == set(launches)
