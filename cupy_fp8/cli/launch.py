"""python -m cupy_fp8 launch -n 4 script.py …: a process for each GPU, which `distributed.init` finds.

Each gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them, and a token that
no other job has. SIGINT and SIGTERM are passed on. When a process fails, the others are told to end (SIGTERM,
and SIGKILL after some seconds), and the exit code is that of the first one that failed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_GRACE = 5.0                    # seconds between SIGTERM and SIGKILL
_POLL = 0.02
_BY_SIGNAL = 128                # what a shell adds to the number of the signal that ended a process
_SIGNALS = signal.SIGINT, signal.SIGTERM


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 launch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=number_of_ranks, required=True, help="how many processes")
    parser.add_argument("-m", "--module", action="store_true", help="script is the name of a module")
    parser.add_argument("--share-gpus", action="store_true",
                        help="more ranks than GPUs are fine (to try something out; NCCL refuses it)")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(argv)
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    return run(command, options.ranks, share_gpus=options.share_gpus)


def number_of_ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def run(command: Sequence[str], ranks: int, *, share_gpus: bool = False) -> int:
    """Run the command in this many processes. Returns the exit code of the first one that fails, or 0."""
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
              "CUPY_FP8_TOKEN": secrets.token_hex(16)}
    if share_gpus:
        shared["CUPY_FP8_SHARE_GPUS"] = "1"
    processes: list[subprocess.Popen[bytes]] = []
    with _passed_on(processes) as received:
        try:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env={**shared, **place}))
                for number in received:         # that came before this process
                    processes[-1].send_signal(number)
            return _watch(processes)
        finally:
            _end(processes)


def _watch(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        if failed := {rank: code for rank, code in enumerate(codes) if code}:
            said = ", ".join(f"rank {rank} ended with {_text(code)}" for rank, code in failed.items())
            print(f"launch: {said}; the others are told to end", file=sys.stderr)
            code = next(iter(failed.values()))
            return code if code > 0 else _BY_SIGNAL - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL)


def _text(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return names.get(-code, f"signal {-code}")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.terminate()
    end = time.monotonic() + _GRACE
    for process in left:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _passed_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals on to the processes. Yields those that came."""
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        received.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = [signal.signal(number, handle) for number in _SIGNALS]
    try:
        yield received
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
