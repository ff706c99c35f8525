"""A Kubernetes control plane on this machine: etcd, API server, controller manager and scheduler.

It listens on one address, with RBAC and tokens; nothing is left when the context ends.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from serin.machine.ports import free_ports
from tests.cluster.part import need
from tests.cluster.parts.kubernetes import binaries
from tests.kit.waiting import running, until

ADMIN = "admin-token"
_READY_S = 600.0  # a busy machine takes minutes

Object = dict[str, Any]


@dataclass
class ControlPlane:
    """`url` with `admin`: a client with all rights. `folder` holds logs, certificates and the kubeconfig."""

    folder: Path
    address: str
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def client(self, token: str = ADMIN) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, verify=False, timeout=30.0
        )

    def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json", **query: str
    ) -> Any:
        """Returns the answer's content; fails the test on an error."""
        with self.client() as api:
            answer = api.request(
                method,
                path,
                params=query,
                content=None if body is None else json.dumps(body),
                headers={"Content-Type": kind},
            )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:800]}"
        return answer.json()

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(binaries() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0 or not check, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done

    def apply(self, documents: Sequence[Object]) -> None:
        """Applies objects by server-side apply."""
        self.kubectl(
            "apply",
            "--server-side",
            "--force-conflicts",
            "--filename",
            "-",
            stdin=yaml.safe_dump_all(documents),
        )

    def token(self, namespace: str, account: str, within_s: float = 60.0) -> str:
        """Returns the token of a service account, as a pod with it has."""
        import base64

        def found() -> str | None:
            for secret in self.call("GET", f"/api/v1/namespaces/{namespace}/secrets")["items"]:
                notes = secret["metadata"].get("annotations", {})
                if notes.get("kubernetes.io/service-account.name") == account and "token" in secret.get(
                    "data", {}
                ):
                    return base64.b64decode(secret["data"]["token"]).decode()
            return None

        alive = running(*self.processes.values())
        return until(found, f"a token of {namespace}/{account}", within_s=within_s, every_s=0.2, alive=alive)


@contextlib.contextmanager
def control_plane(
    folder: Path, *, address: str = "127.0.0.1", schedule: bool = True
) -> Iterator[ControlPlane]:
    """Starts it and ends it. `schedule`: with the controller manager and the scheduler."""
    need("kubernetes")
    folder.mkdir(parents=True, exist_ok=True)
    client_port, peer_port, port = free_ports(3)
    plane = ControlPlane(folder=folder, address=address, port=port)
    _make_keys(folder, address)
    (folder / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n')
    (folder / "tokens.csv").chmod(0o600)
    etcd = f"http://127.0.0.1:{client_port}"
    try:
        _start(plane, "etcd", _etcd(folder, etcd, peer_port))
        _start(plane, "kube-apiserver", _api_server(folder, etcd, address, port))
        alive = running(*plane.processes.values())
        until(lambda: _is_ready(plane), "the API server", within_s=_READY_S, every_s=0.2, alive=alive)
        _write_kubeconfig(plane)
        if schedule:
            shared = [
                f"--kubeconfig={plane.kubeconfig}",
                "--leader-elect=false",
                "--port=0",
                "--secure-port=0",
            ]
            _start(
                plane,
                "kube-controller-manager",
                [
                    *shared,
                    f"--service-account-private-key-file={folder / 'sa.key'}",
                    f"--root-ca-file={folder / 'tls.crt'}",
                    "--use-service-account-credentials=false",
                    "--controllers=*,-nodelifecycle,-ttl",
                    "--horizontal-pod-autoscaler-sync-period=2s",
                ],
            )
            _start(plane, "kube-scheduler", shared)
        yield plane
    finally:
        # The API server before etcd: without etcd it does not end.
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            process = plane.processes.get(name)
            if process is not None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _make_keys(folder: Path, address: str) -> None:
    commands = (
        ["genrsa", "-out", "sa.key", "2048"],
        ["rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"],
        [
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubernetes",
            "-addext", f"subjectAltName=IP:{address},IP:127.0.0.1,DNS:localhost",
            "-keyout", "tls.key", "-out", "tls.crt",
        ],
        [
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=front-proxy-client",
            "-keyout", "front.key", "-out", "front.crt",
        ],
    )  # fmt: skip
    for command in commands:
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)


def _etcd(folder: Path, url: str, peer_port: int) -> list[str]:
    peer = f"http://127.0.0.1:{peer_port}"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _api_server(folder: Path, etcd: str, address: str, port: int) -> list[str]:
    return [
        f"--etcd-servers={etcd}",
        f"--bind-address={address}",
        f"--advertise-address={address if address != '127.0.0.1' else '198.18.255.254'}",
        f"--secure-port={port}",
        f"--tls-cert-file={folder / 'tls.crt'}",
        f"--tls-private-key-file={folder / 'tls.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        f"--service-account-key-file={folder / 'sa.pub'}",
        "--service-cluster-ip-range=10.96.0.0/24",
        "--authorization-mode=RBAC",
        f"--token-auth-file={folder / 'tokens.csv'}",
        # For aggregated servers: how this one shows them who it is, and who asks.
        f"--proxy-client-cert-file={folder / 'front.crt'}",
        f"--proxy-client-key-file={folder / 'front.key'}",
        f"--requestheader-client-ca-file={folder / 'front.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
    ]


def _start(plane: ControlPlane, name: str, options: Sequence[str]) -> None:
    with (plane.folder / f"{name}.log").open("wb") as log:
        plane.processes[name] = subprocess.Popen(
            [str(binaries() / name), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=plane.folder,
        )


def _is_ready(plane: ControlPlane) -> bool:
    try:
        with plane.client() as api:
            return api.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _write_kubeconfig(plane: ControlPlane) -> None:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [
            {
                "name": "test",
                "cluster": {"server": plane.url, "certificate-authority": str(plane.folder / "tls.crt")},
            }
        ],
        "users": [{"name": "admin", "user": {"token": ADMIN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
    }
    plane.kubeconfig.write_text(yaml.safe_dump(document))
    plane.kubeconfig.chmod(0o600)
