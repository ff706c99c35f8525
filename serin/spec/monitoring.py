"""The section `monitoring`: what happens after the release."""

from __future__ import annotations

from typing import Literal

from serin.spec.section import Section


class MonitoringSpec(Section):
    """What happens to a version once it is live."""

    retrain: tuple[Literal["nightly", "data", "drift"], ...] = ()
    """When the live version is trained again from its own spec: every night (`nightly`), when its tables have changed
    (`data`), or when an event `serin.drift` arrives (`drift`). The result is rolled out unless it is worse. By default
    never."""
