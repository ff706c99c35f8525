"""What every fleet promises to the controller: tests that run with releases on this machine and in Kubernetes.

A subclass gives a `scene`: a fleet, a store, and a way to kill a release's process as the kernel does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from serin.errors import NotFound, ReleaseNotReady
from serin.rollout.run.ports import Processes
from serin.serving.client.client import predict
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store
from tests.kit.waiting import until
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

V1, V2, V9 = (Release(model=MODEL, version=version) for version in (1, 2, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """`reach`: returns the address at which the test reaches an endpoint."""

    fleet: Processes
    store: Store
    kill: Callable[[Release], None]
    reach: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint
    within_s: float = 120.0

    def wait(self, what: str, check: Callable[[], bool]) -> None:
        until(check, what, within_s=self.within_s, every_s=0.1)

    def wait_ready(self, release: Release) -> None:
        self.wait(f"{release.name} ready", lambda: self.fleet.state(release) == "ready")


class FleetContract:
    """The tests depend on each other's order: starting a release takes seconds."""

    def test_a_release_that_was_never_started_is_absent(self, scene: Scene) -> None:
        assert scene.fleet.state(V1) == "absent"
        assert scene.fleet.instance(V1) is None
        assert list(scene.fleet.running()) == []
        with pytest.raises(ReleaseNotReady, match="was not started"):
            scene.fleet.endpoint(V1)
        scene.fleet.stop(V1)

    def test_a_version_that_was_never_published_is_not_started(self, scene: Scene) -> None:
        with pytest.raises(NotFound):
            scene.fleet.start(V9)
        assert list(scene.fleet.running()) == []

    def test_releases_start_side_by_side_and_answer_as_their_bundles_say(self, scene: Scene) -> None:
        for release in (V1, V2):
            scene.fleet.start(release)
        for release in (V1, V2):
            scene.wait_ready(release)
            scene.fleet.verify(release)
            columns = bundles.rows(5)
            place = scene.reach(scene.fleet.endpoint(release))
            served = predict(place.http, MODEL, columns, SCHEMA, "http", release.version)["score"]
            own = bundles.score(scene.store.bundle(MODEL, release.version).path, columns)
            assert np.array_equal(served, own)
        assert list(scene.fleet.running()) == [V1, V2]

    def test_starting_again_changes_nothing(self, scene: Scene) -> None:
        before, place = scene.fleet.instance(V1), scene.fleet.endpoint(V1)
        scene.fleet.start(V1)
        assert scene.fleet.state(V1) == "ready"
        assert (scene.fleet.instance(V1), scene.fleet.endpoint(V1)) == (before, place)

    def test_a_release_that_dies_is_seen_and_comes_back_as_another_instance(self, scene: Scene) -> None:
        before = scene.fleet.instance(V1)
        scene.kill(V1)
        scene.wait(
            "its death", lambda: scene.fleet.state(V1) != "ready" or scene.fleet.instance(V1) != before
        )
        scene.fleet.start(V1)
        scene.wait_ready(V1)
        assert scene.fleet.instance(V1) not in (None, before)
        assert scene.fleet.state(V2) == "ready"

    def test_a_stopped_release_is_absent_and_can_be_started_again(self, scene: Scene) -> None:
        scene.fleet.stop(V1)
        assert scene.fleet.state(V1) == "absent"
        assert list(scene.fleet.running()) == [V2]
        scene.fleet.stop(V1)
        scene.fleet.start(V1)
        scene.wait_ready(V1)
        for release in (V1, V2):
            scene.fleet.stop(release)
        assert list(scene.fleet.running()) == []
