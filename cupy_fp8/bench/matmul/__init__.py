"""Products of FP8 matrices: matmul_nt."""
