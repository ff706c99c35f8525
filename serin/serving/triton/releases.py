"""The releases that run on this machine: one Triton process each, with its own repository, ports and shared memory."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from serin.errors import FileBroken, SerinError
from serin.formats.bundle import REPOSITORY, read_manifest
from serin.machine.hardware import Device, inventory
from serin.machine.locks import locked
from serin.machine.ports import free_ports, is_free
from serin.machine.process import ProcessHost
from serin.serving.triton.gpu_memory import estimate_need, look_around, pick_devices, repository_need
from serin.serving.triton.installation import TritonInstall, find_triton
from serin.serving.triton.probe import KnownReleases
from serin.serving.triton.process import new_place, reclaim_shared_memory, triton_process
from serin.serving.triton.release_record import FILE, Record, Served, write_record
from serin.serving.triton.repository import (
    build_repository,
    check_own_repository,
    choose_for,
    fetch_tuned,
    serving_settings,
)
from serin.serving.triton.verify import verify_release
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from serin.store.trust import Trust

logger = logging.getLogger(__name__)


class Releases(KnownReleases):
    """Starts, verifies and stops releases."""

    def __init__(
        self,
        folder: Path,
        *,
        host: ProcessHost,
        store: Store,
        install: TritonInstall | None = None,
        devices: Callable[[], Sequence[Device]] = inventory,
        ports: tuple[int, int, int] | None = None,
        trust: Trust | None = None,
    ) -> None:
        """`ports`: of the only release, where it has an address for itself; None: free ones. `trust`: who must have
        signed a version; None: nobody."""
        super().__init__(folder, host=host)
        self._store = store
        self._install = install
        self._devices = devices
        self._ports, self._trust = ports, trust

    def start(self, release: Release) -> None:
        """Starts the release unless it runs or is starting. One that stopped answering is restarted.

        Raises BundleUntrusted, GpuMemoryShort or BackendRefused before anything is loaded, when it is not signed by a
        trusted key, does not fit or cannot be served as requested.
        """
        record = self._usable_record(release)
        if record and self._host.state(release.name) in ("starting", "running"):
            if self.state(release) != "dead":
                return
            self._host.stop(release.name)
        bundle = self._store.bundle(release.model, release.label)
        if self._trust is not None:
            self._trust.check(self._store, bundle)
        if self._install is None:
            self._install = find_triton()
        if record:
            reclaim_shared_memory(record.place)
        if record is None:
            fetch_tuned(self._store, bundle)
        if record is None or not all(map(is_free, record.place.ports)):
            record = self._write_record(release, bundle, record)
        try:
            repository = self._build_repository(release, bundle, record.served)
        except (SerinError, OSError):
            shutil.rmtree(self._folder / release.name, ignore_errors=True)  # its memory reservation ends too
            raise
        self._row_times.forget(release)
        process = triton_process(
            self._install,
            release,
            repository,
            record.place,
            self.log(release),
            record.served.devices,
        )
        self._host.start(process)

    def verify(self, release: Release) -> None:
        """Checks that the running release answers the golden rows as its bundle says: by HTTP and gRPC, alone and in
        batches."""
        bundle = self._store.bundle(release.model, release.label)
        verify_release(release, self.endpoint(release), bundle)

    def stop(self, release: Release) -> None:
        """Removes the process, shared memory and folder of the release. Its log is kept."""
        place = self._place_if_known(release)
        self._host.stop(release.name)
        if place:
            reclaim_shared_memory(place)
        self._row_times.forget(release)
        shutil.rmtree(self._folder / release.name, ignore_errors=True)

    def _usable_record(self, release: Release) -> Record | None:
        """Returns the record. A damaged one that nobody remembers is kept under another name."""
        try:
            return self._record(release)
        except FileBroken as error:
            aside = Path(error.path).with_name(f"{FILE}.broken-{time.time():.0f}")
            logger.warning(f"{error.path} is damaged ({error.problem}); it is kept as {aside}")
            Path(error.path).rename(aside)
            return None

    def _write_record(self, release: Release, bundle: Bundle, before: Record | None) -> Record:
        """Assigns ports, and GPU memory where needed: one release at a time, so that no two get the same."""
        with self._alone():
            served = before.served if before else self._serve(release, bundle)
            served = replace(served, request_s=serving_settings(bundle).request_timeout)
            others = [self._place_if_known(other) for other in self._known() if other != release]
            taken = [port for place in others if place for port in place.ports]
            http, grpc, metrics = self._ports or free_ports(3, but=taken)
            place = new_place(release, (http, grpc, metrics))
            record = Record(release=release.name, place=place, served=served)
            write_record(self._folder / release.name, record)
        log = self.log(release)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as lines:
            lines.write(f"{release.name} is served as {served}\n")
        return record

    def _serve(self, release: Release, bundle: Bundle) -> Served:
        """Chooses the backend, and the devices with their memory."""
        assert self._install is not None, "called before Triton was found"
        serving, devices, folder = serving_settings(bundle), tuple(self._devices()), Path(bundle.path)
        server = self._install.describe(gpus=bool(devices))
        if (folder / REPOSITORY).is_dir():
            wanted = len(devices) if serving.device != "cpu" else 0
            asks = check_own_repository(folder, read_manifest(folder), server, wanted)
            if not asks:
                return Served(backend="repository", reason="your own repository, unchanged")
            backend, reason = "repository", "one of its models needs a GPU"
            need = repository_need(folder, serving)
        else:
            choice = choose_for(bundle, server=server, serving=serving, gpus=len(devices))
            if choice.place == "cpu":
                return Served(backend=choice.backend, reason=choice.reason)
            backend, reason = choice.backend, choice.reason
            need = estimate_need(folder, choice, serving)
        rooms = look_around(devices, releases=self._folder, but=release.name)
        picked = pick_devices(release.name, need, serving.gpus, rooms)
        return Served(
            backend=backend,
            reason=reason,
            devices=tuple(device.id for device in picked),
            bytes=need.total_bytes,
            arena_bytes=need.arena_bytes,
        )

    def _build_repository(self, release: Release, bundle: Bundle, served: Served) -> Path:
        assert self._install is not None, "called before Triton was found"
        serving = serving_settings(bundle)
        if not served.devices:
            serving = serving.model_copy(update={"device": "cpu"})
        return build_repository(
            bundle,
            self._repository(release),
            server=self._install.describe(gpus=bool(served.devices)),
            serving=serving,
            gpus=tuple(range(len(served.devices))),
            gpu_bytes=served.arena_bytes or None,
            release=release,
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / ".lock"):
            yield
