"""`save_safetensors`: writes arrays and quantised tensors as a .safetensors file, or as a folder that other
libraries load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend
from ..advice import shown, type_name
from ..arrays import Array, asnumpy, bits
from ..options import check_path
from ..results import Quantized, Scaled
from ..scaled_parts import check_one_piece
from .checkpoint import INDEX, SUFFIX
from .leftovers import check_no_strangers
from .pairing import scale_names
from .quantization_config import module_of, read_json
from .replace import PathLike, replacing
from .safetensors import by_alignment, dtype_name, header_of, nbytes
from .staying import FLOATS
from .written_config import LayerForm, has_group, quantization_config, without_description

__all__ = ["save_safetensors"]

_COLUMNS, _MX = (None, 1), (1, 32)


def save_safetensors(path: PathLike, tensors: Mapping[str, Any], *, metadata: Mapping[str, str] | None = None,
                     config: Mapping[str, Any] | None = None, max_shard_size: int = 5_000_000_000) -> None:
    """Write arrays and quantised tensors as a .safetensors file, or as a folder with config.json and index.
    Existing files are replaced only once the new ones are on disk.

    path : a name that ends in .safetensors, or else a folder, which is created if necessary.
    tensors : by name: NumPy or CuPy arrays of the format's dtypes, `Scaled` or `Quantized` (its row-wise
        part). Scales are written beside their data: `<name>_scale_inv` for blocks (compact), `<name>_scale`
        for one scale ([1]), rows ([M, 1]) and columns ([1, K]). In a folder, as other libraries have it,
        those of MX are U8, and if there are several forms that compressed-tensors knows, all are
        `<name>_scale`.
    metadata : strings by name, shown by other libraries (some require {"format": "pt"}).
    config : for a folder: the other entries of config.json (``{"model_type": "llama", …}``). Default: the
        existing ones. Its quantization_config is written from the tensors.
    max_shard_size : for a folder: most bytes of a file, unless a single tensor has more.
    Raises TypeError, ValueError (data that is not row-wise, names that collide, a folder with other
    .safetensors files) before anything is written, OSError.

    >>> import os, tempfile, numpy as np, cupy_fp8 as fp8
    >>> folder = os.path.join(tempfile.mkdtemp(), "model")
    >>> w = fp8.quantize_mx(np.ones((64, 128), np.float32))
    >>> fp8.io.save_safetensors(folder, {"proj.weight": w}, config={"model_type": "llama"})
    >>> sorted(os.listdir(folder))
    ['config.json', 'model.safetensors', 'model.safetensors.index.json']
    """
    check_path(path)
    _check_options(tensors, metadata, config, max_shard_size)
    target = Path(path)
    is_file = target.name.endswith(SUFFIX) and not target.is_dir()
    layers = {name: _layer(name, value, is_file) for name, value in tensors.items()}
    forms = {name: layer.form for name, layer in layers.items() if layer.form}
    if is_file:
        arrays = _arrays(layers, forms)
        said = quantization_config({module_of(name): form for name, form in forms.items()}, [])
        about = {**(metadata or {}), **({"quantization_config": json.dumps(said)} if said else {})}
        with replacing(target) as file:
            _write_file(file, arrays, about)
        return
    if config is not None and without_description(config) != config:
        raise ValueError("config: quantization_config is written from the tensors; leave it out")
    grouped = {name: form._replace(end="_scale") for name, form in forms.items()}
    if len(set(forms.values())) > 1 and all(map(has_group, grouped.values())):
        forms = grouped
    _save_folder(target, layers, _arrays(layers, forms), forms, metadata or {}, config, max_shard_size)


class _Layer:
    """A tensor as stored in a file: its data, and the form and the scales of a `Scaled`."""

    def __init__(self, data: Array, form: LayerForm | None = None, scales: Array | None = None) -> None:
        self.data, self.form, self.scales = data, form, scales


def _layer(name: Any, value: Any, keeps_exponents: bool) -> _Layer:
    """keeps_exponents: MX scales keep their dtype; other libraries expect U8."""
    if not isinstance(name, str):
        raise TypeError(f"tensors: expected names as keys, got {name!r}")
    if name == "__metadata__":
        raise ValueError("tensors: '__metadata__' is no name of a tensor")
    if isinstance(value, Quantized):
        if value._row is None:
            check_one_piece(value._any, name)
            raise ValueError(f"{name}: expected a row-wise part, got {value!r}")
        value = value._row
    if not isinstance(value, Scaled):
        backend.module_of(value, name)
        dtype_name(name, value.dtype)
        return _Layer(value)
    check_one_piece(value, name)
    block = value.block
    if value.transposed or (block and block != _COLUMNS and (block[0] is None or block[1] == 1)):
        raise ValueError(f"{name}: expected row-wise data, not stored transposed, got {value!r}; transpose "
                         "it, or save the row-wise part")
    if block is None:
        scales = value.scale_inv.reshape(1)
    else:
        scales = (value if value.scale_layout == "compact" else value.to_layout("compact")).scale_inv
    if block == _MX and not keeps_exponents:
        scales = scales.view(np.uint8)
    end = "_scale" if block is None or None in block else "_scale_inv"
    dtypes = dtype_name(name, value.dtype), dtype_name(name, scales.dtype)
    return _Layer(value.data, LayerForm(dtypes[0], block, end, dtypes[1]), scales)


def _arrays(layers: Mapping[str, _Layer], forms: Mapping[str, LayerForm]) -> dict[str, Array]:
    """Return all tensors by their names in files. ValueError for names that collide, and for scales that
    readers would pair with other data."""
    found: dict[str, Array] = {}
    for name, layer in layers.items():
        made = {name: layer.data} if layer.scales is None else {
            name: layer.data, name + forms[name].end: layer.scales}
        for key, a in made.items():
            if key in found:
                raise ValueError(f"{name}: {key} is taken by another tensor of the file")
            found[key] = a
    for name, form in forms.items():
        if others := [one for one in scale_names(name) if one in found and one != name + form.end]:
            raise ValueError(f"{name}: expected one tensor of scales, got {name}{form.end} and {others[0]}; "
                             "give the other one another name")
    return found


def _save_folder(folder: Path, layers: Mapping[str, _Layer], arrays: Mapping[str, Array],
                 forms: Mapping[str, LayerForm], metadata: Mapping[str, str],
                 config: Mapping[str, Any] | None, most: int) -> None:
    plain = [module_of(name) for name, layer in layers.items()
             if name not in forms and layer.data.ndim > 1 and dtype_name(name, layer.data.dtype) in FLOATS]
    said = quantization_config({module_of(name): form for name, form in forms.items()}, plain)
    kept = dict(config) if config is not None else without_description(read_json(folder / "config.json"))
    shards = _shards(layers, arrays, forms, most)
    check_no_strangers(folder, {INDEX, "config.json", *shards})
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(nbytes(dtype_name(name, a.dtype), a.shape) for name, a in arrays.items())
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    small = {INDEX: {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
             "config.json": {**kept, **({"quantization_config": said} if said else {})}}
    with ExitStack() as stack:                  # all files are renamed once all are on disk
        for name, content in small.items():
            stack.enter_context(replacing(folder / name)).write(
                json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
        for shard, names in shards.items():
            _write_file(stack.enter_context(replacing(folder / shard)),
                        {name: arrays[name] for name in names}, {"format": "pt", **metadata})


def _shards(layers: Mapping[str, _Layer], arrays: Mapping[str, Array], forms: Mapping[str, LayerForm],
            most: int) -> dict[str, list[str]]:
    """Return the names of files, and the tensors in each: data and their scales together, in order."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in layers:
        names = [name, name + forms[name].end] if name in forms else [name]
        own = sum(int(arrays[one].nbytes) for one in names)
        if size and size + own > most:
            parts.append([])
            size = 0
        parts[-1] += names
        size += own
    if len(parts) == 1:
        return {f"model{SUFFIX}": parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}{SUFFIX}": names for i, names in enumerate(parts, 1)}


def _write_file(file: Any, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    about = {name: (dtype_name(name, a.dtype), a.shape) for name, a in arrays.items()}
    order = by_alignment((name, dtype) for name, (dtype, _) in about.items())
    file.write(header_of({name: about[name] for name in order}, metadata))
    for name in order:
        host = np.ascontiguousarray(bits(asnumpy(arrays[name])))
        file.write(host.reshape(-1).view(np.uint8).data)


def _check_options(tensors: Any, metadata: Any, config: Any, most: Any) -> None:
    for option, given in (("tensors", tensors), ("metadata", metadata), ("config", config)):
        if not isinstance(given, Mapping) and (given is not None or option == "tensors"):
            raise TypeError(f"{option}: expected a dict by name, got {type_name(given)}")
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"metadata: expected strings by name, got {key!r}: {text!r}")
    if type(most) is not int or most < 1:
        raise ValueError(f"max_shard_size: expected a number of bytes, got {shown(most)}")
    try:
        json.dumps(config)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"config: expected what JSON holds ({error})") from None
