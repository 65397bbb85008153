"""Files: archives of arrays and results (`save`, `load`), and .safetensors checkpoints with FP8 tensors."""

from typing import Any

from ..advice import no_attribute
from .archive import load, save
from .checkpoint import load_safetensors, save_safetensors
from .matrices import read_matrices

__all__ = ["load", "load_safetensors", "read_matrices", "save", "save_safetensors"]


def __getattr__(name: str) -> Any:
    raise no_attribute(f"module {__name__!r}", name, __all__)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
