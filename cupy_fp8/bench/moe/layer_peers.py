"""The same layer by other means: in bfloat16 with PyTorch, and in FP8 as composed where only a dispatch in
FP8 exists, with columns that are dequantised and quantised again."""

from __future__ import annotations

from typing import Any

from ...arrays import Array
from ...dlpack import from_dlpack, to_dlpack
from ...moe.dataflow import GROUP
from ...ops.convert.dequantize import dequantize
from ...ops.matmul.grouped import grouped_matmul_nt
from ...ops.moe.offsets import splits_to_offsets
from ...ops.moe.permute import permute, permute_backward, unpermute
from ...ops.moe.route import route
from ...ops.quantize.blocks import quantize_block
from ...ops.quantize.swiglu import swiglu_backward_quantize, swiglu_quantize
from ...recipes import BlockScaling
from .layer import CALL, Problem

_COMPACT = BlockScaling((1, GROUP), scale_layout="compact")
_ROWS, _WEIGHTS = BlockScaling((1, GROUP)), BlockScaling((GROUP, GROUP))
#: `torch._grouped_mm` needs groups that begin at multiples of 16 bytes
BF16_ALIGN = 16


def tensor(a: Array) -> Any:
    """Return a PyTorch tensor in the same memory."""
    import torch

    return torch.from_dlpack(to_dlpack(a))


class Bf16:
    """The layer in bfloat16: `torch._grouped_mm`, SwiGLU in Triton, this package's routing and
    permutation."""

    def __init__(self, given: Problem) -> None:
        import torch

        self._given, self._torch = given, torch
        self._up, self._down = tensor(given.up), tensor(given.down)
        self._kernels: Any = None
        if self._up.is_cuda:
            try:
                from .. import triton_swiglu
            except ImportError:
                pass                    # SwiGLU then uses PyTorch's operations, and its name says so
            else:
                self._kernels = triton_swiglu
        self.name = "bf16 torch._grouped_mm, SwiGLU by " + ("Triton" if self._kernels else "PyTorch's ops")

    def __call__(self) -> tuple[Any, ...]:
        """Run a step: (y, dx, dprobs, d_up, d_down)."""
        y, saved = self._forward()
        return (y, *self._backward(saved))

    def forward(self) -> Any:
        """Run the forward pass alone."""
        return self._forward()[0]

    def _forward(self) -> tuple[Any, Any]:
        given = self._given
        r = CALL("route", route, given.chosen, num_experts=given.shape.experts, align=BF16_ALIGN)
        ends = CALL("offsets", splits_to_offsets, r.aligned_splits, include_leading_zero=False,
                    dtypes="int32")[0]
        permuted, row_probs = CALL("x permuted", permute, given.x, r, probs=given.probs)
        out, saved = self.forward_rows(tensor(permuted), tensor(ends), tensor(row_probs))
        return CALL("y", unpermute, from_dlpack(out), r), (r, saved)

    def _backward(self, saved: Any) -> tuple[Any, ...]:
        r, of_rows = saved
        grads = tensor(CALL("grad permuted", permute, self._given.grad, r))
        dx_rows, dp, d_up, d_down = self.backward_rows(grads, of_rows)
        dx, dprobs = CALL("dx", permute_backward, from_dlpack(dx_rows), r, probs_grad=from_dlpack(dp))
        return dx, dprobs, from_dlpack(d_up), from_dlpack(d_down)

    def forward_rows(self, rows: Any, ends: Any, row_probs: Any) -> tuple[Any, Any]:
        """Return (the experts' outputs for permuted rows, what `backward_rows` needs), as tensors. ends: of
        the experts' rows, int32."""
        product = self._torch._grouped_mm
        h = CALL("h", product, rows, self._up.transpose(-2, -1), ends)
        activation = CALL("activation", self._activate, h, row_probs)
        out = CALL("rows out", product, activation, self._down.transpose(-2, -1), ends)
        return out, (ends, rows, h, activation, row_probs)

    def backward_rows(self, grads: Any, saved: Any) -> tuple[Any, Any, Any, Any]:
        """Return (gradients of the rows, of their probs, d_up, d_down), as tensors."""
        product = self._torch._grouped_mm
        ends, rows, h, activation, row_probs = saved
        d_activation = CALL("activation grad", product, grads, self._down, ends)
        dh, dp = CALL("hidden grad", self._activate_backward, d_activation, h, row_probs)
        d_down = CALL("down grad", product, grads.t(), activation, ends)
        d_up = CALL("up grad", product, dh.t(), rows, ends)
        return CALL("rows grad", product, dh, self._up, ends), dp, d_up, d_down

    def _activate(self, h: Any, row_probs: Any) -> Any:
        if self._kernels is None:
            a, b = h.float().chunk(2, 1)
            return (self._torch.nn.functional.silu(a) * b * row_probs[:, None]).bfloat16()
        inner = h.shape[1] // 2
        made = h.new_empty(h.shape[0], inner)
        self._kernels.forward[(h.shape[0],)](h, row_probs, made, inner, num_warps=self._kernels.WARPS)
        return made

    def _activate_backward(self, grads: Any, h: Any, row_probs: Any) -> tuple[Any, Any]:
        if self._kernels is None:
            a, b = h.float().chunk(2, 1)
            s, g = self._torch.sigmoid(a), grads.float()
            dp = (g * a * s * b).sum(1)
            g = g * row_probs[:, None]
            halves = g * b * s * (1 + a * (1 - s)), g * a * s
            return self._torch.cat(halves, 1).bfloat16(), dp
        dh, dp = self._torch.empty_like(h), self._torch.empty_like(row_probs)
        self._kernels.backward[(h.shape[0],)](grads, h, row_probs, dh, dp, h.shape[1] // 2,
                                              num_warps=self._kernels.WARPS)
        return dh, dp


