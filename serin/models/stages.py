"""Networks that declare where they can be split into consecutive pieces, for a pipeline of several ranks.

Serin's networks have a method `stages()`. A user's network names its parts, in order: `stages = ("embed", "body.0",
"head")`. The first gets (num, cat), each other one the output tensor of the part before, and the output of the last is
the answer. All weights must be in these parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One piece of a network. `owns`: prefixes of the names of its weights."""

    run: Callable[..., Tensor]
    owns: tuple[str, ...]


def stages_of(network: nn.Module) -> list[Stage]:
    """Returns the stages of a network; empty when it declares none."""
    named = getattr(network, "stages", None)
    found: list[Stage] = named() if callable(named) else []
    return found


def named_stages(network: nn.Module, names: Sequence[str], prefix: str) -> list[Stage]:
    """Returns the stages of a network whose parts are modules. Raises AttributeError for an unknown name."""
    return [Stage(run=network.get_submodule(name), owns=(f"{prefix}{name}.",)) for name in names]


def assign_stages(sizes: Sequence[int], ranks: int) -> list[range]:
    """Assigns neighbouring stages to each rank so that the largest share is as small as possible. Pure.

    Raises ValueError when there are fewer stages than ranks.
    """
    if len(sizes) < ranks:
        raise ValueError(f"{len(sizes)} stages do not fill {ranks} processes")
    best: dict[tuple[int, int], tuple[int, list[range]]] = {}

    def cut(start: int, left: int) -> tuple[int, list[range]]:
        if left == 1:
            return sum(sizes[start:]), [range(start, len(sizes))]
        if (start, left) not in best:
            options = []
            for stop in range(start + 1, len(sizes) - left + 2):
                heaviest, others = cut(stop, left - 1)
                options.append((max(sum(sizes[start:stop]), heaviest), [range(start, stop), *others]))
            best[start, left] = min(options, key=lambda option: option[0])
        return best[start, left]

    return cut(0, ranks)[1]
