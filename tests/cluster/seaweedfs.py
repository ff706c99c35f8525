"""A running object store for tests: SeaweedFS with one bucket, and the environment in which Serin uses it."""

import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from obstore.exceptions import BaseError
from obstore.store import S3Store

from serin.machine.ports import free_ports
from tests.cluster.part import need
from tests.cluster.parts.seaweedfs import PROGRAM

BUCKET = "serin-tests"
_READY_S = 60.0


@contextmanager
def running_seaweedfs(
    folder: Path, *, address: str = "127.0.0.1", others: Mapping[str, Sequence[str]] | None = None
) -> Iterator[dict[str, str]]:
    """Starts a server that keeps its files in `folder`; yields the variables that name its store and credentials.

    `address`: where it listens, such as the bridge of several network namespaces. `others`: further access keys with
    the same secret, and what each may do.
    """
    need("seaweedfs")
    access, secret = "serin-tests", secrets.token_urlsafe(24)
    (folder / "data").mkdir(parents=True)
    credentials = [{"accessKey": name, "secretKey": secret} for name in (access, f"{access}-2")]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = [{"name": "tests", "credentials": credentials, "actions": actions}]
    for name, limited in (others or {}).items():
        pair = {"accessKey": name, "secretKey": secret}
        identities.append({"name": name, "credentials": [pair], "actions": [*limited]})
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    port, options = _options(folder, address)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [PROGRAM, f"-logdir={folder}", "server", *options], stdout=log, stderr=subprocess.STDOUT
        )
    environment = {
        "SERIN_STORE": f"s3://{BUCKET}/{secrets.token_hex(4)}",
        "AWS_ENDPOINT_URL": f"http://{address}:{port}",
        "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        _wait_until_ready(environment, server, folder / "log")
        yield environment
    finally:
        server.kill()  # SIGTERM takes it 20 s
        server.wait()


def _options(folder: Path, address: str) -> tuple[int, list[str]]:
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    options = [f"-dir={folder / 'data'}", f"-ip={address}", f"-ip.bind={address}"]
    for number, name in enumerate(names):
        options += [f"-{name}.port={ports[2 * number]}", f"-{name}.port.grpc={ports[2 * number + 1]}"]
    options += ["-filer", "-s3", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    options += ["-volume.max=20", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false"]
    options += [f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"]
    return ports[2 * names.index("s3")], options


def _wait_until_ready(environment: dict[str, str], server: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when an object was written, which makes the bucket: volumes are made after the server answers."""
    client = S3Store(
        BUCKET,
        endpoint=environment["AWS_ENDPOINT_URL"],
        region=environment["AWS_DEFAULT_REGION"],
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True, "connect_timeout": "2s", "timeout": "10s"},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            client.put("ready", b"x")
        except BaseError:
            _check(server, log, deadline)
        else:
            return
        time.sleep(0.1)


def _check(server: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    ended = server.poll()
    if ended is not None or time.monotonic() > deadline:
        state = "is not ready" if ended is None else f"exited with {ended}"
        raise AssertionError(f"SeaweedFS {state}:\n{log.read_text(errors='replace')[-3000:]}")
