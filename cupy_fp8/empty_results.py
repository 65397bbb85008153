"""Uninitialised results, of new arrays or of the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import backend
from .arrays import Array, empty, empty_beside
from .directions import Direction
from .formats import float32
from .results import Scaled

Directions = Mapping[str, Direction]


def with_one_scale(directions: Directions, like: Any) -> dict[str, Scaled]:
    """The parts of a result of per-tensor scaling, which share their scale_inv."""
    scale_inv = empty((1,), float32, like=like)
    return {name: direction.scaled(empty_beside(scale_inv, direction.stored, direction.dtype), scale_inv)
            for name, direction in directions.items()}


def with_scales(directions: Directions, like: Any, same_data: bool = False) -> dict[str, Scaled]:
    """The parts of a result of quantisation in blocks. same_data: both directions have the same codes, stored
    alike, so they share one array."""
    parts: dict[str, Scaled] = {}
    for name, direction in directions.items():
        if same_data and "rowwise" in parts:
            data = parts["rowwise"].data
        else:
            data = empty(direction.stored, direction.dtype, like=like)
        parts[name] = direction.scaled(data, empty(direction.scale_shape, direction.scale_dtype, like=like))
    return parts


def from_buffers(buffers: Mapping[str, tuple[Array, Array]], directions: Directions) -> dict[str, Scaled]:
    """The parts of a result in the caller's arrays. TypeError or ValueError if these do not fit."""
    if not isinstance(buffers, Mapping):
        raise TypeError(f"buffers: expected a dict of (data, scale_inv) pairs, got {type(buffers).__name__}")
    if sorted(buffers) != sorted(directions):
        raise ValueError(f"buffers: expected a (data, scale_inv) pair for each of {list(directions)}, got "
                         f"{sorted(buffers)}")
    return {name: _part(name, buffers[name], direction) for name, direction in directions.items()}


def _part(name: str, pair: tuple[Array, Array], direction: Direction) -> Scaled:
    try:
        data, scale_inv = pair
    except (TypeError, ValueError):
        raise ValueError(f"buffers[{name!r}]: expected a (data, scale_inv) pair, "
                         f"got {type(pair).__name__}") from None
    xp = backend.module_of(data, f"buffers[{name!r}] data")
    backend.require_module(scale_inv, xp, f"buffers[{name!r}] scale_inv")
    for what, a, shape, dtype in (("data", data, direction.stored, direction.dtype),
                                  ("scale_inv", scale_inv, direction.scale_shape, direction.scale_dtype)):
        if a.dtype != dtype:
            raise TypeError(f"buffers[{name!r}] {what}: expected dtype {dtype}, got {a.dtype}")
        if a.shape != shape or not a.flags.c_contiguous:
            raise ValueError(f"buffers[{name!r}] {what}: expected a C-contiguous array of shape {shape}, got "
                             f"shape {a.shape}, strides {a.strides}")
    return direction.scaled(data, scale_inv)
