"""Who may do what: a role for models whose names begin alike, and the role that each act needs. Pure.

The table is the only one: the console, keys, the rights in a store and the documentation follow it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import Field

from serin.spec.section import Section

Role = Literal["view", "release", "administer"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""Each may do what those before it may."""

Pattern = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9-]{0,62}\*?)$")]
"""A model's name, the beginning of names with a `*` behind it, or `*` for all: what rules of a store can say, too."""

_VIEW: Final = (
    "alerts list", "alerts receivers list", "captures export", "captures list", "captures show", "drift",
    "events show", "explain", "gpus", "hosts list", "keys issuer list", "keys list", "labels show", "logs",
    "lookups show", "models diff", "models list", "models show", "models verify", "predict", "quality",
    "rollout replay", "rollout report", "rollout status", "rollout watch", "runs fetch", "runs list", "runs logs",
    "runs report", "runs show", "slo", "status", "tables list", "trust list",
)  # fmt: skip
_RELEASE: Final = (
    "alerts ack", "etl", "events backfill", "events push", "export", "labels add", "lookups refresh", "models copy",
    "models import", "models sign", "retire", "rollout abort", "rollout approve", "rollout pause", "rollout promote",
    "rollout resume", "rollout rollback", "rollout start", "run", "runs cancel", "score", "search", "tables push",
    "train", "tune",
)  # fmt: skip
_ADMINISTER: Final = (
    "agent", "alerts receivers add", "alerts receivers remove", "alerts silence", "alerts test", "alerts unsilence",
    "backup create", "backup restore", "captures forget", "console run", "console secret", "controller", "deploy",
    "down", "events forget", "gc", "hosts remove", "keys create", "keys issuer add", "keys issuer remove",
    "keys remove", "keys require", "keys share", "models remove", "tables remove", "trust add", "trust off",
    "trust policy", "trust remove", "up", "worker",
)  # fmt: skip
_NOBODY: Final = (
    "check", "doctor", "env", "init", "install gateway", "install kernels", "install triton", "schema", "trust create",
)  # fmt: skip

ACTS: Final[dict[str, Role | None]] = {
    **dict.fromkeys(_VIEW, "view"),
    **dict.fromkeys(_RELEASE, "release"),
    **dict.fromkeys(_ADMINISTER, "administer"),
    **dict.fromkeys(_NOBODY, None),
}
"""The least role of each act, by the command that does it. None: it concerns nobody else."""


class Grant(Section):
    """A role for some models."""

    models: Pattern
    """A model's name, the beginning of names with a `*` behind it (`fraud-*`), or `*` for all models."""
    role: Role
    """What is allowed: view, release or administer."""

    def covers(self, model: str | None) -> bool:
        """Returns whether it is for this model; None: for all of them."""
        if model is None:
            return self.models == "*"
        if self.models.endswith("*"):
            return model.startswith(self.models[:-1])
        return model == self.models


@dataclass(frozen=True, slots=True)
class Access:
    """What somebody may do: all their grants together."""

    grants: frozenset[Grant] = frozenset()

    @classmethod
    def of(cls, models: Iterable[str], role: Role) -> Self:
        return cls(frozenset(Grant(models=each, role=role) for each in models))

    @property
    def sees_all(self) -> bool:
        return self._has("view", None)

    def sees(self, model: str | None) -> bool:
        """Returns whether somebody may read what there is about a model. What is of no model is for all who may read
        anything."""
        return self._has("view", model) if model else bool(self.grants)

    def may(self, act: str, model: str | None) -> bool:
        """Returns whether an act is allowed. One on no model needs its role for all of them."""
        least = ACTS[act]
        return least is None or self._has(least, model or None)

    def _has(self, least: Role, model: str | None) -> bool:
        place = ROLES.index(least)
        return any(ROLES.index(each.role) >= place and each.covers(model) for each in self.grants)


NOTHING: Final = Access()
