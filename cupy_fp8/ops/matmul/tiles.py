"""Products by a kernel of this package: any shape, alignment and pair of scalings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import reference
from ...arrays import bits
from ...backend import DeviceError
from ...calls.call import Call

if TYPE_CHECKING:
    from .dense import Product


def own_kernel_launches(call: Call, product: Product, out_at: int) -> Iterator[Any]:
    """The launches that write a product into the call's result, whose address is out_at. On the CPU it is
    the reference that computes it."""
    if call.xp is not np:
        raise DeviceError("this product is not one that cuBLASLt takes: it wants K in multiples of 16, N of "
                          "8, M of 4 beside 1×128 blocks of a, data, scales and result at multiples of 16 "
                          "bytes, and not e5m2 × e5m2 or 128×128 × 128×128; pad the operands")
    call.repeatable = False
    yield _ByReference(call, product)


class _ByReference:
    def __init__(self, call: Call, product: Product) -> None:
        self._call, self._product = call, product

    def run(self) -> None:
        p = self._product
        made = reference.matmul_nt(p.a.s, p.b.s, dtype=p.to, bias=p.bias and p.bias.array,
                                   accumulate=p.accumulate)
        into = self._call.arrays[0] if p.accumulate is None else p.accumulate
        bits(into)[...] = bits(made)
