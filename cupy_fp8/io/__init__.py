"""Files: archives of arrays and results (`save`, `load`), and .safetensors checkpoints with FP8 tensors."""

from typing import TYPE_CHECKING

from ..advice import public_only
from .archive import load, save
from .loading import load_safetensors
from .matrices import read_matrices
from .saving import save_safetensors

__all__ = ["load", "load_safetensors", "read_matrices", "save", "save_safetensors"]

if not TYPE_CHECKING:               # otherwise type checkers accept any name
    __getattr__, __dir__ = public_only(globals())
