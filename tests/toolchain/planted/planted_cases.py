"""The planted-bug kernels: their inputs and expected outputs. Run as a script to execute some of them in one
mode:

    python planted_cases.py [--bug] [--order desc] [--seed 1] name...   (mode: $CUPY_FP8_HOST_MODE)

prints one JSON line per run: name, outcome ("right", "wrong" or "error") and the error's text.
"""

import argparse
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from cupy_fp8 import hostexec  # noqa: E402

THREADS = 64


@dataclass(frozen=True)
class Case:
    file: str
    expected: Callable[[np.ndarray], Any]  # input -> the whole output
    blocks: int = 2
    n: int = 2 * THREADS  # elements of the input
    shared_mem: int = 0
    resident: bool = False
    cluster: int = 1


def per_block(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, THREADS)


def copy(x: np.ndarray) -> np.ndarray:
    return x


def reverse(x: np.ndarray) -> np.ndarray:
    return per_block(x)[:, ::-1]


def other_block(x: np.ndarray) -> np.ndarray:
    return per_block(x)[::-1]


def other_block_reversed(x: np.ndarray) -> np.ndarray:
    return per_block(x)[::-1, ::-1]


def vector_pick(x: np.ndarray) -> np.ndarray:  # the .x and .w of every aligned group of four
    groups = x.reshape(-1, 4)
    return np.concatenate([groups[:, 0] + groups[:, 3], np.zeros(x.size - len(groups), int)])


def add_partner(x: np.ndarray) -> np.ndarray:  # v + (v of lane ^ 8), in the lower half of every warp
    lanes: np.ndarray = x.reshape(-1, 32).copy()
    lanes[:, :16] += x.reshape(-1, 32)[:, np.arange(16) ^ 8]
    return lanes


# Adds the value 16 lanes up, or the lane's own if there is none. Absent lanes are 0.
def add_lane_above(x: np.ndarray) -> np.ndarray:
    lanes = np.concatenate([x, np.zeros(-len(x) % 32, int)]).reshape(-1, 32)
    above = np.concatenate([lanes[:, 16:], lanes[:, 16:]], 1)
    total: np.ndarray = lanes + above
    return total.reshape(-1)[: len(x)]


def last_block(x: np.ndarray) -> np.ndarray:
    partials = per_block(x)[:, :32].sum(1)
    return np.concatenate([[len(partials), partials.sum()], partials])


def grid_barrier(x: np.ndarray) -> np.ndarray:
    rows = per_block(x)
    return np.concatenate([[len(rows)], x, (np.roll(rows, 1, 0) + 4 * rows[:, ::-1]).reshape(-1)])


i32 = np.arange(2 * THREADS)
CASES = {
    "global_read": Case("memory", copy, n=100),
    "global_write": Case("memory", lambda x: np.arange(100), n=100),
    "static_shared": Case("memory", lambda x: 2 * x),
    "dynamic_shared": Case("memory", copy, shared_mem=4 * THREADS),
    "local_array": Case("memory", lambda x: i32 % THREADS + (i32 & 7)),
    "misaligned": Case("memory", vector_pick),
    "misaligned_load": Case("memory", vector_pick),
    "misaligned_store": Case("memory", lambda x: i32 // 4 + i32 % 4),
    "int_overflow": Case("memory", lambda x: (i32 + 50000) ** 2 >> 8),
    "bad_shift": Case("memory", lambda x: (1 << i32 % 32).astype(np.uint32).view(np.int32)),
    "stack_overflow": Case("memory", lambda x: i32 % THREADS * 3),
    "float_to_int": Case("memory", lambda x: np.full(2 * THREADS, 2**31 - 1)),
    "uninitialised_shared": Case("memory", lambda x: np.repeat(per_block(x).sum(1), THREADS)),
    "shared_starts_filled": Case("memory", lambda x: np.full(2 * THREADS, -1), shared_mem=4 * THREADS),
    "missing_syncthreads": Case("order", reverse),
    "missing_second_syncthreads": Case("order", lambda x: 4 * np.roll(per_block(x), -1, 1) + 6),
    "missing_syncwarp": Case("order", lambda x: x.reshape(-1, 2)[:, ::-1]),
    "shuffle_as_barrier": Case("order", lambda x: x.reshape(-1, 2)[:, ::-1]),
    "unordered_blocks": Case("order", lambda x: [5], blocks=5, n=5 * THREADS),
    "last_block": Case("order", last_block, blocks=5, n=5 * THREADS),
    "grid_barrier": Case("order", grid_barrier, blocks=5, n=5 * THREADS, shared_mem=4 * THREADS,
                         resident=True),
    "look_back": Case("order", lambda x: np.concatenate([np.cumsum(x), np.ones(x.size)]), blocks=9, n=9,
                      resident=True),
    "divergent_shuffle": Case("collectives", add_partner),
    "shuffle_from_exited": Case("collectives", add_lane_above, n=2 * THREADS - 20),
    "divergent_barrier": Case("collectives", copy, n=100),
    "named_barrier": Case("collectives", lambda x: x.reshape(-1, 32)[:, ::-1]),
    "cp_async": Case("collectives", reverse),
    "mbarrier_wait": Case("collectives", reverse),
    "bulk_bytes": Case("collectives", reverse),
    "refilled_buffer": Case("collectives", lambda x: per_block(x)[:, ::-1] + x[:THREADS]),
    "bulk_store": Case("collectives", copy),
    "bulk_bounds": Case("collectives", copy),
    "cluster_store": Case("collectives", other_block_reversed, shared_mem=16 + 4 * THREADS, cluster=2),
    "cluster_end": Case("collectives", copy, shared_mem=4 * THREADS, cluster=2),
    "cluster_begin": Case("collectives", other_block, shared_mem=4 * THREADS, cluster=2),
}


def source(name: str) -> Path:
    return HERE / f"{CASES[name].file}.cu"


def compile_case(name: str, bug: bool) -> hostexec.HostKernel:
    return hostexec.compile_kernel(source(name), name, defines={"BUG": 1} if bug else {}, include_dirs=[HERE])


def run(name: str, *, bug: bool, order: str, seed: int, resident: bool | None = None,
        cluster: int | None = None) -> dict[str, Any]:
    case = CASES[name]
    x = np.random.default_rng(0).integers(1, 1000, case.n).astype(np.int32)
    expected = np.asarray(case.expected(x)).astype(np.int32).reshape(-1)
    y = np.zeros(expected.size, np.int32)
    params = struct.pack("QQi4x", x.ctypes.data, y.ctypes.data, case.n)
    result = {"name": name, "order": order, "seed": seed, "outcome": "error", "text": ""}
    try:
        kernel = compile_case(name, bug)
        resident = case.resident if resident is None else resident
        kernel((case.blocks,), (THREADS,), params, shared_mem=case.shared_mem, order=order, seed=seed,
               resident=resident, cluster=case.cluster if cluster is None else cluster)
    except hostexec.HostError as error:
        return result | {"text": str(error)}
    return result | {"outcome": "right" if np.array_equal(y, expected) else "wrong"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--order", default="asc,desc,random")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    for name in options.names or CASES:
        for order in options.order.split(","):
            for seed in range(options.seeds if order == "random" else 1):
                print(json.dumps(run(name, bug=options.bug, order=order, seed=seed)), flush=True)
