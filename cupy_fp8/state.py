"""The state of delayed scaling between steps: the scales and amax histories of a model's tensors."""

from __future__ import annotations

from typing import Any

from .arrays import Array, full, zeros
from .formats import float32, integer
from .ops.scales.scale import update_delayed_scaling
from .recipes import DelayedScaling, check_recipe
from .typed_array import TypedArray

__all__ = ["DelayedScalingState"]


class DelayedScalingState:
    """Scales and amax histories of n tensors that share a recipe.

    n : the number of tensors.
    recipe : DelayedScaling, whose dtype, margin, history_len and algo hold for all of them.
    like : an array, 'numpy' / 'cupy' or the module: where the state lives; default `cupy_fp8.xp`.

    scale         f32 [n], 1 at first
    amax_history  f32 [recipe.history_len, n], 0 at first; row 0 belongs to the current step

    Both arrays stay the same from step to step, so a captured CUDA graph may read and update them. Tensor i's
    views ``scale[i:i+1]`` and ``amax_history[0, i:i+1]`` are what `quantize_tensor` takes as `scale` and
    `amax`:

    >>> import numpy as np, cupy_fp8 as fp8
    >>> state = fp8.DelayedScalingState(2, fp8.DelayedScaling(history_len=16), like=np)
    >>> x = np.array([[0.5, -3.5]], np.float32)
    >>> for step in range(2):                       # the second step uses the scale that the first one found
    ...     q = state.recipe.quantize(x, scale=state.scale[:1], amax=state.amax_history[0, :1])
    ...     state.update()
    >>> q.data.astype(np.float32).tolist(), state.scale.tolist()
    ([[64.0, -448.0]], [128.0, 1.0])

    Source: TransformerEngine's delayed scaling recipe; docs/numerics.md section 1.
    """

    def __init__(self, n: int, recipe: DelayedScaling, *, like: Any = None) -> None:
        n = integer(n, "n")
        if n < 0:
            raise ValueError(f"n: expected 0 or more tensors, got {n}")
        check_recipe(recipe, (DelayedScaling,))
        self.recipe = recipe
        self.scale: TypedArray = full((n,), 1.0, float32, like=like)
        self.amax_history: TypedArray = zeros((recipe.history_len, n), float32, like=like)
        self._updates = 0

    def update(self, amax: Array | None = None) -> None:
        """Call `update_delayed_scaling` for all tensors in one launch, at the end of a step. amax: f32 [n] to
        use for row 0, after a reduction over devices."""
        self._updates += 1
        update_delayed_scaling(self.amax_history, self.scale, dtype=self.recipe.dtype,
                               margin=self.recipe.margin,
                               algo=self.recipe.algo, amax=amax)

    def __repr__(self) -> str:
        length, n = self.amax_history.shape
        kind = type(self.scale).__module__.partition(".")[0]
        recipe = self.recipe
        return f"DelayedScalingState({n} tensors × {length} steps, {recipe.dtype}, {recipe.algo}, {kind})"
