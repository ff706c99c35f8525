"""The status of the models' rollouts, read from their journals. It needs no controller and does not disturb one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from serin.formats.serving.journal import Decision
from serin.machine.contained import contained
from serin.machine.in_memory import read_problems
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.access import Rollouts, home_rollouts
from serin.rollout.run.record import decision2rollout
from serin.spec.names import valid_model_name
from serin.store.artifacts import Release, version_label

if TYPE_CHECKING:
    from serin.reports.rollout_page import ShadowStory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseStatus:
    """A release that should be running, with its share of the model's traffic."""

    version: int
    arm: Literal["stable", "baseline", "candidate"]
    weight_percent: float
    edition: int = 1  # of its lookups

    @property
    def label(self) -> str:
        return version_label(self.version, self.edition)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """A model's newest rollout. Times are seconds since 1970."""

    id: str
    version: int
    phase: str
    running: bool
    step: int | None
    steps: tuple[float, ...]
    weight_percent: float
    hold: str | None
    verdict: str | None
    reason: str
    by: str
    began: float
    since: float
    decided: float
    shadow: ShadowStory | None = None  # while it answers recorded requests, before it has traffic
    edition: int = 1

    @property
    def label(self) -> str:
        return version_label(self.version, self.edition)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    name: str
    live: int | None
    previous: int | None
    releases: tuple[ReleaseStatus, ...]
    rollout: RolloutStatus
    live_edition: int = 1
    previous_edition: int = 1

    def release_of(self, entry: ReleaseStatus) -> Release:
        return Release(
            model=self.name, version=entry.version, edition=entry.edition, baseline=entry.arm == "baseline"
        )

    @property
    def live_release(self) -> Release | None:
        return self._release(self.live, self.live_edition)

    @property
    def previous_release(self) -> Release | None:
        return self._release(self.previous, self.previous_edition)

    def _release(self, version: int | None, edition: int) -> Release | None:
        return None if version is None else Release(model=self.name, version=version, edition=edition)

    def rollout_line(self) -> str:
        """The rollout that runs as a line for people; empty when none does."""
        rollout = self.rollout
        held = f", held: {rollout.hold}" if rollout.hold else ""
        words = f"  rolling out version {rollout.label}: {rollout.phase}{held} ({rollout.reason})"
        return words if rollout.running else ""


def status(home: Path) -> list[ModelStatus]:
    """Returns one entry for each model that ever had a rollout in `home`, by name. `problems` has
    those whose journal cannot be read."""
    return statuses(home_rollouts(home))


def problems(home: Path, model: str | None = None) -> dict[str, str]:
    """Returns by model what keeps it from being decided about, or its state from being known; names the file and the
    way out. It needs neither the disk's space nor a controller. `model`: of this one alone."""
    rollouts, failed = home_rollouts(home), dict[str, str]()
    models = rollouts.models() if model is None else [model]
    _readable(rollouts, models, failed)
    reported = read_problems(home)
    if model is not None:
        reported = {model: reported[model]} if model in reported else {}
    return {**failed, **reported}


def model_status(home: Path, model: str) -> ModelStatus | None:
    """Returns the status of one model in `home`; None if it never had a rollout."""
    return status_of(home_rollouts(home), model)


def statuses(rollouts: Rollouts) -> list[ModelStatus]:
    """Returns one entry for each model that ever had a rollout, by name."""
    return _readable(rollouts, rollouts.models(), {})


def _readable(rollouts: Rollouts, models: Iterable[str], failed: dict[str, str]) -> list[ModelStatus]:
    """One model whose journal cannot be read does not hide the others; `failed` gets the reason."""
    readable = []
    for model in models:
        with contained(failed, model):
            if entry := status_of(rollouts, model):
                readable.append(entry)
    return readable


def status_of(rollouts: Rollouts, model: str) -> ModelStatus | None:
    """Returns the status of one model; None if it never had a rollout."""
    decision = rollouts.last(valid_model_name(model))
    if decision is None:
        return None
    now, shadow = decision2rollout(decision), None
    if now.phase is Phase.SHADOWING:
        from serin.rollout.run.story import shadow_story  # with numpy

        shadow = shadow_story(now)
    return ModelStatus(
        name=model,
        live=now.live.version if now.live else None,
        previous=now.before_live.version if now.before_live else None,
        live_edition=now.live.edition if now.live else 1,
        previous_edition=now.before_live.edition if now.before_live else 1,
        releases=tuple(_releases(now)),
        rollout=RolloutStatus(
            id=now.id,
            version=now.candidate.version,
            edition=now.candidate.edition,
            phase=now.phase.value,
            running=not now.phase.final,
            step=now.step,
            steps=now.plan.steps,
            weight_percent=now.weight_percent,
            hold=now.hold.value if now.hold else None,
            verdict=now.verdict.value if now.verdict else None,
            reason=now.reason,
            by=now.by,
            began=now.began,
            since=now.since,
            decided=decision.t,
            shadow=shadow,
        ),
    )


def history(home: Path, model: str, rollout: str | None = None) -> list[Decision]:
    """Returns every decision about `model` in `home`, oldest first, or those of one rollout."""
    return home_rollouts(home).decisions(model, rollout)


def _releases(now: Rollout) -> Iterator[ReleaseStatus]:
    for release in now.wanted:
        arm: Literal["stable", "baseline", "candidate"]
        if release.baseline:
            arm, weight = "baseline", now.baseline_percent
        elif release == now.live:
            arm = "stable"
            weight = 100.0 if now.phase.final else 100.0 - now.weight_percent - now.baseline_percent
        else:
            arm, weight = "candidate", now.weight_percent
        yield ReleaseStatus(version=release.version, edition=release.edition, arm=arm, weight_percent=weight)