class Requantising:
    """FP8 for the dispatch, composed of public calls. Weight gradients dequantise and quantise again."""

    name = "FP8 dispatch, dequantised and quantised again"

    def __init__(self, given: Problem) -> None:
        self._given = given
        self._up, self._down = (_WEIGHTS.quantize(w, columnwise=True) for w in (given.up, given.down))

    def __call__(self) -> tuple[Any, ...]:
        """Run a step: (y, dx, dprobs, d_up, d_down)."""
        given = self._given
        r = CALL("route", route, given.chosen, num_experts=given.shape.experts, align=GROUP)
        splits = r.aligned_splits
        tokens = CALL("x tokens", _COMPACT.quantize, given.x)
        rows, row_probs = CALL("x permuted", permute, tokens, r, probs=given.probs)
        h = CALL("h", grouped_matmul_nt, rows, self._up, splits)
        activation = CALL("activation", swiglu_quantize, h, _ROWS, probs=row_probs)
        out = CALL("rows out", grouped_matmul_nt, activation, self._down, splits)
        y = CALL("y", unpermute, out, r)
        return (y, *self._backward(r, splits, rows, h, activation, row_probs))

    def _backward(self, r: Any, splits: Any, rows: Any, h: Any, activation: Any, row_probs: Any
                  ) -> tuple[Any, ...]:
        grads = CALL("grad permuted", permute, CALL("grad tokens", _COMPACT.quantize, self._given.grad), r)
        grad_columns, x_columns, activation_columns = (
            CALL("columns", _again, q) for q in (grads, rows, activation))
        d_activation = CALL("activation grad", grouped_matmul_nt, grads, self._down.T, splits)
        dh, dp = CALL("hidden grad", swiglu_backward_quantize, d_activation, h, _ROWS, probs=row_probs,
                      columnwise=True)
        d_down = CALL("down grad", grouped_matmul_nt, grad_columns.T, activation_columns.T, splits, group="k")
        d_up = CALL("up grad", grouped_matmul_nt, dh.T, x_columns.T, splits, group="k")
        dx_rows = CALL("rows grad", grouped_matmul_nt, dh, self._up.T, splits)
        dx, dprobs = CALL("dx", permute_backward, dx_rows, r, probs_grad=dp)
        return dx, dprobs, d_up, d_down


def _again(q: Any) -> Any:
    return quantize_block(dequantize(q, dtype="bfloat16"), rowwise=False, columnwise=True)
