"""What a model's answers mean, in words, for people who see a number."""

from __future__ import annotations

from pathlib import Path

import yaml

from serin.formats.schema import Schema
from serin.spec.yaml_file import read_yaml


def answer_meaning(output: str, schema: Schema, bundle: Path) -> str:
    """What one output of a version means, by the target in its spec; empty for a model that brought its own outputs."""
    target = _target(bundle)
    if output == "label" and schema.classes is not None:
        return f"the most probable class: its number among {', '.join(schema.classes)}"
    if output == "probabilities" and schema.classes is not None:
        return f"of the classes {', '.join(schema.classes)}, in this order"
    if output != "score":
        return ""
    if schema.targets:
        return f"{', '.join(schema.targets)}, in this order"
    if target is None:
        return ""
    return f"probability that {target} is true" if schema.task == "binary" else f"estimate of {target}"


def _target(bundle: Path) -> str | None:
    try:
        spec = read_yaml((bundle / "spec.yaml").read_text(encoding="utf-8"))
        expression = spec["data"]["target"]["expression"]
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return None
    return expression if isinstance(expression, str) else None
