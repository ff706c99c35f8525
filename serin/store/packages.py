"""Packages: what a run needs of the machine that sent it, as files of the store, named by their digest.

packages/<digest>/package.json   the manifest: size and SHA-256 of every file; its own SHA-256 is the digest
packages/<digest>/<name>         the files

The manifest is written last: without it there is no package. A name has one content, so two that write the same package
write the same bytes. A reader believes nothing but the digest: what was changed, added or enlarged in the store is
refused before it is on this host's disk under its name. Pushed tables (pipeline/tables.py) have the same form.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from serin.errors import BundleBroken, NameInvalid, ObjectExists, PackageRefused, SpecError
from serin.machine import environment
from serin.machine.documents import canonical, read_if_any
from serin.machine.packages import enter, entered
from serin.machine.typed_json import Document
from serin.spec.environment import EnvironmentSpec
from serin.spec.stored import stored_section
from serin.store.file_list import RENEWED_S, ListedFile, Published
from serin.store.objects import checked_key
from serin.store.store import Store

if TYPE_CHECKING:
    from serin.spec.pipeline import PipelineSpec

MANIFEST: Final = "package.json"
FOLDER: Final = "packages"
REFERENCE: Final = "package:"
"""What a reference to a package begins with; its digest follows."""
IMPORTS: Final = "imports"
"""The folder in a package of code that is not beside its spec, under the names it is imported by."""
MOST_BYTES: Final = 16 << 20
"""What a package may take: it is read into memory, and a table belongs into the store."""
MOST_FILES: Final = 2000
_MANIFEST_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f\\:]{1,400}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageManifest(Document, form="serin.package"):
    files: Mapping[str, ListedFile]

    def to_bytes(self) -> bytes:
        """The same for the same files."""
        return canonical(self.to_json())

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def manifest_of(contents: Mapping[str, bytes]) -> PackageManifest:
    files = {
        name: ListedFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    return PackageManifest(files=dict(sorted(files.items())))


def publish_package(store: Store, contents: Mapping[str, bytes]) -> bool:
    """Writes a package; False when the store has it: nothing was sent."""
    manifest = manifest_of(contents)
    _check(manifest)
    if renew_files(store, FOLDER, manifest):
        return False
    with store.workspace() as folder:
        paths = {name: folder / str(number) for number, name in enumerate(contents)}
        for path, content in zip(paths.values(), contents.values(), strict=True):
            path.write_bytes(content)
        write_files(store, FOLDER, manifest, paths)
    return True


def renew_files(store: Store, folder: str, manifest: PackageManifest) -> bool:
    """Whether the store has these files; `serin gc` counts their age from now on, at most a day off."""
    key, files = f"{folder}/{manifest.digest}/{MANIFEST}", store.shared_files()
    found = files.read(key)
    if found is not None and found.age_s > RENEWED_S:
        files.put(key, found.content)
    return found is not None


def write_files(store: Store, folder: str, manifest: PackageManifest, paths: Mapping[str, Path]) -> None:
    """Writes files by their names, and their manifest last."""
    place, files = f"{folder}/{manifest.digest}", store.shared_files()
    files.upload({f"{place}/{name}": path for name, path in paths.items()})
    with suppress(ObjectExists):  # of another who sends the same
        files.create(f"{place}/{MANIFEST}", manifest.to_bytes())


def fetch_package(store: Store, digest: str) -> Path:
    """The package's folder on this host, in use until this process ends. PackageRefused when the store has none, or has
    other files than the digest says; nothing is left of it then."""
    place, copies = f"{FOLDER}/{checked_package(digest)}", store.copies()
    if copies.known(place) is not None and (known := copies.known(place, hold=True)) is not None:
        return known
    manifest, files = read_manifest(store, digest), store.shared_files()

    def download(wanted: Mapping[str, Path]) -> None:
        files.download({f"{place}/{name}": path for name, path in wanted.items()})

    published = Published(attempt=digest, by="", files=manifest.files)
    try:
        copies.get(place, published, download)
    except (BundleBroken, FileNotFoundError) as error:
        copies.forget(place)
        raise _refused(
            store, digest, f"a file is missing or was changed ({error}); send the run again"
        ) from None
    return copies.get(place, published, download, hold=True)


@contextmanager
def inside_package(store: Store, digest: str) -> Iterator[Path]:
    """The package's folder, in which this process and its children work during the block: relative paths begin there,
    and modules are imported from there."""
    folder = fetch_package(store, digest)
    with environment.working_in(folder, imports=(folder, folder / IMPORTS), package=digest):
        yield folder


def stored_spec(bundle: Path) -> PipelineSpec:
    """The spec of a published version. An operator that was sent with its run is imported from the run's package."""
    from serin.spec.load import load_spec  # takes a while to import

    try:
        return load_spec(bundle / "spec.yaml")
    except SpecError as error:
        if (package := package_of(bundle)) is None:
            raise
        try:
            folder = fetch_package(Store.open(), package)
        except PackageRefused:
            raise error from None
        enter_stored(bundle)
        with environment.importing_from((folder, folder / IMPORTS)):
            return load_spec(bundle / "spec.yaml")


