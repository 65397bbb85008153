"""`load_safetensors`: reads checkpoints as arrays, and FP8 tensors with their scales as `Scaled`."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import backend
from ..advice import shown, type_name
from ..arrays import asarray
from ..formats import flag
from ..layouts import as_block, check_block
from ..options import check_path
from ..results import Scaled
from .checkpoint import Checkpoint
from .pairing import NONE, Pairing, ScaleNames, Sharing, near
from .replace import PathLike
from .summary import Loaded

__all__ = ["check_no_odd", "load_safetensors", "placed", "scale_names_of", "sharing_of", "shortened"]

_LARGEST = 2**31                # largest extent of a block: more than any tensor has
_MOST_NAMES = 8                 # names listed in full in a message


def load_safetensors(path: PathLike, *, names: str | Iterable[str] | None = None, like: Any = None,
                     block: Any = None, scales: ScaleNames = None, raw: bool = False) -> dict[str, Any]:
    """Read a checkpoint into a dict of arrays, with a `Scaled` for each FP8 tensor; its repr is a summary.

    path : a .safetensors file, a folder of them, with or without an index, or an index.
    names : the tensors wanted, a name or pattern ('model.layers.0.*') or several; None: all.
    like : the kind of array wanted: an array, 'numpy' / 'cupy' or the module. NumPy arrays are memory-mapped,
        and read-only; CuPy arrays are copied to the GPU one tensor at a time. Default NumPy.
    block : (rows, columns) that share a scale, None for all of them: for every FP8 tensor, or a dict of these
        by name or pattern. Default: as dtypes, shapes and the checkpoint's configuration tell.
    scales : for scales with unknown names, a dict from the names of data to those of scales, in which each *
        stands for the same text: ``{"*.weight": "*.my_scale"}``; None instead of a name: the codes are the
        values. 'none': they are wherever no scales are found.
    raw : return every tensor as stored, scales as tensors of their own.

    Every dtype of the format that NumPy and ml_dtypes have is read: F8_E4M3, F8_E5M2, F8_E8M0, BF16, F16,
    F32, F64, integers, bool. value = data * scale, whatever the scales are called, and a Scaled has the name
    of its data. Scales are one for the tensor, each matrix, row or column, or for blocks of any size given by
    the configuration or `block`; f32, bf16, f16, E8M0, or E8M0 stored as U8. FNUZ data, and blocks that no
    Scaled can have, are returned as their float32 values; packed data (FP4, INT4) as stored, F4 and F6 as
    uint8 rows.

    Raises OSError, ValueError (damaged files, unknown names, and FP8 tensors among those wanted whose scales
    are missing or can be read in no way or in several: one error names all), TypeError, DeviceError.
    Source: the safetensors format; docs/files.md lists the known names of scales.

    >>> import os, tempfile, numpy as np, cupy_fp8 as fp8
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> w = fp8.quantize_block(np.ones((256, 128), np.float32), block=(128, 128))
    >>> fp8.io.save_safetensors(path, {"proj.weight": w, "norm.weight": np.ones(128, np.float32)})
    >>> fp8.io.load_safetensors(path)["proj.weight"]
    Scaled(float8_e4m3fn[256, 128], block 128×128, compact scales, numpy)
    """
    check_path(path)
    flag(raw, "raw")
    like = np if like is None else like
    backend.like_module(like)
    given, sharing = scale_names_of(scales), sharing_of(block)
    checkpoint = Checkpoint(path)
    pairing = checkpoint.pairing(given, sharing)
    if raw:
        pairing = Pairing()
    wanted = _wanted(checkpoint, names, pairing)
    check_no_odd(checkpoint, pairing, wanted,
                 "read the others with names=[…], or all as stored with raw=True")
    found = Loaded()
    for name in wanted:
        if name in pairing.pairs:
            found[name] = placed(checkpoint.combined(pairing.pairs[name]), like)
        elif name not in pairing.scales:
            found[name] = asarray(checkpoint.read(name), like=like)
    return found


def placed(value: Any, like: Any) -> Any:
    """Return an array or a compact `Scaled` of NumPy arrays, on the device wanted."""
    if not isinstance(value, Scaled):
        return asarray(value, like=like)
    return Scaled(asarray(value.data, like=like), asarray(value.scale_inv, like=like), value.shape, False,
                  value.block, value.scale_layout)


def check_no_odd(checkpoint: Checkpoint, pairing: Pairing, wanted: Iterable[str], otherwise: str) -> None:
    """Raise ValueError naming all tensors among these that cannot be read. otherwise: what else to do."""
    kinds: dict[str, list[str]] = {}
    for name in wanted:
        if reason := pairing.odd.get(name):
            kinds.setdefault(reason.replace(name, ""), []).append(name)
    if not kinds:
        return
    lines = [pairing.odd[names[0]] + (f" (and so are {shortened(names[1:])})" if names[1:] else "")
             for names in kinds.values()]
    number = sum(map(len, kinds.values()))
    if number > 1:
        lines = [f"{number} tensors cannot be read", *lines, otherwise]
    raise ValueError(f"{checkpoint.path}: " + "\n  ".join(lines))


def shortened(names: Sequence[str]) -> str:
    """List all these names; many that differ only in numbers as one pattern with their count."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    patterns = Counter(re.sub(r"\d+", "*", name) for name in names)
    return ", ".join(pattern if n == 1 else f"{pattern} ({n})" for pattern, n in patterns.items())


