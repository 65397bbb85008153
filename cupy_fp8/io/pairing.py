"""Finds the scales of a checkpoint's FP8 tensors: candidates by name, checked by dtype and shape. An FP8
tensor whose scales are not found is odd, and never read unscaled."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..advice import shown
from .quantization_config import Described, module_of
from .safetensors import Tensor
from .scale_forms import SCALES, Form, Share, form_of, share_text, shares_that_fit

__all__ = ["FP8_NAMES", "NONE", "Pair", "Pairer", "Pairing", "ScaleNames", "Sharing", "is_marker",
           "near", "packed_module", "plain_name", "scale_names"]

#: Dtypes of data that can have scales. FNUZ types have other values and no NaN pattern.
FP8_NAMES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
#: Suffixes of names of data and of their scales, by origin.
FORMS = (
    ("", "_scale_inv"),                             # DeepSeek-V3
    ("", "_scale"),                                 # compressed-tensors, ModelOpt, FBGEMM, Quark
    ("", "_weight_scale"),                          # ModelOpt's stacked experts
    (".weight", ".scale"),                          # DeepSeek-V4
    (".weight", ".scale_weight"),                   # ComfyUI's scaled FP8
    (".weight", ".qscale_weight"),                  # Mistral
    (".weight", ".weights_scaling_factor"),         # TensorRT-LLM
    ("_qdata", "_scale"), (":qdata", ":scale"),     # torchao
    ("._data", "._scale"),                          # optimum-quanto
)
#: Suffixes of names of packed integers (FP4, INT4, INT8) and of the tensors that belong to them. These are
#: not read.
_PACKED = (*FORMS, ("_packed", "_scale"), ("_blocks", "_scales"), (".weight", ".scales"),
           (".qweight", ".scales"), (".weight", ".weight_scale_2"), (".weight", ".weight.absmax"))
_PACKED_DTYPES = ("U8", "I8", "I32", "U32", "F4", "F6_E2M3", "F6_E3M2")
#: Names of packed weights in a module of their own.
_PACKED_LAST = ("weight", "weight_packed", "qweight", "W_q", "codes", "B", "Wq_packed")
#: the user's value for data whose codes are the values
NONE = "none"
#: Where scales are, as given by the caller: 'none', or patterns of names (None: these have no scales).
ScaleNames = str | Mapping[str, str | None] | None
#: What shares a scale, as given by the caller: for all tensors, or by name or pattern.
Sharing = Share | Mapping[str, Share]
_MOST_CANDIDATES = 4
#: Suffixes of other tensors beside data with scales that change the values, unless they are 0 or 1.
_ZERO_POINT = "_zero_point"
_UNREAD = (_ZERO_POINT, "_offset", "_scale_2")
#: Words that occur in names of scales, but not in names of weights.
_WORDS_OF_SCALES = re.compile(r"scal|scl|factor|inv(_|$)|(^|_)s$")
_OTHER_WORDS = frozenset(("input", "output", "act", "activation", "activations", "zero", "bias", "norm", "k",
                          "v"))


class Pair(NamedTuple):
    """An FP8 tensor, its scales, and how these are shared."""

    data: str
    scale: str
    form: Form


@dataclass
class Pairing:
    """The FP8 tensors of a checkpoint.

    pairs    those with scales, by the names of their data
    bare     those whose codes are the values (as given by the caller), and markers
    odd      those that cannot be read: the reason by name
    packed   tensors in forms that are not read (FP4, INT4, …) and those that belong to them: the name of the
             data
    beside   tensors that may be the scales of odd ones
    """

    pairs: dict[str, Pair] = field(default_factory=dict)
    bare: set[str] = field(default_factory=set)
    odd: dict[str, str] = field(default_factory=dict)
    packed: dict[str, str] = field(default_factory=dict)
    beside: set[str] = field(default_factory=set)

    @cached_property
    def scales(self) -> dict[str, str]:
        """The data's name for each tensor of scales."""
        return {pair.scale: pair.data for pair in self.pairs.values()}


