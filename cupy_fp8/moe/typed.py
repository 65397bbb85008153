"""Types for `Experts`: whether `backward` returns the gradients of biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import TypedDict, TypeVar
    from typing_extensions import Unpack as Unpack

    from ..formats import DType
    from ..ops.quantize.swiglu import Form
    from ..typed_array import TypedArray
    from .dataflow import Dataflow

    #: (dx, dprobs, d_up, d_down), and with biases (d_up_bias, d_down_bias)
    FourGradients: TypeAlias = tuple[TypedArray, TypedArray | None, TypedArray, TypedArray]
    FiveGradients: TypeAlias = tuple[TypedArray, TypedArray | None, TypedArray, TypedArray,
                                     tuple[TypedArray | None, TypedArray | None]]
    Gradients = TypeVar("Gradients", bound=tuple[object, ...], default=Any)

    class Options(TypedDict, total=False):
        form: Form
        clamp: float | None
        interleaved: bool
        dtype: DType
        dataflow: Dataflow
else:
    from typing import TypeVar

    Gradients = TypeVar("Gradients")
    Options = Unpack = FourGradients = FiveGradients = Any
