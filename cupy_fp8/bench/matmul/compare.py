"""python -m cupy_fp8.bench.matmul.compare: TFLOP/s of products beside cuBLASLt called directly and PyTorch.

A GPU at its power limit slows down, so two protocols are shown: bursts of calls with pauses between them, and
back-to-back bursts once the GPU is warm.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ... import backend
from ...arrays import bits, empty
from ...formats import bfloat16
from ...ops.matmul import cublaslt, library
from ...ops.matmul.dense import matmul_nt
from ...recipes import BlockScaling, CurrentScaling
from ...results import Scaled
from ..measure import DELAY, Call

#: M, N, K of the products. The last one is the gradient of a weight over 32768 tokens.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (32768, 2048, 7168), (2048, 7168, 32768))
PAIRS = (("tensor", "tensor"), ("row", "row"), ("vector", "block"), ("vector", "vector"))
_BURSTS, _CALLS, _PAUSE, _WARM = 5, 10, 0.2, 0.5
_RECIPES: dict[str, Any] = {
    "tensor": CurrentScaling(), "row": BlockScaling((1, None)), "vector": BlockScaling(),
    "block": BlockScaling((128, 128))}
_WORKSPACE = 32 << 20
_HOST_NS = 1_000_000               # most host time to enqueue a burst

class Row(NamedTuple):
    """TFLOP/s of one caller, with pauses and without; or why there are none."""

    shape: tuple[int, int, int]
    pair: tuple[str, str]
    caller: str
    paused: float
    unpaused: float
    problem: str = ""

    def __str__(self) -> str:
        shape, pair = "×".join(map(str, self.shape)), " × ".join(self.pair)
        speed = self.problem or f"{self.paused:7.0f} {self.unpaused:7.0f}"
        return f"{shape:>18} {pair:>16} {self.caller:28} {speed}"


def operand(rows: int, k: int, scaling: str) -> Scaled:
    """Return a quantised operand of N(0, 1)."""
    cp = backend.cupy()
    return _RECIPES[scaling].quantize(cp.random.standard_normal((rows, k), dtype=cp.float32)).rowwise


def callers(a: Scaled, b: Scaled, out: Any) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield what is timed, each with a function that makes the call."""
    row_wise = a.block is None or a.block == (1, None)
    for label, fast in (("", False), (" fast", True)):
        if row_wise or not fast:
            yield f"matmul_nt{label}", partial(_ours, a, b, out, fast_accum=fast)
            yield f"matmul_nt{label} tuned", partial(_ours, a, b, out, fast_accum=fast, autotune=True)
            yield f"cuBLASLt{label}", partial(directly, a, b, out, fast_accum=fast)
            yield f"torch._scaled_mm{label}", partial(by_torch, a, b, fast_accum=fast)
    yield "torch bf16", partial(by_torch_in_bf16, a, b)


def _ours(a: Scaled, b: Scaled, out: Any, **options: Any) -> Call:
    return partial(matmul_nt, a, b, out=out, **options)


def directly(a: Scaled, b: Scaled, out: Any, fast_accum: bool = False) -> Call:
    """Return a call of cublasLtMatmul like that of the library's samples: the heuristic's first algorithm, 32
    MB of workspace, arguments that are made once."""
    cp = backend.cupy()
    lib = library.found()
    if isinstance(lib, str):
        raise backend.DeviceError(lib)
    (m, k), n = a.shape, b.shape[0]
    modes: dict[Any, int] = {None: 0, (1, None): 3, (1, 128): 4, (128, 128): 5}
    key = cublaslt.AlgorithmKey(
        device=out.data.device_id, m=m, n=n, k=k, batch=1, a_type=b.dtype, b_type=a.dtype, to=out.dtype,
        a_mode=modes[b.block], b_mode=modes[a.block], bias=None, accumulate=False, fast_accum=fast_accum,
        autotune=False, alignment=256)
    plan, workspace = cublaslt.MatmulPlan(lib, key), cp.empty(_WORKSPACE, cp.uint8)
    values = [x.data.ptr for x in (b.data, a.data, out, b.scale_inv, a.scale_inv)] + [0, workspace.data.ptr]
    plan.set_addresses(plan.description, values)
    found = lib.algorithms(plan.handle, plan.description, plan.a, plan.b, plan.c,
                           library.preference(lib, workspace=_WORKSPACE), 1)
    if not found:
        raise backend.DeviceError(f"the heuristic has no algorithm for {key}")
    arguments, matmul = plan.arguments(plan.description, values, found[0]), lib.matmul
    stream = ctypes.c_void_p(cp.cuda.get_current_stream().ptr)

    def call() -> None:
        if status := matmul(*arguments, stream):
            raise plan.failed(status)
        assert workspace is not None, "the call keeps it and the algorithm alive"
        assert found

    return call


