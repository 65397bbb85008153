"""The functions users call, one module per family: validation, allocation, choice of kernel variant,
launch."""
