"""The way from a call to a launch that all ops share: validation, split sizes, tensor lists, and calls that
are remembered."""
