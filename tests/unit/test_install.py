"""What `make install` does before anything is installed (.ci/install.py, the Makefile)."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from serin.cli import app
from serin.prefect import prepared, template
from serin.prefect.deploy import deployments_digest
from serin.serving.triton import installation
from serin.serving.triton.installation import NUMPY, WHEEL
from tests.logs import heard

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "-" + "-find-links"  # in two parts: no file of this repository names a place of packages


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serin_install", ROOT / ".ci" / "install.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_the_indexes_and_folders_that_pip_uses(install: ModuleType) -> None:
    options, variables = install.uv_options(
        [
            ":env:.find-links='/wheels'",
            "global.cert='/authorities.pem'",
            "global.extra-index-url='file:///a file:///b'",
            "global.find-links='/wheels'",
            "global.index-url='https://example.org/simple'",
            "global.timeout='180'",
        ]
    )
    assert options == [
        *("--index-strategy", "unsafe-best-match", FOLDER, "/wheels"),
        *("--index", "file:///a", "--index", "file:///b", FOLDER, "/wheels"),
        *("--default-index", "https://example.org/simple"),
    ]
    assert variables == {"SSL_CERT_FILE": "/authorities.pem"}


@pytest.mark.parametrize(
    ("uv", "programs"), [("/bin/true", ["true"]), ("/bin/false", ["false", "echo"]), (None, ["echo"])]
)
def test_pip_installs_what_uv_cannot(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uv: str | None, programs: list[str]
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(install, "PYTHON", Path("/bin/echo"))
    assert install.install_packages(uv, Path("/bin/echo"), ["a-package"], log) == 0
    ran = [line for line in log.read_text().splitlines() if line.startswith("$ ")]
    assert [line.split()[1].rpartition("/")[2] for line in ran] == programs
    assert all(line.endswith(" a-package") for line in ran)


def test_triton_s_packages_are_known_before_serin_is_installed(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 12))
    monkeypatch.setattr(install, "TRITON", tmp_path)
    wheel, numpy, runtime = install.triton_wheels()
    assert (wheel, numpy) == (WHEEL, NUMPY)
    assert runtime in (ROOT / "constraints.txt").read_text().splitlines()
    (tmp_path / "lib/python3.12/site-packages/pytriton").mkdir(parents=True)
    assert install.triton_wheels() == []


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the Makefile, and an install script that only records what it was asked for."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "install.py").write_text(
        "import os, pathlib, sys\n"
        "for name in ('.venv/bin', '.venv-triton'): pathlib.Path(name).mkdir(parents=True, exist_ok=True)\n"
        "command = pathlib.Path('.venv/bin/serin')\n"
        "command.write_text('#!/bin/sh\\necho $2 >> asked\\n')\n"
        "command.chmod(0o755)\n"
        "open('asked', 'a').write(sys.argv[1] + '\\n')\n"
        "sys.exit('no network') if 'FAIL' in os.environ else None\n"
    )
    source = Path("serin/serving/triton/installation.py")
    (tmp_path / source).parent.mkdir(parents=True)
    shutil.copy(ROOT / source, tmp_path / source)
    return tmp_path


def _make(clone: Path, *targets: str, **variables: str) -> tuple[int, str, list[str]]:
    asked = clone / "asked"
    asked.unlink(missing_ok=True)
    done = subprocess.run(
        ["make", f"PYTHON={sys.executable}", *targets],
        cwd=clone,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout, asked.read_text().split() if asked.exists() else []


DEVELOPERS, TRITON = ".venv/.installed", ".venv-triton/.installed"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on PATH")
def test_users_and_developers_get_what_they_need_in_any_order(clone: Path) -> None:
    assert _make(clone, "install")[2] == ["users", "triton"]
    assert _make(clone, "install")[2] == []
    assert _make(clone, DEVELOPERS, TRITON)[2] == ["developers"]
    shutil.rmtree(clone / ".venv")
    shutil.rmtree(clone / ".venv-triton")
    assert _make(clone, DEVELOPERS, TRITON)[2] == ["developers", "triton"]
    assert _make(clone, "install")[2] == []  # what developers have includes it
    later = (clone / DEVELOPERS).stat().st_mtime + 10
    os.utime(clone / "pyproject.toml", (later, later))
    assert _make(clone, "install")[2] == ["users"]
    assert _make(clone, DEVELOPERS)[2] == ["developers"]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on PATH")
def test_a_failed_installation_fails_make_and_is_repeated(clone: Path) -> None:
    code, said, _ = _make(clone, "install", FAIL="1")
    assert code != 0
    assert "no network" in said
    assert _make(clone, "install")[2] == ["users", "triton"]


@pytest.mark.parametrize("part", ["triton", "gateway"])
def test_an_installation_prepares_prefects_database_for_the_first_stack(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path, digest: str, whole: Path) -> None:
        assert folder == whole.parent
        assert whole == prepared.template_file(digest)
        whole.write_text("made")

    library = tmp_path / "filter.so"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(template, "_make_template", make)
    monkeypatch.setattr(installation, "install_triton", lambda: None)
    monkeypatch.setattr(installation, "install_request_filter", lambda: library)
    done = CliRunner().invoke(app, ["install", part])
    assert done.exit_code == 0, done.output
    assert prepared.template_file(deployments_digest()).read_text() == "made"


def test_a_database_that_cannot_be_prepared_does_not_fail_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (tmp_path / "serin").write_text("a file where the cache should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with heard(said.append):
        template.prepare()
    assert "Prefect's database is not prepared" in said[0]
