"""Finds, by name and shape, tensors that are not weights of matrix products, or that publishers of FP8 models
leave in 16 bits."""

from __future__ import annotations

import fnmatch

from .quantization_config import module_of

__all__ = ["FLOATS", "why_it_stays"]

FLOATS = ("F64", "F32", "F16", "BF16")
_WIDEST_CONVOLUTION = 64        # largest last extent of [out, in, width]: stacks of experts have longer rows
_PATTERNS = (
    "*norm*", "ln_f.*", "*.ln_*",
    "*embed*", "*embd*", "*wte.*", "*wpe.*", "emb.*", "*.emb.*", "shared.weight", "*_token", "*_tokens",
    "*codebook*", "*relative_attention_bias*", "*scale_shift_table*", "*.modulation",
    "*.pos_emb*", "*rel_pos*", "*.latents", "*.query", "*.queries",
    "*router*", "*.gate.*", "gate.*", "*shared_expert_gate*", "*shared_experts_gate*", "*.gating.*",
    "*.gate_weight", "*moe_gate*", "*.gate_inp.*", "*gate_layer.*", "*.wgate.*",
    "*weights_proj*", "*.in_proj_ba.*", "*.in_proj_a.*", "*.in_proj_b.*",
    "*lm_head*", "*codec_head*", "*medusa*", "*to_logits*", "*output_projection*",
    "*.eh_proj.*", "*.hc_*", "*.compressor.*",                      # DeepSeek's
    "*.bias", "*_bias", "*_bias_*",
    "*conv1d*", "*conv2d*", "*conv3d*", "*conv.*", "*conv[0-9].*", "*conv_in.*", "*conv_out.*",
    "*.A_log", "*.dt_bias", "*.D", "*.time_*",                      # states of linear attention
    "*_scale", "*_scale_inv", "*.scale", "*scales", "*scale_weight", "*scale_input", "*_zero_point",
    "*scaling_factor",
)
#: Names of the last part of an output head: everywhere, and outside of layers (which have numbers).
_HEADS = ("head", "output_layer", "embed_out", "unembed")
_HEADS_OUTSIDE = ("output", "score", "classifier", "proj_out", "out_head", "logits", "vocab_head")


def why_it_stays(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Return why a tensor without scales of its own is not converted; '' if it is."""
    if dtype not in FLOATS:
        return f"of type {dtype}"
    if stays := next((pattern for pattern in _PATTERNS if fnmatch.fnmatchcase(name, pattern)), ""):
        return stays
    if len(shape) < 2:
        return "of one dimension"
    *path, last = module_of(name).split(".")
    if last in _HEADS or (last in _HEADS_OUTSIDE and not any(part.isdigit() for part in path)):
        return "output head"
    if len(shape) > 3 or (len(shape) == 3 and shape[-1] <= _WIDEST_CONVOLUTION):
        return "convolution"
    return "one wide" if 1 in shape[-2:] else ""
