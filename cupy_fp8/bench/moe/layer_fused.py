"""DeepGEMM's forward pass of the whole layer on Hopper: a launch that quantises tokens, and one for
everything else, dispatch and combine between ranks included."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from ...arrays import bits
from ...results import Quantized
from ..measure import Call
from .layer import Problem
from .layer_peers import tensor

_MODULES = ("deep_gemm", "sgl_deep_gemm")
_NEEDED = ("fp8_mega_moe", "transform_weights_for_mega_moe_sm90", "get_symm_buffer_for_mega_moe",
           "mega_moe_pre_dispatch_sm90")
NAME = "DeepGEMM's fp8_mega_moe"


def library() -> Any:
    """Return the module, or why there is none."""
    problems = []
    for name in _MODULES:
        try:
            module = import_module(name)
        except Exception as error:      # a build for another PyTorch or CUDA raises several types
            problems.append(f"{name}: {type(error).__name__}: {str(error)[:120]}")
            continue
        missing = [need for need in _NEEDED if not hasattr(module, need)]
        if not missing:
            return module
        problems.append(f"{name} has no {', '.join(missing)}")
    return "; ".join(problems)


class Place(NamedTuple):
    """A rank, their number, and the port at which rank 0 of this host listens."""

    rank: int
    ranks: int
    port: int


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def fused(module: Any, given: Problem, up: Quantized, down: Quantized, place: Place) -> Iterator[Call]:
    """Yield the forward pass of a problem. up, down: this rank's weights in blocks of 128 x 128; tokens
    choose among the experts of all ranks."""
    import torch

    shape = given.shape
    weights = module.transform_weights_for_mega_moe_sm90(_operand(up), _operand(down))
    x, chosen, probs = tensor(given.x), tensor(given.chosen), tensor(given.probs)
    y = torch.empty((shape.tokens, shape.hidden), dtype=torch.bfloat16, device=x.device)
    with _group(place) as group:
        buffer = module.get_symm_buffer_for_mega_moe(group, shape.experts * place.ranks, shape.tokens,
                                                     shape.topk, shape.hidden, shape.inner)

        def forward() -> Any:
            module.mega_moe_pre_dispatch_sm90(x, chosen, probs, buffer.x, buffer.x_sf, buffer.topk_idx,
                                              buffer.topk_weights, num_tokens=shape.tokens)
            module.fp8_mega_moe(y, *weights, buffer)
            return y

        try:
            yield forward
        finally:
            torch.cuda.synchronize()
            buffer.destroy()


def _operand(weights: Quantized) -> tuple[Any, Any]:
    """Return codes, and one float32 scale for each block."""
    import torch

    compact = weights.rowwise.to_layout("compact")
    return tensor(bits(compact.data)).view(torch.float8_e4m3fn), tensor(compact.scale_inv).contiguous()


@contextmanager
def _group(place: Place) -> Iterator[Any]:
    import torch.distributed as dist

    rank, ranks, port = place
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", world_size=ranks, rank=rank)
    try:
        yield dist.new_group(list(range(ranks)))
    finally:
        dist.destroy_process_group()
