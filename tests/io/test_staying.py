"""Tensors that are not weights of a matrix product, or that FP8 releases leave in 16 bits, are not
converted."""

import numpy as np
import pytest
from checkpoints import BF16, E4M3, bf16, codes, config_of, convert, factors, read, write

import cupy_fp8 as fp8
from cupy_fp8 import io

L = "model.layers.0."
STAY = {
    "lm_head.weight": (128, 128),
    "head.weight": (128, 128),
    "output.weight": (128, 128),
    "transformer.output_layer.weight": (128, 128),
    "embed_out.weight": (128, 128),
    "score.weight": (128, 128),
    "model.layers.61.shared_head.head.weight": (128, 128),
    "classifier.weight": (128, 128),
    f"{L}mlp.gate.weight": (16, 128),
    f"{L}mlp.gate.wg.weight": (16, 128),
    f"{L}block_sparse_moe.gate.weight": (16, 128),
    f"{L}feed_forward.router.weight": (16, 128),
    f"{L}mlp.router.classifier.weight": (16, 128),
    f"{L}mlp.shared_expert_gate.weight": (1, 128),
    f"{L}linear_attn.in_proj_ba.weight": (16, 128),
    f"{L}linear_attn.in_proj_a.weight": (16, 128),
    f"{L}self_attn.indexer.weights_proj.weight": (64, 128),
    f"{L}linear_attn.A_log": (16, 128),
    f"{L}linear_attn.conv1d.weight": (128, 1, 4),
    "visual.patch.proj.weight": (64, 3, 2, 16, 16),
    "audio.conv1.weight": (64, 80, 3),
    "vae.conv.weight": (32, 16, 3, 3),
    "audio.pointwise.weight": (64, 128, 1),
    "visual.patch_embed.proj.weight": (64, 128),
    f"{L}one.weight": (128, 1),
    f"{L}input_layernorm.weight": (128,),
    "model.embed_tokens.weight": (128, 128),
    "token_embd.weight": (128, 128),
    "shared.weight": (128, 128),
    f"{L}self_attn.relative_attention_bias.weight": (32, 16),
    "time_text.scale_shift_table": (2, 128),
    "talker.code_predictor.lm_head.0.weight": (128, 128),
    "lm_heads.0.weight": (128, 128),
    "talker.codec_head.weight": (128, 128),
    "lm_head.decoder.weight": (128, 128),
    "decoder.output_projection.weight": (128, 128),
    "to_logits.weight": (128, 128),
    "medusa_heads.0.0.linear.weight": (128, 128),
    f"{L}mlp.moe_gate.weight": (16, 128),
    f"{L}mlp.gate_inp.weight": (16, 128),
    f"{L}mlp.gate_layer.weight": (16, 128),
    f"{L}eh_proj.weight": (128, 256),
    f"{L}hc_attn_fn": (24, 128),
    f"{L}attn.compressor.wgate.weight": (128, 128),
    "visual.rel_pos_h": (27, 64),
    "visual.pos_emb": (64, 128),
    "perceiver.latents": (64, 128),
    "resampler.query": (64, 128),
    "vocoder.ups.0.weight": (64, 64, 40),
}
CHANGE = {
    f"{L}mlp.gate_proj.weight": (128, 128),
    f"{L}mlp.gate_up_proj.weight": (128, 128),
    f"{L}attention.output.dense.weight": (128, 128),
    f"{L}output.weight": (128, 128),
    f"{L}mlp.experts.gate_up_proj": (2, 128, 128),
    f"{L}self_attn.head_proj.weight": (128, 128),
    f"{L}linear_attn.in_proj_qkvz.weight": (128, 128),
    "single_blocks.0.proj_out.weight": (128, 128),
    f"{L}convert.weight": (128, 128),
}


@pytest.mark.parametrize("recipe", ["block128", "mxfp8", "row", "tensor"])
def test_what_stays(tmp_path, recipe):
    rng = np.random.default_rng(0)
    tensors = {name: bf16(rng.standard_normal(shape) / 50) for name, shape in {**STAY, **CHANGE}.items()}
    write(tmp_path / "model.safetensors", tensors, config={})
    assert convert(tmp_path, tmp_path / "out", "--recipe", recipe) == 0
    after = read(tmp_path / "out")
    assert [name for name in STAY if after[name].tobytes() != tensors[name].tobytes()] == []
    assert [name for name in CHANGE if after[name].dtype != E4M3] == []
    config = config_of(tmp_path / "out")["quantization_config"]
    left = config["modules_to_not_convert" if "modules_to_not_convert" in config else "ignore"]
    weights = [name for name, shape in STAY.items() if name.endswith(".weight") and len(shape) > 1]
    assert {name.removesuffix(".weight") for name in weights} == set(left)


def test_include_converts_them_all_the_same(tmp_path):
    write(
        tmp_path / "a.safetensors",
        {name: bf16(np.ones(STAY[name])) for name in ("lm_head.weight", "head.weight")},
    )
    assert (
        convert(
            tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "row", "--include", "lm_head*"
        )
        == 0
    )
    after = read(tmp_path / "b.safetensors")
    assert (after["lm_head.weight"].dtype, after["head.weight"].dtype) == (E4M3, BF16)


def test_what_the_source_quantised_is_converted_whatever_its_name(tmp_path):
    """A head in FP8 was quantised by the source's own choice."""
    write(
        tmp_path / "a.safetensors",
        {"lm_head.weight": codes(128, 128), "lm_head.weight_scale": factors(128, 1)},
    )
    assert convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--recipe", "mxfp8") == 0
    assert isinstance(io.load_safetensors(tmp_path / "b.safetensors")["lm_head.weight"], fp8.Scaled)
