"""python -m cupy_fp8 bench moe: measures and prints its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .. import backend, kernels

_HEADING = (f"{'':28}{'out=':>9}{'allocating':>12}{'graph':>9}{'TFLOP/s':>9}{'spread':>8}"
            f"{'host: out=':>12}{'allocating':>12}{'graph':>9}{'bf16 ÷':>8}{'requant. ÷':>12}")
_FORWARD = (f"{'':36}{'ms':>8}{'graph':>8}{'TFLOP/s':>9}{'spread':>8}{'host µs':>9}{'÷ ours':>8}"
            f"{'÷ graph':>9}")
_FORWARD_LABEL = "forward: "


def moe_rows() -> Iterator[dict[str, Any]]:
    """Print and yield the rows of the layer."""
    from ..bench.moe import layer_rows

    cp = backend.cupy()
    kernels.announce(print)
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.runtime.getDevice())
    print(f"The expert layer on {properties['name'].decode()}: medians of bursts of steps with pauses",
          flush=True)
    problem = layer_rows.torch_problem()
    if problem is not None:
        print(f"Nothing in bf16 beside it: {problem}", flush=True)
    with layer_rows.on_gpu() as (stream, clock):
        yield from shown("A step (route, forward, backward) in ms, and the host's time for it in µs",
                         _HEADING, layer_rows.step_rows(clock, stream, cp))
        yield from shown("The forward pass alone (route, forward), keeping nothing", _FORWARD,
                         layer_rows.forward_rows(clock, stream, cp))


def shown(title: str, heading: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Print rows as they come."""
    shape = None
    print(f"\n{title}", flush=True)
    for row in rows:
        if row["shape"] != shape:
            shape = row["shape"]
            experts, tokens, topk, hidden, inner = shape
            print(f"E={experts}, T={tokens}, k={topk}, hidden {hidden}, inner {inner}\n{heading}", flush=True)
        print("\n".join(lines(row)), flush=True)
        yield row


def lines(row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a row."""
    label = row["variant"]
    if "us" in row:
        yield (_forward_line if label.startswith(_FORWARD_LABEL) else _step_line)(row)
        yield f"    µs: {', '.join(f'{name} {us:.0f}' for name, us in row['calls_us'].items())}"
    if "bytes_per_token" in row:
        kept = ", ".join(f"{keep} {nbytes / 1024:.1f}" for keep, nbytes in row["bytes_per_token"].items())
        yield f"    kept for the backward pass, KiB a token: {kept}"
    if "checks" in row:
        same = ", ".join(f"{name} {'yes' if equal else 'NO'}" for name, equal in row["checks"].items())
        yield f"    same bytes: {same}"
    if "error" in row:
        errors = ", ".join(f"{name} {error:.4f}" for name, error in row["error"].items())
        yield f"    relative error: {errors}"
    if "by" in row:
        yield f"    {row['by']}"
    for key in ("skipped", "problem"):
        if key in row:
            yield f"{label:28} {key.upper() if key == 'problem' else key}: {row[key]}"


def _step_line(row: dict[str, Any]) -> str:
    """Return the line of a step. Other implementations of the layer allocate."""
    own = "allocating_us" in row
    device = [row["us"] if own else None, row["allocating_us" if own else "us"], row.get("graph_us")]
    host = [row["host_us"] if own else None, row["allocating_host_us" if own else "host_us"],
            row.get("graph_host_us")]
    ms = [None if us is None else us / 1e3 for us in device]
    return (f"{row['variant']:28}" + "".join(map(_cell, ms, (9, 12, 9), (3, 3, 3)))
            + f"{row['tflops']:9.0f}{row['spread_percent']:7.1f}%"
            + "".join(map(_cell, host, (12, 12, 9), (0, 0, 0)))
            + _cell(row.get("bf16_ratio"), 8, 2) + _cell(row.get("requantising_ratio"), 12, 2)).rstrip()


def _forward_line(row: dict[str, Any]) -> str:
    graph = None if "graph_us" not in row else row["graph_us"] / 1e3
    return (f"{row['variant'].removeprefix(_FORWARD_LABEL):36}{row['us'] / 1e3:8.3f}{_cell(graph, 8, 3)}"
            f"{row['tflops']:9.0f}{row['spread_percent']:7.1f}%{row['host_us']:9.0f}"
            f"{_cell(row.get('to_ours'), 8, 2)}{_cell(row.get('to_graph'), 9, 2)}").rstrip()


def _cell(value: float | None, width: int, digits: int) -> str:
    return " " * width if value is None else f"{value:{width}.{digits}f}"
