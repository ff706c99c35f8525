"""Networks that say where they can be cut into pieces, one after the other: for a pipeline of several ranks.

One of ours has a method `stages()`. A user's own names its parts, in order: `stages = ("embed", "body.0", "head")`. The
first is given (num, cat), each other the one tensor that came out of the part before, and what comes out of the last is
the answer. All weights must lie in these parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`owns`: how the names of its weights begin."""

    run: Callable[..., Tensor]
    owns: tuple[str, ...]


def stages_of(network: nn.Module) -> list[Stage]:
    """None of them when the network does not say."""
    named = getattr(network, "stages", None)
    found: list[Stage] = named() if callable(named) else []
    return found


def named_stages(network: nn.Module, names: Sequence[str], prefix: str) -> list[Stage]:
    """Of a network whose parts are modules. AttributeError for a name that is none."""
    return [Stage(run=network.get_submodule(name), owns=(f"{prefix}{name}.",)) for name in names]


def assign_stages(sizes: Sequence[int], ranks: int) -> list[range]:
    """Neighbouring stages for each rank, so that the largest share is as small as it can be. Pure.

    ValueError when there are fewer stages than ranks.
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
