"""python -m cupy_fp8 demo: what each recipe does to the tensors of files, or to a made-up weight and
activation.

Every float tensor of two or three dimensions is compared. FP8 data with scales are the values that they stand
for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend, kernels, plot
from ..arrays import asarray
from ..diagnostics.text import Column
from ..diagnostics.verdict import KINDS, recommended, verdict_on
from ..formats import bfloat16
from ..io.found import Found, tensors
from ..io.replace import check_replaceable, replacing
from ..plot import style
from . import demo_ahead, demo_data, demo_rows, terminal
from .arguments import file_name, natural, positive
from .demo_ahead import Ahead
from .demo_rows import Compared
from .progress import Progress
from .tables import TextTable, table

#: (rows, columns) of the weight and (tokens, channels) of the activation
SIZES = {"numpy": ((2048, 2048), (2048, 2048)), "cupy": ((4096, 4096), (8192, 4096))}


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        demo = _Demo(options)
    except (backend.DeviceError, OSError, ValueError, ImportError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    with demo_ahead.compiling(demo.xp) as ahead:
        try:
            for name, found in demo.tensors(ahead):
                demo.compare(name, found, ahead)
        finally:
            kernels.announce(None)
        demo.finish()
    return 1 if demo.failed else 0


class _Demo:
    """What the command has read and compared so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.failed, self._options = False, options
        self.xp = backend.like_module(options.array)
        _require_writable(options)
        self._sources = dict(self._opened())
        self._progress = Progress()                 # shown before the tables
        self._compared: list[Compared] = []
        self._skipped: dict[str, list[str]] = {}
        self._columns = demo_rows.columns(self.xp.__name__)
        self._hidden: list[str] = []                # titles of columns that do not fit the terminal

    def _opened(self) -> Iterator[tuple[str, Iterator[Found]]]:
        for path in self._options.files:
            try:
                yield path, tensors(path)
            except (OSError, ValueError) as error:
                self._fail(error)

    def _fail(self, error: object) -> None:
        print(f"demo: {error}", file=sys.stderr, flush=True)
        self.failed = True

    def tensors(self, ahead: Ahead) -> Iterator[tuple[str, Found]]:
        """Yield the tensors to compare, by the names that are shown."""
        if self._sources or not self._options.files:
            made_up = "" if self._options.files else " These tensors are made up: demo FILE shows your own."
            terminal.say(f"{_executor_name(self.xp)}.{made_up}")
            print(flush=True)
            self._progress.printed()
        if not self._options.files:
            yield from self._made_up(ahead)
        for file, source in zip(_labels([*self._sources]), self._sources.values(), strict=True):
            try:
                for found in source:
                    yield file + found.name, found
            except (OSError, ValueError) as error:
                self._fail(error)

    def _made_up(self, ahead: Ahead) -> Iterator[tuple[str, Found]]:
        """Yield made-up tensors, whose numbers threads make beside the compilers."""
        shapes, makers = SIZES[self.xp.__name__], (demo_data.weight, demo_data.activation)
        with ThreadPoolExecutor(1) as thread:
            coming = [thread.submit(make, *shape, seed=self._options.seed)
                      for make, shape in zip(makers, shapes, strict=True)]
            for shape in shapes:
                ahead.expect(shape, bfloat16)
            for make, values in zip(makers, coming, strict=True):
                yield make.__name__, Found(make.__name__, asarray(values.result(), bfloat16, like=self.xp),
                                           "bfloat16")

    def compare(self, name: str, found: Found, ahead: Ahead) -> None:
        """Compare the recipes on a tensor. Rows are shown as they come, unless those of all tensors are
        needed first."""
        if found.values is None:
            self._skipped.setdefault(found.what, []).append(name)
            return
        x, kind = asarray(found.values, like=self.xp), self._options.kind
        ahead.expect(x.shape, x.dtype)
        if self._options.worst or self._options.summary:
            kernels.announce(_from_here(self._progress.show))
            self._compared.append(demo_rows.compare(name, found.what, x, kind, lambda cells: None,
                                                    lambda recipe: self._progress.show(f"{name}: {recipe}")))
            return
        with self._table(demo_rows.title(name, x.shape, found.what), self._columns) as shown:
            kernels.announce(_from_here(shown.working))
            one = demo_rows.compare(name, found.what, x, kind, shown.row, shown.working)
        self._after(one.comparison.notes)
        self._compared.append(one)

    def finish(self) -> None:
        """Show what is known only after the last tensor, and write the requested files."""
        self._progress.clear()
        if not self._compared and not self.failed:
            self._fail(f"no float tensor of two or three dimensions in {', '.join(self._options.files)}")
        rows, kinds = ([getattr(one.comparison, name) for one in self._compared] for name in ("rows", "kind"))
        if self._options.summary:
            for title, cells in demo_rows.summaries(self._compared):
                self._show(title, demo_rows.SUMMARY_COLUMNS, cells)
        if self._options.worst and rows:
            best = recommended(rows, kinds)
            worst = sorted(self._compared, key=lambda one: max(
                one.comparison[name].local_sqnr_db for kind, name in best.items()
                if one.comparison.kind in (kind, None)))
            for one in worst[:self._options.worst]:
                self._show(one.title, self._columns, one.cells(), one.comparison.notes)
        for why, names in self._skipped.items():
            more = f" and {len(names) - 1} more" if names[1:] else ""
            terminal.say(f"Left out: {names[0]}{more} ({why}).")
        if not rows:
            return
        verdict = verdict_on(rows, kinds)
        self._explain(verdict)
        self._write(verdict)

    def _explain(self, verdict: str) -> None:
        if self._skipped:
            print()
        legend = demo_rows.legend(self.xp.__name__, self._hidden)
        if self._options.markdown:
            print("\n".join(f"- {title}: {text}" for title, text in legend.items()))
        else:
            terminal.say_facts(legend)
        if self._hidden:
            terminal.say(f"Left out at this width: {', '.join(self._hidden)}.")
        print(flush=True)
        terminal.say(verdict)

    def _show(self, title: Sequence[str], columns: Sequence[Column], rows: Iterable[Sequence[str]],
              notes: Sequence[str] = ()) -> None:
        with self._table(title, columns) as shown:
            for cells in rows:
                shown.row(cells)
        self._after(notes)

    def _table(self, title: Sequence[str], columns: Sequence[Column]) -> TextTable:
        made = table(title, columns, markdown=self._options.markdown)
        self._hidden = made.left_out
        return made

    def _after(self, notes: Sequence[str]) -> None:
        if self._options.markdown and notes:
            print()
        for note in notes:
            terminal.say(note)
        print(flush=True)

    def _write(self, verdict: str) -> None:
        if self._options.json:
            report = {"executor": _executor_name(self.xp), "platform": platform.machine(),
                      "numpy": np.__version__, "verdict": verdict, "left_out": self._skipped,
                      "rows": [row for one in self._compared for row in one.as_json()]}
            text = json.dumps(report, indent=1, allow_nan=False)
            with replacing(self._options.json) as file:
                file.write(f"{text}\n".encode())
        if self._options.plot:
            axes = plot.comparison({one.name: one.comparison for one in self._compared})
            figure: Any = axes[0].figure
            figure.savefig(self._options.plot, dpi=150)
            print(f"Picture: {self._options.plot}")


