"""Quantisation: per tensor, in blocks, MX, SwiGLU, of row groups and of tensor lists.

Each op returns a Quantized or a Grouped, which `quantized_result` and `grouped_result` describe. One scale
for a tensor: `tensor`, with `tensor_current` and `bias_gradient`. Blocks: `blocks` and `mx` each have a
`Quantization` (`block_quantization`), which is what follows from a shape and the options: directions, rule
and scales. Their own ops launch kernels for it, and so do `grouped_blocks` and `tensor_list_blocks`. SwiGLU:
`swiglu` has the functions, and `swiglu_launches` an `Output` for each kind of recipe, which is what its
kernels need for the result. Current scaling of lists and groups can read x once (`single_read`).
"""
