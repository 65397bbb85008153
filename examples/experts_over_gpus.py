"""A small expert layer over several GPUs, which trains two steps:

    python -m cupy_fp8 launch -n 2 examples/experts_over_gpus.py

A process is a rank, with a GPU of its own, some of the experts and some of the tokens. Where CuPy finds no
GPU the arrays are NumPy's. torchrun, mpirun and srun start it too (docs/several-gpus.md).

Every rank also trains the whole layer alone. With reduce="exact" the ranks together have its bytes. On GPUs
the exchanges do, but a product of one rank's experts may differ in the last place from one of all experts;
then the last line says so.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

import cupy_fp8 as fp8

STEPS, RATE = 2, 0.05
EXPERTS_OF_A_RANK, TOPK = 4, 4
TOKENS, HIDDEN, INNER = 128, 256, 128           # tokens of a rank


class Data(NamedTuple):
    """What all ranks have: tokens, what the layer should make of them, the gate's logits, first weights."""

    x: Any
    target: Any
    logits: Any
    up: Any
    down: Any


def data(ranks: int) -> Data:
    rng, experts = np.random.default_rng(0), ranks * EXPERTS_OF_A_RANK

    def normal(*shape: int) -> Any:
        return fp8.asarray(rng.standard_normal(shape, np.float32), like=fp8.xp)

    return Data(normal(ranks, TOKENS, HIDDEN), normal(ranks, TOKENS, HIDDEN), normal(ranks, TOKENS, experts),
                normal(experts, 2 * INNER, HIDDEN) / HIDDEN ** 0.5,
                normal(experts, HIDDEN, INNER) / INNER ** 0.5)


def squared_error(y: Any, target: Any) -> tuple[float, Any]:
    """The sum over all values, and its gradient."""
    difference = fp8.astype(y, fp8.xp.float32) - target
    return float((difference * difference).sum()), 2 * difference


def over_ranks(world: fp8.distributed.World, given: Data) -> tuple[Any, Any, list[float]]:
    """This rank's weights after the steps, and its part of each step's loss."""
    rank, losses = world.rank, []
    with fp8.distributed.ExpertParallel(world, num_experts=len(given.up), max_tokens=TOKENS, hidden=HIDDEN,
                                        topk=TOPK, reduce="exact") as ep:
        if rank == 0:
            print(f"{ep!r}, windows of {ep.nbytes / 2 ** 20:.1f} MiB", flush=True)
        own = slice(rank * ep.experts, (rank + 1) * ep.experts)
        up, down = given.up[own], given.down[own]
        experts = fp8.moe.Experts(up, down)
        gate = fp8.topk_gate(given.logits[rank], TOPK)
        for _ in range(STEPS):
            routing = ep.route(gate.indices)                                            # forward
            rows, row_probs = ep.dispatch(given.x[rank], routing, gate.weights)
            y_rows, saved = experts.forward_rows(rows, routing.splits, row_probs)
            y = ep.combine(y_rows, routing)

            loss, grad = squared_error(y, given.target[rank])
            grad_rows = ep.combine_backward(grad, routing)                              # backward
            dx_rows, row_dprobs, d_up, d_down = experts.backward_rows(grad_rows, saved)
            ep.dispatch_backward(dx_rows, row_dprobs, routing)      # dx, dprobs: for the layers before this

            ep.check()                          # no rank was late: the gradients are good
            up, down = updated(up, d_up), updated(down, d_down)
            experts.update(up, down)
            losses.append(loss)
    return up, down, losses


def alone(given: Data) -> tuple[Any, Any]:
    """The weights of all experts after the same steps on one rank that has all tokens."""
    up, down = given.up, given.down
    experts = fp8.moe.Experts(up, down)
    gate = fp8.topk_gate(given.logits.reshape(-1, len(up)), TOPK)
    for _ in range(STEPS):
        y, saved = experts.forward(given.x.reshape(-1, HIDDEN), gate)
        _, grad = squared_error(y, given.target.reshape(-1, HIDDEN))
        _, _, d_up, d_down = experts.backward(grad, saved)
        up, down = updated(up, d_up), updated(down, d_down)
        experts.update(up, down)
    return up, down


def updated(weights: Any, gradient: Any) -> Any:
    return weights - RATE / HIDDEN * fp8.astype(gradient, fp8.xp.float32)


def main() -> None:
    with fp8.distributed.init() as world:
        given = data(world.size)
        up, down, losses = over_ranks(world, given)
        own = slice(world.rank * EXPERTS_OF_A_RANK, (world.rank + 1) * EXPERTS_OF_A_RANK)
        same = all(fp8.bytes_equal(mine, whole[own])
                   for mine, whole in zip((up, down), alone(given), strict=True))
        every = [struct.unpack(f"!?{STEPS}d", each)
                 for each in world.gather(struct.pack(f"!?{STEPS}d", same, *losses))]
        if world.rank == 0:
            for step, parts in enumerate(list(zip(*every, strict=True))[1:]):
                print(f"step {step}: loss {sum(parts) / (world.size * TOKENS * HIDDEN):.4f}")
            print(f"weights of {world.size} ranks after {STEPS} steps:",
                  "the bytes of one rank" if all(each[0] for each in every) else "not the bytes of one rank")


if __name__ == "__main__":
    main()
