"""python -m cupy_fp8.bench.matmul.compare_grouped: TFLOP/s of grouped products beside a dense product of
cuBLASLt for each group, and beside PyTorch, by the two protocols of `compare`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ... import backend
from ...arrays import bits
from ..measure import Call
from .compare import directly, main, timed
from .grouped import SHAPES, Shape, operands, product, result, scaled


def callers(shape: Shape) -> Iterator[tuple[str, Any]]:
    """Yield what is timed, each with a function that makes the call."""
    a, b, splits = operands(shape)
    out = result(shape, b.data if shape.group == "m" else b.columnwise)
    yield "grouped_matmul_nt", lambda: product(shape, a, b, splits, out)
    if not shape.accumulate:
        yield "cuBLASLt for each group", partial(_each_group, shape, out)
    # PyTorch does not accumulate. Sizes that are not multiples of 16 fail on the device, which ends the
    # process.
    if shape.accumulate or (shape.group == "k" and shape.multiple % 16):
        return
    yield "torch._scaled_grouped_mm rows", partial(_by_torch, shape, a, b, True)
    yield "torch._scaled_grouped_mm rows fast", partial(_by_torch, shape, a, b, True, fast=True)
    yield "torch._grouped_mm bf16", partial(_by_torch, shape, a, b, False)


def _each_group(shape: Shape, out: Any) -> Call:
    """Return dense products of groups whose sizes the host knows, in sequence in a CUDA graph."""
    cp, of_rows = backend.cupy(), shape.group == "m"
    kept, end = [], 0
    with cp.cuda.Stream(non_blocking=True) as stream:
        for expert, size in enumerate(map(int, shape.sizes())):
            end += size
            if size == 0:
                continue
            m, k = (size, shape.other) if of_rows else (shape.other, size)
            a, b = scaled((m, k), (1, 128)), scaled((shape.n, k), (128 if of_rows else 1, 128))
            kept.append((directly(a, b, out[end - size : end] if of_rows else out[expert]), a, b))
        stream.synchronize()
        stream.begin_capture()
        for call, _, _ in kept:
            call()
        graph = stream.end_capture()

    def launch() -> None:
        graph.launch(cp.cuda.get_current_stream())
        assert kept, "the graph reads their memory"

    return launch


def _by_torch(shape: Shape, a: Any, b: Any, in_fp8: bool, fast: bool = False) -> Call:
    """Return PyTorch's call, with one scale per row. Its second operand is transposed; for gradients all
    columns of a matrix have one pitch."""
    import torch

    ends = torch.as_tensor(shape.sizes(), device="cuda").cumsum(0).to(torch.int32)

    def tensor(data: Any, *extents: int) -> Any:
        return torch.as_tensor(bits(data), device="cuda").view(torch.float8_e4m3fn).reshape(extents)

    def ones(*extents: int) -> Any:
        return torch.ones(extents, device="cuda")

    if shape.group == "m":
        left = tensor(a.data, shape.total, shape.other)
        right = tensor(b.data, shape.experts, shape.n, shape.other).transpose(1, 2)
        scales = ones(shape.total), ones(shape.experts, shape.n)
    else:
        left = tensor(a.columnwise, shape.other, shape.total)
        right = tensor(b.columnwise, shape.n, shape.total).t()
        scales = ones(shape.experts * shape.other), ones(shape.experts * shape.n)
    if in_fp8:
        return lambda: torch._scaled_grouped_mm(left, right, *scales, offs=ends, out_dtype=torch.bfloat16,
                                                use_fast_accum=fast)
    wide = left.bfloat16(), right.bfloat16()
    return lambda: torch._grouped_mm(*wide, offs=ends, out_dtype=torch.bfloat16)


def lines() -> Iterator[str]:
    """Yield a line of text for each product and caller."""
    for shape in SHAPES:
        for caller, paused, unpaused, problem in timed(callers(shape)):
            speed = problem or (f"{shape.flops / paused / 1e12:7.0f} {shape.flops / unpaused / 1e12:7.0f} "
                                f"TFLOP/s {shape.traffic / paused / 1e9:7.0f} GB/s")
            yield f"{shape.label:32} {shape.total}x{shape.n}x{shape.other} {caller:36} {speed}"


if __name__ == "__main__":
    raise SystemExit(main("TFLOP/s with pauses between bursts, without; GB/s with pauses", lines))
