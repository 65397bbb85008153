"""How much `diagnostics` works on at a time."""

#: Elements that are processed at a time. Their f64 intermediates are eight arrays of 8 MB.
CHUNK = 1 << 20
