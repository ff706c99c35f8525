"""Models that came through other doors in a real Triton, and the tuner on Tritons of its own."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from serin.export.build import export_model
from serin.formats.bundle import read_golden
from serin.formats.schema import read_schema
from serin.pipeline.run_stage import run_etl
from serin.scoring.predict import Scorer
from serin.serving.client.client import predict
from serin.serving.triton.releases import Releases
from serin.serving.triton.repository import build_repository, serving_settings
from serin.serving.tuning.report import write_report
from serin.serving.tuning.trials import Settings
from serin.serving.tuning.tune import Tuner
from serin.spec.load import load_spec
from serin.spec.serving import ServingSpec
from serin.store.artifacts import NO_DATASET, Bundle, Checkpoint, Release
from serin.store.store import Store
from serin.training.launch.job import TrainingJob
from serin.training.programs import trees
from tests.e2e.serving_host import ChildHost, wait_for
from tests.logs import heard
from tests.unit.export.test_own_inputs import IMAGES, chances, picture_model, spec_in, taken_over
from tests.unit.serving import bundles
from tests.unit.test_doors import LATE, several


def pictures(folder: Path, store: Store) -> Bundle:
    spec = spec_in(folder / "own", picture_model())
    return export_model(spec, taken_over(spec, folder / "run"), NO_DATASET, store=store, lineage={})


def two_targets(folder: Path, store: Store) -> Bundle:
    spec = load_spec(several(folder / "data", LATE, "binary", model={"kind": "xgboost", "rounds": 15}))
    dataset, run = run_etl(spec).value, folder / "trees"
    run.mkdir()
    job = TrainingJob(
        model=spec.model, training=spec.training, dataset=dataset.path, dataset_digest=dataset.digest,
        processes=1, gpu=False,
    )  # fmt: skip
    trees.train(job, run, lambda: False)
    checkpoint = Checkpoint(path=str(run / "result"), step=1, metrics={})
    return export_model(spec, checkpoint, dataset, store=store, lineage={})


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="serin-doors-"))  # short: it holds unix sockets
    monkeypatch.setenv("SERIN_HOME", str(folder / "home"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_trees_and_images_are_answered_by_triton_as_in_this_process(place: Path) -> None:
    store, host = Store(str(place / "store")), ChildHost()
    releases = Releases(place / "releases", host=host, store=store)
    bundles = [make(place, store) for make in (pictures, two_targets)]
    try:
        for bundle in bundles:
            releases.start(Release(model=bundle.model, version=bundle.version))
        for bundle in bundles:
            release = Release(model=bundle.model, version=bundle.version)

            def ready(release: Release = release) -> bool:
                return releases.state(release) == "ready"

            wait_for(release.name, ready, host, release.name)
            releases.verify(release)  # the golden rows, over HTTP and gRPC
            folder = Path(bundle.path)
            golden = read_golden(folder, read_schema(folder))
            found = predict(releases.endpoint(release).http, bundle.model, golden.inputs, read_schema(folder))
            for name, values in golden.outputs.items():
                assert np.abs(found[name] - values).max() < 1e-5, name
    finally:
        for release in releases.running():
            host.kill(release.name)  # that it goes in peace is shown elsewhere
            releases.stop(release)
        host.stop_all()
    own = Scorer(bundles[0].path).answers(pa.table({"image": IMAGES.tolist()}))["probabilities"]
    assert own == pytest.approx(chances(IMAGES), abs=1e-5)
    assert len(golden) > 100
    assert golden.outputs["score"].shape[1] == 2


BEFORE = Settings(instances=1, threads=1, queue_delay=0.002, max_batch_rows=64)
LIMIT_MS = 60_000.0  # what a busy machine holds, too: the search is looked at here, not the speed
SPEC = "objectives: {latency_ms: 60000}\nserving: {max_batch_rows: 64, queue_delay: 2000us}\n"


def test_a_model_is_tuned_and_its_next_release_is_served_so(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    bundle = bundles.publish(store, bias=0.0, spec=SPEC)
    said: list[str] = []
    with heard(said.append):
        tuner = Tuner(bundle=bundle, limit_ms=LIMIT_MS, budget_s=600.0, most_trials=2, lap_s=0.1)
    tuning = tuner.run()
    print(*said, sep="\n")
    assert tuning.before.settings == BEFORE
    assert tuning.trials[0] is tuning.before
    assert len(tuning.trials) == 2, "another setting was measured"
    assert tuning.steady.failed == 0
    best = max(trial.requests_per_s(LIMIT_MS) for trial in tuning.trials)
    assert tuning.chosen.requests_per_s(LIMIT_MS) in (best, tuning.before.requests_per_s(LIMIT_MS))
    write_report(tuning)
    whole = {"serving": ServingSpec(max_string=60_000).model_dump(mode="json")}  # as an export writes it
    following = bundles.publish(store, bias=0.0, spec=yaml.safe_dump(whole))
    wanted = tuning.chosen.settings
    served = serving_settings(following)
    assert (served.instances, served.threads) == (wanted.instances, wanted.threads)
    assert served.queue_delay == wanted.queue_delay == BEFORE.queue_delay
    config = build_repository(following, tmp_path / "repository") / bundles.MODEL / "config.pbtxt"
    assert f"count: {wanted.instances}" in config.read_text()
    assert "max_queue_delay_microseconds: 2000" in config.read_text()
