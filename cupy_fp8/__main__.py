"""The command line: python -m cupy_fp8 demo | info | selftest | bench | list."""

from __future__ import annotations

import sys
from importlib import import_module

from .cli import terminal

COMMANDS = {
    "demo": "quantise example matrices, or your own files, with every recipe",
    "info": "versions, GPU, compiler, caches, and what works here",
    "selftest": "every op against its reference on this machine: a quick pass, or --full",
    "bench": "time, GB/s, share of copy speed and host time of every op (needs a GPU)",
    "list": "the ops, a line each",
    "convert": "a checkpoint to FP8, between FP8 formats, or back to bfloat16",
}


_CLOSED_PIPE = 141             # what a shell reports for a program that SIGPIPE ended


def main(argv: list[str] | None = None) -> int:
    terminal.show_any_text()
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:         # `| head` has read enough
        terminal.drop_output()
        return _CLOSED_PIPE


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return int(import_module(f"cupy_fp8.cli.{arguments[0]}").main(arguments[1:]))
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    lines = [f"  {name:9} {text}" for name, text in COMMANDS.items()]
    usage = "\n".join(["usage: python -m cupy_fp8 COMMAND [--help]", *lines])
    print(usage, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
