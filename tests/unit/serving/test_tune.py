"""The tuner: what it measures, for which device, and with requests of which sizes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from serin.errors import GpuMemoryShort, TuningFailed
from serin.formats.bundle import verify_bundle
from serin.machine.hardware import core_count
from serin.serving.client.address import Address
from serin.serving.triton import repository
from serin.serving.triton.backends import Place, Server
from serin.serving.triton.repository import fetch_tuned, read_tuned, serving_settings, share_tuned, tuned_file
from serin.serving.tuning import tune
from serin.serving.tuning.load import LoadResult
from serin.serving.tuning.load_connections import Target
from serin.serving.tuning.report import findings, values, write_report
from serin.serving.tuning.requests import declared_mix, in_words, mixed_target, parse_mix
from serin.serving.tuning.trials import LoadPoint, Settings, Trial, Tuning, copy_with
from serin.serving.tuning.tune import Tuner, possible_devices
from serin.spec.serving import ServingSpec
from serin.spec.stored import stored_objectives
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.logs import heard
from tests.unit.serving import bundles

ONE = Settings(instances=1, threads=1, queue_delay=0.0, max_batch_rows=1024)
TWO = replace(ONE, instances=2)
SPEC = "objectives: {latency_ms: 50}\n"


def trial(settings: Settings, *figures: tuple[int, float, float]) -> Trial:
    points = tuple(
        LoadPoint(clients=clients, requests_per_s=speed, p50_ms=p99 / 2, tail_ms=p99)
        for clients, speed, p99 in figures
    )
    return Trial(settings=settings, points=points)


def tuning(bundle: Bundle, *, better: bool = True) -> Tuning:
    before = trial(ONE, (1, 400, 2.0), (8, 900, 20.0), (16, 950, 60.0))
    best = trial(TWO, (1, 390, 2.1), (8, 1300, 18.0), (16, 1500, 49.0))
    steady = LoadResult(seconds=1, outcomes={"200": 2}, latencies=[0.01, 0.02])
    return Tuning(
        bundle=bundle, limit_ms=50, share=0.99, mix={1: 1.0}, before=before, chosen=best if better else before,
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
    assert serving_settings(bundle).instances == 1
    write_report(tuning(bundle))
    tuned = serving_settings(bundle)
    assert (tuned.instances, tuned.threads) == (2, 1)
    store = Store(str(Path(bundle.path).parents[3]))
    named = bundles.publish(store, bias=0.0, spec="serving: {instances: 3}\n")
    assert (serving_settings(named).instances, serving_settings(named).threads) == (3, 1)


def test_what_was_measured_goes_before_the_defaults_that_an_export_writes_out(bundle: Bundle) -> None:
    write_report(tuning(bundle))
    whole = yaml.safe_dump({"serving": ServingSpec(max_string=40).model_dump(mode="json")})
    store = Store(str(Path(bundle.path).parents[3]))
    served = serving_settings(bundles.publish(store, bias=0.0, spec=whole))
    assert (served.instances, served.threads, served.max_string) == (2, 1, 40)


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
    path = write_report(tuning(bundle))
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
    assert "(2 instances x 1 thread, 0s of delay, 1024 rows; 1,500/s) gave 0.69 times as many" in words
    path = write_report(rival)
    assert yaml.safe_load(path.read_text())["serving"]["instances"] == 1


def test_values_of_another_machine_are_left_alone(bundle: Bundle) -> None:
    path = write_report(tuning(bundle))
    path.write_text(path.read_text().replace(f"cores: {core_count()}", f"cores: {core_count() + 1}"))
    assert read_tuned(bundle) == {}
    assert serving_settings(bundle).instances == 1


def test_what_one_host_measured_is_used_by_all_with_as_many_cores(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (Store(bucket, cache=tmp_path / name) for name in ("here", "there"))
    made = bundles.publish(here, bias=0.1)
    fetch_tuned(here, made)
    assert read_tuned(made) == {}
    write_report(tuning(made))
    share_tuned(here, made)
    other = there.bundle(made.model, made.version)
    fetch_tuned(there, other)
    assert read_tuned(other) == read_tuned(made) != {}
    monkeypatch.setattr(repository, "core_count", lambda: 64)
    tuned_file(other).unlink()
    fetch_tuned(there, other)
    assert read_tuned(other) == {}


@pytest.mark.parametrize("text", ["", "format: other\n", "serving: [", "format: serin.tuned\nversion: 1\n"])
def test_a_file_that_is_none_is_named(bundle: Bundle, text: str) -> None:
    tuned_file(bundle).write_text(text)
    with pytest.raises(TuningFailed, match=r"serving\.yaml.*`serin tune"):
        serving_settings(bundle)


def test_a_copy_to_measure_is_a_whole_bundle_with_other_settings(bundle: Bundle, tmp_path: Path) -> None:
    made = copy_with(bundle, Store(str(tmp_path / "scratch")), TWO)
    verify_bundle(Path(made.path))
    assert serving_settings(made).instances == 2
    assert stored_objectives(Path(made.path)).latency_ms == 50
    assert serving_settings(bundle).instances == 1


WITH_CUDA = Server(backends=frozenset({"python"}), accelerators=frozenset({"cuda"}))
WITHOUT = Server(backends=frozenset({"python"}))


def publish(tmp_path: Path, spec: str = "{}\n", *, in_two: bool = True) -> Bundle:
    return bundles.publish(Store(str(tmp_path / "store")), bias=0.0, spec=spec, in_two=in_two)


@pytest.mark.parametrize(
    ("serving", "in_two", "server", "gpus", "devices"),
    [
        ("{}", True, WITH_CUDA, 1, ("gpu", "cpu")),
        ("{device: auto}", True, WITH_CUDA, 1, ("gpu", "cpu")),
        ("{device: gpu}", True, WITH_CUDA, 1, ("gpu",)),
        ("{device: cpu}", True, WITH_CUDA, 1, ("cpu",)),
        ("{gpus: 2}", True, WITH_CUDA, 2, ("gpu",)),
        ("{}", False, WITH_CUDA, 1, ("cpu",)),
        ("{}", True, WITHOUT, 1, ("cpu",)),
        ("{}", True, WITH_CUDA, 0, ("cpu",)),
    ],
    ids=["left open", "auto", "gpu named", "cpu named", "two GPUs", "not exported for one", "no provider", "no GPU"],
)  # fmt: skip
def test_both_devices_are_tried_where_nothing_names_or_rules_out_one(
    tmp_path: Path, serving: str, in_two: bool, server: Server, gpus: int, devices: tuple[Place, ...]
) -> None:
    bundle = publish(tmp_path, f"serving: {serving}\n", in_two=in_two)
    assert possible_devices(bundle, server, gpus) == devices


def test_the_choice_of_an_earlier_tuning_is_tried_first_and_not_final(tmp_path: Path) -> None:
    bundle = publish(tmp_path)
    text = f"format: serin.tuned\nversion: 1\nmachine: {{cores: {tune.core_count()}}}\nserving: {{device: cpu}}\n"
    tuned_file(bundle).write_text(text)
    assert possible_devices(bundle, WITH_CUDA, 1) == ("cpu", "gpu")


@dataclass(slots=True)
class Measured(Tuner):
    """Requests/s by device and instances, instead of a Triton's."""

    speeds: dict[tuple[Place, int], float] = field(default_factory=dict)
    no_room: bool = False

    def _try(self, settings: Settings, near: LoadPoint | None = None) -> Trial:
        if self.no_room and settings.device == "gpu":
            raise GpuMemoryShort(release="m-v1", wanted_mb=9, room=["0 MB free"])
        speed = self.speeds.get((settings.device, settings.instances), 1.0)
        point = LoadPoint(clients=1, requests_per_s=speed, p50_ms=1.0, tail_ms=1e9 if speed == 0 else 2.0)
        return self._trials.setdefault(settings, Trial(settings=settings, points=(point,)))

    def _in_turns(self, one: Trial, other: Trial) -> float:
        return other.points[0].requests_per_s / max(one.points[0].requests_per_s, 1.0)

    def _steady(self, best: Trial) -> tuple[float, LoadResult]:
        return 1.0, LoadResult(seconds=1, outcomes={"200": 1}, latencies=[0.001])


