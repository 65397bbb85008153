"""The allowed values of recipes' options, and the defaults of each profile."""

from __future__ import annotations

import os
import struct
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from .advice import block_instead, shown, type_name
from .formats import FORMATS, choice, flag, float32
from .layouts import is_of_integers

Algorithm: TypeAlias = Literal["max", "most_recent"]
MXMode: TypeAlias = Literal["rceil", "floor", "ceil", "even"]
MXProfile: TypeAlias = Literal["te", "torchao"]
MXScaleLayout: TypeAlias = Literal["compact", "swizzled"]
BlockProfileName: TypeAlias = Literal["te", "deepgemm", "tilekernels", "vllm", "sglang", "torchao"]
BlockScaleLayout: TypeAlias = Literal["gemm_ready", "compact", "deepgemm_sm90"]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
MX_MODES: tuple[MXMode, ...] = get_args(MXMode)
MX_PROFILES: tuple[MXProfile, ...] = get_args(MXProfile)
MX_BLOCKS = ((1, 32), (32, 32))
MX_SCALE_LAYOUTS: tuple[MXScaleLayout, ...] = get_args(MXScaleLayout)
_MX_OPTIONS = frozenset(product(MX_MODES, MX_PROFILES, MX_BLOCKS, MX_SCALE_LAYOUTS))


class BlockProfile(NamedTuple):
    """The default options of a library's arithmetic for blocks with f32 scales (docs/numerics.md, section
    3)."""

    eps: float
    pow2_scale: bool


BLOCK_PROFILES = {"te": BlockProfile(0.0, True), "deepgemm": BlockProfile(1e-4, False),
                  "tilekernels": BlockProfile(1e-4, False), "vllm": BlockProfile(1e-10, False),
                  "sglang": BlockProfile(1e-10, False), "torchao": BlockProfile(1e-12, False)}
BLOCKS: tuple[tuple[int | None, int | None], ...] = (
    (1, 128), (128, 1), (128, 128), (1, 64), (64, 1), (1, 32), (32, 1), (1, None), (None, 1))
BLOCK_SCALE_LAYOUTS: tuple[BlockScaleLayout, ...] = get_args(BlockScaleLayout)
_BLOCK_OPTIONS = frozenset(o for o in product(BLOCKS, BLOCK_PROFILES, BLOCK_SCALE_LAYOUTS)
                           if o[0] != (128, 128) or o[2] != "deepgemm_sm90")

_F32 = struct.Struct("f")        # rounds to f32 ten times faster than np.float32


def checked_eps(eps: Any) -> float:
    """Return eps rounded to f32. TypeError or ValueError unless it is a finite number of 0 or more."""
    if not isinstance(eps, (int, float, np.floating, np.integer)) or isinstance(eps, bool):
        raise TypeError(f"eps: expected a number, got {shown(eps)}")
    value = float(eps) if isinstance(eps, np.floating) else eps     # NumPy rounds the limit to eps's type
    if not 0 <= value <= FORMATS[float32].max:
        raise ValueError(f"eps: expected a finite float32 of 0 or more, got {shown(eps)}")
    return float(_F32.unpack(_F32.pack(value))[0])


def check_mx_options(mode: str, profile: str, block: tuple[int, int], scale_layout: str) -> None:
    """Raise ValueError for an unknown option of MX quantisation."""
    given = mode, profile, block, scale_layout
    try:
        if given in _MX_OPTIONS and is_of_integers(block):
            return
    except (TypeError, ValueError):                 # an option cannot be hashed: the loop finds it
        pass
    for name, value, allowed in zip(("mode", "profile", "block", "scale_layout"), given,
                                    (MX_MODES, MX_PROFILES, MX_BLOCKS, MX_SCALE_LAYOUTS), strict=True):
        _check_option(name, value, allowed)


def check_block_options(block: tuple[int | None, int | None], profile: str, scale_layout: str) -> None:
    """Raise ValueError for an unknown option of blocks with f32 scales, or one that does not fit the
    block."""
    given = block, profile, scale_layout
    try:
        if given in _BLOCK_OPTIONS and is_of_integers(block):
            return
    except (TypeError, ValueError):                 # an option cannot be hashed: the loop finds it
        pass
    for name, value, allowed in zip(("block", "profile", "scale_layout"), given,
                                    (BLOCKS, tuple(BLOCK_PROFILES), BLOCK_SCALE_LAYOUTS), strict=True):
        _check_option(name, value, allowed)
    raise ValueError("scale_layout: 'deepgemm_sm90' belongs to blocks along one line; DeepGEMM takes scales "
                     "of 128 x 128 blocks compact")


def _check_option(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    if name != "block":
        choice(value, name, allowed)
        return
    is_block = isinstance(value, tuple) and is_of_integers(value)
    if is_block and value in allowed:
        return
    if is_block and value[::-1] in allowed:
        advice = "; blocks along columns are the column-wise ones, which columnwise=True makes"
    else:
        advice = block_instead(value)
    raise ValueError(f"{name}: expected one of {allowed}, got {shown(value)}{advice}")


def check_path(path: Any, advice: str = "") -> None:
    """Raise TypeError or ValueError unless it is a file name. Python would take a number for an open file,
    and an empty name for the current folder."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a file name, got {type_name(path)}{advice}")
    if path == "":
        raise ValueError(f"path: expected a file name, got ''{advice}")


def block_eps(eps: Any, profile: str) -> float:
    """Return eps rounded to f32, or the profile's own."""
    return float(_F32.unpack(_F32.pack(BLOCK_PROFILES[profile].eps))[0]) if eps is None else checked_eps(eps)


def block_pow2(pow2_scale: Any, profile: str) -> bool:
    """Whether scales are powers of two: as given, or by the profile's default."""
    return BLOCK_PROFILES[profile].pow2_scale if pow2_scale is None else flag(pow2_scale, "pow2_scale")
