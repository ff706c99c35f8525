"""Which device a model is tuned for, and with requests of which sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serin.errors import GpuMemoryShort, TuningFailed
from serin.reports.tuning import LoadPoint
from serin.serving.client.address import Address
from serin.serving.client.latencies import Latencies
from serin.serving.client.load import LoadResult
from serin.serving.client.load_connections import Target
from serin.serving.triton.backends import Place, Server
from serin.serving.triton.tuned import tuned_file
from serin.serving.tuning import tune
from serin.serving.tuning.devices import possible_devices
from serin.serving.tuning.requests import declared_mix, in_words, mixed_target, parse_mix
from serin.serving.tuning.trials import Settings, Trial
from serin.serving.tuning.tune import Tuner
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.logs import heard
from tests.unit.serving import bundles

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
        point = LoadPoint(clients=1, requests_per_s=speed, p50_ms=1.0, p99_ms=1e9 if speed == 0 else 2.0)
        return self._trials.setdefault(settings, Trial(settings=settings, points=(point,)))

    def _in_turns(self, one: Trial, other: Trial) -> float:
        return other.points[0].requests_per_s / max(one.points[0].requests_per_s, 1.0)

    def _steady(self, best: Trial) -> tuple[float, LoadResult]:
        return 1.0, LoadResult(seconds=1, outcomes={"200": 1}, latencies=Latencies([0.001]))


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
    tuning = Measured(bundle=publish(tmp_path), p99_ms=50, gpu_price=price, speeds=speeds).run()
    assert (tuning.chosen.settings.device, tuning.chosen.settings.instances) == wanted
    assert set(tuning.devices) == {"gpu", "cpu"}
    assert tuning.before.settings.device == "gpu"


def test_a_gpu_without_room_leaves_the_cpu_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "devices_for", lambda _: ("cpu", "gpu"))
    said: list[str] = []
    with heard(said.append):
        tuning = Measured(bundle=publish(tmp_path), p99_ms=50, no_room=True).run()
    assert set(tuning.devices) == {"cpu"}
    assert any("not on the gpu: release m-v1 needs 9 MB" in line for line in said)


@dataclass(slots=True)
class Laddered(Tuner):
    """Every setting holds the limit up to so many clients."""

    most_clients: int = 64
    asked: list[int] = field(default_factory=list)

    def _point(self, target: Target, clients: int) -> LoadPoint | None:
        self.asked.append(clients)
        p99_ms = 10.0 if clients <= self.most_clients else 90.0
        return LoadPoint(clients=clients, requests_per_s=100.0 * clients, p50_ms=1.0, p99_ms=p99_ms)

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
    tuner = Laddered(bundle=publish(tmp_path), p99_ms=50, most_clients=most_clients)
    point = LoadPoint(clients=near, requests_per_s=1.0, p50_ms=1.0, p99_ms=1.0) if near else None
    found = tuner._try(Settings(instances=1, threads=1, queue_delay_us=0, max_batch_rows=64), point)
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
    tuner = Measured(bundle=publish(tmp_path), p99_ms=50, mix=parse_mix("1:9,1025:1"))
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
