"""Advice at the end of error messages: what to write instead. Nothing here runs before a call is refused.

Functions return the end of a message, which begins with a semicolon, or '' if there is no advice.
"""

from __future__ import annotations

import inspect
import numbers
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: short names of dtypes, accepted in place of the dtype
SHORT_DTYPES = {
    **dict.fromkeys(("e4m3", "e4m3fn", "fp8_e4m3", "fp8_e4m3fn"), "float8_e4m3fn"),
    **dict.fromkeys(("e5m2", "fp8_e5m2"), "float8_e5m2"),
    **dict.fromkeys(("e8m0", "e8m0fnu"), "float8_e8m0fnu"),
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32",
}  # fmt: skip
#: names in other libraries, in lower case, and the names here
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gemm", "mm", "scaled_mm", "fp8_gemm", "linear", "dot"),
                    ("matmul_nt", "grouped_matmul_nt")),
    **dict.fromkeys(("cast", "to_fp8"), ("quantize_tensor", "astype")),
    "quantise": ("quantize",),
    **dict.fromkeys(("rmsnorm", "rms_norm"), ("rms", "norm_quantize")),
    **dict.fromkeys(("layernorm", "layer_norm"), ("layer", "norm_quantize")),
    "swish": ("silu",), "silu_and_mul": ("swiglu", "swiglu_quantize"),
    **dict.fromkeys(("array", "tensor", "from_numpy"), ("asarray",)),
    **dict.fromkeys(("numpy", "to_numpy"), ("asnumpy",)),
    **dict.fromkeys(("from_torch", "from_jax"), ("from_dlpack",)),
    **dict.fromkeys(("to_torch", "to_jax"), ("to_dlpack",)),
    **{short: (name,) for short, name in SHORT_DTYPES.items()},
    "float8_e4m3": ("float8_e4m3fn",), "float8_e8m0": ("float8_e8m0fnu",),
    **dict.fromkeys(("mx", "mxfp8", "mxfp8scaling", "mxfp8blockscaling"), ("MXScaling",)),
}  # fmt: skip
_OUR_BYTES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_MOST = 4               # names that a message suggests
_MOST_BITS = 128        # bits of an integer that a message shows


# ---- instead of a value ----
def type_name(a: Any) -> str:
    """Return the name of a value's type, or of the class that it is itself."""
    return f"the class {a.__name__}" if isinstance(a, type) else type(a).__name__


