"""Converts checkpoints from one weight format to another, shard by shard, with bounded memory.

Every shard of the result is written under a temporary name and renamed once it is on disk, so that a killed
conversion continues with the missing shards. Workers read, compute and write chunks of rows in parallel.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from . import weights
from .checkpoint import INDEX, SUFFIX, Checkpoint, is_index
from .chunks import COPY_BYTES, Chunk, Compared, Copy, Out, Queue, Report, Source, Work, reserve
from .claim import claimed
from .leftovers import check_no_strangers, metadata_without, small_file
from .planning import Plan, Planned, Settings, written_tensors
from .quantization_config import read_json
from .replace import resuming
from .safetensors import TensorFile, by_alignment, header_of, nbytes
from .scale_forms import share_text
from .written_config import without_description

__all__ = ["Conversion", "Settings"]

_KEY = "cupy_fp8_convert"                       # the metadata key of all converted shards
_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken")


class Conversion:
    """A conversion of a checkpoint into another folder or file. Use it in a `with`, which claims the place.

    source       a .safetensors file or a folder of them
    destination  a folder, or the name of a .safetensors file if the source is one file
    part         (i, n): only every n-th shard, from the i-th on (i from 1 to n)
    like         where values are computed: 'numpy' or 'cupy'
    workers      threads that read, compute and write
    Raises OSError, ValueError before anything is written.
    """

    def __init__(self, source: Path, destination: Path, settings: Settings, *, part: tuple[int, int] = (1, 1),
                 like: Any = np, workers: int | None = None) -> None:
        self.checkpoint, self.settings = Checkpoint(source), settings
        single = destination.suffix == SUFFIX
        if single and len(self.checkpoint.files) != 1:
            raise ValueError(
                f"{destination}: expected a folder, since {source} has {len(self.checkpoint.files)} shards")
        self.folder = destination.parent if single else destination
        if self.folder.exists() and os.path.samefile(self.folder, self.checkpoint.folder) and (
                not single or destination.name in self.checkpoint.files):
            raise ValueError(f"{destination}: expected another place than the source")
        if not 1 <= part[0] <= part[1]:
            raise ValueError(f"part: expected I/N with I from 1 to N, got {part[0]}/{part[1]}")
        self._single, self._part, self._like = single, part, like
        self._workers = workers or min(8, os.cpu_count() or 1)
        self.plan = Plan(self.checkpoint, settings)
        self.names = {shard: destination.name if single else shard for shard in self.checkpoint.files}
        self._claim = ExitStack()
        self._check_claim: Callable[[], None] = lambda: None
        written_tensors(self.plan.tensors.values(), self.checkpoint)    # names that collide, also of shards

    def __enter__(self) -> Conversion:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._single:
            check_no_strangers(self.folder, {*self.names.values(), *self._written_beside()})
        place = self.folder / next(iter(self.names.values())) if self._single else self.folder
        whole = hashlib.sha256("".join(map(self._fingerprint, self.names)).encode()).hexdigest()
        with ExitStack() as stack:
            self._check_claim = stack.enter_context(claimed(place, whole))
            for shard, name in self.names.items():              # those of other parts too
                self._check_ours(shard, self.folder / name)
            self._claim = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._claim.close()

    @property
    def shards(self) -> list[str]:
        """The source's shards that this part converts."""
        first, step = self._part
        return list(self.checkpoint.files)[first - 1::step]

    # ---- a shard ----
    def convert(self, shard: str, progress: Callable[[int], None]) -> list[Report] | None:
        """Write a shard of the result; None if it exists already. progress: called with numbers of source
        bytes done, which add up to `nbytes` of the shard."""
        target = self.folder / self.names[shard]
        if target.exists():
            self._check_ours(shard, target)
            return None
        tensors = self.written(shard)
        order = by_alignment((name, dtype) for name, (dtype, _) in tensors.items())
        header = header_of({name: tensors[name] for name in order}, self._metadata(shard))
        with resuming(target, lambda: self._check_ours(shard, target)) as file:
            out = Out(file.fileno(), header, {name: tensors[name] for name in order})
            file.write(header)
            file.flush()
            reserve(file.fileno(), out.size)
            return self._fill(shard, out, progress, self._like)

    def _check_ours(self, shard: str, target: Path) -> None:
        """Raise ValueError unless the place belongs to this conversion, and so does any file of the shard's
        name."""
        self._check_claim()
        if target.exists() and self._fingerprint(shard) != _fingerprint_of(target):
            raise ValueError(f"{target}: is there already, and not of this conversion; delete it or choose "
                             "another place")

    def compare(self, shard: str, progress: Callable[[int], None], like: Any = None) -> list[Report]:
        """Make a shard of the result again and compare every byte with the existing one. ValueError names the
        first tensor that differs. like: NumPy or CuPy, which computes; None: as for `convert`."""
        written = Compared(TensorFile(self.folder / self.names[shard]))
        return self._fill(shard, written, progress, self._like if like is None else like)

    def planned(self, shard: str) -> list[Planned]:
        tensors = self.plan.tensors
        return [tensors[name] for name in self.checkpoint.files[shard].tensors if name in tensors]

    def nbytes(self, shard: str) -> int:
        """Return the source bytes that a shard of the result is made from."""
        names = [name for one in self.planned(shard) for name in one.sources]
        return sum(self.checkpoint.tensors[name].nbytes for name in names)

    def written(self, shard: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the tensors of a shard of the result by name: dtype and shape."""
        return written_tensors(self.planned(shard), self.checkpoint)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of all tensors of the source, and of the result."""
        after = [nbytes(*about) for shard in self.names for about in self.written(shard).values()]
        return sum(tensor.nbytes for tensor in self.checkpoint.tensors.values()), sum(after)

    def _fill(self, shard: str, out: Out | Compared, progress: Callable[[int], None],
              like: Any) -> list[Report]:
        with ThreadPoolExecutor(self._workers) as pool:
            queue = Queue(pool, 2 * self._workers)
            reports = []
            for one in self.planned(shard):
                tensor = self.checkpoint.tensors[one.name]
                report = Report(one.name, tensor.shape, self._kind(one), self._kind_after(one))
                reports.append(report)
                for work in self._works(one, out, pool, like):
                    queue.put(work, report, progress)
                if one.pair and one.stored:             # all scales are read before the first chunk
                    progress(self.checkpoint.tensors[one.pair.scale].nbytes)
            queue.drain()
        return reports

    def _works(self, one: Planned, out: Out | Compared, pool: ThreadPoolExecutor,
               like: Any) -> Iterator[Work]:
        """Yield the chunks of a tensor and of its scales as callables. like: NumPy or CuPy, which
        computes."""
        if one.stored is None:
            for name in one.sources:
                for start in range(0, self.checkpoint.tensors[name].nbytes, COPY_BYTES):
                    yield Copy(self.checkpoint, name, start, out)
            return
        source = Source(self.checkpoint, one.name, one.pair, like)
        chunks = list(weights.row_chunks(source.shape, source.unit))
        scale = None
        if one.stored.scale is not None and one.stored.block is None and (
                not source.keeps_scale(one.stored.dtype)):
            amaxes = pool.map(lambda rows: weights.amax_of(source.rows(rows)), chunks)
            scale = weights.tensor_scale(list(amaxes))
        for rows in chunks:
            yield Chunk(source, rows, one.stored, scale, one.target, out)

    def _kind(self, one: Planned) -> str:
        kind = self.checkpoint.tensors[one.name].dtype
        if one.pair is None:
            return kind
        scale = self.checkpoint.tensors[one.pair.scale].dtype
        return f"{kind}, a scale for {share_text(one.pair.form.share)} ({scale})"

    def _kind_after(self, one: Planned) -> str:
        if one.stored is None:
            return "as it is"
        return self.settings.recipe if one.stored.scale else "bf16"

    # ---- fingerprints of shards ----
    def _fingerprint(self, shard: str) -> str:
        """Return a hash of the settings, of the header entries of the tensors that go into a shard, and of
        what becomes of each."""
        s = self.settings
        about = [[one.target, one.why, one.stored and str(one.stored),
                  [(name, *self.checkpoint.tensors[name][:2]) for name in one.sources],
                  one.pair and one.pair.form] for one in self.planned(shard)]
        settings = [s.recipe, s.scale_format, s.include, s.exclude, s.scales, str(s.block)]
        said = json.dumps([*settings, shard, about], default=str)
        return hashlib.sha256(said.encode()).hexdigest()

    def _metadata(self, shard: str) -> dict[str, str]:
        kept = metadata_without(self.checkpoint.files[shard].metadata, self.plan.converted)
        found = {"format": "pt", **kept, _KEY: self._fingerprint(shard)}
        if self._single and (config := self.plan.quantization_config):
            found["quantization_config"] = json.dumps(config)
        return found

    # ---- the other files ----
    def finish(self) -> bool:
        """Write the index, config.json and the other files of such a folder, once all shards of all parts
        exist; return whether they do."""
        for shard, name in self.names.items():
            target = self.folder / name
            if not target.exists() or _fingerprint_of(target) != self._fingerprint(shard):
                return False
        if self._single:
            return True
        files = {name: TensorFile(self.folder / name) for name in self.names.values()}
        if self._index:
            weight_map = {tensor: name for name, file in files.items() for tensor in file.tensors}
            total = sum(t.nbytes for file in files.values() for t in file.tensors.values())
            self._write(self._index,
                        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        for path in self._small_files():
            content = self._after(path)
            if content is None:
                with path.open("rb") as file, resuming(self.folder / path.name, self._check_claim) as copy:
                    while data := file.read(COPY_BYTES):
                        copy.write(data)
            elif content:
                self._write(path.name, content)
        if (config := self._config()) is not None:
            self._write("config.json", config)
        return True

    def _config(self) -> dict[str, Any] | None:
        """Return the result's config.json; None without one."""
        config, found = without_description(self.checkpoint.config), self.plan.quantization_config
        key = self.plan.source.key if self.plan.keeps_description else "quantization_config"
        if found and key:
            return {**config, key: found}
        return config if (self.checkpoint.folder / "config.json").is_file() else None

    def _written_beside(self) -> set[str]:
        """Return the names of the files written beside the shards."""
        small = {path.name for path in self._small_files() if self._after(path) != {}}
        return small | {self._index} | ({"config.json"} if self._config() is not None else set())

    @property
    def _index(self) -> str:
        """The name of the result's index; '' for a single file."""
        return self.checkpoint.index or (INDEX if len(self.names) > 1 else "")

    def _small_files(self) -> list[Path]:
        """Return the files of the source's folder that are copied with its weights."""
        return [path for path in sorted(self.checkpoint.folder.iterdir())
                if path.suffix in _COPIED and path.is_file() and path.name != "config.json"
                and not is_index(path.name)]

    def _after(self, path: Path) -> dict[str, Any] | None:
        """Return the new content of a small file; {}: nothing is left of it; None: unchanged."""
        if path.suffix != ".json":
            return None
        try:
            before = read_json(path)
        except ValueError:                  # not a JSON object, so it does not describe weights
            return None
        converted = self.plan.converted if self.plan.keeps_description else None
        after = small_file(path.name, before, converted)
        return None if after == before else after or {}

    @property
    def rewritten(self) -> dict[str, str]:
        """The small files that change or are dropped, by name, and what becomes of them."""
        found = {} if self._single else {path.name: self._after(path) for path in self._small_files()}
        return {name: "rewritten" if after else "removed" for name, after in found.items()
                if after is not None}

    def _write(self, name: str, found: dict[str, Any]) -> None:
        with resuming(self.folder / name, self._check_claim) as file:
            file.write(json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n")


def _fingerprint_of(path: Path) -> str | None:
    return TensorFile(path).metadata.get(_KEY)
