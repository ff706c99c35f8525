"""The store: datasets by their content, model versions by number. Published completely or not at all, never changed.

    datasets/<digest>/          a dataset, by its content and what made it; dataset.json is its marker
    keys/<key>                  the digest of the dataset that was computed for a key (spec sections and inputs)
    models/<model>/numbers/<n>  a version number that was given out; never given out again
    models/<model>/versions/<n>/  a bundle; manifest.json is its marker
    models/<model>/versions/<n>e<m>/  the same version with edition m of its lookups; the version itself is edition 1
    models/<model>/editions/<n>/<m>  a number of an edition that was given out; never given out again
    models/<model>/lookups/<n>e<m>  when the tables of an edition were last read and found unchanged
    models/<model>/signatures/<n>.json  who has signed a version, or <n>e<m>.json an edition (store/trust.py)
    models/<model>/origins/<n>.json  the stores that a copied version came through (store/origin.py)
    models/<model>/aliases.json live, candidate, previous
    policy.json                 what a version must have to be copied here or rolled out (formats/policy.py)
    work/                       folders that are being filled
    kept/<key>                  what a build made of a single file, for the next build
    locks/                      who uses what: a process that has found something holds it (machine/locks.py)

On a file system a folder is renamed into place. On an object store its files are uploaded with a list of them last, and
read through a cache (places.py).
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from serin.errors import BundleBroken, NameInvalid, NotFound, ObjectChanged, ObjectExists
from serin.machine import environment
from serin.machine.documents import parse_json
from serin.machine.durable import make_private
from serin.machine.locks import holding
from serin.spec.names import split_version, valid_model_name
from serin.store.artifacts import Bundle, Dataset, Release, parse_label
from serin.store.cache import Cache
from serin.store.objects import Files, FolderObjects
from serin.store.open import open_files
from serin.store.places import LocalPlaces, RemotePlaces, copies_of, writing_to
from serin.store.published import bundle_at, checked_digest, dataset_at, make_home_of, touch

_ALIAS = re.compile(r"live|candidate|previous")
_DATASET, _BUNDLE = "dataset.json", "manifest.json"


class Store:
    """Datasets and model versions. `Store.open()` is the one that SERIN_STORE or SERIN_HOME names."""

    def __init__(self, url: str, *, cache: Path | None = None) -> None:
        self.url = url
        self.local = "://" not in url or url.startswith("file://")
        self._root = Path(url.removeprefix("file://")).expanduser().absolute()
        self._cache = cache or environment.home() / "cache"
        self._files: Files = FolderObjects(self._root) if self.local else open_files(url)
        self._places: LocalPlaces | RemotePlaces
        self._places = LocalPlaces(self._root) if self.local else RemotePlaces(self._files, self._cache)

    @classmethod
    def open(cls) -> Store:
        """The store that this process is configured to use."""
        return cls(environment.store_url())

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """An empty folder to fill and publish. What is left of it at the end is removed."""
        name = secrets.token_hex(8)
        with writing_to(self.url):
            parent, lock = self._places.workspace_parent(), self._places.workspace_lock(name)
            with holding(lock):
                parent.mkdir(parents=True, exist_ok=True)
                folder = parent / name
                folder.mkdir(mode=0o700)  # half done is for its owner alone
                inside = folder / "it"  # and has the mode that the umask gives once it is published
                try:
                    inside.mkdir()
                    yield inside
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                lock.unlink(missing_ok=True)

    def workspace_parent(self) -> Path:
        """Where the folders of `workspace` are."""
        return self._places.workspace_parent()

    def workspace_lock(self, name: str) -> Path:
        """Held while the folder of that name is in use."""
        return self._places.workspace_lock(name)

    def kept_folder(self) -> Path:
        """Where builds keep what the next one may find: on this machine, also when the store is elsewhere. Where
        several hosts compute one dataset, SERIN_SCRATCH is a folder that all of them see."""
        if self.local:
            make_home_of(self._root)
            return self._root / "kept"
        if (scratch := environment.path("SERIN_SCRATCH")) is not None:
            return make_private(scratch) / "kept"
        make_home_of(self._cache)
        return make_private(self._cache) / "kept"

    @contextmanager
    def using_kept(self) -> Iterator[Path]:
        """`kept_folder`, from which nothing is removed during the block."""
        kept = self.kept_folder()
        with ExitStack() as stack:
            with suppress(OSError):  # a store that is only read keeps nothing either
                stack.enter_context(holding(self.lock("kept")))
            yield kept

    def shared_files(self) -> Files:
        """Objects and files that all hosts with this store see, beside datasets and versions."""
        return self._files

    def copies(self) -> Cache:
        """Copies on this host of what all hosts see in this store."""
        make_home_of(self._cache)
        make_private(self._cache)
        return copies_of(self.url, self._cache)

    def lock(self, relative: str) -> Path:
        """The lock file of something in a local store, or on this machine."""
        return (self._root if self.local else self._cache) / "locks" / relative

    # datasets

    def find_dataset(self, key: str) -> Dataset | None:
        """The dataset that was published for `key`, if there is one."""
        digest = self._read(f"keys/{checked_digest(key)}")
        return None if digest is None else self.dataset(digest.decode().strip())

    def dataset(self, edition: str) -> Dataset | None:
        """A published dataset by the name of its folder: in use until this process ends, and as good as new to
        `serin gc`."""
        folder = self._places.fetch(f"datasets/{checked_digest(edition)}", marker=_DATASET, hold=True)
        if folder is None:
            return None
        if self.local:
            touch(folder / _DATASET)
        return dataset_at(folder)

    def knows_dataset(self, key: str) -> bool:
        """Whether a dataset was ever published or remembered for `key`; nothing is fetched."""
        return self._read(f"keys/{checked_digest(key)}") is not None

    def publish_dataset(
        self, key: str, digest: str, folder: Path, *, lasting: Collection[Path] = ()
    ) -> Dataset:
        """Makes `folder` (from `workspace`) visible under its digest and remembers it for `key`. `lasting`: its files
        that are on the disk already."""
        place = f"datasets/{checked_digest(digest)}"
        published = self._publish(folder, place, marker=_DATASET, lasting=lasting)
        self.remember_dataset(key, digest)
        if self.local:
            touch(published / _DATASET)
        return dataset_at(published)

    def hold_dataset(self, dataset: Dataset) -> None:
        """One that another process has found is in use by this one, too, until it ends."""
        path = Path(dataset.path)
        if self.local and dataset.path and path.parent == self._root / "datasets":
            self.dataset(path.name)

    def remember_dataset(self, key: str, digest: str) -> None:
        """`find_dataset(key)` finds this published dataset from now on."""
        with writing_to(self.url):
            self._files.put(f"keys/{checked_digest(key)}", checked_digest(digest).encode())

    def datasets(self) -> list[str]:
        return self._places.published("datasets", marker=_DATASET)

    # model versions

    def reserve_version(self, model: str, *, claim: str | None = None) -> int:
        """The next number for `model`; nobody else gets it, also after a crash. All who ask with the same `claim` (a
        digest) get the same one."""
        base = f"models/{valid_model_name(model)}"
        place = f"{base}/claims/{checked_digest(claim)}" if claim else None
        if place is not None and (claimed := self._read(place)) is not None:
            return int(claimed)
        folder = f"{base}/numbers"
        number = max((int(name) for name in self._files.names(f"{folder}/")), default=0) + 1
        with writing_to(self.url):
            while not self._create(f"{folder}/{number}"):
                number += 1
            if place is not None and not self._create(place, str(number)):
                return self.reserve_version(model, claim=claim)  # another host was faster
        return number

    def claim_version(self, model: str, version: int, digest: str) -> bool:
        """Takes a number that another store gave to the version with this manifest; its next claim is the same one.
        False: the number was given out here."""
        key, mine = (
            f"models/{valid_model_name(model)}/numbers/{int(version)}",
            f"copy of {checked_digest(digest)}",
        )
        with writing_to(self.url):
            return self._create(key, mine) or self._read(key) == mine.encode()

    def publish_bundle(self, model: str, version: int | str, folder: Path, *, copied: bool = False) -> Bundle:
        """Makes `folder` (from `workspace`, manifest.json inside) visible as a version, or as an edition of one
        (`3e2`). It is written once. `copied`: from another store. The same may have been copied before, and an object
        store must have each file as it was sent before it shows the version."""
        release = _numbered(model, version)
        place = _place(release)
        if not copied and release.edition in self.editions(model, release.version):
            raise BundleBroken(path=place, reason="this version is published already; versions never change")
        published = self._publish(folder, place, marker=_BUNDLE, same=True, read_back=copied)
        return bundle_at(published, release)

    def bundle(self, model: str, version: int | str, *, hold: bool = False) -> Bundle:
        """A published version by number, number with edition (`3e2`) or alias, on a local path. A number alone is the
        version as it was exported, an alias has the edition that it was given. `hold`: it is in use until this process
        ends, though no alias points to it."""
        release = self.release(f"{model}:{version}")
        folder = self._places.fetch(_place(release), marker=_BUNDLE, hold=hold)
        if folder is None:
            raise self._no_version(model, release.label)
        return bundle_at(folder, release)

    def find(self, name: str) -> Bundle:
        """The version that MODEL[:VERSION] names, on a local path; the newest when it names none."""
        found = self.release(name)
        return self.bundle(found.model, found.label)

    def bundle_here(self, model: str, version: int | str, *, hold: bool = False) -> Bundle | None:
        """A version that this host has whole, without asking an object store: versions never change."""
        release = _numbered(model, version)
        folder = self._places.here(_place(release), marker=_BUNDLE, hold=hold)
        return None if folder is None else bundle_at(folder, release)

    def manifest_digest(self, model: str, version: int | str) -> str | None:
        """The digest of a version, without fetching it; None when there is no such version."""
        return self._places.marker_digest(_place(_numbered(model, version)), marker=_BUNDLE)

    def has_file(self, model: str, version: int | str, name: str) -> bool | None:
        """Whether a version has a file of this name, without fetching it; None when there is no such version."""
        return self._places.has_file(_place(_numbered(model, version)), name, marker=_BUNDLE)

    def read_file(self, model: str, version: int | str, name: str) -> bytes | None:
        """One file of a version, without fetching the others; None when there is none."""
        return self.read_published(_place(_numbered(model, version)), name)

    def read_published(self, place: str, name: str) -> bytes | None:
        """The same of any published folder."""
        return self._places.read_file(place, name)

    def release(self, name: str, *, prefer: str = "") -> Release:
        """What MODEL[:VERSION] names. Without a version: the one with the alias `prefer`, if there is one, else the
        newest. A number is not checked here: `bundle` finds out whether it exists."""
        model, version = split_version(name)
        if version is not None and parse_label(version) is not None:
            return _numbered(model, version)
        found = self.aliased(model).get(version or prefer)
        if found is None and version is None and (versions := self.versions(model)):
            found = Release(model=model, version=versions[-1])
        if found is None:
            raise self._no_version(model, version or "")
        return found

    def _no_version(self, model: str, version: int | str) -> NotFound:
        if not self.versions(model):
            return NotFound(kind="model", name=model, known=self.models())
        editions = (
            f"{number}e{each}" for number in self.versions(model) for each in self.editions(model, number)[1:]
        )
        known = [*map(str, self.versions(model)), *editions, *self.aliases(model)]
        return NotFound(kind=f"version of {model!r}:", name=str(version), known=known)

    def models(self) -> list[str]:
        return [name for name in self._files.names("models/") if self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """The published versions, oldest first."""
        found = self._places.published(f"models/{valid_model_name(model)}/versions", marker=_BUNDLE)
        return sorted(int(name) for name in found if name.isdigit())

    def editions(self, model: str, version: int) -> list[int]:
        """The published editions of a version, oldest first; 1 is the version as it was exported."""
        found = self._places.published(f"models/{valid_model_name(model)}/versions", marker=_BUNDLE)
        labels = (label for name in found if (label := parse_label(name)) is not None)
        return sorted(edition for number, edition in labels if number == version)

    def reserve_edition(self, model: str, version: int) -> int:
        """The next number for an edition of a version; nobody else gets it, also after a crash."""
        number = self.edition_numbers(model, version)[-1] + 1
        with writing_to(self.url):
            while not self._create(f"{_editions(model, version)}{number}"):
                number += 1
        return number

    def edition_numbers(self, model: str, version: int) -> list[int]:
        """All numbers that were given to editions of a version, published or not, also of one that was deleted."""
        return [1, *sorted(int(name) for name in self._files.names(_editions(model, version)))]

    def note_lookups_read(self, release: Release, t: float) -> None:
        """Notes that the tables of an edition were read again at this time, and are as they were."""
        with writing_to(self.url):
            self._files.put(_lookups_read(release), json.dumps({"read": t}).encode())

    def lookups_read(self, release: Release) -> float | None:
        """When the tables of an edition were last found unchanged; None when nobody looked since it was made."""
        content = self._read(_lookups_read(release))
        advice = "remove it: the next refresh writes it again"
        path = f"{self.url}/{_lookups_read(release)}"
        return (
            None
            if content is None
            else parse_json(path, content, lambda found: float(found["read"]), advice=advice)
        )

    def aliases(self, model: str) -> dict[str, int]:
        """The version of each alias."""
        return {alias: release.version for alias, release in self.aliased(model).items()}

    def aliased(self, model: str) -> dict[str, Release]:
        """The version of each alias, with the edition of its lookups."""
        return self._aliases(model, self._read(f"models/{valid_model_name(model)}/aliases.json"))

    def _aliases(self, model: str, content: bytes | None) -> dict[str, Release]:
        if content is None:
            return {}
        path = f"{self.url}/models/{model}/aliases.json"
        advice = "restore it, or move it away: a controller that decides about this model writes it again"
        return parse_json(
            path,
            content,
            lambda found: {name: _numbered(model, found[name]) for name in found},
            advice=advice,
        )

    def set_alias(
        self, model: str, alias: str, version: int | str | None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Moves an alias in one step; None removes it. `check` may raise; it is called between reading the aliases and
        writing them, which fails and begins again if they were changed in the meantime."""
        if not _ALIAS.fullmatch(alias):
            raise NameInvalid(kind="alias", name=alias, rule="one of live, candidate, previous")
        release = None if version is None else _numbered(model, version)
        if release is not None and release.edition not in self.editions(model, release.version):
            raise self._no_version(model, release.label)

        def moved(content: bytes | None) -> bytes:
            aliases = self._aliases(model, content)
            if check is not None:
                check()
            if release is None:
                aliases.pop(alias, None)
            else:
                aliases[alias] = release
            return json.dumps(
                {name: each.version if each.edition == 1 else each.label for name, each in aliases.items()},
                sort_keys=True,
            ).encode()

        self._change(f"models/{valid_model_name(model)}/aliases.json", moved)

    def signatures(self, model: str, version: int | str) -> bytes | None:
        """The file of signatures of a version; None when there is none."""
        return self._read(_signatures(model, version))

    def change_signatures(
        self, model: str, version: int | str, change: Callable[[bytes | None], bytes]
    ) -> None:
        """Replaces the file of signatures by what `change` makes of it, in one step."""
        self._change(_signatures(model, version), change)

    def remove(self, relative: str) -> None:
        """Takes a published folder away: its marker first, so that nobody reads half of it."""
        with writing_to(self.url):
            self._places.remove(relative)

    # how

    def _read(self, key: str) -> bytes | None:
        found = self._files.read(key)
        return None if found is None else found.content

    def _create(self, key: str, content: str = "") -> bool:
        """Takes a name for good; False when it is taken."""
        mine = content or f"{environment.host()} {secrets.token_hex(16)}"  # a retry must know its own object
        try:
            self._files.create(key, mine.encode())
        except ObjectExists:
            return False
        return True

    def _change(self, key: str, change: Callable[[bytes | None], bytes]) -> None:
        """Replaces a file by what `change` makes of its content; of two at a time none is lost."""
        with writing_to(self.url):
            while True:
                found = self._files.read(key)
                content = change(None if found is None else found.content)
                # Another one was faster: what it wrote is changed.
                with suppress(ObjectExists, ObjectChanged):
                    if found is None:
                        self._files.create(key, content)
                    elif found.content != content:
                        self._files.replace(key, content, found.tag)
                    return

    def _publish(
        self,
        folder: Path,
        place: str,
        *,
        marker: str,
        lasting: Collection[Path] = (),
        same: bool = False,
        read_back: bool = False,
    ) -> Path:
        assert (folder / marker).is_file(), f"{marker} must be in the folder before it is published"
        with writing_to(self.url):
            return self._places.publish(
                folder, place, marker=marker, lasting=lasting, same=same, read_back=read_back
            )


def _numbered(model: str, version: int | str) -> Release:
    """A version by its number, or by its number and edition. ValueError for anything else."""
    found = parse_label(str(version))
    if found is None:
        raise ValueError(f"{version!r} is neither a version such as 3 nor an edition of one such as 3e2")
    return Release(model=valid_model_name(model), version=found[0], edition=found[1])


def _place(release: Release) -> str:
    return f"models/{release.model}/versions/{release.label}"


def _editions(model: str, version: int) -> str:
    return f"models/{valid_model_name(model)}/editions/{int(version)}/"


def _lookups_read(release: Release) -> str:
    return f"models/{release.model}/lookups/{release.label}.json"


def _signatures(model: str, version: int | str) -> str:
    return f"models/{valid_model_name(model)}/signatures/{_numbered(model, version).label}.json"