class _Shown(reprlib.Repr):
    """`repr` for messages: shows only the size of huge integers, which Python may refuse to print, and only
    the beginning and the end of what would fill a page."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 20
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= _MOST_BITS else f"an integer of {bits} bits"


shown = _Shown().repr


def member(a: Any, name: str) -> str:
    """Return the advice to take a member of a Grouped, whose scales are those of all groups and fit no
    matrix; '' for anything else."""
    if type(a).__module__ != "cupy_fp8.grouped":
        return ""
    return f"; {name}[i] is the tensor of group i" + ("" if a._plain else
                                                      f", and {name}.dequantize() has the values of all")


def array_instead(a: Any, name: str, dtype: str = "float32", dimensions: int = 0) -> str:
    """Return advice on making an array of this dtype from something that is not a NumPy or CuPy array.
    dimensions: those of an array made from a number; 0 if that would be of no use."""
    kind = type(a)
    if kind.__module__.startswith("cupy_fp8."):
        if instead := member(a, name):
            return instead
        if hasattr(kind, "dequantize"):
            return (f"; {name}.dequantize() has its values, {name}.data its codes and {name}.scale_inv its "
                    "scales")
        is_recipe = hasattr(kind, "quantize")
        return f"; a recipe quantises by {kind.__name__}().quantize(x)" if is_recipe else ""
    if isinstance(a, np.ma.MaskedArray):
        return f"; {name}.filled(0) replaces what is masked"
    if isinstance(a, (type, str, bytes, dict, set)) or a is None:
        return ""
    if isinstance(a, numbers.Number):
        made = f'cupy_fp8.asarray({"[" * dimensions}{name}{"]" * dimensions}, "{dtype}")'
        what = "a matrix" if dimensions == 2 else "an array"
        return f"; {made} makes {what} of a number" if dimensions else ""
    if hasattr(kind, "__dlpack__"):
        return f"; cupy_fp8.from_dlpack({name}) reads its memory without a copy"
    if hasattr(kind, "__cuda_array_interface__"):
        return f"; cupy.asarray({name}) reads its memory without a copy"
    if hasattr(kind, "toarray"):
        return f'; {name}.toarray().astype("{dtype}") makes one'
    if hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):
        return f'; numpy.asarray({name}, "{dtype}") makes one'
    if hasattr(kind, "__iter__"):
        values = name if isinstance(a, (list, tuple)) else f"list({name})"
        return f'; cupy_fp8.asarray({values}, "{dtype}") makes one'
    return ""


def dtype_instead(dtype: np.dtype[Any], allowed: Iterable[np.dtype[Any]], name: str) -> str:
    """Return advice on converting an array whose dtype is not allowed."""
    wanted = [each.name for each in allowed]
    if not wanted or not (dtype.kind in "biufcOUS" or dtype.type.__module__ == "ml_dtypes"):
        return ""
    if set(wanted) <= set(_OUR_BYTES):
        if dtype.kind in "iu" and dtype.itemsize == 1:
            return f"; {name}.view(cupy_fp8.{wanted[0]}) reads its bytes as codes"
        return "; quantize_tensor, quantize_block and quantize_mx make FP8 of it"
    best = "float32" if "float32" in wanted else wanted[0]
    if dtype.name in _OUR_BYTES:
        return (f'; cupy_fp8.astype({name}, "{best}") widens the codes alone, dequantize() of a result '
                "applies their scales") if "float" in best else ""
    real = ".real" if dtype.kind == "c" else ""
    return f'; {name}{real}.astype("{best}") converts it'


def scale_instead(a: Any, name: str) -> str:
    """Return advice for a scale that is neither a number nor an array."""
    if isinstance(a, np.dtype) or (isinstance(a, str) and a.rpartition("_")[2].lower() in SHORT_DTYPES):
        return "; write dtype= before a dtype"
    return array_instead(a, name)


def dtype_named(dtype: Any, allowed: Sequence[str]) -> str:
    """Return a suggestion of the dtype that is meant by one that is not among these."""
    text = dtype if isinstance(dtype, str) else str(dtype) if type(dtype).__module__ == "torch" else ""
    name = text.removeprefix("torch.")
    if name in allowed and name != text:
        return f'; write "{name}"'
    name = name.lower()
    found = [each for each in allowed if each in (name, f"{name}fn")]
    if name in ("fp8", "float8", "f8"):
        found = [each for each in allowed if each in _OUR_BYTES[:2]]
    return f"; did you mean {listed(found)}?" if found else ""


def matrix_instead(shape: tuple[int, ...], name: str, batch: bool = True) -> str:
    """Return advice on reading an array that is not a matrix as one, or as a batch of matrices."""
    if len(shape) > 2 and batch:
        return f"; {name}.reshape(-1, *{name}.shape[-2:]) is a batch of matrices"
    if len(shape) > 2:
        return f"; {name}.reshape(-1, {name}.shape[-1]) is a matrix"
    return f"; {name}.reshape(1, -1) is a matrix of one row"


def block_instead(block: Any) -> str:
    """Return advice for a block that is not a pair of rows and columns."""
    if isinstance(block, int) and not isinstance(block, bool):
        return f"; write (1, {block if 1 < block < 2**31 else 128}) for blocks of a row"
    return "" if isinstance(block, tuple) else "; write a pair of rows and columns, such as (1, 128)"


def list_instead(a: Any, name: str) -> str:
    """Return advice on making a list of something else."""
    if hasattr(type(a), "values"):
        return f"; list({name}.values()) makes one"
    if hasattr(type(a), "__next__") or isinstance(a, (set, frozenset, range)):
        return f"; list({name}) makes one"
    return f"; [{name}] is a list of one" if hasattr(a, "dtype") else ""


# ---- instead of a call ----
def without_rest(function: _Function) -> _Function:
    """Hide from a function's signature the parameters that only answer misplaced arguments: a `*rest` or
    `**renamed` of NoReturn."""
    shown = inspect.signature(function)
    named = [each for each in shown.parameters.values() if each.annotation != "NoReturn"]
    vars(function)["__signature__"] = shown.replace(parameters=named)
    return function


def renamed(function: str, given: Iterable[str], **names: str) -> TypeError:
    """Return the error for unknown keywords. names: former keywords, with the keyword or the call that
    replaces each."""
    name = next(iter(given))
    instead = names.get(name, "")
    advice = instead and f"; write {instead}" + ("" if instead.endswith(")") else "=")
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{advice}")


# ---- instead of a name ----
def listed(names: Sequence[str]) -> str:
    """'a', 'a or b', 'a, b or c'."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def meant(name: str, public: Iterable[str]) -> str:
    """Return a suggestion of names in `public` (with the modules that hold them) for an unknown name."""
    found = list(_meant(name, list(public)))[:_MOST]
    return f"; did you mean {listed(found)}?" if found else ""


