"""Checkpoints of .safetensors files: one file, or a folder of shards with or without an index; read and
written with FP8 tensors and their scales together, as `Scaled`."""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend
from ..advice import shown, type_name
from ..arrays import Array, asarray, asnumpy, bits
from ..formats import flag
from ..layouts import Block, check_block
from ..options import check_path
from ..results import Quantized, Scaled
from .pairing import FP8_NAMES, Pair, combine, pairs_of, scales_among
from .replace import PathLike, replacing
from .safetensors import Tensor, TensorFile, by_alignment, header_of

__all__ = ["INDEX", "Checkpoint", "load_safetensors", "save_safetensors"]

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"


class Checkpoint:
    """The tensors of a .safetensors file, or of all shards in a folder: names, dtypes, shapes and places;
    none is read yet.

    files    the shards by their file names
    shard    the file name of each tensor's shard
    tensors  what headers say of each tensor
    config   the folder's config.json, {} without one
    Raises OSError, and ValueError that names the file for damaged files and for an index that does not fit
    its shards.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        names = _shards(self.path)
        self.files = {name: TensorFile(self.folder / name) for name in names}
        self.shard: dict[str, str] = {}
        for name, file in self.files.items():
            for tensor in file.tensors:
                if other := self.shard.get(tensor):
                    raise ValueError(f"{self.path}: {tensor} is in {other} and in {name}")
                self.shard[tensor] = name
        self.tensors: dict[str, Tensor] = {t: self.files[name].tensors[t] for t, name in self.shard.items()}
        self._check_index()
        self.config = read_json(self.folder / "config.json")

    def read(self, name: str) -> np.ndarray:
        """A tensor, mapped and read-only."""
        return self.files[self.shard[name]].read(name)

    def scaled(self, pair: Pair) -> Scaled:
        return combine(self.read(pair.data), self.read(pair.scale), pair)

    def pairs(self, block: Block | Mapping[str, Block] | None = None) -> dict[str, Pair]:
        """FP8 tensors and their scales (see `pairs_of`)."""
        try:
            return pairs_of(self.tensors, config_block(self.config), block)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None

    def _check_index(self) -> None:
        """Raises ValueError unless an index names exactly the tensors that there are."""
        listed = _weight_map(self.folder / INDEX) if self.path.is_dir() else {}
        for name, shard in listed.items():
            if self.shard.get(name) != shard:
                raise ValueError(f"{self.folder / INDEX}: {name} is not in {shard}")


def load_safetensors(path: PathLike, *, names: Iterable[str] | None = None, like: Any = None,
                     block: Block | Mapping[str, Block] | None = None, raw: bool = False) -> dict[str, Any]:
    """Read a checkpoint: a dict of arrays, and of a `Scaled` for each FP8 tensor that has scales.

    path : a .safetensors file, or a folder of them, with or without an index.
    names : the tensors wanted, by name or pattern ('model.layers.0.*'); None: all.
    like : the kind of array wanted: an array, 'numpy' / 'cupy' or the module. NumPy arrays are mapped, not
        read, and read-only; CuPy arrays are copied to the GPU one tensor at a time. Default NumPy.
    block : (rows, columns) that share a scale, or a dict of these by name, where shapes do not say.
    raw : every tensor as it is stored, scales as tensors of their own.

    Every dtype of the format that NumPy and ml_dtypes have is read: F8_E4M3, F8_E5M2, F8_E8M0, BF16, F16,
    F32, F64, integers, bool. Scales are found by dtype, shape and the folder's quantization_config: one for
    the tensor, one for each row, blocks of 128×128, 1×128 and 1×32; f32, bf16, f16, E8M0, or E8M0 stored as
    U8. A Scaled has the name of its data.

    Raises OSError, ValueError (damaged files, scales that fit no reading or several, names that are not
    there), DeviceError.
    Source: the safetensors format; DeepSeek-V3's, compressed-tensors', ModelOpt's and MX checkpoints.

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
    blocks = _as_blocks(block)
    checkpoint = Checkpoint(path)
    _check_blocks_of(checkpoint, blocks)
    pairs = {} if raw else checkpoint.pairs(blocks)
    scales = {pair.scale for pair in pairs.values()}
    found: dict[str, Any] = {}
    for name in _wanted(checkpoint, names):
        if name in pairs:
            s = checkpoint.scaled(pairs[name])
            found[name] = Scaled(asarray(s.data, like=like), asarray(s.scale_inv, like=like), s.shape, False,
                                 s.block, s.scale_layout)
        elif name not in scales:
            found[name] = asarray(checkpoint.read(name), like=like)
    return found


