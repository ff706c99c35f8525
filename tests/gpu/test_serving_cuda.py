"""A release on a GPU through the gateway, and the tuner that chooses its device. Skipped where there is none."""

import gc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from serin.cluster.shadow.compare import Answered, Columns, Comparison
from serin.errors import GpuMemoryShort
from serin.formats.schema import read_schema
from serin.formats.wire import Array, to_wire
from serin.host.gpu_use import read_gpu_use
from serin.machine.hardware import Nvml, inventory
from serin.serving.client.client import predict
from serin.serving.triton.releases import Releases
from serin.serving.triton.repository import serving_settings
from serin.serving.tuning.load import Closed, run_load
from serin.serving.tuning.report import write_report
from serin.serving.tuning.requests import parse_mix
from serin.serving.tuning.tune import Tuner, devices_for
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.e2e.serving_host import ChildHost
from tests.gpu.parts import why_no_release
from tests.gpu.releases import exported, serving_gateway
from tests.kit.load import model_target
from tests.unit.export.small_dataset import flights

SECONDS = 0.5
MOST_ROWS = 4096
CLIENTS_OF_SIZE = {1: (1, 32), 64: (8,), 512: (8,), MOST_ROWS: (4,)}  # benchmarks.serving.gpu measures more


_WHY = why_no_release()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)


def latency_table(name: str, url: str, bundle: Bundle) -> None:
    """Prints; asserts only that everything was answered."""
    schema = read_schema(Path(bundle.path))
    rows = to_wire(flights(2 * MOST_ROWS), schema)
    print(f"\n{name}, through the gateway\nprotocol  rows  clients  requests/s  p50 ms  p95 ms  p99 ms")
    for protocol in ("http", "grpc"):
        for size, all_clients in CLIENTS_OF_SIZE.items():
            for clients in all_clients:
                target = model_target(
                    url, bundle.model, rows, schema, protocol=protocol, rows_per_request=size
                )
                result = run_load(target, Closed(clients=clients), seconds=SECONDS, warm_up_s=0.3)
                quantiles = "  ".join(f"{result.quantile_ms(share):6.2f}" for share in (0.5, 0.95, 0.99))
                print(f"{protocol:8}  {size:4}  {clients:7}  {result.requests_per_s:10.0f}  {quantiles}")
                assert result.requests, "nothing was asked"
                assert result.failed == 0, result.errors


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_release_answers_through_the_gateway_as_the_trained_network_does(
    tmp_path: Path, device: str
) -> None:
    store = Store(str(tmp_path / "store"))
    trained, bundle = exported(tmp_path / "work", store, device, max_batch_rows=MOST_ROWS)
    rows = flights(300)
    wanted = torch.sigmoid(torch.from_numpy(trained.logits(rows))).numpy()
    schema = read_schema(Path(bundle.path))
    with serving_gateway(store, bundle) as (releases, url):
        release = Release(model=bundle.model, version=bundle.version)
        served = releases.served(release)
        assert served is not None
        print(served)
        assert bool(served.devices) == (device == "gpu")
        releases.verify(release)
        for size in (1, 64, 300):
            found = predict(url, bundle.model, to_wire(rows, schema), schema, "grpc", batch_rows=size)[
                "score"
            ]
            print(f"{size} rows at once: {np.abs(found - wanted).max():.2g} from torch")
            np.testing.assert_allclose(found, wanted, atol=0.01)
        assert_served_as_computed(url, bundle)
        latency_table(f"{served.backend} on {device}", url, bundle)


def assert_served_as_computed(url: str, bundle: Bundle) -> None:
    """As a candidate is judged by recorded requests: this process computes the graph on the CPU."""
    schema = read_schema(Path(bundle.path))
    columns = to_wire(flights(300), schema)

    def ask(rows: Columns) -> dict[str, Array]:
        return predict(url, bundle.model, rows, schema, batch_rows=1)

    recorded = pa.table({"_id": [str(row) for row in range(300)], "_row": [0] * 300})
    rows = Answered(recorded=recorded, request=np.arange(300), columns=columns, served=ask(columns))
    compared = Comparison.of(Path(bundle.path)).with_bundle(rows, ask)
    assert (compared.compared, compared.unsteady, compared.mismatch) == (300, 0, None)


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_release_takes_no_more_memory_than_it_reserved_and_gives_it_back(tmp_path: Path) -> None:
    nvml = Nvml.open()
    assert nvml is not None
    store = Store(str(tmp_path / "store"))
    _, bundle = exported(tmp_path / "work", store, "gpu", max_batch_rows=512)
    release = Release(model=bundle.model, version=bundle.version)
    device = inventory()[0].id
    gc.collect()  # the export's own sessions
    torch.cuda.empty_cache()
    before = nvml.free_bytes(device)
    with serving_gateway(store, bundle) as (releases, url):
        served = releases.served(release)
        assert served is not None
        schema = read_schema(Path(bundle.path))
        predict(url, bundle.model, to_wire(flights(512), schema), schema, batch_rows=512)
        taken = (before or 0) - (nvml.free_bytes(served.devices[0]) or 0)
        print(f"took {taken >> 20} MB of {served.bytes >> 20} MB that were reserved")
        (seen,) = [
            entry
            for use in read_gpu_use(releases.log(release).parents[2], releases._host)
            for entry in use.releases
            if use.device.id == served.devices[0]
        ]
        print(seen)
        assert (seen.release, seen.reserved_bytes) == (release.name, served.bytes)
        if served.devices[0] == device:
            assert 0 < taken <= served.bytes
    left = (before or 0) - (nvml.free_bytes(device) or 0)
    print(f"{left >> 20} MB are not given back")
    assert left < 64 << 20


def test_a_release_larger_than_every_gpu_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    most = max(device.memory_bytes for device in inventory()) >> 20
    _, bundle = exported(tmp_path / "work", store, "gpu", gpu_memory=f"{most + 1}MiB")
    host = ChildHost()
    releases = Releases(tmp_path / "releases", host=host, store=store)
    release = Release(model=bundle.model, version=bundle.version)
    with pytest.raises(GpuMemoryShort, match=f"needs {most + 1:,} MB"):
        releases.start(release)
    assert host.state(release.name) == "absent"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mix", ["1", "64"])
def test_the_tuner_measures_both_devices_and_the_next_release_is_on_the_one_it_chose(
    tmp_path: Path, mix: str
) -> None:
    store = Store(str(tmp_path / "store"))
    _, bundle = exported(tmp_path / "work", store, "auto")
    assert devices_for(bundle) == ("gpu", "cpu")
    tuner = Tuner(bundle=bundle, limit_ms=50, mix=parse_mix(mix), budget_s=20, lap_s=0.3)
    tuning = tuner.run()
    path = write_report(tuning)
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
