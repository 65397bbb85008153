"""Writes the `quantization_config` of checkpoints: the form of each layer, as DeepSeek's, MX and
compressed-tensors' readers expect it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .layer_patterns import LayerPatterns, matches
from .quantization_config import EXCLUSIONS, Described, as_dict, is_description
from .scale_forms import EXPONENTS, Share, share_text

__all__ = ["LayerForm", "adapted", "can_describe", "has_group", "layer_entry", "quantization_config",
           "without_description"]

_ROWS, _MX = (1, None), (1, 32)
_FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
#: A method that no other library has, so that other libraries refuse what only `quantized_layers` describes.
_OWN_METHOD = "cupy_fp8"


class LayerForm(NamedTuple):
    """The stored form of an FP8 weight.

    dtype        of the data
    share        what shares a scale
    end          suffix of the scales' name after the data's, their whole name if it does not extend that, or
                 '' if no scales are known
    scale_dtype  of the scales
    swizzled     whether these are stored in tiles
    """

    dtype: str
    share: Share
    end: str
    scale_dtype: str
    swizzled: bool = False


_NOTHING = Described()


def quantization_config(layers: Mapping[str, LayerForm], plain: Iterable[str], source: Described = _NOTHING,
                        main: LayerForm | None = None, packed: Iterable[str] = ()) -> dict[str, Any] | None:
    """Return the description of a checkpoint; None if nothing is quantised.

    layers : the form of each FP8 weight, by module
    plain : modules that stay in 16 bits
    source : the description that came with the data, from which key-value caches and exclusions of absent
        modules are kept
    main : the form of most layers, by default the most frequent one
    packed : modules of packed data, which the source's compressed-tensors groups describe
    """
    cache = _cache(source)
    if not layers:
        return {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [],
                **cache} if cache else None
    main = main or Counter(layers.values()).most_common(1)[0][0]
    plain, others = list(plain), {module: form for module, form in layers.items() if form != main}
    if has_group(main):
        return _compressed(main, layers, plain, source, packed) | cache
    found: dict[str, Any] = {"quant_method": _method(main), "fmt": main.dtype[3:].lower(),
                             "activation_scheme": "dynamic"}
    if found["quant_method"] == _OWN_METHOD:
        others = dict(layers)
    elif isinstance(main.share, tuple):
        found["weight_block_size"] = list(main.share)
    found["modules_to_not_convert"] = _merged([*plain, *others], source, {*layers} - {*others})
    if main.scale_dtype in EXPONENTS:
        found["scale_fmt"] = "ue8m0"
    return found | _others(others) | cache


def has_group(form: LayerForm) -> bool:
    """Whether compressed-tensors has a group for such layers."""
    if form.end != "_scale" or form.dtype != "F8_E4M3" or form.swizzled:
        return False
    if form.share is None or form.share == _ROWS:
        return True
    return None not in form.share and (form.scale_dtype not in EXPONENTS
                                       or (form.share == _MX and form.scale_dtype == "U8"))


def can_describe(source: Described, main: LayerForm) -> bool:
    """Whether the target's description can also describe the source's packed layers."""
    if has_group(main):
        return source.method == "compressed-tensors"
    return source.method == "fp8" and _method(main) == "fp8"


def adapted(raw: Mapping[str, Any], converted: Iterable[str]) -> dict[str, Any]:
    """Return the source's own description, with these modules now in 16 bits."""
    found: dict[str, Any] = json.loads(json.dumps(raw))
    modules = set(converted)
    usual = "ignore" if found.get("quant_method") in ("compressed-tensors", "modelopt") else EXCLUSIONS[0]
    usual = "exclude_modules" if "quant_method" not in found and "quant_algo" in found else usual
    key = next((key for key in EXCLUSIONS if isinstance(found.get(key), list)), usual)
    found[key] = list(dict.fromkeys([*(found.get(key) or []), *sorted(modules)]))
    if isinstance(found.get("quantized_layers"), dict):
        found["quantized_layers"] = {module: about for module, about in found["quantized_layers"].items()
                                     if module not in modules}
    return found


