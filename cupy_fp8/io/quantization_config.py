"""What a checkpoint's own configuration says of its quantisation: which layers have blocks of which size, and
which stay in 16 bits.

It stands in config.json (`quantization_config`, `compression_config`, also inside `text_config` and others),
in ModelOpt's hf_quant_config.json, in Mistral's params.json, or in the header of a single file. Modules are
named as tensors are, without `.weight`.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .scale_forms import Share

__all__ = ["EXCLUSIONS", "Described", "as_dict", "described", "matches", "module_of", "read_json", "targets"]

#: What other libraries call the list of modules that stay in 16 bits.
EXCLUSIONS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude")
#: Where config.json has a description, itself or in the parts of a model of several.
_KEYS = ("quantization_config", "compression_config")
_MOST_REPEATS = 4           # of .* in one regular expression, so that none takes long
_DEEPEST = 8                # of nested parts


class Described(NamedTuple):
    """What a configuration says. method, raw: '' and {} where there is none.

    raw       the description as it stands in its file
    origin    the file, for messages
    excluded  patterns of modules that stay in 16 bits
    kv_cache  what it says of key-value caches, by its own keys
    """

    raw: Mapping[str, Any] = {}
    origin: str = ""
    excluded: tuple[str, ...] = ()
    kv_cache: Mapping[str, Any] = {}

    @property
    def method(self) -> str:
        return str(self.raw.get("quant_method", ""))

    def excludes(self, module: str) -> str:
        """The pattern by which a module stays in 16 bits, or ''."""
        return next((pattern for pattern in self.excluded if matches(pattern, module)), "")

    def share(self, module: str) -> Share | bool:
        """What shares a scale in a module's weight; False where nothing says."""
        own = as_dict(self.raw.get("quantized_layers")).get(module)
        if isinstance(own, dict) and (size := _block(own.get("weight_block_size"))):
            return size
        group = next((group for group in self.groups() if targets(group, module)), {})
        weights = as_dict(group.get("weights"))
        if weights.get("strategy") == "block":
            return _block(weights.get("block_structure")) or False
        if weights.get("strategy") == "group" and _size(weights.get("group_size")):
            return 1, weights["group_size"]
        return _block(self.raw.get("weight_block_size")) or False

    def groups(self) -> list[Mapping[str, Any]]:
        """compressed-tensors' groups of layers, those that name layers first."""
        groups = [as_dict(group) for group in as_dict(self.raw.get("config_groups")).values()]
        return sorted(groups, key=lambda group: any(map(_is_class, _targets(group))))


def described(folder: Path, config: Mapping[str, Any], metadata: Mapping[str, str]) -> Described:
    """What the files of a folder and a file's header say. ValueError that names the file where it cannot be
    understood."""
    found = [(where, raw) for where, raw in _places(folder, config, metadata) if raw]
    if not found:
        return Described()
    excluded: list[str] = []
    kv_cache: dict[str, Any] = {}
    for where, raw in found:
        for key in EXCLUSIONS:
            excluded += _names(raw.get(key), f"{where}: {key}")
        said = {key: value for key, value in raw.items() if key.startswith("kv_cache") and value}
        kv_cache = said | kv_cache
    for pattern in excluded:
        _check_regex(pattern, found[0][0])
    where, raw = found[0]
    for target in (target for group in Described(raw).groups() for target in _targets(group)):
        _check_regex(target, where)
    return Described(raw, where, tuple(dict.fromkeys(excluded)), kv_cache)


def _places(folder: Path, config: Mapping[str, Any], metadata: Mapping[str, str]
            ) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for raw in _inside(config, _DEEPEST):
        yield str(folder / "config.json"), raw
    for name in ("hf_quant_config.json", "params.json"):
        yield str(folder / name), as_dict(read_json(folder / name).get("quantization"))
    if text := metadata.get("quantization_config"):
        try:
            yield "the header's quantization_config", as_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the header's quantization_config: not JSON ({error})") from None


def _inside(config: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Descriptions in a config, its own before those of its parts."""
    yield from (as_dict(config.get(key)) for key in _KEYS)
    for key, part in config.items():
        if isinstance(part, dict) and key not in _KEYS and depth:
            yield from _inside(part, depth - 1)


def module_of(name: str) -> str:
    """The module that has a tensor of this name."""
    return name.removesuffix(".weight")


def matches(pattern: str, module: str) -> bool:
    """Whether an entry of a configuration's list means a module: 're:' begins a regular expression, * is any
    text, and anything else is a run of whole parts of the module's name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return bool(pattern) and f".{pattern}." in f".{module}."


def targets(group: Mapping[str, Any], module: str) -> bool:
    """Whether a group of compressed-tensors means a module."""
    return any(_is_class(target) or matches(target, module) for target in _targets(group))


def _targets(group: Mapping[str, Any]) -> list[str]:
    found = group.get("targets")
    return list(filter(_is_name, found)) if isinstance(found, list) else ["Linear"]


def _is_class(target: str) -> bool:
    """Whether a target is a type of layers: these files tell nothing of types."""
    return target[:1].isupper() and "." not in target


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _names(value: Any, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(map(_is_name, value)):
        raise ValueError(f"{where}: expected a list of names")
    return value


def _check_regex(pattern: str, where: str) -> None:
    """ValueError unless a regular expression is valid and takes no long time."""
    text = pattern[3:]
    if not pattern.startswith("re:"):
        return
    if re.search(r"[*+}][^()]*\)\s*[*+{]", text) or len(re.findall(r"[*+{]", text)) > _MOST_REPEATS:
        raise ValueError(f"{where}: {pattern!r} has repeats of repeats, or too many; write names or simpler "
                         "patterns")
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{where}: {pattern!r} is no regular expression ({error})") from None


def _block(size: Any) -> tuple[int, int] | None:
    """A block as configurations write it: [128, 128] or '128x128'."""
    if isinstance(size, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", size):
        size = [int(n) for n in size.split("x")]
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(map(_size, size)):
        return size[0], size[1]
    return None


def _size(n: Any) -> bool:
    return type(n) is int and n > 0


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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
