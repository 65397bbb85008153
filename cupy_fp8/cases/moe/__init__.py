"""Tokens of expert layers: routing, permutation, padding, offsets."""
