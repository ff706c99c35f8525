"""What a user gets from `pip install serin`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, repository_files

APPLICATION = ("flows", "tasks", "deployments", "triton_models")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_claims_one_name_in_site_packages(wheel: Path) -> None:
    top_level = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"serin"}


def test_the_wheel_holds_the_core_and_the_application_folder_and_nothing_else(wheel: Path) -> None:
    sources = [name for name in repository_files() if name.split("/")[0] in ("serin", *APPLICATION)]
    expected = {name if name.startswith("serin/") else f"serin/app/{name}" for name in sources}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_the_installed_wheel_finds_its_application_folder_and_prefect_its_worker_type(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import inspect; from prefect.workers.base import BaseWorker; "
        "from serin.machine.environment import application_folder; print(application_folder()); "
        "print(inspect.getfile(BaseWorker.get_worker_class_from_type('serin')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    application = tmp_path / "serin" / "app"
    worker = application / "deployments" / "workers" / "worker.py"  # found by the wheel's entry point
    assert done.stdout.split() == [str(application), str(worker)], done.stderr
    assert sorted(path.name for path in (tmp_path / "serin" / "app").iterdir()) == sorted(APPLICATION)


def test_the_wheel_gives_the_command_and_the_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "serin = serin.cli:main" in archive.read(entry_points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