def save_safetensors(path: PathLike, tensors: Mapping[str, Any], *, metadata: Mapping[str, str]
                     | None = None) -> None:
    """Write arrays and quantised tensors to one .safetensors file, which is replaced only once the new one is
    on disk.

    tensors : by name: NumPy or CuPy arrays of the format's dtypes, `Scaled` or `Quantized` (its row-wise
        part). Scales are written beside their data: `<name>_scale_inv` for blocks (compact), `<name>_scale`
        for one scale ([1]) and for rows ([M, 1]).
    metadata : strings by name, which other libraries show ({"format": "pt"} is what some of them want).
    Raises TypeError, ValueError (data that is not row-wise, names that collide) before anything is written,
    OSError.
    """
    check_path(path)
    for option, given in (("tensors", tensors), ("metadata", metadata)):
        if not isinstance(given, Mapping) and (given is not None or option == "tensors"):
            raise TypeError(f"{option}: expected a dict by name, got {type_name(given)}")
    arrays: dict[str, Array] = {}
    for name, value in tensors.items():
        for key, a in _stored(name, value).items():
            if key in arrays:
                raise ValueError(f"{name}: {key} is taken by another tensor of the file")
            arrays[key] = a
    for name, value in tensors.items():
        if isinstance(value, (Scaled, Quantized)):
            scales_among(arrays, name, "give the other one another name")
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"metadata: expected strings by name, got {key!r}: {text!r}")
    order = by_alignment((name, a.dtype) for name, a in arrays.items())
    header = header_of({name: (arrays[name].dtype, arrays[name].shape) for name in order}, metadata)
    with replacing(path) as file:
        file.write(header)
        for name in order:
            write_array(file, arrays[name])


def write_array(file: Any, a: Array) -> None:
    """An array's bytes in C order."""
    host = np.ascontiguousarray(bits(asnumpy(a)))
    file.write(host.reshape(-1).view(np.uint8).data)


def scaled_arrays(name: str, s: Scaled) -> dict[str, Array]:
    """The tensors that a file holds for a row-wise Scaled: its data, and scales under the name that readers
    look for."""
    block = s.block or (1, None)
    if s.transposed or block[0] is None or block[1] == 1:
        raise ValueError(f"{name}: expected row-wise data, not stored transposed, got {s!r}; transpose it, "
                         "or save the row-wise part")
    if s.block is None:
        return {name: s.data, f"{name}_scale": s.scale_inv.reshape(1)}
    if s.scale_layout != "compact":
        s = s.to_layout("compact")
    return {name: s.data, f"{name}_{'scale' if block[1] is None else 'scale_inv'}": s.scale_inv}


def _stored(name: Any, value: Any) -> dict[str, Array]:
    if not isinstance(name, str):
        raise TypeError(f"tensors: expected names as keys, got {name!r}")
    if name == "__metadata__":
        raise ValueError("tensors: '__metadata__' is no name of a tensor")
    if isinstance(value, Quantized):
        if value._row is None:
            raise ValueError(f"{name}: expected a row-wise part, got {value!r}")
        value = value._row
    if isinstance(value, Scaled):
        return scaled_arrays(name, value)
    backend.module_of(value, name)
    return {name: value}


def config_block(config: Mapping[str, Any]) -> Block | None:
    """`weight_block_size` of a checkpoint's config.json."""
    size = quantization_of(config).get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    return None


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("quantization_config")
    return found if isinstance(found, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no such file. ValueError for anything else."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _shards(path: Path) -> list[str]:
    """The file names of a checkpoint's shards."""
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file or folder")
        return [path.name]
    if listed := _weight_map(path / INDEX):
        return sorted(set(listed.values()))
    found = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(_SUFFIX)
                   and not entry.name.startswith("."))
    if not found:
        raise ValueError(f"{path}: no {_SUFFIX} files in this folder")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    """The shard of each tensor by an index; {} without one. Shards are files of the index's own folder."""
    index = read_json(path)
    listed = index.get("weight_map", {} if not index else None)
    if not isinstance(listed, dict):
        raise ValueError(f"{path}: expected a weight_map, the shard of each tensor")
    for name, shard in listed.items():
        if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard.endswith(_SUFFIX):
            raise ValueError(
                f"{path}: {name}: expected the name of a {_SUFFIX} file of this folder, got {shard!r}")
    return listed


def _wanted(checkpoint: Checkpoint, names: Iterable[str] | None) -> list[str]:
    """The tensors that the caller asks for, in the order of the checkpoint."""
    if names is None:
        return list(checkpoint.tensors)
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable) or getattr(names, "ndim", 1) != 1:
        raise TypeError(f"names: expected a list of names or patterns, got {shown(names)}")
    chosen: set[str] = set()
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names: expected strings, got {shown(name)}")
        found = [name] if name in checkpoint.tensors else fnmatch.filter(checkpoint.tensors, name)
        if not found:
            raise ValueError(f"names: {checkpoint.path} has no tensor {name!r}"
                             f"{_near(name, checkpoint.tensors)}")
        chosen.update(found)
    return [name for name in checkpoint.tensors if name in chosen]


def _as_blocks(block: Any) -> Block | dict[Any, Block] | None:
    """The blocks that the caller gives, as tuples. ValueError for what is no block."""
    if isinstance(block, Mapping):
        return {name: check_block(one, f"block[{shown(name)}]") for name, one in block.items()}
    return None if block is None else check_block(block)


def _check_blocks_of(checkpoint: Checkpoint, blocks: Block | Mapping[Any, Block] | None) -> None:
    """ValueError unless blocks that are given by name are those of FP8 tensors."""
    known = [name for name, tensor in checkpoint.tensors.items() if tensor.dtype in FP8_NAMES]
    for name in blocks if isinstance(blocks, Mapping) else ():
        if name not in known:
            raise ValueError(f"block: {checkpoint.path} has no FP8 tensor {shown(name)}{_near(name, known)}")


def _near(name: Any, known: Iterable[str]) -> str:
    """The end of a message that suggests a name that is there."""
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""