def _meant(name: str, public: list[str]) -> Iterable[str]:
    """Return the names that may be meant, best first: the same name in another spelling, a synonym, names
    that it begins, the longest one that begins it, names that contain it, names with its first word, names
    with similar letters. A name in lower case is not taken for a class, if anything else has such a name."""
    from difflib import get_close_matches

    plain, first_word = _plain(name), _plain(name.partition("_")[0])
    spelled: dict[str, str] = {}
    for each in public:
        spelled.setdefault(_plain(each.rpartition(".")[2]), each)
    if plain in spelled:
        return [spelled[plain]]
    if known := [each for each in _ELSEWHERE.get(name.lower(), ()) if each in public]:
        return known
    longest = max((other for other in spelled if len(other) >= 4 and plain.startswith(other)), key=len,
                  default="")
    rules: list[Callable[[str], bool]] = [
        lambda other: other.startswith(plain) or other == longest,
        lambda other: plain in other or (len(other) >= 4 and other in plain),
        lambda other: len(first_word) >= 4 and other.startswith(first_word)]
    similar = [spelled[each] for each in get_close_matches(plain, spelled, _MOST, 0.7)]
    for rule in rules if len(plain) >= 4 else ():
        if found := _of_its_case(name, [each for other, each in spelled.items() if rule(other)]):
            return sorted(found, key=lambda each: (len(each), each))
    return _of_its_case(name, similar) or similar


def _of_its_case(name: str, found: list[str]) -> list[str]:
    return [each for each in found if each.islower()] if name.islower() else found


def _plain(name: str) -> str:
    """Return a name without case and underscores, in American spelling."""
    return name.lower().replace("_", "").replace("quantis", "quantiz").replace("normalis", "normaliz")


def no_attribute(owner: str, name: str, public: Iterable[str]) -> AttributeError:
    """Return the error for a name that a module or an object does not have."""
    advice = "" if name[:1] == "_" else meant(name, public)
    return AttributeError(f"{owner} has no attribute {name!r}{advice}")


def public_only(module: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module with these globals: `dir` shows the names in `__all__`,
    and an unknown name is answered with a similar one."""
    public: list[str] = module["__all__"]

    def missing(name: str) -> Any:
        raise no_attribute(f"module {module['__name__']!r}", name, public)

    return missing, lambda: [*public, *(name for name in module if name.startswith("__"))]


class Absent:
    """An attribute that users look for under a name that it does not have here: raises AttributeError with
    the right name. Unlike `__getattr__`, it costs nothing when other attributes are read."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, a: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"{owner and owner.__name__} has no attribute {self._name!r}; did you mean "
                             f"{self._instead}?")