def scale_names_of(scales: Any) -> ScaleNames:
    """Return the caller's names of scales, checked."""
    if scales is None or (isinstance(scales, str) and scales == NONE):
        return scales
    if isinstance(scales, str):
        raise ValueError(f"scales: expected {NONE!r} or a dict of names by names, got {scales!r}")
    if not isinstance(scales, Mapping):
        raise TypeError(f"scales: expected {NONE!r} or a dict of names by names, got {type_name(scales)}")
    for data, scale in scales.items():
        if not isinstance(data, str) or not (scale is None or isinstance(scale, str)):
            raise TypeError(f"scales: expected names (or None) by names, got {shown(data)}: {shown(scale)}")
        if scale and scale.count("*") > data.count("*"):
            raise ValueError(f"scales: {scale!r} has more * than {data!r}, whose text they stand for")
    return dict(scales)


def sharing_of(block: Any) -> Sharing | bool:
    """Return what the caller says shares a scale, as tuples; False if nothing."""
    if isinstance(block, Mapping):
        return {name: _share(one, f"block[{shown(name)}]") for name, one in block.items()}
    return False if block is None else _share(block, "block")


def _share(block: Any, name: str) -> tuple[int | None, int | None]:
    """Return a checked pair of sizes; any are allowed, not only blocks of a Scaled."""
    found = as_block(block)
    if isinstance(found, tuple) and len(found) == 2 and all(
            n is None or (type(n) is int and n > 0) for n in found):
        down, across = (n and min(n, _LARGEST) for n in found)
        return down, across
    return check_block(block, name)


def _wanted(checkpoint: Checkpoint, names: Any, pairing: Pairing) -> list[str]:
    """Return the tensors that the caller asks for, in the order of the checkpoint."""
    if names is None:
        return list(checkpoint.tensors)
    if isinstance(names, str):
        names = [names]
    if isinstance(names, bytes) or not isinstance(names, Iterable) or getattr(names, "ndim", 1) != 1:
        raise TypeError(f"names: expected a name or pattern, or a list of these, got {shown(names)}")
    chosen: set[str] = set()
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names: expected strings, got {shown(name)}")
        found = [name] if name in checkpoint.tensors else fnmatch.filter(checkpoint.tensors, name)
        if not found:
            raise ValueError(f"names: {checkpoint.path} has no tensor {name!r}"
                             f"{near(name, checkpoint.tensors)}")
        if scales := next((one for one in found if all(other in pairing.scales for other in found)), ""):
            raise ValueError(f"names: {name!r} means scales alone, which come with {pairing.scales[scales]}; "
                             "pass raw=True for tensors as they are stored")
        chosen.update(found)
    return [name for name in checkpoint.tensors if name in chosen]
