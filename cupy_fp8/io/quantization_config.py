"""Reads a checkpoint's own description of its quantisation: which layers have blocks of which size, and which
stay in 16 bits.

It is found in config.json (`quantization_config`, `compression_config`, `quantization`, also in `text_config`
and other parts), in ModelOpt's hf_quant_config.json, in Mistral's params.json, or in the header of a single
file. Modules are named like tensors, without `.weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .layer_patterns import LayerPatterns, check_regex
from .scale_forms import Share

__all__ = ["EXCLUSIONS", "Described", "as_dict", "described", "is_description", "module_of", "read_json"]

#: Other libraries' names for the list of modules that stay in 16 bits.
EXCLUSIONS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude",
              "skip_modules", "llm_int8_skip_modules")
#: Keys of the description in config.json, at the top or in the parts of a composite model.
_KEYS = ("quantization_config", "compression_config", "quantization")
#: Methods whose integer tensors are not weights; all others pack weights into them.
_FP8_METHODS = ("", "fp8", "mxfp8", "compressed-tensors", "modelopt", "fbgemm_fp8", "quark", "torchao",
                "quanto", "cupy_fp8")
_DEEPEST = 64               # most levels of nested objects
_LARGEST = 2**31            # largest extent of a block


@dataclass(frozen=True)
class Described:
    """What a configuration says. raw: {} if there is none.

    raw       the description as stored
    origin    the file, or the header, for messages
    key       its key in config.json; '' if stored elsewhere
    excluded  patterns of modules that stay in 16 bits
    kv_cache  entries for key-value caches, by their own keys
    """

    raw: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    key: str = ""
    excluded: tuple[str, ...] = ()
    kv_cache: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return str(self.raw.get("quant_method", ""))

    @property
    def packs_integers(self) -> bool:
        """Whether 2-D integer tensors are packed weights, whatever their names."""
        return self.method not in _FP8_METHODS

    def excludes(self, module: str) -> str:
        """Return why a module stays in 16 bits: the pattern that matches it, or another reason; '' if it does
        not."""
        if pattern := self._exclusions.match(module):
            return pattern
        if self.groups and not self._group_of(module):
            return "in no group"
        if self.raw.get("quant_algo") == "MIXED_PRECISION" and self._layers and module not in self._layers:
            return "in no list"
        bits = as_dict(as_dict(self.raw.get("extra_config")).get(module)).get("bits")    # auto-round's
        return "16 bits" if bits == 16 else ""

    def share(self, module: str) -> Share | bool:
        """Return what shares a scale in a module's weight; False if unknown."""
        own = as_dict(self._layers.get(module)).get("weight_block_size")
        if isinstance(own, list) and len(own) == 2 and all(n is None or _size(n) for n in own):
            return own[0], own[1]
        weights = as_dict(self._group_of(module).get("weights"))
        if weights.get("strategy") == "block":
            return _block(weights.get("block_structure")) or False
        if weights.get("strategy") == "group" and _size(weights.get("group_size")):
            return 1, weights["group_size"]
        return _block(self.raw.get("weight_block_size")) or False

    def scales(self, module: str) -> str | None:
        """Return the name of the scales of a module's weight, if it is not one of the usual names."""
        found = as_dict(self._layers.get(module)).get("scales")
        return found if isinstance(found, str) else None

    @cached_property
    def groups(self) -> list[Mapping[str, Any]]:
        """compressed-tensors' groups of layers."""
        return [as_dict(group) for group in as_dict(self.raw.get("config_groups")).values()]

    def targets(self, group: Mapping[str, Any]) -> list[str]:
        """Return the targets of a group; ['Linear'] if it gives none."""
        found = group.get("targets")
        return [one for one in found if isinstance(one, str)] if isinstance(found, list) else ["Linear"]

    def _group_of(self, module: str) -> Mapping[str, Any]:
        """Return the group that names a layer, or else one for a type of layers; {} if there is none."""
        for patterns, group in self._named_groups:
            if patterns.match(module):
                return group
        return next((group for group in self.groups if any(map(_is_class, self.targets(group)))), {})

    @cached_property
    def _named_groups(self) -> list[tuple[LayerPatterns, Mapping[str, Any]]]:
        return [(LayerPatterns(one for one in self.targets(group) if not _is_class(one)), group)
                for group in self.groups]

    @cached_property
    def _exclusions(self) -> LayerPatterns:
        return LayerPatterns(self.excluded)

    @cached_property
    def _layers(self) -> dict[str, Any]:
        return as_dict(self.raw.get("quantized_layers"))


def described(folder: Path, config: Mapping[str, Any], metadata: Mapping[str, str]) -> Described:
    """Read the description from the files of a folder and a file's header. ValueError names the file if it
    cannot be understood."""
    found = [(where, key, raw) for where, key, raw in _places(folder, config, metadata) if raw]
    if not found:
        return Described()
    excluded: list[str] = []
    kv_cache: dict[str, Any] = {}
    for where, _, raw in found:
        for name in EXCLUSIONS:
            excluded += _names(raw.get(name), f"{where}: {name}")
        said = {name: value for name, value in raw.items() if name.startswith("kv_cache") and value}
        kv_cache = said | kv_cache
    where, key, raw = found[0]
    made = Described(raw, where, key, tuple(dict.fromkeys(excluded)), kv_cache)
    for pattern in (*excluded, *(target for group in made.groups for target in made.targets(group))):
        check_regex(pattern, where)
    return made


def _places(folder: Path, config: Mapping[str, Any], metadata: Mapping[str, str]
            ) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for key, raw in _inside(config):
        yield str(folder / "config.json"), key, raw
    for name in ("hf_quant_config.json", "params.json"):
        yield str(folder / name), "", as_dict(read_json(folder / name).get("quantization"))
    if text := metadata.get("quantization_config"):
        try:
            yield "the header's quantization_config", "", as_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the header's quantization_config: not JSON ({error})") from None


def _inside(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield descriptions in a config with their keys, its own before those of its parts."""
    yield from ((key, as_dict(config[key])) for key in _KEYS if is_description(key, config.get(key)))
    for key, part in config.items():
        if isinstance(part, dict) and key not in _KEYS:
            yield from _inside(part)


def is_description(key: str, value: Any) -> bool:
    """Whether an entry of a config describes quantisation. TensorRT-LLM and MLX call it `quantization`, a key
    with other meanings elsewhere."""
    return key in _KEYS and isinstance(value, dict) and (
        key != "quantization" or not {"quant_algo", "bits", "mode", "group_size"}.isdisjoint(value))


def module_of(name: str) -> str:
    """Return the module of a tensor."""
    return name.removesuffix(".weight")


def _is_class(target: str) -> bool:
    """Whether a target is a type of layers, which these files do not record."""
    return target[:1].isupper() and "." not in target


def _names(value: Any, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{where}: expected a list of names")
    return value


def _block(size: Any) -> tuple[int, int] | None:
    """Parse a block as configurations write it: [128, 128] or '128x128'."""
    if isinstance(size, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", size):
        size = [int(n) for n in size.split("x")]
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(map(_size, size)):
        return size[0], size[1]
    return None


def _size(n: Any) -> bool:
    return type(n) is int and 0 < n < _LARGEST


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file. ValueError for anything else."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    inner: list[Any] = [found]
    for _ in range(_DEEPEST):
        inner = [value for one in inner for value in (one.values() if isinstance(one, dict) else one)
                 if isinstance(value, (dict, list))]
    if inner:
        raise ValueError(f"{path}: objects in objects, more than {_DEEPEST} deep")
    return found
