"""The tuner on real Tritons of its own."""

from __future__ import annotations

from pathlib import Path

import yaml

from serin.serving.triton.repository import build_repository, serving_settings
from serin.serving.tuning.report import write_report
from serin.serving.tuning.trials import Settings
from serin.serving.tuning.tune import Tuner
from serin.spec.serving import ServingSpec
from serin.store.store import Store
from tests.logs import heard
from tests.unit.serving import bundles

BEFORE = Settings(instances=1, threads=1, queue_delay_us=2_000, max_batch_rows=64)
P99_MS = 60_000.0  # what a busy machine holds, too: the search is looked at here, not the speed
SPEC = "serving: {p99_ms: 60000, max_batch_rows: 64, queue_delay_us: 2000}\n"


def test_a_model_is_tuned_and_its_next_release_is_served_so(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    bundle = bundles.publish(store, bias=0.0, spec=SPEC)
    said: list[str] = []
    with heard(said.append):
        tuner = Tuner(bundle=bundle, p99_ms=P99_MS, budget_s=600.0, most_trials=2, lap_s=0.1)
    tuning = tuner.run()
    print(*said, sep="\n")
    assert tuning.before.settings == BEFORE
    assert tuning.trials[0] is tuning.before
    assert len(tuning.trials) == 2, "another setting was measured"
    assert tuning.steady.failed == 0
    best = max(trial.requests_per_s(P99_MS) for trial in tuning.trials)
    assert tuning.chosen.requests_per_s(P99_MS) in (best, tuning.before.requests_per_s(P99_MS))
    write_report(tuning)
    whole = {"serving": ServingSpec(p99_ms=60_000).model_dump(mode="json")}  # as an export writes it
    following = bundles.publish(store, bias=0.0, spec=yaml.safe_dump(whole))
    wanted = tuning.chosen.settings
    served = serving_settings(following)
    assert (served.instances, served.threads) == (wanted.instances, wanted.threads)
    assert served.queue_delay_us == wanted.queue_delay_us == BEFORE.queue_delay_us
    config = build_repository(following, tmp_path / "repository") / bundles.MODEL / "config.pbtxt"
    assert f"count: {wanted.instances}" in config.read_text()
    assert "max_queue_delay_microseconds: 2000" in config.read_text()
