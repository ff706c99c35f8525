"""Podman and podman-compose, a Debian base image made with debootstrap, and a wheelhouse: no image can be pulled, and
nothing is downloaded while an image is built."""

import hashlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from serin.serving.triton.installation import NUMPY, WHEEL
from tests.cluster.part import FOLDER, Missing, apt_install, making

ROOT = Path(__file__).resolve().parents[3]
_COMPOSE = "podman-compose==1.6.0"
_SUITE = "bookworm"
_PACKAGES = ("python3", "python3-venv", "libpython3.11", "g++", "postgresql-15", "ca-certificates")
_EXTRAS = (
    "cpu",
    "flows",
    "kubernetes",
    "prefect-server",
    "s3",
    "xgboost",
)  # of cpu.Dockerfile, which has the most
_OLDER_PYTHON = ("async-timeout",)  # needed by Python 3.11.2, Debian's, and not by this one
_MIRROR = "http://deb.debian.org/debian"


def install() -> None:
    apt_install("podman", "runc", "netavark", "aardvark-dns", "catatonit", "debootstrap")
    compose()
    base()
    wheelhouse()


def compose() -> Path:
    """The folder for PYTHONPATH; `python -m podman_compose` runs it."""
    return _once(FOLDER / _COMPOSE, lambda made: _pip("install", "--target", str(made), _COMPOSE))


def base() -> Path:
    """A tar file with Debian, Python, a compiler and PostgreSQL."""
    name = hashlib.sha256(" ".join((_SUITE, *_PACKAGES)).encode()).hexdigest()[:12]
    return _once(FOLDER / f"debian-{_SUITE}-{name}.tar", _bootstrap)


def wheelhouse() -> Path:
    """A folder with every package that the images install, for this machine's architecture and Debian's Python."""
    if sys.version_info[:2] != (3, 11):
        raise Missing("the wheels of the images are for Python 3.11, which is not the one that runs here")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*_requirements(project["project"]), *project["build-system"]["requires"], *_OLDER_PYTHON]
    pins = (ROOT / "constraints.txt").read_text()
    runtime = next(line for line in pins.splitlines() if line.startswith("onnxruntime=="))
    folder = FOLDER / "wheelhouse"
    complete, text = folder / "complete", "\n".join([*wanted, WHEEL, NUMPY, pins])
    if not complete.exists() or complete.read_text() != text:
        making("the wheels of the images")
        folder.mkdir(parents=True, exist_ok=True)
        common = ("download", "--dest", str(folder), "-f", str(folder), "--only-binary", ":all:")
        _pip(*common, "--constraint", str(ROOT / "constraints.txt"), *wanted)
        _pip(*common, WHEEL, NUMPY, runtime)
        complete.write_text(text)
    return folder


def _requirements(project: dict[str, object]) -> list[str]:
    """Those of the project and of the extras, without the extras that name other extras."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    found = list(project["dependencies"])  # type: ignore[call-overload]
    waiting = list(_EXTRAS)
    while waiting:
        for line in extras[waiting.pop()]:
            if line.startswith("serin["):
                waiting += line.removeprefix("serin[").rstrip("]").split(",")
            else:
                found.append(line)
    return sorted(set(found))


def _bootstrap(made: Path) -> None:
    folder = made.with_suffix(".rootfs")
    shutil.rmtree(folder, ignore_errors=True)
    _run("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, str(folder), _MIRROR)
    shutil.rmtree(folder / "var" / "cache" / "apt", ignore_errors=True)
    shutil.rmtree(folder / "var" / "lib" / "apt" / "lists", ignore_errors=True)
    _run("tar", "--directory", str(folder), "--create", "--file", str(made), ".")
    shutil.rmtree(folder)


def _once(place: Path, make: object) -> Path:
    """Makes a file or folder beside its place, and moves it there when it is complete."""
    if not place.exists():
        making(place.name)
        made = place.with_name(f"{place.name}.part")
        if made.is_dir():
            shutil.rmtree(made)
        FOLDER.mkdir(parents=True, exist_ok=True)
        assert callable(make)
        make(made)
        made.rename(place)
    return place


def _pip(*words: str) -> None:
    _run(sys.executable, "-m", "pip", "--quiet", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-700:]
        raise Missing(f"{_short(command)}: {said}")


def _short(command: Sequence[str]) -> str:
    return " ".join(command[:6])
