"""The store: datasets by their content, model versions by number. Published completely or not at all, never changed.

    datasets/<digest>/          a dataset, by its content and what made it; dataset.json is its marker
    keys/<key>                  the digest of the dataset that was computed for a key (spec sections and inputs)
    models/<model>/numbers/<n>  a version number that was given out; never given out again
    models/<model>/versions/<n>/  a bundle; manifest.json is its marker
    models/<model>/aliases.json live, candidate, previous
    work/                       folders that are being filled
    kept/<key>                  what a build made of a single file, for the next build
    locks/                      who uses what: a process that has found something holds it (in_use.py)

On a local file system a folder is filled in work/ and renamed into place. On an object store (any fsspec URL) its files
are uploaded with the marker last, and a reader that finds no marker finds nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from serin.errors import BundleBroken, NameInvalid, NotFound, StoreNotWritable
from serin.machine import environment
from serin.machine.durable import sync, write_whole
from serin.machine.in_use import hold_until_exit, holding
from serin.machine.locks import locked
from serin.machine.private import make_private
from serin.spec.names import valid_model_name
from serin.store.artifacts import Bundle, Dataset
from serin.store.published import bundle_at, checked_digest, dataset_at, make_home_of, touch

_ALIAS = re.compile(r"live|candidate|previous")
_SYNCS_AT_ONCE = 8
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


class Store:
    """Datasets and model versions. `Store.open()` is the one that SERIN_STORE or SERIN_HOME names."""

    def __init__(self, url: str, *, cache: Path | None = None) -> None:
        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self.local = isinstance(self._fs, LocalFileSystem)
        self._cache = cache or environment.home() / "cache"

    @classmethod
    def open(cls) -> Store:
        """The store that this process is configured to use."""
        return cls(environment.store_url())

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """An empty folder to fill and publish. What is left of it at the end is removed."""
        parent = Path(self._root) / "work" if self.local else Path(tempfile.gettempdir())
        name = secrets.token_hex(8)
        with self._writing():
            make_home_of(parent)
        with self._writing(), self._using(f"work/{name}"):
            parent.mkdir(parents=True, exist_ok=True)
            folder = parent / name
            folder.mkdir(mode=0o700)  # half done is for its owner alone, here and in the temporary folder
            inside = folder / "it"  # and has the mode that the umask gives once it is published
            try:
                inside.mkdir()
                yield inside
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                if self.local:
                    self.lock(f"work/{name}").unlink(missing_ok=True)

    def kept_folder(self) -> Path:
        """Where builds keep what the next one may find: on this machine, also when the store is elsewhere."""
        if self.local:
            make_home_of(Path(self._root))
        return Path(self._root) / "kept" if self.local else self._private_cache() / "kept"

    @contextmanager
    def using_kept(self) -> Iterator[Path]:
        """`kept_folder`, from which nothing is removed during the block."""
        kept = self.kept_folder()
        with ExitStack() as stack:
            with suppress(OSError):  # a store that is only read keeps nothing either
                stack.enter_context(self._using("kept"))
            yield kept

    def lock(self, relative: str) -> Path:
        """The lock file of something in a local store."""
        return Path(self._path("locks", relative))

    # datasets

    def find_dataset(self, key: str) -> Dataset | None:
        """The dataset that was published for `key`, if there is one."""
        pointer = self._path("keys", checked_digest(key))
        if not self._fs.exists(pointer):
            return None
        digest = self._fs.cat_file(pointer).decode().strip()
        return self._held_dataset(f"datasets/{checked_digest(digest)}")

    def knows_dataset(self, key: str) -> bool:
        """Whether a dataset was ever published or remembered for `key`; nothing is fetched."""
        return bool(self._fs.exists(self._path("keys", checked_digest(key))))

    def publish_dataset(
        self, key: str, digest: str, folder: Path, *, lasting: Collection[Path] = ()
    ) -> Dataset:
        """Makes `folder` (from `workspace`) visible under its digest and remembers it for `key`. `lasting`: its files
        that are on the disk already."""
        with self._writing():
            place = f"datasets/{checked_digest(digest)}"
            self._hold(place)  # the same one may have been published long ago
            published = self._publish(folder, place, marker="dataset.json", lasting=lasting)
            self._replace(f"keys/{checked_digest(key)}", digest.encode())
            touch(published / "dataset.json")
        return dataset_at(published)

    def hold_dataset(self, dataset: Dataset) -> None:
        """One that another process has found is in use by this one, too, until it ends."""
        if self.local and dataset.path:
            self._held_dataset(f"datasets/{Path(dataset.path).name}")

    def remember_dataset(self, key: str, digest: str) -> None:
        """`find_dataset(key)` finds this published dataset from now on."""
        with self._writing():
            self._replace(f"keys/{checked_digest(key)}", checked_digest(digest).encode())

    def datasets(self) -> list[str]:
        return [
            name
            for name in self._names("datasets")
            if self._fs.exists(self._path("datasets", name, "dataset.json"))
        ]

    # model versions

    def reserve_version(self, model: str) -> int:
        """The next number for `model`; nobody else gets it, also after a crash."""
        valid_model_name(model)
        number = max((int(name) for name in self._names(f"models/{model}/numbers")), default=0) + 1
        with self._writing():
            self._fs.makedirs(self._path("models", model, "numbers"), exist_ok=True)
            while True:
                try:
                    self._create(f"models/{model}/numbers/{number}")
                except FileExistsError:
                    number += 1
                else:
                    return number

    def publish_bundle(self, model: str, version: int, folder: Path) -> Bundle:
        """Makes `folder` (from `workspace`, manifest.json inside) visible as a version. A version is written once."""
        target = f"models/{valid_model_name(model)}/versions/{int(version)}"
        if self._fs.exists(self._path(target, "manifest.json")):
            raise BundleBroken(path=target, reason="this version is published already; versions never change")
        with self._writing():
            self._hold(target)
            return bundle_at(self._publish(folder, target, marker="manifest.json"), model, version)

    def bundle(self, model: str, version: int | str, *, hold: bool = False) -> Bundle:
        """A published version by number or alias, on a local path. `hold`: it is in use until this process ends, though
        no alias points to it."""
        valid_model_name(model)
        if isinstance(version, str) and not version.isdigit():
            if version not in (aliases := self.aliases(model)):
                raise self._no_version(model, version)
            version = aliases[version]
        place = f"models/{model}/versions/{int(version)}"
        if hold:
            self._hold(place)
        folder = self._fetch(place, marker="manifest.json")
        if folder is None:
            raise self._no_version(model, version)
        return bundle_at(folder, model, int(version))

    def _no_version(self, model: str, version: int | str) -> NotFound:
        if not self.versions(model):
            return NotFound(kind="model", name=model, known=self.models())
        known = [*map(str, self.versions(model)), *self.aliases(model)]
        return NotFound(kind=f"version of {model!r}:", name=str(version), known=known)

    def models(self) -> list[str]:
        return [name for name in self._names("models") if self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """The published versions, oldest first."""
        base = f"models/{valid_model_name(model)}/versions"
        numbers = sorted(int(name) for name in self._names(base) if name.isdigit())
        return [
            number for number in numbers if self._fs.exists(self._path(base, str(number), "manifest.json"))
        ]

    def aliases(self, model: str) -> dict[str, int]:
        path = self._path("models", valid_model_name(model), "aliases.json")
        return dict(json.loads(self._fs.cat_file(path))) if self._fs.exists(path) else {}

    def set_alias(self, model: str, alias: str, version: int | None) -> None:
        """Moves an alias in one step; None removes it."""
        if not _ALIAS.fullmatch(alias):
            raise NameInvalid(kind="alias", name=alias, rule="one of live, candidate, previous")
        if version is not None and version not in self.versions(model):
            raise self._no_version(model, version)
        with self._writing(), self._locked(f"models/{valid_model_name(model)}"):
            aliases = self.aliases(model)
            if version is None:
                aliases.pop(alias, None)
            else:
                aliases[alias] = version
            self._replace(f"models/{model}/aliases.json", json.dumps(aliases, sort_keys=True).encode())

    def remove(self, relative: str) -> None:
        """Takes a published folder away: its marker first, so that nobody reads half of it."""
        with self._writing():
            path = self._path(relative)
            for marker in ("dataset.json", "manifest.json"):
                if self._fs.exists(f"{path}/{marker}"):
                    self._fs.rm_file(f"{path}/{marker}")
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    # how

    def _held_dataset(self, place: str) -> Dataset | None:
        """In use until this process ends, and as good as new to `serin gc`."""
        self._hold(place)
        folder = self._fetch(place, marker="dataset.json")
        if folder is None:
            return None
        touch(folder / "dataset.json")
        return dataset_at(folder)

    def _hold(self, relative: str) -> None:
        if self.local and Path(self._root).is_dir():
            hold_until_exit(self.lock(relative))

    @contextmanager
    def _using(self, relative: str) -> Iterator[None]:
        with holding(self.lock(relative)) if self.local else nullcontext():
            yield

    def _path(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *parts])

    def _names(self, relative: str) -> list[str]:
        path = self._path(relative)
        if not self._fs.exists(path):
            return []
        self._fs.invalidate_cache(path)
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in self._fs.ls(path, detail=False))

    def _publish(self, folder: Path, relative: str, *, marker: str, lasting: Collection[Path] = ()) -> Path:
        assert (folder / marker).is_file(), f"{marker} must be in the folder before it is published"
        if not self.local:
            return self._upload(folder, relative, marker=marker)
        target = Path(self._path(relative))
        if (target / marker).is_file():
            return target  # another process published the same content in the meantime
        target.parent.mkdir(parents=True, exist_ok=True)
        rest = [path for path in folder.rglob("*") if path not in lasting]
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as threads:  # a disk takes several at the price of one
            list(threads.map(sync, rest))
        sync(folder)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not (target / marker).is_file():
                raise
        sync(target.parent)
        return target

    def _upload(self, folder: Path, relative: str, *, marker: str) -> Path:
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for name in [name for name in files if name != marker] + [marker]:
            self._fs.makedirs(self._path(relative, name).rsplit("/", 1)[0], exist_ok=True)
            self._fs.put_file(str(folder / name), self._path(relative, name))
        fetched = self._fetch(relative, marker=marker)
        assert fetched is not None
        return fetched

    def _fetch(self, relative: str, *, marker: str) -> Path | None:
        """A local folder with the published files, or None when nothing is published there."""
        if self.local:
            folder = Path(self._path(relative))
            return folder if (folder / marker).is_file() else None
        if not self._fs.exists(self._path(relative, marker)):
            return None
        origin = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        kept = self._private_cache() / origin / relative
        if not (kept / marker).is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as temporary:
                self._fs.get(self._path(relative) + "/", f"{temporary}/it/", recursive=True)
                try:
                    Path(temporary, "it").rename(kept)
                except OSError:
                    if not (kept / marker).is_file():
                        raise
        return kept

    def _create(self, relative: str) -> None:
        """An empty file that was not there before, or FileExistsError. fsspec's own "create" asks first and then
        writes on a local file system, so two can win."""
        if self.local:
            os.close(os.open(self._path(relative), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        else:
            self._fs.pipe_file(self._path(relative), b"", mode="create")

    def _replace(self, relative: str, content: bytes) -> None:
        path = self._path(relative)
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        if not self.local:
            self._fs.pipe_file(path, content)
            return
        write_whole(Path(path), content)

    def _private_cache(self) -> Path:
        """What was fetched from elsewhere is for those alone who may read it there."""
        make_home_of(self._cache)
        return make_private(self._cache)

    @contextmanager
    def _locked(self, relative: str) -> Iterator[None]:
        if not self.local:
            yield
            return
        folder = Path(self._path(relative))
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            raise StoreNotWritable(path=self.url, reason=error.strerror or str(error)) from error