def by_torch(a: Scaled, b: Scaled, fast_accum: bool = False) -> Call:
    import torch

    def tensor(x: Any) -> Any:
        return torch.as_tensor(x, device="cuda")

    left, right = (tensor(bits(s.data)).view(torch.float8_e4m3fn) for s in (a, b))
    scales = []
    for s, transposed in ((a, False), (b, True)):
        compact = tensor(s.scale_inv if s.block is None else s.to_layout("compact").scale_inv)
        if s.block is None:
            compact = compact.reshape(())
        elif s.block == (1, 128):
            compact = compact.t().contiguous().t()
        scales.append(compact.t() if transposed and s.block is not None else compact)
    return lambda: torch._scaled_mm(left, right.t(), scales[0], scales[1], out_dtype=torch.bfloat16,
                                    use_fast_accum=fast_accum)


def by_torch_in_bf16(a: Scaled, b: Scaled) -> Call:
    import torch

    left, right = (torch.as_tensor(bits(s.data), device="cuda").view(torch.float8_e4m3fn).bfloat16()
                   for s in (a, b))
    return lambda: torch.mm(left, right.t())


def seconds(call: Call) -> float:
    """Return the device time of one call in a burst, all of which is enqueued before the first call
    begins."""
    cuda = backend.cupy().cuda
    start, end = cuda.Event(), cuda.Event()
    DELAY.bind(backend.cupy().empty(1, np.uint8), 1, nanoseconds=_HOST_NS).run()
    start.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(start, end)) / 1e3 / _CALLS


def timed(callers: Iterable[tuple[str, Callable[[], Call]]]) -> Iterator[tuple[str, float, float, str]]:
    """Yield (caller, seconds of a call with pauses between bursts, without, "") for each caller, or (caller,
    0, 0, why) for one that is missing or refuses the product. First all are called with pauses, then all
    without."""
    calls: dict[str, Call] = {}
    problems: dict[str, str] = {}
    for caller, make in callers:
        try:
            call = make()
            call()
            backend.cupy().cuda.get_current_stream().synchronize()
            calls[caller] = call
        except Exception as error:
            problems[caller] = f"{type(error).__name__}: {str(error)[:150]}"
    medians = [{caller: _median(call, paused) for caller, call in calls.items()} for paused in (True, False)]
    yield from ((caller, medians[0][caller], medians[1][caller], "") for caller in calls)
    yield from ((caller, 0, 0, problem) for caller, problem in problems.items())


def _median(call: Call, paused: bool) -> float:
    """Return the median seconds of a call over some bursts."""
    end = time.perf_counter() + (0 if paused else _WARM)
    while time.perf_counter() < end:
        seconds(call)
    times = []
    for _ in range(_BURSTS):
        time.sleep(_PAUSE if paused else 0)
        times.append(seconds(call))
    return statistics.median(times)


def compared(shape: tuple[int, int, int], pair: tuple[str, str], dtype: Any = bfloat16) -> Iterator[Row]:
    """Yield the rows of one product, caller by caller."""
    m, n, k = shape
    a, b = operand(m, k, pair[0]), operand(n, k, pair[1])
    out, tera = empty((m, n), np.dtype(dtype), like=a.data), 2 * m * n * k / 1e12
    for caller, paused, unpaused, problem in timed(callers(a, b, out)):
        yield Row(shape, pair, caller, paused and tera / paused, unpaused and tera / unpaused, problem)


def main(title: str, lines: Callable[[], Iterable[Any]]) -> int:
    """Print a comparison."""
    problem = backend.gpu_problem()
    if problem:
        print(f"a comparison needs a GPU: {problem}")
        return 1
    print(title, flush=True)
    for line in lines():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(
        f"{'M×N×K':>18} {'scales':>16} {'':28} TFLOP/s with pauses, without",
        lambda: (row for shape in SHAPES for pair in PAIRS for row in compared(shape, pair))))
