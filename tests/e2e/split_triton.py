"""A bundle for a GPU in a real Triton whose native backend lets the host play the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serin.machine.ports import free_ports
from serin.serving.native.onnx_backend import NATIVE, SETTINGS
from serin.serving.triton.backends import Server
from serin.serving.triton.installation import find_triton
from serin.serving.triton.process import TritonPorts, new_place, triton_process
from serin.serving.triton.repository import build_repository
from serin.store.artifacts import Bundle, Release
from tests.e2e.serving_host import ChildHost, is_ready, wait_for

SERVER = Server(backends=frozenset({"python", NATIVE}), accelerators=frozenset({"cuda"}))


@contextmanager
def serving_split(bundle: Bundle, folder: Path, *, workers: int, piece_rows: int) -> Iterator[TritonPorts]:
    """Serves `bundle` as on a GPU, but on the CPU."""
    release = Release(model=bundle.model, version=bundle.version)
    repository = build_repository(bundle, folder / "repository", server=SERVER, gpus=(0,))
    on_the_host(repository / bundle.model, bundle.version, workers=workers, piece_rows=piece_rows)
    http, grpc, metrics = free_ports(3)
    place = new_place(release, (http, grpc, metrics))
    host, log = ChildHost(), folder / "log.txt"
    try:
        host.start(triton_process(find_triton(), release, repository, place, log))
        wait_for(release.name, lambda: is_ready(place.endpoint.http), host, release.name)
        yield place
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from error
    finally:
        host.stop_all()


def on_the_host(model: Path, version: int, *, workers: int, piece_rows: int) -> None:
    """Changes the settings of a model for a GPU."""
    settings = model / str(version) / SETTINGS
    lines = settings.read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("split ")]
    word, _, arena, graphs, _, _, sizes = lines[at].split()
    lines[at] = f"{word} cpu {arena} {graphs} {workers} {piece_rows} {sizes}"
    config = model / "config.pbtxt"
    for path, text in (
        (settings, "\n".join([*lines, ""])),
        (config, config.read_text().replace("KIND_GPU", "KIND_CPU").replace("gpus: 0", "")),
    ):
        path.chmod(0o644)
        path.write_text(text)
