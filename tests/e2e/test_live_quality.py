"""Labels for answers of real releases: the live AUC of each is that of the scores which its clients got."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from serin import metrics
from serin.monitoring.quality.labels import Columns, add_labels
from serin.monitoring.quality.truth import TruthOf
from serin.monitoring.quality.view import QualityView, read_quality
from serin.spec.load import load_stored_spec
from serin.store.store import Store
from tests.e2e.recording_stack import SCHEMA, Recorder, RecordingStack, recording_stack
from tests.e2e.test_recorder_killed import _until, watcher
from tests.fakes.live_quality import spec
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

REQUESTS, EACH = 40, 5


def test_live_auc_of_each_release_is_that_of_the_scores_its_clients_got() -> None:
    with recording_stack(one=spec(), two=spec()) as stack:
        clients = [stack.recorder(name) for name in ("one", "two")]
        truth = {}
        for client in clients:
            for number in range(REQUESTS):
                send = client.grpc if number % 2 else client.binary
                send(bundles.rows(EACH, seed=1000 * client.release.version + number))
            truth |= labels_of(client)
        shuffled = np.random.default_rng(1).permutation(sorted(truth))
        keys = [(found, int(row)) for found, row in shuffled][: int(0.8 * len(truth))]  # a fifth never comes
        add(stack, {key: 1 - truth[key] if place < 20 else truth[key] for place, key in enumerate(keys)})
        log = stack.folder / "watcher.log"
        with watcher(stack) as child:
            _until("labels", lambda: labelled(stack) == len(keys), child, log)
            add(stack, {key: truth[key] for key in keys[:20]})  # what was wrong at first
            _until("corrections", lambda: seen(stack).received == len(keys) + 20, child, log)
        for client, release in zip(clients, seen(stack).releases, strict=True):
            own = [key for key in keys if key in client.rows]
            scores = np.array([score(client, key) for key in own], np.float32)
            assert release.recorded == REQUESTS * EACH
            assert release.metrics["auc"].value == metrics.auc([truth[key] for key in own], scores)
            assert 0 < release.estimate["auc"].value < 1


def labels_of(client: Recorder) -> dict[tuple[str, int], int]:
    random = np.random.default_rng(client.release.version)
    return {key: int(random.random() < score(client, key)) for key in client.rows}


def score(client: Recorder, key: tuple[str, int]) -> float:
    return float(np.frombuffer(client.rows[key].got[0], "f4")[0])


def add(stack: RecordingStack, truth: dict[tuple[str, int], int]) -> None:
    version = stack.by_name["one"].version
    bundle = Path(Store(str(stack.folder / "store")).bundle(MODEL, version).path)
    of = TruthOf(model=MODEL, data=load_stored_spec(bundle / "spec.yaml").data, schema=SCHEMA)
    table = pa.table(
        {
            "_id": [found for found, _ in truth],
            "_row": [row for _, row in truth],
            "arr_delay": [60.0 if late else 0.0 for late in truth.values()],
        }
    )
    add_labels(stack.folder, of, table, Columns(), time.time())


def seen(stack: RecordingStack) -> QualityView:
    view = read_quality(stack.folder, MODEL)
    assert view is not None
    return view


def labelled(stack: RecordingStack) -> int:
    view = read_quality(stack.folder, MODEL)
    return 0 if view is None else sum(release.labelled for release in view.releases)
