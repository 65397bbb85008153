"""What a converted checkpoint must drop from the old form: scales of activations, markers, and entries of
headers and small files."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from .checkpoint import SUFFIX, is_index
from .pairing import Pairing, is_marker, plain_name, scale_names
from .quantization_config import as_dict, module_of, read_json
from .safetensors import Tensor
from .staying import FLOATS
from .written_config import adapted, without_description

__all__ = ["check_no_strangers", "left_over_tensors", "metadata_without", "small_file"]

#: Suffixes of names of activation scales, after a module's name or its weight's.
_ACTIVATIONS = ("input_scale", "activation_scale", "act_scale", "scale_input", "scale_act", "qscale_act",
                "input_scale_ub", "activation_scaling_factor", "input_scale_inv", "in_scale", "input_amax",
                "input_offset", "input_zero_point", "input_global_scale", "input_quantizer._amax",
                "output_quantizer._amax")
#: Other tensors in modules of FP8 weights.
_OF_WEIGHTS = ("weight_quantizer._amax", "weight_amax", "weight_shape", "weight_offset", "weight_zero_point",
               "weight_scale_2", "deq_scale")
_OF_QUANTO = ("input_scale", "output_scale")
#: Files that only describe quantisation.
_DESCRIPTIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json",
                "quantization_config.json", "quanto_qmap.json", "quant_model_description.json")


def left_over_tensors(tensors: Mapping[str, Tensor], pairing: Pairing, is_converted: Callable[[str], bool]
                      ) -> dict[str, str]:
    """Return the tensors that lose their meaning once the weights beside them are converted, and what they
    are. is_converted: whether an FP8 tensor changes its form."""
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        converted = name in pairing.pairs or name in pairing.bare
        if is_marker(name, tensor) or (converted and not is_converted(name)) or not (
                converted or (tensor.dtype in FLOATS and name.endswith("weight"))):
            continue
        module = module_of(plain_name(name))
        ends = _OF_QUANTO if name.endswith("._data") else _ACTIVATIONS
        around = [f"{module}{joint}{end}" for end in ends for joint in "._"]
        found |= dict.fromkeys(around, "scales of activations")
        if converted:
            found[f"{module}.comfy_quant"] = "markers"
            others = [scale for scale in scale_names(name) if not scale.endswith(".scale")]
            found |= dict.fromkeys((*others, *(f"{module}.{end}" for end in _OF_WEIGHTS)), "of the old form")
        else:
            found |= dict.fromkeys((scale for scale in scale_names(name) if not scale.endswith(".scale")),
                                   "scales of weights in 16 or 32 bits")
    for name, tensor in tensors.items():
        if is_marker(name, tensor) and all(map(is_converted, pairing.pairs)):
            found[name] = "markers"
    return {name: what for name, what in found.items()
            if name in tensors and name not in pairing.scales and name not in pairing.packed}


def metadata_without(metadata: Mapping[str, str], modules: set[str]) -> dict[str, str]:
    """Return a header's metadata without ComfyUI's and torchao's entries for converted weights."""
    found = {key: text for key, text in metadata.items() if key != "quantization_config"}
    comfy = as_dict(_json(found.get("_quantization_metadata")))
    if isinstance(comfy.get("layers"), dict):
        comfy["layers"] = {name: about for name, about in comfy["layers"].items() if name not in modules}
        found["_quantization_metadata"] = json.dumps(comfy)
        if not comfy["layers"]:
            del found["_quantization_metadata"]
    about = {key: as_dict(_json(text)).get("_type") for key, text in found.items()}     # torchao's
    left = {key: None for key, kind in about.items() if kind and module_of(key) not in modules}
    if all(about[key] == "Tensor" for key in left):
        left = {}
    found = {key: text for key, text in found.items() if not about[key] or key in left}
    if "tensor_names" in found:
        found["tensor_names"] = json.dumps(list(left))
        if not left:
            del found["tensor_names"]
    return found


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None


def small_file(name: str, content: Mapping[str, Any], converted: set[str] | None) -> dict[str, Any] | None:
    """Return the new content of a JSON file that describes quantisation; None: it is dropped. converted: the
    modules now in 16 bits, if the source's description still holds for the others; None: if it does not."""
    inner = as_dict(content.get("quantization"))
    describes = name in _DESCRIPTIONS
    if not describes and not (name == "params.json" and inner):
        return dict(content)
    if converted is not None:
        key = "quantization" if inner else ""
        return {**content, key: adapted(inner, converted)} if key else adapted(content, converted)
    return None if describes else {key: value for key, value in content.items() if key != "quantization"}


def check_no_strangers(folder: Path, written: Container[str]) -> None:
    """Raise ValueError if a folder has weights, an index or descriptions that are not among the files to be
    written: readers would take them for parts of the result."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = path.name
        if name not in written and not name.startswith(".") and (
                name.endswith(SUFFIX) or is_index(name) or name in _DESCRIPTIONS or _describes(path)):
            raise ValueError(f"{folder}: has {name}, which is not of this checkpoint; delete it, or choose "
                             "another place")


def _describes(path: Path) -> bool:
    """Whether a config.json or params.json describes quantisation."""
    if path.name not in ("config.json", "params.json"):
        return False
    found = read_json(path)
    return without_description(found) != found or (path.name == "params.json" and "quantization" in found)