def package_of(bundle: Path) -> str | None:
    """The digest of the package that a published version was made from."""
    package = read_if_any(bundle / "manifest.json").get("lineage", {}).get("package")
    return None if package is None else str(package)


def enter_stored(bundle: Path) -> None:
    """For a published version whose own code runs here: enters its environment unless this process is in one. The lock
    that was sent with its run is that of the run's package."""
    given = stored_section(bundle, "environment")
    if not given or entered() is not None:
        return
    asked = EnvironmentSpec.model_validate(given)
    if asked.lock is not None and (package := package_of(bundle)) is not None:
        lock = fetch_package(Store.open(), package) / asked.lock
        asked = asked.model_copy(update={"lock": str(lock)})
    enter(asked, stored=True)


def read_manifest(store: Store, digest: str) -> PackageManifest:
    """The manifest, after its digest and the sizes of all files were compared: what is too large is not read."""
    place, files = f"{FOLDER}/{checked_package(digest)}", store.shared_files()
    sizes = {entry.key.removeprefix(f"{place}/"): entry.size for entry in files.entries(f"{place}/")}
    if MANIFEST not in sizes:
        reason = (
            "there is none; sender and workers must have the same SERIN_STORE, or `serin gc` has removed it"
        )
        raise _refused(store, digest, reason)
    if sizes[MANIFEST] > _MANIFEST_BYTES:
        raise _refused(store, digest, f"its manifest has {sizes[MANIFEST]:,} bytes")
    found = files.read(f"{place}/{MANIFEST}")
    if found is None or hashlib.sha256(found.content).hexdigest() != digest:
        raise _refused(store, digest, "its manifest was changed; send the run again")
    try:
        manifest = PackageManifest.load(found.content)
        _check(manifest)
    except (ValueError, NameInvalid) as error:
        raise _refused(store, digest, str(error)) from error
    for name, file in manifest.files.items():
        if sizes.get(name) != file.size:
            reason = f"{name} has {sizes.get(name, 0):,} bytes there and {file.size:,} in the manifest"
            raise _refused(store, digest, f"{reason}; send the run again")
    return manifest


def checked_package(digest: str) -> str:
    """The digest of a package, or NameInvalid."""
    if not _DIGEST.fullmatch(digest):
        raise NameInvalid(kind="package", name=digest, rule="64 hexadecimal digits")
    return digest


def _check(manifest: PackageManifest) -> None:
    """Raises NameInvalid or ValueError for what no package may hold."""
    if manifest.size > MOST_BYTES or len(manifest.files) > MOST_FILES:
        raise ValueError(
            f"it holds {len(manifest.files):,} files with {manifest.size:,} bytes; at most {MOST_FILES:,} with "
            f"{MOST_BYTES:,} are allowed"
        )
    folders = {parent for name in manifest.files for parent in _parents(name)}
    for name in manifest.files:
        if not _PLAIN.fullmatch(checked_key(name)) or name in folders or name == MANIFEST:
            raise NameInvalid(kind="file", name=name, rule="a relative path of a file in the package")


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def _refused(store: Store, digest: str, reason: str) -> PackageRefused:
    return PackageRefused(digest=digest[:12], place=store.url, reason=reason)
