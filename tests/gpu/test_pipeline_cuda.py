"""The stages on a real GPU, by their use cases: each leases what it uses, and its receipt names it. Skipped without."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from serin.etl.engines.device import usable_gpus
from serin.machine import environment
from serin.machine.hardware import Nvml, inventory
from serin.machine.leases import holders
from serin.pipeline.run_stage import run_etl, run_export, run_train
from serin.scoring.session import has_device
from serin.spec.load import load_spec
from serin.store.receipt import Receipt
from tests.fakes.small_pipeline import small_spec

pytestmark = pytest.mark.skipif(not inventory() or not torch.cuda.is_available(), reason="no GPU")


def booked(receipt: Receipt | None) -> set[str]:
    assert receipt is not None
    print(receipt)
    for cost in receipt.device:
        assert cost.busy_share is not None
        assert cost.peak_bytes is not None
        assert cost.peak_bytes > 0
    return {cost.id for cost in receipt.device}


@pytest.mark.timeout(600)
def test_every_stage_pays_for_the_gpu_it_leased(home: Path, tmp_path: Path) -> None:
    engine = "cuda" if usable_gpus().count else "process"
    spec = load_spec(
        small_spec(
            tmp_path / "data",
            etl={"engine": engine},
            training={"epochs": 1, "batch_rows": 512, "processes": 1},
            export={"target": "gpu"},
        )
    )
    ours = {device.id for device in inventory()}
    assert booked(run_etl(spec).receipt) <= (ours if engine == "cuda" else {"cpu"})
    assert booked(run_train(spec).receipt) <= ours
    exported = run_export(spec)
    assert booked(exported.receipt) <= (ours if has_device("cuda") else {"cpu"})
    assert holders(home) == ()
    assert not run_export(spec).ran


def test_a_process_that_is_shown_no_gpu_sees_none() -> None:
    with environment.showing_devices(()):
        program = "import torch; print(torch.cuda.device_count())"
        seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert (seen.stdout.strip(), inventory()) == ("0", ())


@pytest.mark.timeout(200)
def test_the_driver_tells_a_process_s_memory_or_nothing() -> None:
    """In a container it may not know the process by the id that it has there."""
    nvml = Nvml.open()
    assert nvml is not None
    program = "import sys, torch; held = torch.zeros(2**27, device='cuda'); print('here', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "here\n"
        found = nvml.process_bytes(inventory()[0].id)
        print(f"process {process.pid}: {found}")
        assert found.get(process.pid, 2**29) >= 2**29
