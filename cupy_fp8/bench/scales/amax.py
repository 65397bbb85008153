"""The result of compute_amax beside CuPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import backend


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
    largest = backend.cupy().abs(args[0].astype(np.float32)).max()
    assert float(out[0]) == float(largest), (float(out[0]), float(largest))


COMPARE = {"compute_amax": _compare}
