"""What splits_to_offsets refuses, before one byte is written; and that outputs which fitted once are still looked at."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, testing
from cupy_fp8.arrays import bits
from cupy_fp8.kernels import Variant, errors
from cupy_fp8.ops.moe import offsets

SPLITS = np.array([3, 0, 5], np.int64)
POISON = 0xAAAAAAAAAAAAAAAA


def outputs_for(*dtypes: Any) -> list[np.ndarray]:
    arrays = [np.empty(4, dtype) for dtype in dtypes or (np.int64,)]
    for a in arrays:
        cases.poison(a)
    return arrays


def refused(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
    """The call raises this error itself; all NumPy outputs stay as they were."""
    outputs = kwargs.get("outputs")
    held = [a for a in outputs if isinstance(a, np.ndarray)] if isinstance(outputs, list) else []
    before = [a.tobytes() for a in held]
    with pytest.raises(error, match="^" + message) as caught:
        fp8.splits_to_offsets(*args, **kwargs)
    assert caught.type is error
    assert [a.tobytes() for a in held] == before, "memory was written"


@pytest.fixture(params=["reference", "host"], autouse=True)
def numpy_run(request: pytest.FixtureRequest) -> Iterator[testing.Executor]:
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)
    with testing.executor(request.param) as executor:
        yield executor


# ---- sizes ----
def test_refused_splits():
    outputs = outputs_for()
    wrong: Any
    for wrong in (9, "45", {4, 5}, None, np.int64(3), memoryview(b"x")):
        refused(TypeError, f"splits: expected a numpy.ndarray or cupy.ndarray, got {type(wrong).__name__}", wrong, outputs=outputs)
    for dtype in (np.float32, np.uint32, np.int16, bool, ">i8"):
        refused(TypeError, "splits: expected dtype int32, int64, got", np.zeros(3, dtype), outputs=outputs)
    for shape in ((), (1, 3), (3, 1)):
        refused(ValueError, rf"splits: expected one dimension, got shape {re.escape(str(shape))}", np.zeros(shape, np.int64),
                outputs=outputs)
    refused(TypeError, "splits: expected integers", [4.0, 5], outputs=outputs)
    refused(TypeError, "splits: expected integers", [[4], [5]], outputs=outputs)
    refused(ValueError, "splits: expected integers of 64 bits", [2**63], outputs=outputs)


@pytest.mark.parametrize("given", [list, np.array], ids=["list", "array"])
def test_refused_sizes(given):
    refused(ValueError, "splits: expected sizes of 0 or more, got -5 for group 1", given([14, -5, 2]), outputs=outputs_for())
    largest = 2**63 - 1
    refused(ValueError, rf"splits: output 0 would end with {largest + 1} \* 1, more than int64 holds$", given([largest, 1, 0]),
            outputs=outputs_for())
    refused(ValueError, r"splits: output 1 would end with 8 \* 268435456, more than int32 holds; ask for int64 there$", given([3, 0, 5]),
            strides=(1, 2**28), dtypes=("int64", "int32"), outputs=outputs_for(np.int64, np.int32))
    fp8.splits_to_offsets(given([largest, 1, 0]), strides=(0,), dtypes="int32")         # 0 is what any dtype holds


# ---- options ----
def test_refused_strides():
    for wrong in (1, None, 1.5, "ab", (1.0,), (1, "2"), (None,), np.array([1.5]), [[1]]):
        refused(TypeError, "strides: expected integers, one for each output, got", SPLITS, strides=wrong, outputs=outputs_for())
    for stride in (-1, -(2**70), 2**63, 2**70):
        refused(ValueError, rf"strides: expected 0 to 2\*\*63 - 1, got {stride} for output 1", SPLITS, strides=(1, stride),
                outputs=outputs_for(np.int64, np.int64))


def test_refused_leading_zeros():
    wrong: Any
    several: Any
    for wrong in (None, "yes", 2, -1, (True, None), [True, "no"], {}, (True, [])):
        refused(TypeError, "include_leading_zero: expected True or False, got", SPLITS, strides=(1, 2), include_leading_zero=wrong,
                outputs=outputs_for(np.int64, np.int64))
    for several in ((), (True,), (True, False, True), np.array([True])):
        refused(ValueError, rf"include_leading_zero: expected one for all outputs or 2, one for each stride; got {len(several)}", SPLITS,
                strides=(1, 2), include_leading_zero=several)


def test_refused_dtypes():
    wrong: Any
    for wrong in (np.float64, "uint32", None, "nope", object(), ">i8", 5, {}, fp8.float8_e4m3fn, ("int32", np.int16), [None, "int64"]):
        refused(TypeError, "dtypes: expected int32, int64, got", SPLITS, strides=(1, 2), dtypes=wrong,
                outputs=outputs_for(np.int64, np.int64))
    for several in ((), ("int32",), ["int32"] * 3):
        refused(ValueError, rf"dtypes: expected one for all outputs or 2, one for each stride; got {len(several)}", SPLITS, strides=(1, 2),
                dtypes=several)


# ---- outputs ----
def test_refused_outputs():
    wrong: Any
    for wrong in (np.empty(4, np.int64), 3, "ab", {}, iter([])):
        refused(TypeError, r"outputs: expected a list of arrays \(an earlier result\), got", SPLITS, outputs=wrong)
    for count in (0, 1, 3):
        refused(ValueError, f"outputs: expected 2 arrays, one for each stride, got {count}", SPLITS, strides=(1, 2),
                outputs=(3 * outputs_for())[:count])
    for wrong in ([1, 2, 3, 4], None, 2.0):
        refused(TypeError, r"outputs\[1\]: expected a numpy.ndarray or cupy.ndarray", SPLITS, strides=(1, 2),
                outputs=[*outputs_for(), wrong])
    refused(TypeError, r"outputs\[0\]: expected a numpy.ndarray or cupy.ndarray", [3, 0, 5], outputs=[None])
    refused(TypeError, r"outputs\[1\]: expected dtype int64, got int32", SPLITS, strides=(1, 2), outputs=outputs_for(np.int64, np.int32))
    refused(ValueError, r"outputs\[0\]: expected shape \(3,\), got \(4,\)", SPLITS, include_leading_zero=False, outputs=outputs_for())
    refused(ValueError, r"outputs\[0\]: expected shape \(4,\), got \(4, 1\)", SPLITS, outputs=[np.full((4, 1), 7)])
    refused(ValueError, r"outputs\[0\]: expected a C-contiguous array, got strides \(16,\)", SPLITS, outputs=[np.zeros(8, np.int64)[::2]])
    buffer = np.zeros(40, np.uint8)
    lead = -buffer.ctypes.data % 8 + 4
    refused(ValueError, r"outputs\[0\]: address 0x[0-9a-f]+ is not a multiple of the element size 8", np.array([1, 2]),
            outputs=[buffer[lead:lead + 24].view(np.int64)])
    (read_only,) = outputs_for()
    read_only.flags.writeable = False
    refused(ValueError, r"outputs\[0\]: the array is read-only", SPLITS, outputs=[read_only])


def test_refused_overlaps():
    memory = np.zeros(20, np.int64)
    memory[:] = 3
    again = "in memory; results need memory of their own$"
    for at in (1, 3, 6):
        refused(ValueError, rf"outputs\[0\]: overlaps splits {again}", memory[3:7], outputs=[memory[at:at + 5]])
    refused(ValueError, rf"outputs\[1\]: overlaps splits {again}", memory[3:7], strides=(1, 1), outputs=[memory[10:15], memory[5:10]])
    for first, second in ((0, 0), (0, 4), (4, 0), (9, 5)):
        late, early = (0, 1) if first > second else (1, 0)
        refused(ValueError, rf"outputs\[{late}\]: overlaps outputs\[{early}\] {again}", np.array([1, 2, 3, 4]), strides=(1, 1),
                outputs=[memory[first:first + 5], memory[second:second + 5]])
    apart = [memory[5:10], memory[0:5], memory[10:15]]
    assert fp8.splits_to_offsets(memory[15:19], strides=(1, 2, 3), outputs=apart) is apart
    assert memory[:15].tolist() == [0, 6, 12, 18, 24, 0, 3, 6, 9, 12, 0, 9, 18, 27, 36]


# ---- CuPy arrays over addresses that nobody owns: everything that is looked at before a launch ----
class Fake:
    def __init__(self, cupy: Any) -> None:
        self.cupy, self.next = cupy, 1 << 30

    def __call__(self, shape: Any, dtype: Any = np.int64, *, at: int | None = None, device: int = 0, strides: Any = None) -> Any:
        if at is None:
            at, self.next = self.next, self.next + (1 << 20)
        memory = self.cupy.cuda.memory.UnownedMemory(at, 1 << 18, None, device_id=device)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0), strides)


@pytest.fixture
def fake() -> Fake:
    return Fake(pytest.importorskip("cupy"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would have been launched: blocks and members of the struct. Device 0 has an error word."""
    seen: list[tuple[Any, ...]] = []

    def launch(self: Variant, x: Any, grid: int, *values: Any) -> None:
        self.kernel.params.pack(*values)
        seen.append((grid, *values))

    monkeypatch.setattr(Variant, "launch", launch)
    monkeypatch.setitem(errors._words, 0, (None, 4096))
    monkeypatch.setitem(errors._words, 1, (None, 8192))
    return seen


