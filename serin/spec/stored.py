"""Reads single sections of the spec that is stored with a version, for processes that do not need all of it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from serin.errors import BundleBroken
from serin.spec.monitoring import CaptureSpec
from serin.spec.objectives import ObjectivesSpec
from serin.spec.section import Section
from serin.spec.yaml_file import read_yaml

_S = TypeVar("_S", bound=Section)


def stored_segments(bundle: Path) -> tuple[str, ...]:
    """Returns the columns of `export.segments`."""
    return tuple(str(name) for name in stored_section(bundle, "export").get("segments") or ())


def stored_capture(bundle: Path, keys: Collection[str] | None = None) -> CaptureSpec:
    """Returns the section `monitoring.capture`. `keys`: the others are not looked at."""
    given = stored_section(bundle, "monitoring").get("capture") or {}
    if keys is not None:
        given = {key: given[key] for key in keys if key in given}
    return _validated(CaptureSpec, bundle, "monitoring.capture", given)


def stored_objectives(bundle: Path) -> ObjectivesSpec:
    """Returns the section `objectives`."""
    return _validated(ObjectivesSpec, bundle, "objectives", stored_section(bundle, "objectives"))


def _validated(kind: type[_S], bundle: Path, place: str, given: dict[str, Any]) -> _S:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise BundleBroken(path=str(bundle / "spec.yaml"), reason=f"{place}: {error}") from error


def stored_section(bundle: Path, name: str) -> dict[str, Any]:
    """Returns a section as it is written; empty where there is none."""
    path = bundle / "spec.yaml"
    try:
        document = read_yaml(path.read_text(encoding="utf-8"))
        return dict(document.get(name) or {})
    except FileNotFoundError:  # a version that was imported without one
        return {}
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
