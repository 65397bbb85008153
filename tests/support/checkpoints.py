"""Checkpoints in other projects' formats, written and read without the package's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupy_fp8.__main__ import main

E4M3, BF16, E8M0 = (
    np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu)
)
_DTYPES: dict[str, Any] = {
    "F8_E4M3": E4M3,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": E8M0,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "BF16": BF16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class Packed:
    """A tensor of a dtype that NumPy lacks, as bytes."""

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data


def write(
    path: Path,
    tensors: dict[str, Any],
    metadata: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a .safetensors file, and config.json beside it."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    blob = b""
    for name, a in tensors.items():
        if isinstance(a, Packed):
            dtype, shape, data = a.dtype, a.shape, a.data
        else:
            a = np.asarray(a)
            dtype, shape, data = _NAMES[a.dtype], a.shape, a.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(blob), len(blob) + len(data)],
        }
        blob += data
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def read(path: Path) -> dict[str, Any]:
    """Return all tensors of a file, or of the files of a folder, as stored."""
    found: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, about in header(file).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                raw = data[start + first : start + last]
                dtype = _DTYPES.get(about["dtype"])
                found[name] = (
                    Packed(about["dtype"], tuple(about["shape"]), raw)
                    if dtype is None
                    else np.frombuffer(raw, dtype).reshape(about["shape"])
                )
    return found


def codes(*shape: int, dtype: Any = E4M3, seed: int = 0) -> np.ndarray:
    """Return FP8 codes of finite values of one sign."""
    return np.random.default_rng(seed).integers(0x20, 0x77, shape).astype(np.uint8).view(dtype)


def factors(*shape: int, dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    """Return scales of about 1/100."""
    return ((np.random.default_rng(seed).random(shape) + 0.5) / 100).astype(dtype)


def values(
    data: np.ndarray, scale: np.ndarray, rows: int | None = None, columns: int | None = None
) -> np.ndarray:
    """Return fl32(code · scale), with scales of blocks of this many rows and columns (None: all)."""
    *batch, height, width = data.shape
    down, across = rows or height, columns or width
    grid = scale.astype(np.float32).reshape(*batch, -(-height // down), -(-width // across))
    grid = grid.repeat(down, -2)[..., :height, :].repeat(across, -1)[..., :width]
    return np.asarray(data.astype(np.float32) * grid)


def bf16(a: np.ndarray) -> np.ndarray:
    """Round float32 values to bfloat16."""
    return a.astype(np.float32).astype(BF16)


def convert(*arguments: Any) -> int:
    """Return the exit code of the command."""
    return main(["convert", *map(str, arguments), "--array", "numpy"])


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
