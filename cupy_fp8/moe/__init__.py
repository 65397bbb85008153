"""The experts of a mixture of experts, in FP8 from the dispatch to the weight gradients.

>>> import numpy as np, cupy_fp8 as fp8
>>> rng = np.random.default_rng(0)
>>> experts = fp8.moe.Experts(rng.standard_normal((4, 256, 128), np.float32) / 11,       # up [E, 2 F, H]
...                           rng.standard_normal((4, 128, 128), np.float32) / 11)       # down [E, H, F]
>>> x, chosen = rng.standard_normal((64, 128), np.float32), rng.integers(0, 4, (64, 1))
>>> routing = fp8.route(chosen, num_experts=4, align=128)
>>> y, saved = experts.forward(x, routing, np.ones((64, 1), np.float32))
>>> dx, dprobs, d_up, d_down = experts.backward(np.ones_like(y), saved)
>>> y.shape, dx.shape, d_up.shape, d_down.shape
((64, 128), (64, 128), (4, 256, 128), (4, 128, 128))
"""

from typing import TYPE_CHECKING

from ..advice import public_only
from .experts import Experts
from .step import Buffers, Saved

__all__ = ["Buffers", "Experts", "Saved"]

if not TYPE_CHECKING:               # otherwise type checkers accept any name
    __getattr__, __dir__ = public_only(globals())