CASES = {
    "the GPU is faster": ({("gpu", 1): 900.0, ("cpu", 1): 100.0, ("cpu", 2): 300.0}, 1.0, ("gpu", 1)),
    "the CPU is faster with more instances": (
        {("gpu", 1): 900.0, ("cpu", 1): 100.0, ("cpu", 2): 1200.0},
        1.0,
        ("cpu", 2),
    ),
    "the GPU is faster and not worth it": ({("gpu", 1): 900.0, ("cpu", 2): 300.0}, 4.0, ("cpu", 2)),
    "only the GPU is below the limit": ({("gpu", 1): 50.0, ("cpu", 1): 0.0, ("cpu", 2): 0.0}, 40.0, ("gpu", 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_device_with_the_most_requests_for_its_price_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    speeds, price, wanted = CASES[case]
    monkeypatch.setattr(tune, "devices_for", lambda _: ("gpu", "cpu"))
    monkeypatch.setattr(tune, "core_count", lambda: 2)
    tuning = Measured(bundle=publish(tmp_path), limit_ms=50, gpu_price=price, speeds=speeds).run()
    assert (tuning.chosen.settings.device, tuning.chosen.settings.instances) == wanted
    assert set(tuning.devices) == {"gpu", "cpu"}
    assert tuning.before.settings.device == "gpu"


def test_a_gpu_without_room_leaves_the_cpu_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "devices_for", lambda _: ("cpu", "gpu"))
    said: list[str] = []
    with heard(said.append):
        tuning = Measured(bundle=publish(tmp_path), limit_ms=50, no_room=True).run()
    assert set(tuning.devices) == {"cpu"}
    assert any("not on the gpu: release m-v1 needs 9 MB" in line for line in said)


@dataclass(slots=True)
class Laddered(Tuner):
    """Every setting holds the limit up to so many clients."""

    most_clients: int = 64
    asked: list[int] = field(default_factory=list)

    def _point(self, target: Target, clients: int) -> LoadPoint | None:
        self.asked.append(clients)
        tail_ms = 10.0 if clients <= self.most_clients else 90.0
        return LoadPoint(clients=clients, requests_per_s=100.0 * clients, p50_ms=1.0, tail_ms=tail_ms)

    @contextmanager
    def _serving(self, settings: Settings) -> Iterator[Target]:
        yield Target(address=Address.parse("127.0.0.1:1"), requests=(b"",))


@pytest.mark.parametrize(
    ("most_clients", "near", "asked", "best"),
    [
        (64, None, [1, 2, 4, 8, 16, 32, 64], 64),
        (64, 32, [8, 16, 32, 64], 64),
        (8, 32, [8, 16], 8),
        (2, 32, [8, 4, 2], 2),
        (0, 32, [8, 4, 2, 1], None),
    ],
    ids=["first", "near the best", "at its limit", "far below", "never"],
)
def test_other_settings_are_asked_by_about_as_many_clients_as_suited_the_best(
    tmp_path: Path, most_clients: int, near: int | None, asked: list[int], best: int | None
) -> None:
    tuner = Laddered(bundle=publish(tmp_path), limit_ms=50, most_clients=most_clients)
    point = LoadPoint(clients=near, requests_per_s=1.0, p50_ms=1.0, tail_ms=1.0) if near else None
    found = tuner._try(Settings(instances=1, threads=1, queue_delay=0.0, max_batch_rows=64), point)
    assert tuner.asked == asked
    chosen = found.best(50)
    assert (chosen.clients if chosen else None) == best
    assert [point.clients for point in found.points] == sorted(asked)


def test_a_mix_is_read_as_shares_and_the_spec_s_is_the_default(tmp_path: Path) -> None:
    assert parse_mix("8") == {8: 1.0}
    assert parse_mix("64:1,1:3") == {1: 0.75, 64: 0.25}
    assert in_words(parse_mix("64:1,1:3")) == "1 (75%), 64 (25%) rows"
    assert declared_mix(publish(tmp_path)) == {1: 1.0}
    assert declared_mix(publish(tmp_path, "export: {batch_mix: {'1': 0.8, '64': 0.2}}\n")) == {
        1: 0.8,
        64: 0.2,
    }


def test_sizes_that_a_release_refuses_are_left_out_of_the_spec_s_mix(tmp_path: Path) -> None:
    spec = "export: {batch_mix: {1: 0.3, 8: 0.1, 64: 0.6}}\nserving: {max_batch_rows: 8}\n"
    assert declared_mix(publish(tmp_path, spec)) == pytest.approx({1: 0.75, 8: 0.25})
    assert declared_mix(publish(tmp_path, spec.replace("1: 0.3, 8: 0.1, 64: 0.6", "64: 1.0"))) == {1: 1.0}


@pytest.mark.parametrize("text", ["", "many", "0", "8:0", "8:-1", "1:x", "1,"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"1:0\.9,64:0\.1|one row or more"):
        parse_mix(text)


def test_requests_that_the_model_would_refuse_are_not_measured(tmp_path: Path) -> None:
    tuner = Measured(bundle=publish(tmp_path), limit_ms=50, mix=parse_mix("1:9,1025:1"))
    with pytest.raises(TuningFailed, match=r"1025 rows are more than its serving\.max_batch_rows=1024"):
        tuner.run()


def test_requests_have_the_sizes_of_the_mix_in_its_shares(tmp_path: Path) -> None:
    mix = {1: 0.7, 8: 0.2, 100: 0.1}  # more rows than the bundle has golden ones
    target = mixed_target("127.0.0.1:1", publish(tmp_path), mix)
    counts = Counter(rows_of(request) for request in target.requests)
    assert counts == {rows: round(share * len(target.requests)) for rows, share in mix.items()}
    first = Counter(rows_of(request) for request in target.requests[:10])
    assert first == {1: 7, 8: 2, 100: 1}, "spread evenly"


def rows_of(request: bytes) -> int:
    return int(request.split(b'"shape": [', 1)[1].split(b",", 1)[0])
