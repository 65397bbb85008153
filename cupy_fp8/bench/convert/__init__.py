"""Changes of type or direction: astype, transpose, dequantize, the scaling-aware transpose."""
