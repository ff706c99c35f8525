"""Podman on one host of a test: its own network, its own images, no cgroup manager and no systemd needed."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster.namespaces import Host
from tests.cluster.parts import podman as part

_ENGINE = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_config_dir = "{folder}/networks"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""
_POLICY = {"default": [{"type": "insecureAcceptAnything"}]}


class Podman:
    def __init__(self, host: Host, folder: Path) -> None:
        """`folder`: on a plain disk."""
        self.host, self.folder = host, folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "networks").mkdir(exist_ok=True)
        for name, text in (("containers.conf", _ENGINE), ("storage.conf", _STORAGE)):
            (folder / name).write_text(text.format(folder=folder))
        self.environment = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
            "TMPDIR": str(folder),
        }

    def __call__(self, *words: str, within_s: float = 120.0, check: bool = True) -> str:
        """What a command says on standard output."""
        done = self.host.run(["podman", *words], within_s=within_s, check=check, env=self.environment)
        return done.stdout

    def has_image(self, name: str) -> bool:
        done = self.host.run(["podman", "image", "exists", name], check=False, env=self.environment)
        return done.returncode == 0

    def import_base(self, name: str) -> None:
        self("import", str(part.base()), name, within_s=600)

    def build(self, file: Path, name: str, *, context: Path, arguments: Mapping[str, str]) -> None:
        """Builds an image with packages from the wheelhouse alone, named in a secret and mounted for the build."""
        settings = self.folder / "pip.conf"
        settings.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        given = [word for pair in arguments.items() for word in ("--build-arg", "=".join(pair))]
        self(  # Docker's format: the other one has no health checks
            "build", "--format", "docker", "--file", str(file), "--tag", name, "--secret", f"id=pip,src={settings}",
            "--volume", f"{part.wheelhouse()}:/wheels:ro", *given, str(context), within_s=3600,
        )  # fmt: skip

    @contextmanager
    def running(self, *words: str) -> Iterator[str]:
        """Runs a container in the background, and removes it with its volumes."""
        name = self("run", "--detach", *words).strip()
        try:
            yield name
        finally:
            self("rm", "--force", "--volumes", name, check=False)

    def inspect(self, name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self("inspect", name))
        return found[0]

    def compose(self, file: Path, *words: str, variables: Mapping[str, str], within_s: float = 600.0) -> str:
        settings = {**self.environment, **variables, "PYTHONPATH": str(part.compose())}
        command = [sys.executable, "-m", "podman_compose", "--file", str(file), *words]
        done = self.host.run(
            command, env=settings, cwd=file.parent, within_s=within_s, stderr=subprocess.STDOUT
        )
        return done.stdout

    @contextmanager
    def checking_health(self) -> Iterator[None]:
        """Runs the health checks of all containers, which systemd's timers do elsewhere."""
        done = threading.Event()

        def check() -> None:
            while not done.wait(1.0):
                with suppress(AssertionError, subprocess.TimeoutExpired):
                    for name in self("ps", "--format", "{{.Names}}").split():
                        self("healthcheck", "run", name, check=False)

        thread = threading.Thread(target=check, name="health")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