class Pairer:
    """Finds the scales of a checkpoint's FP8 tensors.

    path       of the checkpoint, for messages
    tensors    entries of the headers
    described  the checkpoint's description of its quantisation
    swizzled   whether markers say that a tensor's scales are stored in tiles
    elsewhere  tensors of files that do not belong to the checkpoint: name, and file
    """

    def __init__(self, path: str, tensors: Mapping[str, Tensor], described: Described,
                 swizzled: Callable[[str], bool], elsewhere: Callable[[], Mapping[str, str]]) -> None:
        self.path, self.tensors, self.described = path, tensors, described
        self._swizzled, self._read_elsewhere = swizzled, elsewhere

    def pairing(self, given: ScaleNames = None, sharing: Sharing | bool = False) -> Pairing:
        """given, sharing: the caller's names of scales, and what shares one; False: not given. ValueError
        where a pattern of either matches no tensor."""
        found = Pairing(packed=dict(self._packed()))
        fp8 = [name for name, tensor in self.tensors.items() if tensor.dtype in FP8_NAMES
               and name not in found.packed and not name.endswith(_ZERO_POINT)]
        mapped = _mapped(given, fp8, self.tensors)
        shares = self._shares(sharing, fp8)
        for name in fp8:
            if is_marker(name, self.tensors[name]) or mapped.get(name, name) is None:
                found.bare.add(name)
                continue
            try:
                pair = self._pair(name, mapped.get(name), shares.get(name, False))
                if pair is not None:
                    found.pairs[name] = pair
                elif given == NONE:
                    found.bare.add(name)
                else:
                    found.odd[name] = self._lost(name)
            except ValueError as error:
                found.odd[name] = str(error)
        for name in found.odd:
            found.beside.update(self._known(name), self._candidates(name))
        return found

    def _shares(self, sharing: Sharing | bool, fp8: list[str]) -> dict[str, Share]:
        """Return what shares a scale as given by the caller, for the tensors that it covers."""
        if isinstance(sharing, bool):
            return {}
        if not isinstance(sharing, Mapping):
            return dict.fromkeys(fp8, sharing)
        found: dict[str, Share] = {}
        for pattern, share in sharing.items():
            is_name = not isinstance(pattern, str) or pattern in fp8
            met = [name for name in (pattern,) if name in fp8] if is_name else fnmatch.filter(fp8, pattern)
            if not met:
                raise ValueError(f"block: {self.path} has no FP8 tensor {shown(pattern)}{near(pattern, fp8)}")
            for name in met:
                found.setdefault(name, share)
        return found

    def _pair(self, name: str, given: str | None, share: Share | bool) -> Pair | None:
        """Return a tensor with its scales. ValueError for several, and for unreadable ones."""
        around = [given] if given is not None else self._known(name)
        if len(around) > 1:
            fitting = [one for one in around if self._fits(name, one)]
            if len(fitting) != 1:
                raise ValueError(f"{name}: expected one tensor of scales, got {' and '.join(around)}; pass "
                                 f"the one that is meant, such as {_advice(name, around[0])}")
            around = fitting
        for end in _UNREAD if given is None else ():
            if (other := f"{name}{end}") in self.tensors and around:
                raise ValueError(f"{name}: has {other} too, which is not read; if it changes nothing, pass "
                                 f"{_advice(name, around[0])}")
        return Pair(name, around[0], self._form(name, around[0], share)) if around else None

    def _known(self, name: str) -> list[str]:
        """Return a tensor's scales by their names, or by the configuration."""
        found = [one for one in scale_names(name) if one in self.tensors]
        said = self.described.scales(module_of(plain_name(name)))
        return found or ([said] if said is not None and said in self.tensors else [])

    def _form(self, name: str, scale: str, share: Share | bool = False) -> Form:
        data, of = self.tensors[name], self.tensors[scale]
        sure = not isinstance(share, bool)
        said = share if sure else self.described.share(module_of(plain_name(name)))
        try:
            return form_of(data, of, said, sure, self._swizzled(name))
        except ValueError as error:
            raise ValueError(f"{scale} {of.dtype} {list(of.shape)} beside {name} {list(data.shape)}: {error};"
                             f" {_block_advice(name, data, of)}") from None

    def _fits(self, name: str, scale: str) -> bool:
        try:
            self._form(name, scale)
        except ValueError:
            return False
        return True

    def _lost(self, name: str) -> str:
        """Return the message for FP8 data without scales."""
        near = [one for one in self._candidates(name) if self._fits(name, one)][:_MOST_CANDIDATES]
        text = f"{name}: no scales are known for these FP8 codes"
        if near:
            shown = ", ".join(f"{one} {self.tensors[one].dtype} {list(self.tensors[one].shape)}"
                              for one in near)
            text += f"; they may be {shown}: pass {_advice(name, near[0])}, or"
        else:
            there = [f"{one} is in {file}" for one in scale_names(name) if (file := self._elsewhere.get(one))]
            text += (f"; {there[0]}, which the path or the index leaves out: read both, or pass" if there
                     else "; pass")
        return f"{text} scales={NONE!r} (convert: --scales {NONE}) if the codes are the values"

    def _candidates(self, name: str) -> Iterator[str]:
        """Yield tensors that may be a tensor's scales: of the same module, of a dtype that scales have, and
        not known as the scales of another tensor."""
        for other in (*self._of_module.get(name.rpartition(".")[0], ()), *self._of_module.get(name, ())):
            if other != name and self.tensors[other].dtype in SCALES and _may_be_scales(other):
                yield other

    @cached_property
    def _of_module(self) -> dict[str, list[str]]:
        """The tensors of each module."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    @cached_property
    def _elsewhere(self) -> Mapping[str, str]:
        return self._read_elsewhere()

    def _packed(self) -> Iterator[tuple[str, str]]:
        """Yield tensors that belong to packed data, with the name of the data."""
        for name, tensor in self.tensors.items():
            if tensor.dtype not in _PACKED_DTYPES or len(tensor.shape) < 2 or name.endswith(".comfy_quant"):
                continue
            beside = [scale for data, end in _PACKED if name.endswith(data)
                      and (scale := name[:len(name) - len(data)] + end) in self.tensors]
            if beside or self.described.packs_integers or tensor.dtype.startswith(("F4", "F6")):
                yield from ((one, name) for one in (name, *beside, *self._of_packed(name)))

    def _of_packed(self, name: str) -> Iterator[str]:
        """Yield the tensors that belong to packed data: all of its module but the bias, or those whose names
        extend its own."""
        module, _, last = name.rpartition(".")
        if module and last in _PACKED_LAST:
            yield from (one for one in self._of_module[module] if not one.endswith("bias"))
        yield from self._of_module.get(name, ())
        stem = re.sub(r"_(packed|blocks)$", "", name)
        yield from (one for one in self._of_module[module]
                    if one.startswith(f"{stem}_") and _WORDS_OF_SCALES.search(one[len(stem):]))


def near(name: Any, known: Iterable[str]) -> str:
    """Return the end of a message that suggests a similar name."""
    found = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    return f"; did you mean {found[0]!r}?" if found else ""


def plain_name(name: str) -> str:
    """Return the unquantised name of a tensor: torchao and optimum-quanto rename its data.

    >>> plain_name("proj._weight_qdata"), plain_name("proj.weight._data"), plain_name("proj.weight")
    ('proj.weight', 'proj.weight', 'proj.weight')
    """
    module, _, last = name.rpartition(".")
    if last.startswith("_") and last.endswith("_qdata"):
        return f"{module}.{last[1:-len('_qdata')]}"
    return name.removesuffix(":qdata").removesuffix("._data")


def scale_names(name: str) -> list[str]:
    """Return the possible names of a tensor's scales."""
    return [name[:len(name) - len(data)] + scale for data, scale in FORMS if name.endswith(data)]


