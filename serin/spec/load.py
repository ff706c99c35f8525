"""From YAML or a plain mapping to a PipelineSpec. Every problem is reported at once, with its key and how to fix it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from serin.errors import SpecError, nearest
from serin.spec.data import DataSpec
from serin.spec.environment import EnvironmentSpec
from serin.spec.names import Priority
from serin.spec.pipeline import PipelineSpec
from serin.spec.tables import as_of, located
from serin.spec.yaml_file import read_mapping

_FILE_NAMES = ("pipeline.yaml", "spec.yaml")
_PACKAGES = "serin.machine.packages"  # in a higher layer, so it is imported by its name, as operators are


def load_spec(source: str | Path | Mapping[str, Any] | PipelineSpec) -> PipelineSpec:
    """A spec from its file (or the folder that `serin init` wrote it to), from a mapping, or as it is.

    Paths of tables become absolute: relative to the spec's file, or to the working directory when there is no file.
    This process enters the spec's environment."""
    if isinstance(source, PipelineSpec):
        if source.environment is not None:
            importlib.import_module(_PACKAGES).enter(source.environment)
        return source
    return read_spec(source).resolved()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSpec:
    """A spec with its paths as they are written: relative ones begin at `folder`."""

    spec: PipelineSpec
    folder: Path
    where: str

    def resolved(self) -> PipelineSpec:
        """The spec with absolute paths."""
        data = absolute_tables(self.spec.data, self.folder)
        model = self.spec.model.located(lambda _, path: _absolute(path, self.folder))
        changes: dict[str, Any] = {"data": data, "model": model}
        if self.spec.environment is not None:
            changes["environment"] = _absolute_lock(self.spec.environment, self.folder)
        return self.spec.model_copy(update=changes)

    def as_of(self, moment: str | None) -> WrittenSpec:
        """The spec with its Delta tables as they were at a moment (ISO 8601); None: as the spec says."""
        return self if moment is None else replace(self, spec=_as_of(self.spec, moment, self.where))


def read_spec(source: str | Path | Mapping[str, Any]) -> WrittenSpec:
    """A spec as it is written, from its file or folder, or from a mapping."""
    if isinstance(source, Mapping):
        return written_spec(source, where="spec", base=Path.cwd())
    path = spec_file(Path(source))
    return written_spec(read_mapping(path), where=str(path), base=path.absolute().parent)


def spec_file(path: Path) -> Path:
    """The file of a spec that was named by its file or by its folder. SpecError for a folder without one."""
    if not path.is_dir():
        return path
    found = [path / name for name in _FILE_NAMES if (path / name).is_file()]
    if not found:
        names = " or ".join(_FILE_NAMES)
        problem = f"is a folder without a {names}; name the spec's file, or write one: serin init {path}"
        raise SpecError(where=str(path), problems=[("", problem)])
    return found[0]


def _as_of(spec: PipelineSpec, moment: str, where: str) -> PipelineSpec:
    try:
        tables = as_of(spec.data.tables, datetime.fromisoformat(moment))
    except ValueError:
        problem = f"{moment!r} is not a valid time: use for example 2026-01-31 or 2026-01-31T12:00:00Z"
        raise SpecError(where=where, problems=[("--as-of", problem)]) from None
    if tables == spec.data.tables:
        problem = "is for Delta tables, and data.tables has none whose version is open"
        raise SpecError(where=where, problems=[("--as-of", problem)])
    return spec.model_copy(update={"data": spec.data.model_copy(update={"tables": tables})})


def load_search_spec(source: str | Path | Mapping[str, Any] | PipelineSpec) -> PipelineSpec:
    """A spec with a `search` section; SpecError for one without."""
    spec = load_spec(source)
    if spec.search is None:
        where = str(source) if isinstance(source, str | Path) else "spec"
        example = "search: {space: {training.learning_rate: {log: [1e-4, 1e-2]}}}"
        raise SpecError(where=where, problems=[("search", f"is missing; add for example {example}")])
    return spec


def checked_spec(raw: Mapping[str, Any], *, where: str) -> PipelineSpec:
    """The spec with its paths as they are written."""
    try:
        return PipelineSpec.model_validate(dict(raw))
    except ValidationError as error:
        raise SpecError(where=where, problems=_problems(error)) from error


def written_spec(raw: Mapping[str, Any], *, where: str, base: Path) -> WrittenSpec:
    """The spec with its paths as they are written: relative ones begin at `base`. This process enters its environment
    first, because checking a spec imports its operators."""
    enter_environment(raw, where=where, base=base)
    spec = checked_spec(raw, where=where)
    if spec.served_elsewhere and not (base / "server.json").is_file():
        command = "`serin rollout start MODEL --stable URL --candidate URL --spec FILE`"
        problem = (
            f"server is for versions that are served elsewhere, and nothing is trained of them: {command}"
        )
        raise SpecError(where=where, problems=[("model.kind", problem)])
    return WrittenSpec(spec=spec, folder=base, where=where)


