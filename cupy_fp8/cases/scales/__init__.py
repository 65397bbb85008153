"""Scales: amax, compute_scale, delayed scaling, and the layouts of block scales."""
