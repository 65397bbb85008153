"""A stand-in for a GPU with a fake cuBLASLt, and operands of products there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fake_cublaslt
import numpy as np
import places
from fake_cublaslt import FakeCublasLt

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, reference
from cupy_fp8.cases.matmul.dense import operand
from cupy_fp8.formats import float8_e4m3fn, float32
from cupy_fp8.reference.matmul.dense import magnitudes
from cupy_fp8.reference.matmul.tolerance import assert_within

M, N, K = 68, 72, 272


class Machine:
    """A stand-in for a GPU with a fake library."""

    def __init__(self, place: places.Place, fake: FakeCublasLt) -> None:
        self.place, self.fake = place, fake

    def array(self, a: np.ndarray) -> Any:
        return self.place.array(a)

    def on_gpu(self, s: Scaled) -> Scaled:
        return Scaled._of(self.array(s.data), self.array(s.scale_inv), s.shape, s.transposed, s.block,
                          s.scale_layout)

    def both(self, pair: tuple[str, str], *, types: Any = (float8_e4m3fn, float8_e4m3fn), m: int = M,
             n: int = N, k: int = K, batch: tuple[int, ...] = (), layout: Any = "gemm_ready",
             scale: Any = float32) -> tuple[Scaled, Scaled]:
        return (self.on_gpu(operand((*batch, m, k), types[0], pair[0], layout, scale, "normal", 1)),
                self.on_gpu(operand((*batch, n, k), types[1], pair[1], layout, scale, "normal", 2)))

    def checked(self, a: Scaled, b: Scaled, **options: Any) -> Any:
        """Return the result after comparison with the reference."""
        def host(value: Any) -> Any:
            return self.place.run.numpy(value) if hasattr(value, "shape") else value

        given = {name: host(value) for name, value in options.items()
                 if name in ("bias", "accumulate", "dtype") and value is not None}
        if "accumulate" in given:
            given["accumulate"] = given["accumulate"].copy()
        want = reference.matmul_nt(host(a), host(b), **given)
        got = fp8.matmul_nt(a, b, **options)
        assert_within(got, want, magnitudes(host(a), host(b), **{name: given[name] for name in (
            "bias", "accumulate") if name in given}))
        assert not self.fake.refused
        return got


@contextmanager
def machine(capability: int = 90, **options: Any) -> Iterator[Machine]:
    import stand_in

    with places.place("stand-in") as place, fake_cublaslt.installed(
            FakeCublasLt(record=stand_in._record_or_run, **options), capability) as fake:
        yield Machine(place, fake)