def without_description(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without its descriptions of quantisation, also in the parts of a model."""
    return {key: without_description(value) if isinstance(value, dict) else value
            for key, value in config.items() if not is_description(key, value)}


def _method(form: LayerForm) -> str:
    whole = isinstance(form.share, tuple) and None not in form.share
    if not whole or form.end not in ("_scale_inv", ".scale") or form.swizzled:
        return _OWN_METHOD
    return "mxfp8" if form.share == _MX and form.scale_dtype in EXPONENTS else "fp8"


def _compressed(main: LayerForm, layers: Mapping[str, LayerForm], plain: list[str], source: Described,
                packed: Iterable[str]) -> dict[str, Any]:
    """Return compressed-tensors' description: a group for the main form, others for modules by name."""
    forms: dict[LayerForm, list[str]] = {}
    others: dict[str, LayerForm] = {}
    for module, form in layers.items():
        if form == main or not has_group(form):
            others |= {} if form == main else {module: form}
        else:
            forms.setdefault(form, []).append(module)
    of_packed = _packed_groups(source, packed)
    plain += sorted({*packed} - {module for group in of_packed for module in group["targets"]})
    groups = [_group(main, ["Linear"]), *(_group(form, sorted(names)) for form, names in forms.items()),
              *of_packed]
    formats = {str(group["format"]) for group in groups}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
            "ignore": _merged([*plain, *others], source, {*layers} - {*others}), **_others(others)}


def _group(form: LayerForm, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs = {**weights, "dynamic": True, "strategy": "token"}
    found: dict[str, Any] = {"targets": targets, "weights": weights, "input_activations": inputs,
                             "format": "float-quantized"}
    if form.share is None:
        weights["strategy"] = inputs["strategy"] = "tensor"
    elif form.share == _ROWS:
        weights["strategy"] = "channel"
    elif form.share[0] == 1:
        weights |= {"strategy": "group", "group_size": form.share[1]}
        inputs |= {"strategy": "group", "group_size": form.share[1]}
        if form.scale_dtype in EXPONENTS:
            found["format"] = "mxfp8-quantized"
            weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
            inputs |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    else:
        weights |= {"strategy": "block", "block_structure": list(form.share)}
        inputs |= {"strategy": "group", "group_size": form.share[1]}
    return found


def _packed_groups(source: Described, packed: Iterable[str]) -> list[dict[str, Any]]:
    """Return the source's groups that describe packed modules, restricted to these."""
    found: dict[str, dict[str, Any]] = {}
    groups = {name: as_dict(group) for name, group in as_dict(source.raw.get("config_groups")).items()}
    patterns = {name: LayerPatterns(one for one in source.targets(group) if one != "Linear")
                for name, group in groups.items()}
    for module in packed:
        for name, group in groups.items():
            weights = as_dict(group.get("weights"))
            is_fp8 = weights.get("num_bits") == 8 and weights.get("type") == "float"
            if not is_fp8 and ("Linear" in source.targets(group) or patterns[name].match(module)):
                kept = found.setdefault(name, {"format": source.raw.get("format"), **group, "targets": []})
                kept["targets"].append(module)
                break
    return list(found.values())


def _merged(plain: Iterable[str], source: Described, quantised: set[str]) -> list[str]:
    """Return the modules in 16 bits: those present, and names of the source's list that match none of these,
    since they may belong to modules whose weights are elsewhere."""
    here = {*plain, *quantised}
    kept = [name for name in source.excluded if not any(sign in name for sign in "*?[:")
            and name not in here and not any(matches(name, module) for module in here)]
    return sorted({*here - quantised, *kept})


def _others(layers: Mapping[str, LayerForm]) -> dict[str, Any]:
    """Return layers of other forms, for which the formats have no list."""
    return {"quantized_layers": {module: layer_entry(form) for module, form in sorted(layers.items())}
            } if layers else {}


def layer_entry(form: LayerForm) -> dict[str, Any]:
    """Return the entry of a layer in `quantized_layers`."""
    if not form.end:
        return {"dtype": form.dtype, "scales": None}
    return {"dtype": form.dtype, "scales": form.end, "scale_dtype": form.scale_dtype,
            "one_scale_for": share_text(form.share),
            "weight_block_size": list(form.share) if form.share else None,
            **({"scale_layout": "swizzled"} if form.swizzled else {})}


def _cache(source: Described) -> dict[str, Any]:
    """Return the source's description of key-value caches, in compressed-tensors' terms where it has them."""
    found = dict(source.kv_cache)
    scheme = found.get("kv_cache_scheme", found.get("kv_cache_quant_algo"))
    if isinstance(scheme, str) and scheme.lower() in ("fp8", "static", "float8"):
        found.pop("kv_cache_quant_algo", None)
        found["kv_cache_scheme"] = dict(_FP8_CACHE)
    elif "kv_cache_scheme" in found and not isinstance(found["kv_cache_scheme"], dict):
        found["kv_cache"] = found.pop("kv_cache_scheme")
    return found
