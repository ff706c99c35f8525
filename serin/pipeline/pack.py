"""Packs what a run needs of the machine that sends it, and sends it to the store, by content.

A package holds the spec, the user's code (modules, scripts and operators with all local modules they import), the lock
of its environment and, where the workers are on other machines, the small files that the spec names:

    spec.yaml           the resolved spec; its paths are relative to the package, or those of the workers
    <name>              files and code in the spec's folder, under their names there
    imports/<name>      code from elsewhere, under the names it is imported by

Nothing else travels: no folder is packed as a whole. Files that look like secrets, hidden ones and those outside of the
spec's folder are never sent.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from serin.errors import SpecError
from serin.machine import environment
from serin.spec.code_digest import Closure, closure_of_file, closure_of_module
from serin.spec.load import WrittenSpec
from serin.spec.model import ModelSpec
from serin.spec.pipeline import PipelineSpec
from serin.spec.tables import DeltaTable, SqlTable, TableSource, located
from serin.store.packages import (
    IMPORTS,
    MOST_BYTES,
    MOST_FILES,
    REFERENCE,
    PackageManifest,
    manifest_of,
    publish_package,
)
from serin.store.store import Store

logger = logging.getLogger(__name__)

SPEC: Final = "spec.yaml"
_SECRET = re.compile(
    r"(?i)(^|/)(\.|_netrc$|id_(rsa|dsa|ecdsa|ed25519)|client_secret[^/]*\.json$)|"
    r"(^|[/._-])((credential|secret)s?(\.(json|ya?ml|ini|toml|txt|csv))?|kubeconfig(\.ya?ml)?)$|"
    r"_(rsa|dsa|ecdsa|ed25519)$|\.(pem|p8|key|p12|pfx|jks|kdbx|ppk|keytab|env)$"
)
_SECRET_LENGTH: Final = 8
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PUSH = "put its folder into the store once (`serin tables push FOLDER`) and write the URL that is printed"
_EVERYWHERE = "or name by its absolute path what every worker has there"

Take = Callable[[str, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """`contents`: what travels, by name. `stays`: paths that are read where they are, and imports
    that are not sent, each with the reason."""

    name: str
    contents: Mapping[str, bytes]
    stays: tuple[tuple[str, str], ...] = ()

    @property
    def manifest(self) -> PackageManifest:
        return manifest_of(self.contents)

    @property
    def reference(self) -> str:
        return f"{REFERENCE}{self.manifest.digest}"

    def send(self) -> None:
        """Writes it to the store, unless it is there."""
        manifest = self.manifest
        if publish_package(Store.open(), self.contents):
            count, size = len(manifest.files), manifest.size / 1000
            logger.info(f"sent package {manifest.digest[:12]} to the store: {count} files, {size:,.1f} kB")


def pack_spec(written: WrittenSpec, *, elsewhere: bool) -> Package:
    """`elsewhere`: the workers may be on machines that do not see this disk. Otherwise files that the spec names stay
    where they are, and only code and the lock of its environment travel. SpecError names everything that must travel
    and cannot."""
    packing = _Packing(folder=written.folder.absolute(), elsewhere=elsewhere)
    spec = packing.pack(written.spec)
    if packing.problems:
        raise SpecError(where=written.where, problems=packing.problems)
    return Package(
        name=spec.name,
        contents=dict(sorted(packing.contents.items())),
        stays=tuple(dict.fromkeys(packing.stays)),
    )


@dataclass(slots=True, kw_only=True)
class _Packing:
    folder: Path
    elsewhere: bool
    contents: dict[str, bytes] = field(default_factory=dict)
    stays: list[tuple[str, str]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    _bytes: int = 0

    def pack(self, spec: PipelineSpec) -> PipelineSpec:
        """The spec with the paths that its files have for the workers."""
        data = spec.data.model_copy(
            update={"tables": {name: self._table(name, table) for name, table in spec.data.tables.items()}}
        )
        for index, feature in enumerate(spec.features):
            for path in filter(None, (step.import_path for step in feature.steps)):
                self._take_code(f"features[{index}].steps", closure_of_module(path.partition(":")[0]))
        changes: dict[str, Any] = {"data": data, "model": self._model(spec.model)}
        if spec.environment is not None and spec.environment.lock is not None:
            why = f"is outside of {self.folder} and is not sent; move it there"
            lock = self._path("environment.lock", spec.environment.lock, self._take_file, why=why)
            changes["environment"] = spec.environment.model_copy(update={"lock": lock})
        packed = spec.model_copy(update=changes)
        document = packed.model_dump(mode="json", by_alias=True)
        self._take(SPEC, SPEC, yaml.safe_dump(document, sort_keys=False, allow_unicode=True).encode())
        return packed

    def _model(self, model: ModelSpec) -> ModelSpec:
        place = (model.module or "").rpartition(":")[0]
        if place and not place.endswith(".py"):
            self._take_code("model.module", closure_of_module(place))
        return model.located(self._model_file)

    def _model_file(self, key: str, path: str) -> str:
        if key in ("onnx", "golden"):
            return self._data(f"model.{key}", path, self._take_file)
        return self._path(f"model.{key}", path, self._take_program)

    def _table(self, name: str, table: TableSource) -> TableSource:
        key = f"data.tables.{name}"
        match table:
            case SqlTable():
                why = "may hold a password and is not sent; write env:NAME"
                return located(table, lambda path: self._path(key, path, None, why=why))
            case DeltaTable():
                why = f"is a Delta table on this machine, which is not sent; {_PUSH}"
                return located(table, lambda path: self._path(key, path, None, why=why))
        return located(table, lambda path: self._data(key, path, self._take_table))

    def _data(self, key: str, written: str, take: Take) -> str:
        """Workers on this machine read files where they are: a table that changes is then seen to change."""
        return self._path(key, written, take if self.elsewhere else None)

    def _path(self, key: str, written: str, take: Take | None, *, why: str = "") -> str:
        """The path for the workers. `take` packs what is there; None: it is not sent, for the reason `why`."""
        if "://" in written:
            return written
        given = Path(written).expanduser()
        place = Path(os.path.normpath(self.folder / given))
        inside = place.is_relative_to(self.folder) and _real(place).is_relative_to(_real(self.folder))
        if take is not None and inside:
            take(key, place)
            return place.relative_to(self.folder).as_posix()
        if not self.elsewhere:
            self.stays.append((str(place), "read where it is" if inside else "outside of the spec's folder"))
        elif given.is_absolute():
            self.stays.append((str(place), "a path of the workers"))
        else:
            why = why or f"is outside of {self.folder} and is not sent; move it there, {_PUSH}"
            self.problems.append((key, f"{written} {why}, {_EVERYWHERE}"))
        return str(place)

    def _take_table(self, key: str, place: Path) -> None:
        from serin.etl.sources.files import find_files

        for file in find_files(key.rpartition(".")[2], str(place)):
            if _real(Path(file.path)).is_relative_to(_real(self.folder)):
                self._take_file(key, Path(file.path))
            else:
                self.problems.append(
                    (key, f"{file.path} is a link to outside of {self.folder} and is not sent")
                )

    def _take_program(self, key: str, place: Path) -> None:
        if place.is_file():
            self._take_code(key, closure_of_file(place), beside=place.parent)
        else:
            self.problems.append((key, f"no file at {place}; put it there or correct the path"))

    def _take_code(self, key: str, closure: Closure, beside: Path | None = None) -> None:
        """`beside`: the folder of a program, whose imports are found there first."""
        for name, path in closure.files.items():
            root = Path(str(path).removesuffix(name))
            inside = root in (self.folder, beside)
            self._take_file(key, path, None if inside else f"{IMPORTS}/{name}")
        for name in closure.unsent() if self.elsewhere else ():
            why = "neither in an installed package nor on the path; if it is yours, put its folder on PYTHONPATH"
            self.stays.append((f"import {name}", why))

    def _take_file(self, key: str, path: Path, name: str | None = None) -> None:
        """`name`: in the package, when it is not the one in the spec's folder."""
        name = name or Path(path).relative_to(self.folder).as_posix()
        if name in self.contents and name != SPEC:
            return
        size, before = path.stat().st_size, self._bytes
        self._bytes += size
        if self._bytes > MOST_BYTES or len(self.contents) >= MOST_FILES:
            most = f"a run sends at most {MOST_BYTES >> 20} MiB and {MOST_FILES:,} files"
            if before <= MOST_BYTES:  # the first of them is named
                self.problems.append(
                    (key, f"{path} has {size / 1e6:,.1f} MB: {most}; {_PUSH}, {_EVERYWHERE}")
                )
        elif looks_secret(name, path, self.folder):
            self.problems.append((key, f"{path} looks like a secret and is not sent; give it another name"))
        else:
            self._take(key, name, path.read_bytes())

    def _take(self, key: str, name: str, content: bytes) -> None:
        if name in self.contents:
            self.problems.append((key, f"{name} is in every package; give your own file another name"))
        elif _PRIVATE_KEY.search(content) or any(each in content for each in _secrets()):
            self.problems.append(
                (key, f"{name} holds a secret and is not sent; read it from a variable instead")
            )
        else:
            self.contents[name] = content


def looks_secret(name: str, path: Path, folder: Path) -> bool:
    """Whether a file's name says that it holds secrets: `name`, or that of the file itself when `path` is a link. Of a
    real place within `folder` the folders count, too."""
    real, base = _real(path), _real(folder)
    below = real.relative_to(base).as_posix() if real.is_relative_to(base) else real.name
    return any(_SECRET.search(each) for each in (name, below))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


@functools.cache
def _secrets() -> tuple[bytes, ...]:
    """Shorter ones occur in tables by chance."""
    return tuple(value.encode() for value in environment.secrets() if len(value) >= _SECRET_LENGTH)
