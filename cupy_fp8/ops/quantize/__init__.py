"""Quantisation: per tensor, in blocks, MX, of SwiGLU and activations, of row groups and of tensor lists.

Each op returns a Quantized or a Grouped, described by `quantized_result` and `grouped_result`. One scale for
a tensor: `tensor`, with `tensor_current` and `bias_gradient`. Blocks: `blocks` and `mx` each have a
`Quantization` (`block_quantization`), derived from a shape and the options: directions, rule and scales.
Their own ops launch kernels for it, and so do `grouped_blocks` and `tensor_list_blocks`. Values that are
computed first (SwiGLU: `swiglu` with `swiglu_launches`; `activation`): `fused` has an `Output` per kind of
recipe, with the kernels' members for the result, and the programs and launches of any source. Current scaling
of lists and groups can read x once (`single_read`).
"""
