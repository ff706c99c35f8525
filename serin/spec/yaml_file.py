"""Reads YAML as people mean it, into plain mappings. Knows no section of a spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from serin.errors import SpecError


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The keys of a spec's file; SpecError when it holds none."""
    try:
        return parse_mapping(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise _missing(str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(where=str(path), problems=[("", f"cannot be read: {error}")]) from error


def _missing(path: str) -> SpecError:
    """For a URL, of which a path has lost a slash, what can read it is named."""
    url = re.sub(r"^([a-z][a-z0-9+.-]+):/(?!/)", r"\1://", path)
    problem = "no such file; `serin init` writes one from a table"
    if url != path:
        command = f"`prefect deployment run pipeline/inline --param spec={url}`"
        problem = f"is a URL, and a spec is read from a file here; copy it here, or run it with {command}"
    return SpecError(where=url, problems=[("", problem)])


def parse_mapping(text: str, where: str) -> Mapping[str, Any]:
    """The keys of a spec; SpecError when it holds none. `where`: its file or URL."""
    try:
        raw = read_yaml(text)
    except yaml.YAMLError as error:
        raise SpecError(where=where, problems=[("", f"is not YAML: {error}")]) from error
    if not isinstance(raw, dict):
        problem = "must hold keys such as name, data, features; this holds none"
        raise SpecError(where=where, problems=[("", problem)])
    return raw


def read_yaml(text: str) -> Any:
    """YAML as people mean it: `on` is a word, and a repeated key is an error."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `on`, `yes` and `no` as booleans and lets a second key silently win over the first."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (the base class calls it an instance's)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(?:true|True|false|False)$"), list("tTfF")
)
