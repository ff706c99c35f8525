"""The tuner on a machine with a GPU: it measures both devices, and the next release is on the one it chose.

Skipped, with the reason, where there is no GPU, or no Triton whose Python has ONNX Runtime's CUDA provider."""

from __future__ import annotations

from pathlib import Path

import pytest

from serin.serving.triton.repository import serving_settings
from serin.serving.tuning.devices import devices_for
from serin.serving.tuning.report import write_report
from serin.serving.tuning.requests import parse_mix
from serin.serving.tuning.tune import Tuner
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.gpu.parts import why_no_release
from tests.gpu.releases import exported, serving_gateway

_WHY = why_no_release()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mix", ["1", "64"])
def test_the_tuner_measures_both_devices_and_the_next_release_is_on_the_one_it_chose(
    tmp_path: Path, mix: str
) -> None:
    store = Store(str(tmp_path / "store"))
    _, bundle = exported(tmp_path / "work", store, "auto")
    assert devices_for(bundle) == ("gpu", "cpu")
    tuner = Tuner(bundle=bundle, p99_ms=50, mix=parse_mix(mix), budget_s=20, lap_s=0.3)
    tuning = tuner.run()
    path, _ = write_report(tuning)
    print(path.read_text())
    assert set(tuning.devices) == {"gpu", "cpu"}
    chosen = tuning.chosen.settings
    assert serving_settings(bundle).instances == chosen.instances
    with serving_gateway(store, bundle) as (releases, _):
        release = Release(model=bundle.model, version=bundle.version)
        served = releases.served(release)
        assert served is not None
        print(served)
        assert bool(served.devices) == (chosen.device == "gpu")
        releases.verify(release)
