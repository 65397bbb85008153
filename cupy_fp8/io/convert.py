"""Checkpoints converted from one format of weights to another, shard by shard, with bounded memory.

Every shard of the result is written under a name of its own and renamed once it is on the disk, so that a
conversion that is killed goes on with the shards that are missing. Workers read, compute and write chunks of
rows at the same time.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import weights
from .checkpoint import INDEX, Checkpoint, quantization_of
from .chunks import COPY_BYTES, Chunk, Compared, Copy, Out, Queue, Report, Source, Work, reserve
from .pairing import Pair
from .replace import resuming
from .safetensors import DTYPES, TensorFile, by_alignment, header_of
from .weights import StoredWeight

__all__ = ["STAYS", "Conversion", "Settings", "Tensors"]

#: These tensors stay as they are unless `include` names them, since they are no weights of matrix products,
#: or suffer most.
STAYS = ("*norm*", "*embed*", "*wte.*", "*wpe.*", "*lm_head*", "*router*", "*.gate.weight", "*.bias",
         "*_bias")
_KEY = "cupy_fp8_convert"                       # the key of metadata that all shards of conversions have
_FLOATS = ("F64", "F32", "F16", "BF16")
_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken")


@dataclass(frozen=True)
class Settings:
    """What a conversion does. Two runs with equal settings make equal files.

    recipe        one of `weights.RECIPES`
    scale_format  of block128: 'f32', or 'e8m0' (powers of two, stored as F8_E8M0); '': the recipe's usual one
    include       patterns of tensors to convert although they stay by default
    exclude       patterns of tensors that stay
    """

    recipe: str
    scale_format: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.recipe not in weights.RECIPES:
            raise ValueError(f"recipe: expected one of {', '.join(weights.RECIPES)}, got {self.recipe!r}")
        formats = weights.SCALE_FORMATS[self.recipe]
        if not self.scale_format:
            self.__dict__["scale_format"] = next(iter(formats), "")
        elif self.scale_format not in formats:
            raise ValueError(f"scale_format: {self.recipe} has {' or '.join(formats) or 'no'} scales, got "
                             f"{self.scale_format!r}")


class Tensors(NamedTuple):
    """What becomes of a tensor, and of its scales. stored: None where both stay as they are. why: it
    stays."""

    name: str
    pair: Pair | None
    stored: StoredWeight | None
    why: str = ""


class Conversion:
    """A checkpoint on its way to another folder or file.

    source       a .safetensors file or a folder of them
    destination  a folder, or the name of a .safetensors file where the source is one file
    part         (i, n): only every n-th shard, from the i-th on (i from 1 to n)
    like         where values are computed: 'numpy' or 'cupy'
    workers      threads that read, compute and write
    compare      measure what rounding changes, for a report
    Raises OSError, ValueError before anything is written.
    """

    def __init__(self, source: Path, destination: Path, settings: Settings, *, part: tuple[int, int] = (1, 1),
                 like: Any = np,
                 workers: int | None = None, compare: bool = False) -> None:
        self.checkpoint, self.settings = Checkpoint(source), settings
        single = destination.suffix == ".safetensors"
        if single and len(self.checkpoint.files) != 1:
            raise ValueError(
                f"{destination}: expected a folder, since {source} has {len(self.checkpoint.files)} shards")
        self.folder = destination.parent if single else destination
        if self.folder.exists() and os.path.samefile(self.folder, self.checkpoint.folder) and (
                not single or destination.name in self.checkpoint.files):
            raise ValueError(f"{destination}: expected another place than the source")
        if not 1 <= part[0] <= part[1]:
            raise ValueError(f"part: expected I/N with I from 1 to N, got {part[0]}/{part[1]}")
        self._single, self._part, self._like, self._compare = single, part, like, compare
        self._workers = workers or min(8, os.cpu_count() or 1)
        pairs = self.checkpoint.pairs()
        self._scales = {pair.scale: pair.data for pair in pairs.values()}
        self.plan = {name: self._planned(name, pairs.get(name)) for name in self.checkpoint.tensors
                     if name not in self._scales}
        self.names = {shard: destination.name if single else shard for shard in self.checkpoint.files}

    @property
    def shards(self) -> list[str]:
        """The source's shards that this part converts."""
        first, step = self._part
        return list(self.checkpoint.files)[first - 1::step]

    def _planned(self, name: str, pair: Pair | None) -> Tensors:
        tensor, s = self.checkpoint.tensors[name], self.settings
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in s.exclude):
            return Tensors(name, pair, None, "excluded")
        bare_fp8 = pair is None and tensor.dtype in ("F8_E4M3", "F8_E5M2") and s.recipe == "bf16"
        if pair is None and not bare_fp8:
            if tensor.dtype not in _FLOATS:
                return Tensors(name, None, None, f"of type {tensor.dtype}")
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in s.include):
                if stays := next((pattern for pattern in STAYS if fnmatch.fnmatchcase(name, pattern)), None):
                    return Tensors(name, None, None, stays)
                if len(tensor.shape) < 2:
                    return Tensors(name, None, None, "of one dimension")
        if (len(tensor.shape) < 2 and s.recipe != "bf16") or not prod(tensor.shape):
            return Tensors(name, pair, None, "of fewer than two dimensions, or empty")
        shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        return Tensors(name, pair, weights.stored_weight(s.recipe, s.scale_format, shape))

    # ---- a shard ----
    def convert(self, shard: str, progress: Callable[[int], None]) -> list[Report] | None:
        """Write a shard of the result; None where it is there already. progress: told of every number of
        source bytes done."""
        target = self.folder / self.names[shard]
        if target.exists():
            if self._fingerprint(shard) != _fingerprint_of(target):
                raise ValueError(
                    f"{target}: is there already, and not of this conversion; delete it or choose another "
                    "place")
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = self._plan_of(shard)
        tensors = self._written(plan)
        order = by_alignment((name, dtype) for name, (dtype, _) in tensors.items())
        header = header_of({name: tensors[name] for name in order}, self._metadata(shard))
        with resuming(target) as file:
            out = Out(file.fileno(), header, {name: tensors[name] for name in order})
            file.write(header)
            file.flush()
            reserve(file.fileno(), out.size)
            return self._fill(plan, out, progress, self._like)

    def _plan_of(self, shard: str) -> list[Tensors]:
        return [self.plan[name] for name in self.checkpoint.files[shard].tensors if name in self.plan]

    def compare(self, shard: str, progress: Callable[[int], None], like: Any = None) -> list[Report]:
        """Make a shard of the result again and compare every byte with what is there. ValueError names the
        first tensor that differs. like: NumPy or CuPy, which computes; None: as `convert` did."""
        written = Compared(TensorFile(self.folder / self.names[shard]))
        return self._fill(self._plan_of(shard), written, progress, self._like if like is None else like)

    def _fill(self, plan: list[Tensors], out: Out | Compared, progress: Callable[[int], None],
              like: Any) -> list[Report]:
        with ThreadPoolExecutor(self._workers) as pool:
            queue = Queue(pool, 2 * self._workers)
            reports = []
            for one in plan:
                tensor = self.checkpoint.tensors[one.name]
                after = self.settings.recipe if one.stored else "as it is"
                report = Report(one.name, tensor.shape, self._kind(one), after)
                reports.append(report)
                for work in self._works(one, out, pool, like):
                    queue.put(work, report, progress)
            queue.drain()
        return reports

    def _works(self, one: Tensors, out: Out | Compared, pool: ThreadPoolExecutor,
               like: Any) -> Iterator[Work]:
        """The chunks of a tensor, and of its scales: what each does when it is called. like: NumPy or CuPy,
        which computes."""
        if one.stored is None:
            for name in (one.name, *([one.pair.scale] if one.pair else [])):
                for start in range(0, self.checkpoint.tensors[name].nbytes, COPY_BYTES):
                    yield Copy(self.checkpoint, name, start, out)
            return
        source = Source(self.checkpoint, one.name, one.pair, like)
        scale = None
        if one.stored.scale is not None and one.stored.block is None and (
                not one.pair or one.pair.block is not None):
            scale = weights.tensor_scale(list(pool.map(lambda rows: weights.amax_of(source.rows(rows)),
                                                       weights.row_chunks(source.shape))))
        for rows in weights.row_chunks(source.shape):
            yield Chunk(source, rows, one.stored, scale, self._compare, out)

    def _written(self, plan: list[Tensors]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """The tensors of a shard of the result, by name: dtype and shape."""
        found: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for one in plan:
            if one.stored is not None:
                made = one.stored.tensors(one.name, self.checkpoint.tensors[one.name].shape)
            else:
                made = {name: (self._dtype(name), self.checkpoint.tensors[name].shape)
                        for name in (one.name, *([one.pair.scale] if one.pair else []))}
            if taken := made.keys() & found.keys():
                raise ValueError(f"{one.name}: {min(taken)} is taken by another tensor")
            found.update(made)
        return found

    def _dtype(self, name: str) -> np.dtype[Any]:
        file, kind = self.checkpoint.files[self.checkpoint.shard[name]], self.checkpoint.tensors[name].dtype
        if kind not in DTYPES:
            raise ValueError(
                f"{file.path}: {name} is of type {kind}, which cannot be copied here; exclude its file")
        return DTYPES[kind]

    def _kind(self, one: Tensors) -> str:
        kind = self.checkpoint.tensors[one.name].dtype
        if one.pair is None:
            return kind
        block = "tensor"
        if one.pair.block is not None:
            block = "×".join("row" if n is None else str(n) for n in one.pair.block)
        return f"{kind} {block} {self.checkpoint.tensors[one.pair.scale].dtype}"

    # ---- what a shard is known by ----
    def _fingerprint(self, shard: str) -> str:
        """A hash of the settings and of what headers say of the tensors that go into a shard."""
        s = self.settings
        about = [[one.name, self.checkpoint.tensors[one.name][:2],
                  one.pair and [one.pair.scale, self.checkpoint.tensors[one.pair.scale][:2], one.pair.block]]
                 for one in self.plan.values() if self.checkpoint.shard[one.name] == shard]
        said = json.dumps([s.recipe, s.scale_format, s.include, s.exclude, shard, about], default=list)
        return hashlib.sha256(said.encode()).hexdigest()

    def _metadata(self, shard: str) -> dict[str, str]:
        found = {"format": "pt", **self.checkpoint.files[shard].metadata, _KEY: self._fingerprint(shard)}
        if self._single and not (self.checkpoint.folder / "config.json").is_file() and (
            config := self.quantization_config()):
            found["quantization_config"] = json.dumps(config)
        return found

    # ---- what goes with the shards ----
    def finish(self) -> bool:
        """Write the index, config.json and whatever else a folder of this kind has, once all shards of all
        parts are there: whether they are."""
        for shard, name in self.names.items():
            target = self.folder / name
            if not target.exists() or _fingerprint_of(target) != self._fingerprint(shard):
                return False
        if self._single:
            return True
        files = {name: TensorFile(self.folder / name) for name in self.names.values()}
        if len(files) > 1 or (self.checkpoint.folder / INDEX).is_file():
            weight_map = {tensor: name for name, file in files.items() for tensor in file.tensors}
            total = sum(t.nbytes for file in files.values() for t in file.tensors.values())
            _write_json(self.folder / INDEX,
                        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        for path in sorted(self.checkpoint.folder.iterdir()):
            if path.suffix in _COPIED and path.is_file() and path.name not in (INDEX, "config.json"):
                with path.open("rb") as file, resuming(self.folder / path.name) as copy:
                    shutil.copyfileobj(file, copy)
        if self.checkpoint.config:
            config = {key: value for key, value in self.checkpoint.config.items()
                      if key != "quantization_config"}
            if found := self.quantization_config():
                config["quantization_config"] = found
            _write_json(self.folder / "config.json", config)
        return True

    def quantization_config(self) -> dict[str, Any] | None:
        """What readers find in config.json: DeepSeek's form for block128, that of MX checkpoints,
        compressed-tensors' form for row and tensor."""
        left = sorted(one.name.removesuffix(".weight") for one in self.plan.values()
                      if one.stored is None and len(self.checkpoint.tensors[one.name].shape) == 2
                      and not one.pair)
        s = self.settings
        if s.recipe == "bf16":
            kept = any(one.pair and one.stored is None for one in self.plan.values())
            return dict(quantization_of(self.checkpoint.config)) or None if kept else None
        if s.recipe in ("block128", "mxfp8"):
            found: dict[str, Any] = {"quant_method": "fp8" if s.recipe == "block128" else "mxfp8",
                                     "fmt": "e4m3",
                                     "activation_scheme": "dynamic",
                                     "weight_block_size": [128, 128] if s.recipe == "block128" else [1, 32],
                                     "modules_to_not_convert": left}
            return {**found,
                    "scale_fmt": "ue8m0"} if s.recipe == "mxfp8" or s.scale_format == "e8m0" else found
        each = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
                "strategy": "channel" if s.recipe == "row" else "tensor"}
        inputs = {**each, "dynamic": True, "strategy": "token" if s.recipe == "row" else "tensor"}
        return {"quant_method": "compressed-tensors", "format": "float-quantized",
                "quantization_status": "compressed",
                "ignore": left,
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": each, "input_activations": inputs}}}


def _fingerprint_of(path: Path) -> str | None:
    return TensorFile(path).metadata.get(_KEY)


def _write_json(path: Path, found: Mapping[str, Any]) -> None:
    with resuming(path) as file:
        file.write(json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n")
