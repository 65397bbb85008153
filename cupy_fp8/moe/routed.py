"""Where a step's tokens go: a Routing, or a Gate from which the layer makes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import backend
from ..advice import type_name
from ..arrays import Array
from ..gate import Gate
from ..layouts import padded_rows
from ..ops.moe.route import route
from ..routing import Routing
from . import checks
from .step import Calls

if TYPE_CHECKING:
    from .experts import Experts


class Routed(NamedTuple):
    """What is known before the routing is made. probs: by slot, or by expert of a mask."""

    given: Routing | Gate
    probs: Array | None
    rows: int
    align: int

    @classmethod
    def of(cls, experts: Experts, given: Any, probs: Any, keep: Any) -> Routed:
        """keep: as for `forward`. Raises TypeError or ValueError if routing or probs do not fit the layer."""
        if not isinstance(given, (Routing, Gate)):
            raise TypeError(f"routing: expected a Routing, as route gives it, or a Gate, got "
                            f"{type_name(given)}")
        if given.num_experts != experts.num_experts:
            raise ValueError(f"routing: expected {experts.num_experts} experts, got {given.num_experts}")
        if isinstance(given, Gate):
            backend.require_module(given.indices, experts._xp, "routing")
            if probs is not None:
                raise ValueError("probs: a Gate has weights of its own; expected None")
            slots, align = given.tokens * given.topk, experts._flow.align(keep)
            return cls(given, given.weights, padded_rows(slots, given.num_experts, align), align)
        backend.require_module(given.row_map, experts._xp, "routing")
        checks.alignment(experts, given.align, "routing")
        by_expert = [] if given.experts is None else [(given.tokens, given.num_experts)]
        checks.probs(experts, probs, "probs", given.row_map.shape, *by_expert)
        return cls(given, probs, given.rows, given.align)

    @property
    def facts(self) -> dict[str, Any]:
        """What buffers must have been made for."""
        return {"tokens": self.given.tokens, "topk": self.given.topk, "align": self.align, "rows": self.rows,
                "probs": self.probs is not None}

    @property
    def read(self) -> dict[str, Any]:
        """The arrays that a step reads, and so must not write."""
        indices = {"routing": self.given.indices} if isinstance(self.given, Gate) else {}
        return {"probs": self.probs, **indices}

    def routing(self, call: Calls) -> Routing:
        if isinstance(self.given, Routing):
            return self.given
        made: Routing = call("routing", route, self.given.indices, num_experts=self.given.num_experts,
                             align=self.align)
        return made
