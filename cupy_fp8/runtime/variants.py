"""Every variant of every kernel that the package may launch: what tests compile, and what a launch is checked against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from ..formats import BYTE_DTYPES, FORMATS, FP8_DTYPES, INPUT_DTYPES

Defines = tuple[tuple[str, str], ...]


class Program(NamedTuple):
    """The arguments of `sources.program`: an entry point of kernels_cu/<family>.cu and the #defines that it is compiled with."""

    family: str
    entry: str
    defines: Defines

    def __str__(self) -> str:
        return "-".join([self.entry, *(f"{name}={value}" for name, value in self.defines)])


_INPUTS, _FP8, _BYTES, _ALL = ([FORMATS[d].tag for d in dtypes] for dtypes in (INPUT_DTYPES, FP8_DTYPES, BYTE_DTYPES, FORMATS))

# Tiles of the kernels that transpose through shared memory (cupy_fp8/ops/tiles.py): small ones, and those for large arrays.
_SMALL, _TALL, _LARGE = ({"TILE_ROWS": rows, "TILE_COLUMNS": columns} for rows, columns in ((128, 128), (256, 128), (256, 256)))


def _cast() -> Iterator[dict[str, Any]]:
    for source, to in product(_INPUTS, _FP8):
        yield {"IN": source, "OUT": to}


def _cast_transpose() -> Iterator[dict[str, Any]]:
    for types, (tile, rowwise) in product(_cast(), ((_SMALL, 0), (_TALL, 0), (_SMALL, 1), (_LARGE, 1))):
        yield {**types, **tile, "ROWWISE": rowwise}


def _convert() -> Iterator[dict[str, Any]]:
    for source, to in product(_ALL, _ALL):
        yield {"IN": source, "OUT": to, "SATURATE": 1}
    for source, to in product(_ALL, _FP8):
        yield {"IN": source, "OUT": to, "SATURATE": 0}


def _transpose() -> Iterator[dict[str, Any]]:
    for source, tile in product(_BYTES, (_SMALL, _LARGE)):
        yield {"IN": source, "OUT": source, "SATURATE": 1, **tile}
    for source, to in product(_FP8, _INPUTS):
        yield {"IN": source, "OUT": to, "SATURATE": 1, **_SMALL}


def _compute_amax() -> Iterator[dict[str, Any]]:
    for source, nan_wins in product(_INPUTS, (0, 1)):
        yield {"IN": source, "NAN_WINS": nan_wins}


def _delay() -> Iterator[dict[str, Any]]:
    yield {}


#: Entry points by family.
_ENTRIES: dict[str, dict[str, Callable[[], Iterator[dict[str, Any]]]]] = {
    "amax": {"compute_amax": _compute_amax},
    "cast": {"cast": _cast, "cast_transpose": _cast_transpose},
    "convert": {"convert": _convert, "transpose": _transpose},
    "delay": {"delay": _delay},
}


@functools.cache
def all_variants() -> tuple[Program, ...]:
    """The variants, entry point by entry point.

    >>> str(all_variants()[0])
    'compute_amax-IN=bf16-NAN_WINS=0'
    """
    return tuple(Program(family, entry, _as_defines(choice)) for family, entries in _ENTRIES.items()
                 for entry, choices in entries.items() for choice in choices())


def is_known(family: str, entry: str, defines: Any) -> bool:
    """Whether a launch's variant (a mapping or pairs of define and value, in any order) is one of `all_variants()`.

    >>> is_known("amax", "compute_amax", (("IN", "f32"), ("NAN_WINS", 1)))
    True
    """
    return (family, entry, frozenset(_as_defines(defines))) in _known()


@functools.cache
def _known() -> frozenset[tuple[str, str, frozenset[tuple[str, str]]]]:
    return frozenset((family, entry, frozenset(defines)) for family, entry, defines in all_variants())


def _as_defines(choice: Any) -> Defines:
    pairs = choice.items() if isinstance(choice, Mapping) else choice
    return tuple((name, str(value)) for name, value in pairs)