def test_kinds_and_devices_are_not_mixed(fake, launched):
    numpy_among, cupy_among = ": a numpy array among cupy arrays", ": a cupy array among numpy arrays"
    refused(TypeError, r"outputs\[0\]" + cupy_among, SPLITS, outputs=[fake(4)])
    refused(TypeError, r"outputs\[0\]" + numpy_among, fake(3), outputs=outputs_for())
    refused(TypeError, r"outputs\[1\]" + numpy_among, fake(3), strides=(1, 1), outputs=[fake(4), *outputs_for()])
    refused(ValueError, r"outputs\[1\]: on GPU 1, the input is on GPU 0$", fake(3), strides=(1, 1), outputs=[fake(4), fake(4, device=1)])
    refused(ValueError, r"outputs\[0\]: expected a C-contiguous array, got strides \(16,\)", fake(3), outputs=[fake(4, strides=(16,))])
    refused(ValueError, "splits: address 0x[0-9a-f]+4 is not a multiple of the element size 8", fake(3, at=(1 << 29) + 4),
            outputs=[fake(4)])
    assert launched == []


def test_outputs_that_fitted_once_are_still_looked_at(fake, launched):
    """What the outputs were found to fit is remembered; what changes from call to call is looked at again."""
    splits, outputs = fake(3), [fake(4), fake(4, np.int32)]
    start = outputs[0].data.ptr
    options: dict[str, Any] = {"strides": (1, 5), "dtypes": ("int64", "int32")}
    for given_splits in (splits, splits, fake(3), fake(3, at=start + 32), fake(3, at=start - 24), splits):
        assert fp8.splits_to_offsets(given_splits, **options, outputs=outputs) is outputs
        assert launched[-1][1] == given_splits.data.ptr
        assert launched[-1][:1] + launched[-1][2:] == launched[0][:1] + launched[0][2:]
    narrow = fake(3, np.int32)
    fp8.splits_to_offsets(narrow, **options, outputs=outputs)
    assert launched[-1][4] != launched[0][4]
    fp8.splits_to_offsets(splits, **options, outputs=outputs)
    before = len(launched)
    again = r": overlaps .* in memory; results need memory of their own$"
    refused(ValueError, r"outputs\[0\]" + again, fake(3, at=start - 8), **options, outputs=outputs)
    refused(ValueError, r"outputs\[1\]" + again, fake(3, at=outputs[1].data.ptr), **options, outputs=outputs)
    refused(ValueError, r"outputs\[0\]: on GPU 0, the input is on GPU 1", fake(3, device=1), **options, outputs=outputs)
    refused(ValueError, r"outputs\[0\]: expected shape \(5,\)", fake(4), **options, outputs=outputs)
    refused(ValueError, "splits: expected one dimension", fake((3, 1)), **options, outputs=outputs)
    refused(TypeError, "splits: expected dtype", fake(3, np.float64), **options, outputs=outputs)
    refused(TypeError, r"splits: a numpy array|outputs\[0\]: a cupy array", SPLITS, **options, outputs=outputs)
    refused(ValueError, r"outputs\[1\]: expected shape \(3,\)", splits, **options, include_leading_zero=(True, False), outputs=outputs)
    refused(TypeError, r"outputs\[1\]: expected dtype int64", splits, strides=(1, 5), outputs=outputs)
    refused(TypeError, r"outputs\[0\]: expected dtype int64, got int32", splits, **options, outputs=outputs[::-1])
    refused(ValueError, "outputs: expected 2 arrays", splits, **options, outputs=outputs[:1])
    refused(TypeError, "strides: expected integers", splits, strides=("a", 5), dtypes=options["dtypes"], outputs=outputs)
    assert len(launched) == before
    packed = launched[0][-1]
    fp8.splits_to_offsets(splits, strides=(2, 5), dtypes=options["dtypes"], outputs=outputs)
    assert launched[-1][-1] != packed
    array: Any = np.array([1, 5])
    for _ in range(2):
        fp8.splits_to_offsets(splits, strides=array, dtypes=options["dtypes"], outputs=outputs)
    assert launched[-1][-1] == packed


