"""Stores the result of `serin tune` beside a model's versions: serving.yaml, with a comment for each value.

The values belong to this machine. A release uses those that its spec does not set, and none on another machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from serin.errors import TuningFailed
from serin.machine.durable import write_whole
from serin.machine.hardware import core_count
from serin.store.artifacts import Bundle

FILE = "serving.yaml"
FORMAT, VERSION = "serin.tuned", 1
KEYS = ("instances", "threads", "queue_delay_us", "max_batch_rows")
DEVICE = "device"  # cpu, or auto: a GPU for what was exported for one, if one is here


def tuned_file(bundle: Bundle) -> Path:
    """Returns the file in the store, or in this machine's copy of a remote store."""
    return Path(bundle.path).parents[1] / FILE


def read_tuned(bundle: Bundle) -> dict[str, int | str]:
    """Returns the values for this machine; none when the model was not tuned here."""
    path = tuned_file(bundle)
    if not path.is_file():
        return {}
    try:
        document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        if document["machine"]["cores"] != core_count():
            return {}
        serving: dict[str, Any] = document["serving"]
        found: dict[str, int | str] = {key: int(value) for key, value in serving.items() if key in KEYS}
        return found | ({DEVICE: str(serving[DEVICE])} if DEVICE in serving else {})
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        reason = f"{path} cannot be read ({why}); remove it, or run `serin tune {bundle.model}` again"
        raise TuningFailed(model=bundle.model, reason=reason) from error


def write_tuned(bundle: Bundle, heading: list[str], values: dict[str, tuple[int | str, str]]) -> Path:
    """Writes the file atomically. `values`: each with the comment that gives the reason."""
    lines = [f"# {line}".rstrip() for line in heading]
    lines += [f"format: {FORMAT}", f"version: {VERSION}", f"machine: {{cores: {core_count()}}}", "serving:"]
    wide = max(len(f"{key}: {value}") for key, (value, _) in values.items())
    for key, (value, why) in values.items():
        lines.append(f"  {f'{key}: {value}':<{wide}}  # {why}")
    path = tuned_file(bundle)
    write_whole(path, "\n".join(lines) + "\n")
    return path
