"""Digests of the definitions that compute something: of what they say, not of how and where it is written.

From the given definitions all those are reached that they name, in whichever module. Counted are the statements at the
top of modules, one by one, so that a definition may be moved, and modules may be merged or split. Not counted are
comments, docstrings, log lines, the arguments of errors, and the names of modules.

A definition that is found by a computed name is not seen: it has to be given. A module or package whose whole name is
in quotes counts with all it holds.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

OUTSIDE = (
    "serin.errors", "serin.machine", "serin.reports", "serin.spec.code_digest", "serin.spec.parsed_code", "serin.store",
    # where, when and in how many parts something is computed: the result is the same
    "serin.etl.engines.attempts", "serin.etl.engines.cuda_cluster", "serin.etl.engines.dask_engine",
    "serin.etl.engines.memory_budget", "serin.etl.engines.progress", "serin.training.launch",
)  # fmt: skip
"""Serin's code that computes no result. What a stage uses of it counts by its name."""
_ERRORS = "serin.errors"
_LOGS = (
    *(
        f"{name}.{how}("
        for name in ("log", "_log", "logger")
        for how in ("debug", "info", "warning", "error", "exception", "log")
    ),
    "warnings.warn(",
)
_NEVER_RUN = ("TYPE_CHECKING", "__name__ == '__main__'")
_UNWRITTEN = ("ctx", "type_comment", "kind", "type_params")
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Definition(NamedTuple):
    """What a name at the top of a module stands for."""

    module: str
    name: str


class WholeModule(NamedTuple):
    """A module that is used as an object or given by its name; `below`: with the modules of the package."""

    name: str
    below: bool = False