def test_options_that_the_caller_changes(fake, launched):
    """Lists belong to the caller: what they were is what was found to fit, not the lists."""
    splits, outputs = fake(3), [fake(4), fake(4)]
    strides, leads, dtypes = [1, 5], [True, True], ["int64", "int64"]
    for _ in range(2):
        fp8.splits_to_offsets(splits, strides=strides, include_leading_zero=leads, dtypes=dtypes, outputs=outputs)
    first = launched[-1]
    strides[1] = 6
    fp8.splits_to_offsets(splits, strides=strides, include_leading_zero=leads, dtypes=dtypes, outputs=outputs)
    assert launched[-1] != first
    leads[0] = False
    refused(ValueError, r"outputs\[0\]: expected shape \(3,\)", splits, strides=strides, include_leading_zero=leads, dtypes=dtypes,
            outputs=outputs)
    leads[0], dtypes[0] = True, "int32"
    refused(TypeError, r"outputs\[0\]: expected dtype int32", splits, strides=strides, include_leading_zero=leads, dtypes=dtypes,
            outputs=outputs)


def test_what_is_remembered_goes_with_the_outputs(fake, launched):
    gc.collect()
    before = len(offsets._targets)
    outputs = [fake(4), fake(4)]
    fp8.splits_to_offsets(fake(3), strides=(1, 2), outputs=outputs)
    fp8.splits_to_offsets(fake(3), strides=(1, 3), outputs=outputs)
    fp8.splits_to_offsets(fake(3), strides=(1,), outputs=outputs[:1])
    assert len(offsets._targets) == before + 2
    del outputs[0]
    gc.collect()
    assert len(offsets._targets) == len(offsets._ends) == before


def test_without_a_gpu_a_list_means_numpy():
    if backend.gpu_problem() is None:
        pytest.skip("there is a GPU")
    (a,) = fp8.splits_to_offsets([1, 2])
    assert isinstance(a, np.ndarray)
    assert not (bits(a) == POISON).any()
