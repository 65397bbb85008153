"""What a step of the layer leaves: its buffers, and what the backward pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..arrays import Array, address
from ..results import Quantized, Scaled
from ..routing import Routing

if TYPE_CHECKING:
    from .experts import Experts


class Buffers:
    """Every array of a step, which the next step with as many tokens writes again: `Experts.empty` makes
    them, and `forward` and `backward` take them as `out`. They belong to one layer, and one step at a time:
    what a step has saved is gone once the next one begins.

    nbytes : of all arrays
    """

    def __init__(self, owner: Experts, facts: dict[str, Any]) -> None:
        self._owner, self._facts = owner, facts
        self._made: dict[str, Any] = {}
        self._step = 0

    @property
    def nbytes(self) -> int:
        return nbytes_of(self._made.values())

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self._facts.items())
        return f"Buffers({facts}: {self.nbytes:,} bytes)"


class Calls:
    """Calls ops, each with the buffer of its name, if there are buffers."""

    def __init__(self, buffers: Buffers | None) -> None:
        self._made = None if buffers is None else buffers._made

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._made is None:
            return function(*args, **options)
        made = self._made[name] = function(*args, **options, out=self._made.get(name))
        return made


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """What `backward` needs of a forward pass.

    nbytes : of the arrays that it keeps, also of those that the caller has (a Scaled that was given for x;
        x itself with 'both_directions' and less kept), which must not change before `backward`. The routing,
        probs and weights are not counted
    """

    experts: Experts
    weights: int                        # how often the weights had been updated
    scales: int                         # how often the scales of delayed scaling had been
    keep: str
    splits: Array
    align: int
    row_probs: Array | None
    routing: Routing | None = None
    routed: int = 0                     # how often the routing had been written
    probs: Array | None = None
    tokens: Any = None                  # x in FP8, from which rows are permuted again
    rows: Any = None
    hidden: Any = None                  # h, or h in FP8
    activation: Quantized | None = None
    buffers: Buffers | None = None
    step: int = 0

    @property
    def nbytes(self) -> int:
        return nbytes_of([self.tokens, self.rows, self.hidden, self.activation, self.row_probs])

    def __repr__(self) -> str:
        kept = [name for name in ("tokens", "rows", "hidden", "activation")
                if getattr(self, name) is not None]
        return f"Saved(keep={self.keep!r}: {', '.join(kept)}, {self.nbytes:,} bytes)"


def nbytes_of(values: Iterable[Any]) -> int:
    """The bytes of all arrays, each once."""
    return sum({address(a): int(a.nbytes) for value in values for a in arrays_of(value) if a.size}.values())


def arrays_of(value: Any) -> Iterator[Array]:
    """The arrays of what an op returns."""
    if isinstance(value, tuple):
        for part in value:
            yield from arrays_of(part)
    elif isinstance(value, Quantized):
        yield from arrays_of(tuple(value.parts.values()))
    elif isinstance(value, Scaled):
        yield from value
        if value.splits is not None:
            yield value.splits
    elif value is not None:
        yield value
