"""Checkpoints of .safetensors files: one file, or a folder of shards with or without an index."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..results import Scaled
from .pairing import Pair, Pairer, Pairing, ScaleNames, Sharing, plain_name
from .quantization_config import Described, as_dict, described, module_of, read_json
from .replace import PathLike
from .safetensors import Tensor, TensorFile
from .scale_forms import combine

__all__ = ["INDEX", "SUFFIX", "Checkpoint", "is_index"]

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_INDEX_END = ".safetensors.index.json"      # diffusers and Mistral put other names before it


class Checkpoint:
    """The tensors of a .safetensors file, or of all shards in a folder: names, dtypes, shapes and places; no
    data is read yet.

    files      the shards by their file names
    shard      the file name of each tensor's shard
    tensors    the header entry of each tensor
    index      the name of the folder's index, '' without one
    config     the folder's config.json, {} without one
    metadata   the metadata of all shards' headers
    described  the description of the quantisation
    Raises OSError, and ValueError that names the file for damaged files and for an index that does not match
    its shards.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        whole = self.path.is_dir() or is_index(self.path.name)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.index = _index_of(self.path) if whole else ""
        listed = _weight_map(self.folder / self.index) if self.index else {}
        names = sorted(set(listed.values())) or _shards(self.path)
        self.files = {name: TensorFile(self.folder / name) for name in names}
        self.shard: dict[str, str] = {}
        for name, file in self.files.items():
            for tensor in file.tensors:
                if other := self.shard.get(tensor):
                    raise ValueError(f"{self.path}: {tensor} is in {other} and in {name}")
                self.shard[tensor] = name
        self.tensors: dict[str, Tensor] = {t: self.files[name].tensors[t] for t, name in self.shard.items()}
        for tensor, shard in listed.items():
            if self.shard.get(tensor) != shard:
                raise ValueError(f"{self.folder / self.index}: {tensor} is not in {shard}")
        self.config = read_json(self.folder / "config.json")
        self.metadata = {key: text for file in self.files.values() for key, text in file.metadata.items()}

    @cached_property
    def described(self) -> Described:
        return described(self.folder, self.config, self.metadata)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor, mapped and read-only."""
        return self.files[self.shard[name]].read(name)

    def combined(self, pair: Pair) -> Scaled | np.ndarray:
        """Return FP8 data with their scales (see `combine`)."""
        return combine(self.read(pair.data), self.read(pair.scale), pair.form)

    def pairing(self, scales: ScaleNames = None, sharing: Sharing | bool = False) -> Pairing:
        """Return the FP8 tensors and their scales (see `Pairer`)."""
        pairer = Pairer(str(self.path), self.tensors, self.described, self._swizzled, self._elsewhere)
        return pairer.pairing(scales, sharing)

    def _swizzled(self, name: str) -> bool:
        """Whether markers say that a tensor's E8M0 scales are stored in tiles: ComfyUI's (in a tensor or the
        header), or torchao's."""
        module = module_of(plain_name(name))
        said = [self._comfy.get(module)]
        if (marker := self.tensors.get(f"{module}.comfy_quant")) and marker.dtype == "U8":
            said.append(_json(self.read(f"{module}.comfy_quant").tobytes()))
        if any(isinstance(one, dict) and one.get("format") == "mxfp8" for one in said):
            return True
        torchao = as_dict(_json(self.metadata.get(plain_name(name))))
        return as_dict(torchao.get("_data")).get("is_swizzled_scales") is True

    @cached_property
    def _comfy(self) -> dict[str, Any]:
        """The layers in ComfyUI's header entry."""
        return as_dict(as_dict(_json(self.metadata.get("_quantization_metadata"))).get("layers"))

    def _elsewhere(self) -> dict[str, str]:
        """Return the tensors of the folder's other .safetensors files."""
        found = {}
        for name in _files_of(self.folder):
            if name not in self.files:
                try:
                    found.update(dict.fromkeys(TensorFile(self.folder / name).tensors, name))
                except (OSError, ValueError):       # not part of this checkpoint: may be anything
                    continue
        return found


def is_index(name: str) -> bool:
    return name.endswith(_INDEX_END) or name == _INDEX_END[1:]


def _json(text: str | bytes | None) -> Any:
    """Parse a marker; None if it is not JSON."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _files_of(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()
                  if entry.name.endswith(SUFFIX) and not entry.name.startswith("."))


def _shards(path: Path) -> list[str]:
    """Return the file names of a checkpoint's shards, without an index."""
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file or folder")
        return [path.name]
    if not (found := _files_of(path)):
        raise ValueError(f"{path}: no {SUFFIX} files in this folder")
    return found


def _index_of(path: Path) -> str:
    """Return the name of a folder's index: the usual one, or the only one; '' if there is none."""
    if not path.is_dir():
        return path.name
    found = sorted(entry.name for entry in path.iterdir() if is_index(entry.name) and entry.name[0] != ".")
    if len(found) > 1 and INDEX not in found:
        raise ValueError(f"{path}: has {' and '.join(found)}; give the path of the one that is meant")
    return INDEX if INDEX in found else found[0] if found else ""


def _weight_map(path: Path) -> dict[str, str]:
    """Read the shard of each tensor from an index. Shards must be in the index's own folder."""
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, Mapping):
        raise ValueError(f"{path}: expected a weight_map, the shard of each tensor")
    for name, shard in listed.items():
        if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard.endswith(SUFFIX):
            raise ValueError(
                f"{path}: {name}: expected the name of a {SUFFIX} file of this folder, got {shard!r}")
    return dict(listed)
