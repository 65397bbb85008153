"""Statistics of a training run: one line of JSON per tensor and step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from ..advice import type_name
from ..arrays import Array
from ..formats import integer
from ..options import check_path
from ..results import Quantized, Scaled, as_scaled
from .inputs import module_of_x, require_shape, values_and_codes
from .per_block import BlockReport, counts_of, report_on
from .scale_report import ScaleReport, report_of
from .text import json_number
from .whole import ErrorReport, error_of

__all__ = ["log_step"]

_PLAIN = (str, int, float, bool, type(None))
_OF_SCALES = {"scales": "scales", "histogram": "scale_histogram", "first_exponent": "scale_first_exponent"}


def log_step(path: str | os.PathLike[str], step: int, tensors: Mapping[str, Any],
             **labels: Any) -> list[dict[str, Any]]:
    """Append the statistics of some quantised tensors to a file: one line for each, a JSON object.

    path : the file, which is created if necessary; its folder is not.
    step : the number of the training step.
    tensors : by name (x, q), or q alone where there is no original. x and q as in `error`: q is a `Scaled` or
        `Quantized` (its row-wise part, if there is one; give q.columnwise a name of its own for the other),
        with one scale or a scale per block. NumPy and CuPy may both occur.
    labels : what else every line should say, such as rank=0 or loss=2.31: strings, numbers, booleans or None.
    Returns the objects, as `json.loads` would read them. Everything is computed before anything is written.

    A line has step, tensor and the labels; dtype, shape, block and elements of the data (block is [1, 32],
    null with one scale, [1, null] for whole rows); the fields of `ErrorReport`, null without x; nan and
    negative_zeros, the codes of −0; scales, the number of scales, and the other fields of `ScaleReport` as
    scale_mean, scale_std, scale_log2_mean, scale_histogram and so on; blocks_saturated, blocks_underflowed,
    blocks_nan and blocks_negative_zeros, the number of blocks that have such elements; most_saturated and
    most_underflowed, the most of them in one block, and most_saturated_at and most_underflowed_at, the index
    of that block. docs/insight.md has a table of them.

    JSON has no NaN and no infinities: they are null. sqnr_db is thus null without any error
    (max_relative_error is then 0) and where nothing is left of the signal.

    `[json.loads(line) for line in file]` reads the file, and so does pandas.read_json(path, lines=True). The
    work is that of `error` and `blocks`: several passes in f64, after which the host waits for a GPU. Log
    every hundredth step rather than each, and give each process a file of its own. Warns with `ScaleWarning`.
    Raises TypeError, ValueError (`error`'s, and for labels that JSON does not hold or that are keys of their
    own), OSError.

    >>> import json, pathlib, tempfile, numpy as np, cupy_fp8 as fp8
    >>> path = pathlib.Path(tempfile.mkdtemp(), "stats.jsonl")
    >>> w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    >>> for step in range(2):
    ...     found = fp8.diagnostics.log_step(path, step, {"w": (w, fp8.quantize_mx(w))}, rank=0)
    >>> lines = [json.loads(line) for line in path.read_text().splitlines()]
    >>> [(line["step"], line["tensor"], line["scales"], line["blocks_saturated"]) for line in lines]
    [(0, 'w', 128, 0), (1, 'w', 128, 0)]
    """
    check_path(path)
    step = integer(step, "step")
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: expected a mapping of names to (x, q) or q, got {type(tensors).__name__}")
    records = []
    for name, pair in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors: expected strings as names, got {name!r}")
        record = {"step": step, "tensor": name}
        found = _statistics(*_pair(name, pair))
        for label, value in labels.items():
            if label in record or label in found:
                raise ValueError(f"{label}: a line has this key of its own; choose another label")
            record[label] = _label(label, value)
        records.append(record | found)
    _append(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode())
    return records


def _pair(name: str, pair: Any) -> tuple[Array | None, Scaled]:
    x, q = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, pair)
    if not isinstance(q, (Scaled, Quantized)):
        raise TypeError(f"tensors[{name!r}]: expected (x, q) or q, a Scaled or Quantized, got {type_name(q)}")
    return x, as_scaled(q)


def _label(name: str, value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, _PLAIN):
        raise TypeError(f"{name}: expected a string, a number, a boolean or None as a label, got "
                        f"{type(value).__name__}; float(...) of an array gives a number")
    return json_number(value) if isinstance(value, float) else value


def _statistics(x: Array | None, s: Scaled) -> dict[str, Any]:
    """Return the keys of a line, except step, tensor and labels."""
    values, codes = values_and_codes(s, None if x is None else module_of_x(x))
    assert codes is not None
    found: dict[str, Any] = {"dtype": s.dtype.name, "shape": list(s.shape),
                             "block": None if s.block is None else list(s.block),
                             "elements": int(values.size)}
    if x is None:
        found |= dict.fromkeys(f.name for f in fields(ErrorReport) if f.name != "elements")
    else:
        require_shape(x, values)
        found |= {key: json_number(value) for key, value in asdict(error_of(x, values, codes)).items()}
    if s.block is None:                         # the tensor is one block
        counts = counts_of(None, values.reshape(1, values.size), codes.reshape(1, values.size),
                           (1, max(1, values.size)))
        found |= {"nan": _total(counts[2]), "negative_zeros": _total(counts[3])}
        return found | _of_scales(report_of(s.scale_inv)) | _of_blocks(None)
    report = report_on(x, s, values, codes)
    found |= {"nan": _total(report.nan), "negative_zeros": _total(report.negative_zeros)}
    return found | _of_scales(report.scales) | _of_blocks(report)


def _of_scales(report: ScaleReport) -> dict[str, Any]:
    return {_OF_SCALES.get(key, f"scale_{key}"):
            list(value) if isinstance(value, tuple) else json_number(value)
            for key, value in asdict(report).items()}


def _of_blocks(report: BlockReport | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("saturated", "underflowed", "nan", "negative_zeros"):
        counts = None if report is None else getattr(report, name)
        found[f"blocks_{name}"] = None if counts is None else _total(counts != 0)
        if name in ("saturated", "underflowed"):
            found[f"most_{name}"], found[f"most_{name}_at"] = _most(counts)
    return found


def _most(counts: Array | None) -> tuple[int | None, list[int] | None]:
    """Return (the largest count, the index of the first block that has it)."""
    if counts is None:
        return None, None
    if not counts.size:
        return 0, None
    at = np.unravel_index(int(counts.argmax()), counts.shape)
    most = int(counts[tuple(map(int, at))])
    return most, [int(i) for i in at] if most else None


def _total(counts: Array) -> int:
    return int(counts.sum(dtype=np.int64))


def _append(path: str | os.PathLike[str], data: bytes) -> None:
    with open(path, "ab+") as file:
        if file.tell() and data:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":       # a process was killed while writing its line
                data = b"\n" + data
        file.write(data)
