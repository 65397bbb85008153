"""Products of FP8 matrices: matmul_nt, and grouped_matmul_nt for groups."""
