"""Decides what a conversion does with each tensor of a checkpoint, and how the result describes itself."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ..advice import listed
from . import weights
from .checkpoint import Checkpoint
from .leftovers import left_over_tensors
from .loading import check_no_odd, shortened
from .pairing import FP8_NAMES, Pair, ScaleNames, Sharing, is_marker, packed_module, plain_name, scale_names
from .quantization_config import Described, as_dict, module_of
from .safetensors import dtype_name
from .scale_forms import form_of
from .staying import FLOATS, why_it_stays
from .weights import StoredWeight
from .written_config import LayerForm, adapted, can_describe, layer_entry, quantization_config

__all__ = ["Plan", "Planned", "Settings"]

#: suffixes of names of key-value cache scales
_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".kv_cache_scaling_factor", "k_cache_scale",
                 "v_cache_scale", "k_proj.output_scale", "v_proj.output_scale", "k_fake_quantizer.qscale_act")
_FP4_EXPERTS = "expert_dtype"           # DeepSeek-V4's configuration entry for packed experts


@dataclass(frozen=True)
class Settings:
    """Settings of a conversion. Runs with equal settings write equal files.

    recipe        one of `weights.RECIPES`
    scale_format  of block128: 'f32', or 'e8m0' (powers of two, stored as F8_E8M0); '': the recipe's usual one
    include       patterns of tensors to convert although they would stay by default
    exclude       patterns of tensors that stay
    scales        unknown names of scales, as `load_safetensors` takes them
    block         what shares a scale in the source, as `load_safetensors` takes it; False: not given
    """

    recipe: str
    scale_format: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    scales: ScaleNames = None
    block: Sharing | bool = False

    def __post_init__(self) -> None:
        if self.recipe not in weights.RECIPES:
            raise ValueError(f"recipe: expected one of {', '.join(weights.RECIPES)}, got {self.recipe!r}")
        formats = weights.SCALE_FORMATS[self.recipe]
        if not self.scale_format:
            self.__dict__["scale_format"] = next(iter(formats), "")
        elif self.scale_format not in formats:
            raise ValueError(f"scale_format: {self.recipe} has {' or '.join(formats) or 'no'} scales, got "
                             f"{self.scale_format!r}")


class Planned(NamedTuple):
    """What becomes of a tensor and of its scales.

    pair    the tensor and its scales, if it has any
    stored  its new form; None if both are unchanged
    why     the reason if it is unchanged
    target  its name in the result
    """

    name: str
    pair: Pair | None
    stored: StoredWeight | None
    why: str
    target: str

    @property
    def module(self) -> str:
        return module_of(plain_name(self.target))

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name, self.pair.scale) if self.pair else (self.name,)


class Plan:
    """A conversion of a checkpoint, tensor by tensor.

    tensors  what becomes of each tensor of the result, by its name in the source
    removed  the tensors of the old form that are dropped, and what they are
    Raises ValueError if tensors to be converted cannot be read, or if the result could not describe the
    tensors that stay.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        self.checkpoint, self.settings, self.source = checkpoint, settings, checkpoint.described
        self.pairing = pairing = checkpoint.pairing(settings.scales, settings.block)
        wanted = [name for name in checkpoint.tensors if not self._is_excluded(name)]
        check_no_odd(checkpoint, pairing, wanted,
                     "exclude those that are to stay as they are (--exclude)")
        planned = {name: self._planned(name) for name in checkpoint.tensors if name not in pairing.scales}
        left_over = left_over_tensors(checkpoint.tensors, pairing,
                                      lambda name: planned[name].stored is not None)
        self.removed = {name: what for name, what in left_over.items() if not self._is_excluded(name)}
        self.tensors = {name: one for name, one in planned.items() if name not in self.removed}
        self._check_packed()

    @property
    def idle_patterns(self) -> list[str]:
        """Patterns of the settings that match no tensor."""
        patterns = (*self.settings.include, *self.settings.exclude)
        return [pattern for pattern in patterns if not fnmatch.filter(self.checkpoint.tensors, pattern)]

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.settings.exclude)

    def _planned(self, name: str) -> Planned:
        tensor, pair = self.checkpoint.tensors[name], self.pairing.pairs.get(name)
        recipe = self.settings.recipe
        if why := self._why_untouched(name):
            return Planned(name, pair, None, why, name)
        is_bare = name in self.pairing.bare
        if why := "" if pair else self._why_it_stays(name, is_bare):
            # FP8 codes that are values become 16 bits, which hold them exactly and everybody can read
            stored = weights.stored_weight("bf16", "", tensor.shape) if is_bare else None
            return Planned(name, None, stored, "" if stored else why, name)
        if (len(tensor.shape) < 2 and recipe != "bf16") or not prod(tensor.shape):
            return Planned(name, pair, None, "of fewer than two dimensions, or empty", name)
        shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        return Planned(name, pair, weights.stored_weight(recipe, self.settings.scale_format, shape), "",
                       plain_name(name))

    def _why_untouched(self, name: str) -> str:
        if self._is_excluded(name):
            return "excluded"
        if name in self.pairing.packed:
            return "packed, of a form that is not read"
        if name in self.pairing.beside:
            return "scales of a tensor that stays"
        return "a marker" if is_marker(name, self.checkpoint.tensors[name]) else ""

    def _why_it_stays(self, name: str, is_bare: bool) -> str:
        """Return why a tensor without scales is not converted; '' if it is."""
        tensor = self.checkpoint.tensors[name]
        if is_bare and self.settings.recipe == "bf16":
            return ""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.settings.include):
            return "" if is_bare or tensor.dtype in FLOATS else f"of type {tensor.dtype}"
        if why := why_it_stays(name, "BF16" if is_bare else tensor.dtype, tensor.shape):
            return why
        return "excluded by the source's configuration" if self.source.excludes(module_of(name)) else ""

    # ---- the result's description ----
    @cached_property
    def layers(self) -> dict[str, LayerForm]:
        """The form of each FP8 weight of the result, by module."""
        return {one.module: form for one in self.tensors.values() if (form := self._form(one))}

    def _form(self, one: Planned) -> LayerForm | None:
        tensor = self.checkpoint.tensors[one.name]
        if one.stored is not None:
            return layer_form(one.stored)
        if one.pair is None:
            is_left = tensor.dtype in FP8_NAMES and len(tensor.shape) > 1 and one.why == "excluded"
            return LayerForm(tensor.dtype, None, "", "") if is_left else None
        end, module = one.pair.scale, module_of(one.name)
        if end in scale_names(one.name):
            end = end.removeprefix(one.name if end.startswith(one.name) else module)
        dtype = self.checkpoint.tensors[one.pair.scale].dtype
        return LayerForm(tensor.dtype, one.pair.form.share, end, dtype, one.pair.form.swizzled)

    @cached_property
    def converted(self) -> set[str]:
        """The modules of FP8 weights that change their form."""
        return {one.module for one in self.tensors.values()
                if one.stored is not None and (one.pair or one.name in self.pairing.bare)}

    @cached_property
    def packed(self) -> list[str]:
        """Modules of packed weights, which stay."""
        return sorted({packed_module(data) for data in self.pairing.packed.values() if data in self.tensors})

    @cached_property
    def keeps_description(self) -> bool:
        """Whether the source's own description still holds, except for what is now in 16 bits."""
        kept = self.packed or any(one.pair and not one.stored for one in self.tensors.values())
        return bool(kept and self.source.raw and not self._main())

    def _main(self) -> LayerForm | None:
        """Return the form of the converted weights; None for 16 bits, and if there are none."""
        forms = (layer_form(one.stored) for one in self.tensors.values() if one.stored)
        return next(filter(None, forms), None)

    @cached_property
    def quantization_config(self) -> dict[str, Any] | None:
        """The description of the quantisation in the result."""
        found = (adapted(self.source.raw, self.converted) if self.keeps_description
                 else self._new_description())
        told = Described(found or {})
        kept = [one for one in self.tensors.values() if one.pair and not one.stored]
        untold = {one.module: layer_entry(self.layers[one.module]) for one in kept
                  if not self._is_told(one, told)}
        if untold and found is not None:
            found["quantized_layers"] = as_dict(found.get("quantized_layers")) | untold
        return found

    def _new_description(self) -> dict[str, Any] | None:
        plain = [one.module for one in self.tensors.values() if self._is_plain(one)]
        if not self.source.raw:             # packed data can only be described by exclusion
            plain += self.packed
        found = quantization_config(self.layers, plain, self._said(), self._main(), self.packed)
        if found and self.packed and _FP4_EXPERTS in self.source.raw:
            found[_FP4_EXPERTS] = self.source.raw[_FP4_EXPERTS]
        return found

    def _is_told(self, one: Planned, told: Described) -> bool:
        """Whether a description and the shapes determine what shares a scale of an unchanged tensor, and
        where its scales are."""
        assert one.pair
        data, scale = (self.checkpoint.tensors[name] for name in one.sources)
        try:
            form = form_of(data, scale, told.share(one.module), swizzled=one.pair.form.swizzled)
        except ValueError:
            return False
        return form == one.pair.form and (one.pair.scale in scale_names(one.name)
                                          or told.scales(one.module) == one.pair.scale)

    def _said(self) -> Described:
        """Return the source's description; without key-value caches if nothing else is quantised and their
        scales are missing."""
        has_scales = any(name.endswith(_CACHE_SCALES) for name in self.tensors)
        return self.source if self.layers or has_scales else replace(self.source, kv_cache={})

    def _is_plain(self, one: Planned) -> bool:
        """Whether readers expect 16-bit weights in a module here."""
        tensor = self.checkpoint.tensors[one.name]
        is_weight = one.name.endswith("weight") if len(tensor.shape) == 2 else len(tensor.shape) > 2
        is_float = tensor.dtype in FLOATS or one.stored is not None
        return is_weight and is_float and one.module not in self.layers

    def _check_packed(self) -> None:
        main = self._main()
        if main and self.packed and self.source.raw and not can_describe(self.source, main):
            possible = [recipe for recipe in weights.RECIPES if not (form := layer_form(weights.stored_weight(
                recipe, "", (1, 1)))) or can_describe(self.source, form)]
            raise ValueError(
                f"{self.checkpoint.path}: {shortened(self.packed)}: packed weights (FP4, INT4, …) stay as "
                f"they are, and no configuration tells of these and of {self.settings.recipe}; take --recipe "
                f"{listed(possible)}")


def layer_form(stored: StoredWeight) -> LayerForm | None:
    """Return the description of a written form; None for 16 bits."""
    if stored.scale is None:
        return None
    share: Any = stored.block
    end, dtype, _ = stored.scale
    return LayerForm(dtype_name("", stored.dtype), share, end, dtype_name("", dtype))


def written_tensors(tensors: Iterable[Planned], checkpoint: Checkpoint
                    ) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a shard of the result by name: dtype and shape. ValueError for names that
    collide."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    shared: set[str] = set()                # scales that several tensors share, as given by the caller
    for one in tensors:
        made: Mapping[str, tuple[str, tuple[int, ...]]]
        if one.stored is not None:
            shape = checkpoint.tensors[one.name].shape
            made = {name: (dtype_name(name, dtype), extents)
                    for name, (dtype, extents) in one.stored.tensors(one.target, shape).items()}
        else:
            made = {name: checkpoint.tensors[name][:2] for name in one.sources if name not in shared}
            shared.update(one.sources[1:])
        if taken := made.keys() & found.keys():
            raise ValueError(f"{one.name}: {min(taken)} is taken by another tensor")
        found.update(made)
    return found
