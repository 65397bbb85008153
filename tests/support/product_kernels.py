"""The kernels of this package that compute products."""

from __future__ import annotations

import pytest

from cupy_fp8 import backend, testing
from cupy_fp8.kernels import compute_capability
from cupy_fp8.kernels.cubin import nvrtc_version
from cupy_fp8.ops.matmul import wgmma

#: The first entry point is Hopper's kernel, the second for other GPUs and for what Hopper's does not take.
HOPPER, PORTABLE = KERNELS = "wgmma_products", "product_tiles"


def use(kernel: str, run: testing.Executor, patch: pytest.MonkeyPatch) -> None:
    """Make products use one of KERNELS where they have the choice. Skips the test on a GPU without it."""
    if kernel == PORTABLE:
        patch.setattr(wgmma, "takes", lambda *_: False)
    elif run.name == "cuda" and compute_capability(backend.cupy().cuda.runtime.getDevice()) != 90:
        pytest.skip("the GPU is no Hopper")
    elif run.name == "cuda" and nvrtc_version() < wgmma._NVRTC:
        pytest.skip("NVRTC does not know Hopper's instructions")
