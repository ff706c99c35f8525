"""A Valkey that keeps the events of several hosts, with the settings of deployments/events: TLS and a password."""

import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

from serin.windows.valkey_place import ValkeyPlace
from tests.cluster.namespaces import Host, end
from tests.cluster.parts import valkey
from tests.e2e.serving_certificates import Authority
from tests.kit.waiting import running, tail, until
from tests.signals import hit

SETTINGS = Path(__file__).resolve().parents[2] / "deployments" / "events" / "valkey.conf"


class EventsServer:
    """`host` None: on this machine."""

    def __init__(self, folder: Path, *, host: Host | None = None, port: int, **more: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self._host, self.address = folder, host, host.address if host else "127.0.0.1"
        self.password = secrets.token_urlsafe(24)
        self.password_file, self.authority = folder / "password", folder / "ca.pem"
        self.password_file.write_text(f"{self.password}\n")
        self.password_file.chmod(0o600)
        authority = Authority()
        self.authority.write_bytes(authority.certificate)
        authority.pair(addresses=[self.address]).write(folder / "own.pem", folder / "own.key")
        words = {
            "requirepass": self.password,
            "bind": self.address,
            "dir": str(folder),
            "tls-port": str(port),
        }
        words |= {"tls-cert-file": str(folder / "own.pem"), "tls-key-file": str(folder / "own.key")}
        words |= {
            "tls-ca-cert-file": str(self.authority),
            **{key.replace("_", "-"): more[key] for key in more},
        }
        own = folder / "valkey.conf"
        own.write_text(f"include {SETTINGS}\n" + "".join(f"{key} {value}\n" for key, value in words.items()))
        own.chmod(0o600)
        self.url = f"valkeys://{self.address}:{port}/0"
        self.process: subprocess.Popen[str] | None = None

    @property
    def place(self) -> ValkeyPlace:
        return ValkeyPlace.read(self.url, self.password_file, self.authority)

    @property
    def variables(self) -> Mapping[str, str]:
        """What each host has in its environment."""
        names = {"SERIN_EVENTS": self.url, "SERIN_EVENTS_PASSWORD_FILE": str(self.password_file)}
        return {**names, "SERIN_EVENTS_CA": str(self.authority)}

    def start(self) -> None:
        log = self.folder / "valkey.log"
        log.write_text("")
        command = [str(valkey.server()), str(self.folder / "valkey.conf")]
        if self._host is not None:
            self.process = self._host.popen(command, log=log)
        else:
            with log.open("ab") as output:
                self.process = subprocess.Popen(command, stdout=output, stderr=output, text=True)
        until(
            lambda: "Ready to accept" in log.read_text(),
            "Valkey is ready",
            within_s=60,
            alive=running(self.process),
            said=tail(log),
        )

    def kill(self) -> None:
        """Ends it at once, as a crash does."""
        assert self.process is not None
        hit(self.process.pid)
        self.process.wait(30)

    def close(self) -> None:
        if self.process is not None:
            end(self.process)
