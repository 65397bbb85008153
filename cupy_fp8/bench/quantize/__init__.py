"""Quantisation: per tensor, in blocks, MX, SwiGLU, of row groups and of tensor lists."""