def packed_module(name: str) -> str:
    """Return the module of packed data."""
    module, _, last = name.rpartition(".")
    return module if last in _PACKED_LAST else re.sub(r"_(packed|blocks)$", "", name)


def is_marker(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a marker: ComfyUI marks files of scaled FP8 with one."""
    return name.rpartition(".")[2] == "scaled_fp8" and len(tensor.shape) < 2


def _may_be_scales(name: str) -> bool:
    """Whether a name contains a word for scales, and none for something else, such as activations."""
    last = name.rpartition(".")[2]
    return _WORDS_OF_SCALES.search(last) is not None and _OTHER_WORDS.isdisjoint(last.split("_"))


def _block_advice(name: str, data: Tensor, scale: Tensor) -> str:
    """Return advice on scales that fit no known form."""
    blocks = shares_that_fit(data, scale) if scale.dtype in SCALES else []
    if not blocks:
        return "read the others with names=[…] (convert: --exclude), or this one with raw=True"
    others = f"; {', '.join(map(share_text, blocks[1:]))} would fit too" if blocks[1:] else ""
    down, across = blocks[0]
    return (f"pass block=(rows, columns), such as block={{{name!r}: {blocks[0]}}} (convert: --block "
            f"{name}={down},{across}){others}")


def _advice(name: str, scale: str) -> str:
    return f"scales={{{name!r}: {scale!r}}} (convert: --scale-name {name}={scale})"


def _mapped(given: ScaleNames, fp8: list[str], tensors: Container[str]) -> dict[str, str | None]:
    """Match FP8 tensors to scales by the caller's patterns. Each * in the scales' name stands for the text it
    matched in the data's; data for which no such scales exist are skipped."""
    found: dict[str, str | None] = {}
    for pattern, scale in ({} if given is None or isinstance(given, str) else given).items():
        regex = re.compile("(.*)".join(map(re.escape, pattern.split("*"))))
        met = {name: match for name in fp8 if (match := regex.fullmatch(name))}
        if not met:
            raise ValueError(f"scales: no FP8 tensor is called {pattern!r}")
        wanted = {name: scale and _filled(scale, match.groups()) for name, match in met.items()}
        if missing := next((one for one in wanted.values() if one is not None and one not in tensors), None):
            wanted = {name: one for name, one in wanted.items() if one is None or one in tensors}
            if not wanted:
                raise ValueError(f"scales: {pattern!r}: {scale!r} means {missing!r}, which is not there")
        found = wanted | found
    return found


def _filled(scale: str, texts: Sequence[str]) -> str:
    parts = scale.split("*")
    return "".join(part + text for part, text in zip(parts, [*texts[:len(parts) - 1], ""], strict=True))
