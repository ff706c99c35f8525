"""The values that stages pass to each other: small, frozen, with paths, ids and numbers. Never frames, tensors or
secrets."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from serin.errors import NameInvalid
from serin.machine.typed_json import Stored
from serin.spec.names import valid_model_name

_RELEASE = re.compile(r"([a-z][a-z0-9-]{0,62})-v([1-9][0-9]{0,8})(?:e([1-9][0-9]{0,8}))?(-baseline)?")
_LABEL = re.compile(r"([1-9][0-9]{0,8})(?:e([1-9][0-9]{0,8}))?")


def version_label(version: int, edition: int = 1) -> str:
    """A version with an edition of its lookups, as people write it: 3, or 3e2. Edition 1 needs no mark."""
    return str(version) if edition == 1 else f"{version}e{edition}"


def parse_label(label: str) -> tuple[int, int] | None:
    """The version and the edition of a label; None for anything else, such as an alias."""
    match = _LABEL.fullmatch(label)
    return None if match is None else (int(match[1]), int(match[2] or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A published dataset folder (formats/dataset.py describes its content)."""

    path: str
    digest: str
    rows: dict[str, int]  # per split

    @property
    def edition(self) -> str:
        """Its name in the store. It stands for the content, also for values that the digest leaves out since they may
        differ in the last bit, and for what made it."""
        return Path(self.path).name


NO_DATASET = Dataset(path="", digest="", rows={})
"""What a pipeline without a data section has in the place of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Trained weights with all that is needed to build the network again (formats/weights.py)."""

    path: str
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A published, immutable model version (formats/bundle.py). `edition`: of its lookups; 1 is the one that it was
    exported with."""

    path: str
    model: str
    version: int
    digest: str
    metrics: dict[str, float] = field(default_factory=dict)
    edition: int = 1

    @property
    def release(self) -> Release:
        return Release(model=self.model, version=self.version, edition=self.edition)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Release:
    """A model version with an edition of its lookups, as a running process. `baseline`: a second process of it, with
    which a candidate is compared."""

    model: str
    version: int
    edition: int = 1
    baseline: bool = False

    def __post_init__(self) -> None:
        valid_model_name(self.model)

    @property
    def label(self) -> str:
        """The version with its edition, by which the store finds its files: 3, or 3e2."""
        return version_label(self.version, self.edition)

    @property
    def name(self) -> str:
        return f"{self.model}-v{self.label}{'-baseline' if self.baseline else ''}"

    @classmethod
    def parse(cls, name: str) -> Release:
        match = _RELEASE.fullmatch(name)
        if match is None or match[3] == "1":  # edition 1 has no mark: a release has one name
            rule = "<model>-v<version>, such as flights-v3, or <model>-v<version>e<edition> from edition 2 on"
            raise NameInvalid(kind="release", name=name, rule=rule)
        return cls(
            model=match[1], version=int(match[2]), edition=int(match[3] or 1), baseline=match[4] is not None
        )


NamedRelease = Annotated[Release, Stored(Release.parse, lambda release: release.name)]
"""In JSON it is the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a release answers, as host:port. `elsewhere`: it is external and numbers its versions differently."""

    http: str
    grpc: str
    elsewhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoute:
    """What the gateway does for one model. `epoch` counts the changes of weight and is in every log line."""

    model: str
    epoch: int
    stable: NamedRelease | None
    candidate: NamedRelease | None = None
    candidate_percent: float = 0.0
    baseline: NamedRelease | None = None  # a second process of the stable version
    baseline_percent: float = 0.0

    @property
    def releases(self) -> tuple[Release, ...]:
        """All that it leads to."""
        return tuple(release for release in (self.stable, self.baseline, self.candidate) if release)

    @property
    def judged(self) -> tuple[Release, ...]:
        """The candidate and the baseline that have traffic."""
        shares = ((self.candidate, self.candidate_percent), (self.baseline, self.baseline_percent))
        return tuple(release for release, percent in shares if release and percent)

    @property
    def busy(self) -> tuple[Release, ...]:
        """All that have traffic."""
        rest = 100 - self.candidate_percent - self.baseline_percent
        return (self.stable, *self.judged) if self.stable and rest > 0 else self.judged

    def without(self, gone: Collection[Release]) -> ModelRoute:
        """Returns the route without a candidate or a baseline that is in `gone`."""
        route = self
        if route.candidate in gone:
            route = replace(route, candidate=None, candidate_percent=0.0)
        if route.baseline in gone:
            route = replace(route, baseline=None, baseline_percent=0.0)
        return route