def _from_here(show: Callable[[str], None]) -> Callable[[str], None]:
    """Return `show` restricted to this thread: of compiled kernels, those that its table waits for."""
    here = threading.get_ident()
    return lambda text: show(text) if threading.get_ident() == here else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 demo", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", type=file_name,
                        help=".npy, .npz or .safetensors, or a folder of .safetensors files; without files a "
                        "made-up weight and activation")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--worst", type=positive, metavar="N",
                       help="show only the N tensors with the lowest local SQNR in the recipe to take")
    shown.add_argument("--summary", action="store_true",
                       help="a table for each kind of tensor: names that differ only in numbers")
    parser.add_argument("--kind", choices=KINDS,
                        help="what the tensors are (default: what their names say, or else either)")
    parser.add_argument("--plot", metavar="FILE.png", type=file_name,
                        help="draw a picture of the figures (needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", type=file_name, help="also write the figures as JSON")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    parser.add_argument("--array", choices=("numpy", "cupy"),
                        help="the kind of array (default: cupy where there is a GPU)")
    parser.add_argument("--seed", type=natural, default=0, help="of the made-up tensors (default 0)")
    return parser


def _labels(paths: list[str]) -> list[str]:
    """Return labels that distinguish the tensors of several files: the files' names, with folders if these
    are equal."""
    if len(paths) < 2:
        return [""] * len(paths)
    short = [Path(path).name for path in paths]
    if len(set(short)) < len(short):
        above = os.path.commonpath([Path(path).absolute().parent for path in paths])
        short = [os.path.relpath(path, above) for path in paths]
    return [f"{name}: " for name in short]


def _require_writable(options: argparse.Namespace) -> None:
    """Raise errors now that would otherwise come after the last tensor."""
    for path in filter(None, (options.json, options.plot)):
        check_replaceable(path)
    if options.plot:
        known = style.pyplot().gcf().canvas.get_supported_filetypes()
        if Path(options.plot).suffix.removeprefix(".") not in known:
            raise ValueError(f"--plot {options.plot}: expected a name that ends in .png or .svg")


def _executor_name(xp: object) -> str:
    if xp is np:
        return "NumPy reference on the CPU"
    runtime = backend.cupy().cuda.runtime
    return f"CUDA kernels on {runtime.getDeviceProperties(runtime.getDevice())['name'].decode()}"
