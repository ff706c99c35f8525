from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from serin.errors import TuningFailed
from serin.formats.bundle import verify_bundle
from serin.machine.hardware import core_count
from serin.reports.tuning import LoadPoint
from serin.serving.client.latencies import Latencies
from serin.serving.client.load import LoadResult
from serin.serving.triton.repository import serving_settings
from serin.serving.triton.tuned import read_tuned, tuned_file
from serin.serving.tuning.report import findings, values, write_report
from serin.serving.tuning.trials import Settings, Trial, Tuning, copy_with
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.unit.serving import bundles

ONE = Settings(instances=1, threads=1, queue_delay_us=0, max_batch_rows=1024)
TWO = replace(ONE, instances=2)
SPEC = "serving: {p99_ms: 50}\n"


def trial(settings: Settings, *figures: tuple[int, float, float]) -> Trial:
    points = tuple(
        LoadPoint(clients=clients, requests_per_s=speed, p50_ms=p99 / 2, p99_ms=p99)
        for clients, speed, p99 in figures
    )
    return Trial(settings=settings, points=points)


def tuning(bundle: Bundle, *, better: bool = True) -> Tuning:
    before = trial(ONE, (1, 400, 2.0), (8, 900, 20.0), (16, 950, 60.0))
    best = trial(TWO, (1, 390, 2.1), (8, 1300, 18.0), (16, 1500, 49.0))
    steady = LoadResult(seconds=1, outcomes={"200": 2}, latencies=Latencies([0.01, 0.02]))
    return Tuning(
        bundle=bundle, p99_ms=50, mix={1: 1.0}, before=before, chosen=best if better else before,
        trials=(before, best), gain=1.6 if better else 1.0, steady_requests_per_s=1200, steady=steady, seconds=100,
    )  # fmt: skip


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return bundles.publish(Store(str(tmp_path / "store")), bias=0.0, spec=SPEC)


def test_the_best_point_is_the_fastest_one_below_the_limit() -> None:
    found = trial(ONE, (1, 400, 2.0), (8, 900, 20.0), (16, 950, 60.0))
    assert found.requests_per_s(50) == 900
    assert found.requests_per_s(1) == 0


def test_a_release_has_what_was_measured_where_its_spec_names_nothing(bundle: Bundle) -> None:
    assert (serving_settings(bundle).instances, serving_settings(bundle).p99_ms) == (1, 50)
    write_report(tuning(bundle))
    tuned = serving_settings(bundle)
    assert (tuned.instances, tuned.threads, tuned.p99_ms) == (2, 1, 50)
    store = Store(str(Path(bundle.path).parents[3]))
    named = bundles.publish(store, bias=0.0, spec="serving: {instances: 3}\n")
    assert (serving_settings(named).instances, serving_settings(named).threads) == (3, 1)


def test_what_was_measured_goes_before_the_defaults_that_an_export_writes_out(bundle: Bundle) -> None:
    write_report(tuning(bundle))
    whole = yaml.safe_dump({"serving": ServingSpec(p99_ms=40).model_dump(mode="json")})
    store = Store(str(Path(bundle.path).parents[3]))
    served = serving_settings(bundles.publish(store, bias=0.0, spec=whole))
    assert (served.instances, served.threads, served.p99_ms) == (2, 1, 40)


def test_the_device_is_written_with_what_both_gave_where_there_was_a_choice(bundle: Bundle) -> None:
    on_cpu = tuning(bundle)
    assert "device" not in values(on_cpu)
    on_gpu = trial(replace(TWO, device="gpu"), (1, 700, 2.0), (64, 6000, 40.0))
    found = replace(
        on_cpu, chosen=on_gpu, trials=(*on_cpu.trials, on_gpu), devices={"cpu": on_cpu.chosen, "gpu": on_gpu},
        gpu_price=3.0,
    )  # fmt: skip
    assert values(found)["device"] == (
        "auto",
        "a GPU; a GPU 6,000/s (2 x 1), the CPU 1,500/s (2 x 1), a GPU counted as 3 times the price",
    )
    write_report(found)
    assert serving_settings(bundle).device == "auto"
    write_report(replace(found, chosen=on_cpu.chosen))
    assert serving_settings(bundle).device == "cpu"


def test_every_value_says_why(bundle: Bundle) -> None:
    path, _ = write_report(tuning(bundle))
    text = path.read_text()
    assert "instances: 2" in text
    assert "1: 900/s, 2: 1,500/s" in text
    assert "1.60 times the requests/s" in text
    assert f"machine: {{cores: {core_count()}}}" in text
    assert yaml.safe_load(text)["serving"] == {
        key: value for key, (value, _) in values(tuning(bundle)).items()
    }
    assert "nothing tried was better" in " ".join(findings(tuning(bundle, better=False)))


def test_what_was_best_in_the_search_and_not_in_turns_is_named_with_both_figures(bundle: Bundle) -> None:
    found = tuning(bundle, better=False)
    rival = replace(found, passed_over=found.trials[1], passed_over_gain=0.69)
    words = " ".join(findings(rival))
    assert "900 requests/s with the settings in use, which stay" in words
    assert "(2 instances x 1 thread, 0 us of delay, 1024 rows; 1,500/s) gave 0.69 times as many" in words
    path, plot = write_report(rival)
    assert yaml.safe_load(path.read_text())["serving"]["instances"] == 1
    assert "best of the search: 2 instances x 1 thread" in plot.read_text()


def test_values_of_another_machine_are_left_alone(bundle: Bundle) -> None:
    path, _ = write_report(tuning(bundle))
    path.write_text(path.read_text().replace(f"cores: {core_count()}", f"cores: {core_count() + 1}"))
    assert read_tuned(bundle) == {}
    assert serving_settings(bundle).instances == 1


@pytest.mark.parametrize("text", ["", "format: other\n", "serving: [", "format: serin.tuned\nversion: 1\n"])
def test_a_file_that_is_none_is_named(bundle: Bundle, text: str) -> None:
    tuned_file(bundle).write_text(text)
    with pytest.raises(TuningFailed, match=r"serving\.yaml.*`serin tune"):
        serving_settings(bundle)


def test_the_plot_has_a_line_for_each_setting_and_the_limit(bundle: Bundle) -> None:
    _, plot = write_report(tuning(bundle))
    drawn = ET.fromstring(plot.read_text())
    shapes = [element.tag.rpartition("}")[2] for element in drawn.iter()]
    assert len(drawn.findall("{*}polyline/{*}title")) == 2, "a hint names the setting of each line"
    assert shapes.count("circle") == 6 + 1, "one around the point that counts"
    texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert texts[texts.index("limit: 50 ms") + 1 :][:3] == ["1", "8", "16"], "clients of the chosen line"
    assert f"delays version 1, {core_count()} cores, requests of 1 row" in texts


def test_a_copy_to_measure_is_a_whole_bundle_with_other_settings(bundle: Bundle, tmp_path: Path) -> None:
    made = copy_with(bundle, Store(str(tmp_path / "scratch")), TWO)
    verify_bundle(Path(made.path))
    assert serving_settings(made).instances == 2
    assert serving_settings(made).p99_ms == 50
    assert serving_settings(bundle).instances == 1
