"""Files: archives of arrays and results (`save`, `load`), and .safetensors checkpoints with FP8 tensors."""

from .archive import load, save
from .checkpoint import load_safetensors, save_safetensors
from .matrices import read_matrices

__all__ = ["load", "load_safetensors", "read_matrices", "save", "save_safetensors"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
