"""The command line: python -m cupy_fp8 demo | info | selftest | launch | bench | list | inspect | convert."""

from __future__ import annotations

import sys
from importlib import import_module

from . import __version__
from .advice import meant
from .cli import terminal

COMMANDS = {
    "demo": "what each recipe loses, on a made-up weight and activation or on your own files",
    "info": "versions, GPU, compiler, caches, and what works here",
    "list": "the ops, by family",
    "selftest": "every op against its reference on this machine: a quick pass, or --full",
    "launch": "a script in a process for each GPU, which distributed.init() finds",
    "bench": "time, GB/s, share of copy speed and host time of every op (needs a GPU)",
    "inspect": "what a checkpoint holds: every tensor, its form and the range of its scales",
    "convert": "a checkpoint to FP8, between FP8 formats, or back to bfloat16",
}

_CLOSED_PIPE = 141             # exit codes that shells report for SIGPIPE
_INTERRUPTED = 130             # and SIGINT


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
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return int(import_module(f"cupy_fp8.cli.{arguments[0]}").main(arguments[1:]))
    if arguments[:1] == ["--version"]:
        print(f"cupy_fp8 {__version__}")
        return 0
    if arguments and arguments[0] not in ("-h", "--help"):
        print(f"cupy_fp8: no such command: {arguments[0]}{meant(arguments[0], COMMANDS)}\n"
              f"The commands are {', '.join(COMMANDS)}; --help says what they do.", file=sys.stderr)
        return 2
    shown = {**COMMANDS, "--version": "the version of this package"}
    lines = [f"  {name:10} {text}" for name, text in shown.items()]
    print("\n".join(["usage: python -m cupy_fp8 COMMAND [--help]", *lines]),
          file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else 2


if __name__ == "__main__":
    sys.exit(main())