def enter_environment(raw: Mapping[str, Any], *, where: str, base: Path) -> None:
    """This process enters the environment of a spec that is not checked yet; for the spec of a bundle only if the check
    imports operators, because nothing else of it is run here. A wrong section is reported by the check."""
    found = environment_of(raw)
    stored = (base / "manifest.json").is_file()
    if found is None or (stored and not _names_operators(raw.get("features"))):
        return
    found = _absolute_lock(found, base)
    if found.lock is not None and not Path(found.lock).is_file():
        if stored:
            return  # it is in the package of the version's run
        problem = f"no file at {found.lock}; `uv lock` writes one (the path is relative to the spec's file)"
        raise SpecError(where=where, problems=[("environment.lock", problem)])
    importlib.import_module(_PACKAGES).enter(found, stored=stored)


def environment_of(raw: Mapping[str, Any]) -> EnvironmentSpec | None:
    """The section `environment` of a spec that is not checked yet; None: there is none, or it is wrong."""
    given = raw.get("environment")
    if not isinstance(given, Mapping | EnvironmentSpec):
        return None
    try:
        return EnvironmentSpec.model_validate(given)
    except ValidationError:
        return None


def priority_of(raw: Mapping[str, Any]) -> Priority:
    """The priority of a spec that is not checked yet; a wrong one counts as none."""
    given = raw.get("priority")
    return next((known for known in get_args(Priority) if known == given), "normal")


def _names_operators(features: Any) -> bool:
    """Whether a step is an import path, in features that are not checked yet."""
    features = [each for each in features or () if isinstance(each, Mapping)]
    steps = [step for each in features for step in each.get("steps") or ()]
    return any(":" in str(next(iter(step), "") if isinstance(step, Mapping) else step) for step in steps)


def absolute_tables(data: DataSpec, base: Path) -> DataSpec:
    """The section with absolute paths; relative ones start at `base`."""
    tables = {name: located(table, lambda path: _absolute(path, base)) for name, table in data.tables.items()}
    return data.model_copy(update={"tables": tables})


def _absolute_lock(section: EnvironmentSpec, base: Path) -> EnvironmentSpec:
    lock = None if section.lock is None else _absolute(section.lock, base)
    return section.model_copy(update={"lock": lock})


def _absolute(path: str, base: Path) -> str:
    if "://" in path:
        return path
    expanded = Path(path).expanduser()
    return str(expanded if expanded.is_absolute() else base / expanded)


def _problems(error: ValidationError) -> list[tuple[str, str]]:
    across: list[tuple[str, str]] = []  # what the sections themselves say about each other
    texts: dict[str, list[str]] = {}  # per key: a union such as int or "auto" complains once per member
    for item in error.errors():
        if item["type"] == "inconsistent":
            across += [(key, text) for key, text in item["ctx"]["problems"]]
        else:
            texts.setdefault(_key(item["loc"]), []).append(_sentence(item))
    for item in error.errors():
        key = _key(item["loc"])
        if item["type"] == "too_short" and any(other.startswith(f"{key}[") for other in texts):
            del texts[key]  # it is empty because its entries are wrong
    return [(key, "; or: ".join(dict.fromkeys(found))) for key, found in texts.items()] + across


def _sentence(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return f"unknown key{nearest(str(item['loc'][-1]), _known_keys(item['loc'][:-1]))}"
    if item["type"] == "missing":
        return "is missing; add it"
    text = str(item["msg"]).removeprefix("Value error, ")
    given = item.get("input")
    if item["type"] == "literal_error" and isinstance(given, str):
        options = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        close = nearest(given, options)
        return f"must be {item['ctx']['expected']}, not {given!r}{close if 'did you mean' in close else ''}"
    if item["type"] == "value_error" or isinstance(given, dict | list | tuple):
        return text
    return f"{text} (given: {given!r})"


def _key(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("int", "float", "str") and not part.startswith(("literal[", "function-", "<")):
            text += f".{part}" if text else str(part)
    return text


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys that are allowed where an unknown one stood."""
    model: type[BaseModel] = PipelineSpec
    named = False  # the next part is a name that the user has given
    for part in location:
        if isinstance(part, int) or named or part.startswith("<"):
            named = False
            continue
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        inner = _section_in(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
        named = field is not None and get_origin(field.annotation) is dict
    return [field.alias or name for name, field in model.model_fields.items()]


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        inner = _section_in(argument)
        if inner is not None:
            return inner
    return None