Target = Definition | WholeModule | str  # text: something outside, which counts by its name
Unit = tuple[str, int]  # a module, and a statement at the top of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """`statements`: the digest of each one, by its module and place. `libraries`: the top-level names of what they
    import from elsewhere."""

    statements: Mapping[Unit, str]
    libraries: frozenset[str]

    def digest(self) -> str:
        return sha256_of("\n".join(sorted(set(self.statements.values()))))


class Package:
    """The modules of a package, each read when it is reached. `outside`: modules and packages that count by the names
    that are used of them; `errors`: the one of them whose classes are errors."""

    def __init__(self, folder: Path, *, outside: Sequence[str] = OUTSIDE, errors: str = _ERRORS) -> None:
        self.name = folder.name
        self._outside, self._errors = tuple(outside), errors
        self._files = {_module_name(path, folder): path for path in map(Path, source_files(str(folder)))}
        self._modules: dict[str, _Module] = {}
        self._written: dict[Unit, list[Target]] = {}

    def reach(self, roots: Iterable[str]) -> Reached:
        """`roots`: `module:name`, or a module or package by its name; LookupError when there is none."""
        walk = _Walk(self)
        for root in roots:
            module, _, name = root.partition(":")
            if module not in self._files:
                raise LookupError(f"no module {module} in {self.name}")
            for target in self._imported(module, name) if name else [WholeModule(module, below=True)]:
                if target == f"global {name}":
                    raise LookupError(f"no {name} in {module}")
                walk.reach(target)
        return walk.finished()

    def root_of(self, dotted: str) -> str:
        """The root for a module, or for a name of one, that is written with dots."""
        module, rest = dotted, ""
        while module not in self._files and "." in module:
            module, _, rest = module.rpartition(".")
        return f"{module}:{rest}" if rest not in ("", "*") else module

    def module(self, name: str) -> _Module:
        if name not in self._modules:
            path = self._files[name]
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            self._modules[name] = _Module(ast.parse(path.read_bytes()), package)
        return self._modules[name]

    def written(self, unit: Unit) -> list[Target]:
        """A statement as texts, and what it names."""
        if unit not in self._written:
            writer = _Writer(self, unit[0])
            writer.visit(self.module(unit[0]).statements[unit[1]])
            self._written[unit] = writer.parts
        return self._written[unit]

    def has(self, module: str) -> bool:
        return module in self._files

    def counts(self, module: str) -> bool:
        """Whether its statements count, and not only the names that are used of it."""
        return module in self._files and not any(_is_within(module, place) for place in self._outside)

    def below(self, package: str) -> list[str]:
        return [name for name in self._files if _is_within(name, package)]

    def resolve(self, module: str, name: str) -> list[Target]:
        """What a name means in a module; several where functions import different things under it."""
        read = self.module(module)
        if name in read.places:
            return [Definition(module, name)]
        if name not in read.imports:
            return [f"global {name}"]
        return [target for origin in sorted(read.imports[name]) for target in self._imported(*origin)]

    def _imported(self, module: str, name: str) -> list[Target]:
        whole = f"{module}.{name}" if name else module
        if whole in self._files:
            return [WholeModule(whole)] if self.counts(whole) else ["outside module"]
        if module not in self._files:
            return [f"library {whole}"]
        if not self.counts(module):
            return [f"{'error' if module == self._errors else 'outside'} {name}"]
        return self.resolve(module, name)


class _Module:
    """The statements at the top of a module. `places`: those that bind a name; `loose`: those that are run for their
    effect; `imports`: what imported names stand for, anywhere in it; `needs`: what is imported before it runs."""

    def __init__(self, tree: ast.Module, package: str) -> None:
        self.statements = [statement for statement in tree.body if not _is_silent(statement)]
        self.places: dict[str, list[int]] = {}
        self.loose: list[int] = []
        for at, statement in enumerate(self.statements):
            names = set(_bound(statement))
            for name in names:
                self.places.setdefault(name, []).append(at)
            if not isinstance(statement, (*_NAMED, ast.Assign, ast.AnnAssign)) or not names:
                self.loose.append(at)
        self.imports: dict[str, set[tuple[str, str]]] = {}
        self.needs: set[str] = set()
        for node in _statements(tree):
            for alias, module, name in _imports(node, package):
                self.imports.setdefault(alias, set()).add((module, name))
                if node in tree.body:
                    self.needs |= {module, f"{module}.{name}"}


class _Walk:
    def __init__(self, package: Package) -> None:
        self._package = package
        self._reached: dict[Unit, list[Target]] = {}
        self._entered: set[str] = set()
        self._waiting: list[Unit] = []

    def reach(self, target: Target) -> None:
        if isinstance(target, WholeModule):
            names = self._package.below(target.name) if target.below else [target.name]
            for name in filter(self._package.counts, names):
                self._enter(name)
                self._waiting += [(name, at) for at in range(len(self._package.module(name).statements))]
        elif isinstance(target, Definition):
            self._enter(target.module)
            self._waiting += self._units(target)

    def finished(self) -> Reached:
        while self._waiting:
            unit = self._waiting.pop()
            if unit not in self._reached:
                self._reached[unit] = parts = self._package.written(unit)
                for target in {part for part in parts if not isinstance(part, str)}:
                    self.reach(target)
        alone = {unit: sha256_of("\n".join(map(_blank, parts))) for unit, parts in self._reached.items()}
        statements = {
            unit: sha256_of("\n".join(self._with_digests(part, alone) for part in parts))
            for unit, parts in self._reached.items()
        }
        texts = (part for parts in self._reached.values() for part in parts if isinstance(part, str))
        used = {text.partition(" ")[2].partition(".")[0] for text in texts if text.startswith("library ")}
        return Reached(statements=statements, libraries=frozenset(used - sys.stdlib_module_names))

    def _enter(self, module: str) -> None:
        """Reaches what runs when a module is imported."""
        waiting = [module]
        while waiting:
            name = waiting.pop()
            if name not in self._entered and self._package.counts(name):
                self._entered.add(name)
                read = self._package.module(name)
                self._waiting += [(name, at) for at in read.loose]
                waiting += [name.rpartition(".")[0], *read.needs]

    def _units(self, target: Definition) -> list[Unit]:
        return [(target.module, at) for at in self._package.module(target.module).places[target.name]]

    def _with_digests(self, part: Target, alone: Mapping[Unit, str]) -> str:
        """So that a name counts by what it stands for, too."""
        if not isinstance(part, Definition):
            return _blank(part)
        return " ".join(alone[unit] for unit in self._units(part))


class _Writer(ast.NodeVisitor):
    """A name is written with what it stands for at the top of the module, also where a local hides that."""

    def __init__(self, package: Package, module: str) -> None:
        self.parts: list[Target] = []
        self._package, self._module = package, module

    def generic_visit(self, node: ast.AST) -> None:
        self.parts.append(type(node).__name__)
        for name in node._fields:
            if name not in _UNWRITTEN:
                self._write(getattr(node, name, None))

    def _write(self, value: object) -> None:
        if isinstance(value, list):
            self.parts.append("[")
            for each in value:
                self._write(each)
            self.parts.append("]")
        elif isinstance(value, ast.AST):
            self.visit(value)
        else:
            self.parts.append(f"{type(value).__name__} {value!r}")

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if isinstance(text, str) and "." in text and self._package.has(text):
            self.parts.append(WholeModule(text, below=True))
        else:
            self._write(text)

    def visit_Name(self, node: ast.Name) -> None:
        self.parts += [node.id, *self._package.resolve(self._module, node.id)]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        targets = self._targets(node)
        if targets is None:
            self.generic_visit(node)
        else:
            self.parts += [node.attr, *targets]

    def visit_Call(self, node: ast.Call) -> None:
        called = self._targets(node.func)
        if called and isinstance(called[0], str) and called[0].startswith("error "):
            self.parts += called
        else:
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.parts.append("Raise")
        self._write(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.parts.append("Assert")
        self.visit(node.test)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not _is_silent(node):
            self.generic_visit(node)

    def visit_Import(self, node: ast.AST) -> None:
        """What is imported counts where it is used."""

    visit_ImportFrom = visit_Import  # noqa: N815

    def _targets(self, node: ast.expr) -> list[Target] | None:
        """What a name at the top of a module, or an attribute of a module, stands for; None of anything else."""
        if isinstance(node, ast.Name):
            return self._package.resolve(self._module, node.id)
        before = self._targets(node.value) if isinstance(node, ast.Attribute) else None
        if not isinstance(node, ast.Attribute) or not before or not isinstance(before[0], WholeModule):
            return None
        inner = f"{before[0].name}.{node.attr}"
        return (
            [WholeModule(inner)]
            if self._package.has(inner)
            else self._package.resolve(before[0].name, node.attr)
        )


def _is_silent(node: ast.stmt) -> bool:
    """Whether a statement computes nothing: imports, texts, log lines, and what is not run in an import."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).removeprefix("typing.") in _NEVER_RUN and not node.orelse
    if not isinstance(node, ast.Expr):
        return isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)
    if isinstance(node.value, ast.Call):
        return f"{ast.unparse(node.value.func)}(".startswith(_LOGS)
    return isinstance(node.value, ast.Constant)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements inside, also those of functions."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        for each in getattr(node, name, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from _statements(each)


def _imports(node: ast.AST, package: str) -> Iterator[tuple[str, str, str]]:
    """(name here, module, name there) of an import; the last is empty for the module itself."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            module = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or module, module, ""
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            yield alias.asname or alias.name, module, alias.name


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement at the top of a module binds there."""
    if isinstance(node, _NAMED):
        yield node.name
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif not isinstance(node, _SCOPES):
        for inner in ast.iter_child_nodes(node):
            yield from _bound(inner)


def source_files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from source_files(entry.path)


def _module_name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def _blank(part: Target) -> str:
    return part if isinstance(part, str) else type(part).__name__


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
