"""Digests of Python code and of all that it imports, the user's and Serin's. No code is run for it.

A local module counts by its content, also one of an editable install, an installed package by its name and version,
the standard library by the version of Python, Serin by what is used of it (parsed_code.py). Imports are read from the
source: in functions, under conditions, relative ones, and `import_module` with a name in quotes. A module whose name is
computed, a change of `sys.path` and the data files that code opens cannot be seen.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import secrets
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

from serin.spec.parsed_code import Package, sha256_of, source_files

_OWN = "serin"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_INSTALLED = ("site-packages", "dist-packages")
_CODE = (".py", ".pyc", ".so", ".pyd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Closure:
    """What code is made of: `files` by the name they are imported under, the dotted names that it imports of Serin
    (`own`), and the top-level names that are in no folder of the user's."""

    files: dict[str, Path] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)

    def unsent(self) -> list[str]:
        """The names found elsewhere that are not of an installed package: workers may not have them."""
        return sorted(name for name in self.elsewhere if _spec_of(name) is None or _root_of(name) is not None)

    def digest(self) -> str:
        content = [[name, _of_bytes(path)] for name, path in sorted(self.files.items())]
        packages = sorted(line for name in self.elsewhere for line in _outside(name))
        own = [digest_of_own_names(tuple(sorted(self.own)))] if self.own else []
        return hashlib.sha256(json.dumps([content, own + packages]).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """A program or a module that is loaded by its path, with all that it imports."""
    return closure_of_file(path).digest()


def digest_of_module(name: str) -> str:
    """A module by its dotted name, with its packages and all that they import."""
    return closure_of_module(name).digest()


def closure_of_file(path: Path) -> Closure:
    """A file that is loaded by its path finds what is beside it first."""
    return closure_of_files([path], [path.absolute().parent, *local_roots()])


def closure_of_module(name: str) -> Closure:
    walk = _Walk(local_roots())
    walk.absolute(name.split("."))
    return walk.finished()


def closure_of_files(files: Iterable[Path], roots: Sequence[Path]) -> Closure:
    """`roots`: the folders that imports are looked for in."""
    walk = _Walk(roots)
    for path in map(Path.absolute, files):
        walk.add(path, next((root for root in roots if path.is_relative_to(root)), path.parent))
    return walk.finished()


def local_roots() -> list[Path]:
    """The working folder (of trainings it is a place to import from) and where this process imports from, without
    the standard library and installed packages."""
    return [folder for folder in dict.fromkeys([Path.cwd(), *map(Path, sys.path)]) if _is_local(folder)]


@functools.cache
def digest_of_own(roots: tuple[str, ...], *, otherwise: Path | None = None) -> str:
    """Returns the digest of Serin's code from `roots` on, see `Package.reach`.

    Parsing takes a second or two. So the digest is kept beside the compiled modules, or in the folder `otherwise` where
    they cannot be written, until any source file changes.
    """
    name = f"digest-{sha256_of(json.dumps(roots))[:16]}.{sys.implementation.cache_tag}.json"
    compiled = Path(importlib.util.cache_from_source(str(_own_folder() / "__init__.py"))).parent
    places = [folder / name for folder in (compiled, otherwise) if folder is not None]
    content = digest_of_all()
    for path in places:
        with suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(path.read_bytes())
            if kept["content"] == content:
                return str(kept["digest"])
    digest = Package(_own_folder()).reach(roots).digest()
    for path in places:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            scratch.write_text(json.dumps({"content": content, "digest": digest}))
            scratch.replace(path)
            break
    return digest


@functools.cache
def digest_of_own_names(names: tuple[str, ...]) -> str:
    """Returns the digest of what dotted names of Serin stand for, as they are imported."""
    package = Package(_own_folder())
    roots = tuple(sorted({package.root_of(name) for name in names}))
    try:
        return digest_of_all() if package.name in roots else digest_of_own(roots)
    except LookupError:
        return digest_of_all()  # a name that does not exist, or is made when it is asked for


@functools.cache
def digest_of_all() -> str:
    """Returns the digest of every source file of Serin, byte by byte."""
    folder, digest = _own_folder(), hashlib.sha256()
    for name in sorted(source_files(str(folder))):
        with open(name, "rb") as stream:  # noqa: PTH123 - Path takes longer, and there are many
            content = stream.read()
        digest.update(f"{os.path.relpath(name, folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


class _Walk:
    """Every file that an import may mean is taken, in whichever folder it is: which of two would win is not judged."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = list(dict.fromkeys(root.absolute() for root in roots))
        self._found = Closure()
        self._waiting: list[tuple[Path, Path]] = []  # a file, and the root that it is imported from
        self._listed: dict[Path, frozenset[str]] = {}

    def finished(self) -> Closure:
        while self._waiting:
            path, root = self._waiting.pop()
            if path.suffix == ".py":
                for level, parts in _imports(path):
                    self.relative(path, root, level, parts) if level else self.absolute(parts)
        return self._found

    def add(self, path: Path, root: Path) -> None:
        name = str(path.relative_to(root))
        if name not in self._found.files:
            self._found.files[name] = path
            self._waiting.append((path, root))

    def absolute(self, parts: Sequence[str]) -> None:
        if parts[0] == _OWN:
            self._found.own.add(".".join(parts))
            return
        found = self._below(self._roots, parts)
        if not found and parts[0] not in sys.stdlib_module_names:
            root = _root_of(parts[0])
            found = [] if root is None else self._below([root], parts)
            if not found:
                self._found.elsewhere.add(parts[0])
        for path, root in found:
            self.add(path, root)

    def _below(self, roots: Iterable[Path], parts: Sequence[str]) -> list[tuple[Path, Path]]:
        return [(path, root) for root in roots for path in _hits(root, parts, self._listed)]

    def relative(self, path: Path, root: Path, level: int, parts: Sequence[str]) -> None:
        """Below the root of the file itself, though another root may contain it, too: names begin there."""
        if level > len(path.relative_to(root).parts):
            return  # Python refuses it
        base = path.parents[level - 1]
        for found in (*_hits(base, ["__init__"], self._listed), *_hits(base, parts, self._listed)):
            self.add(found, root)


def _hits(base: Path, parts: Sequence[str], listed: dict[Path, frozenset[str]]) -> Iterator[Path]:
    """The files of a dotted name below a folder, those of its packages first; `*` stands for all modules there."""
    folder = base
    for part in parts:
        names = _listing(folder, listed)
        if part == "*":
            yield from sorted(folder / name for name in names if name.endswith(".py"))
            yield from sorted(folder.glob("*/__init__.py"))
            return
        yield from _sources(folder, part, names)
        if part not in names:
            return
        folder = folder / part
        yield from _sources(folder, "__init__", _listing(folder, listed))


def _sources(folder: Path, stem: str, names: Iterable[str]) -> list[Path]:
    return sorted(folder / name for name in names if name.startswith(f"{stem}.") and name.endswith(_CODE))


def _listing(folder: Path, listed: dict[Path, frozenset[str]]) -> frozenset[str]:
    if folder not in listed:
        try:
            listed[folder] = frozenset(entry.name for entry in folder.iterdir())
        except OSError:
            listed[folder] = frozenset()
    return listed[folder]


def _imports(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(level, dotted name) of everything that may be imported; what a name is taken from may be a module too."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # it fails with its own message when it is run
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            before = node.module.split(".") if node.module else []
            yield from ((node.level, [*before, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called, name = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str) and name.strip("."):
                bare = name.lstrip(".")
                yield len(name) - len(bare), bare.split(".")


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those in `if TYPE_CHECKING:`, which never run."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _outside(name: str) -> list[str]:
    """An installed package and what it requires, by versions; what is in no distribution by its files."""
    try:
        owners = [importlib.metadata.distribution(name).metadata["Name"]]
    except importlib.metadata.PackageNotFoundError:
        owners = list(_owners().get(name, ()))
    lines = sorted({line for owner in owners for line in _with_requirements(owner)})
    if owners and not any(_is_editable(owner) for owner in owners):
        return lines
    return [*lines, f"{name} {_of_loose_files(name)}"]


@functools.cache
def _with_requirements(distribution: str) -> tuple[str, ...]:
    """`name==version` of a distribution and, through its requirements, of all that is installed for it."""
    found, waiting = dict[str, str](), [distribution]
    while waiting:
        name = waiting.pop()
        if name.lower() in found:
            continue
        try:
            one = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # What was not installed from an index may change without its version: its record has the files' digests.
        record = one.read_text("RECORD") if one.read_text("direct_url.json") else None
        mark = f" {hashlib.sha256(record.encode()).hexdigest()}" if record else ""
        found[name.lower()] = f"{name.lower()}=={one.version}{mark}"
        needed = [text for text in one.requires or () if "extra" not in text.partition(";")[2]]
        waiting += [match[0] for text in needed if (match := _NAME.match(text))]
    return tuple(found.values())


@functools.cache
def _owners() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def forget_installed() -> None:
    """For a process that can import more packages than before."""
    _owners.cache_clear()
    _with_requirements.cache_clear()


def _is_editable(distribution: str) -> bool:
    try:
        text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def _of_loose_files(name: str) -> str:
    """Describes a top-level module that belongs to no distribution: a custom finder knows it, or nothing does."""
    spec = _spec_of(name)
    if spec is None:
        return "missing"
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    if not files and spec.origin and Path(spec.origin).is_file():
        files = [Path(spec.origin)]
    return hashlib.sha256("".join(map(_of_bytes, files)).encode()).hexdigest()


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _root_of(name: str) -> Path | None:
    """The folder of a top-level name that a finder imports from there, such as that of an editable install; None for
    an installed package and for what is nowhere."""
    spec = _spec_of(name)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    root = next(
        (Path(place).parent for place in places if Path(place).is_absolute() and Path(place).exists()), None
    )
    return root if root is not None and _is_local(root) else None


def _own_folder() -> Path:
    return Path(__file__).resolve().parents[1]


def _of_bytes(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.errno}"


def _is_local(folder: Path) -> bool:
    folder = folder.absolute()
    standard = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    installed = any(part in _INSTALLED for part in folder.parts) or str(folder) in site.getsitepackages()
    below = any(folder == place or folder.is_relative_to(place) for place in standard)
    return folder.is_dir() and not installed and not below
