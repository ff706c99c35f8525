"""What may be a name. Checked where a name turns into a path, a route or a command, after decoding."""

from __future__ import annotations

import re
from typing import Literal

from serin.errors import NameInvalid

Priority = Literal["urgent", "normal", "idle"]
_MODEL = re.compile(r"[a-z][a-z0-9-]{0,62}")


def is_model_name(name: str) -> bool:
    return _MODEL.fullmatch(name) is not None


def split_version(name: str) -> tuple[str, str | None]:
    """MODEL[:VERSION] as a model, and a version's number or alias; None when no version is named."""
    model, _, version = name.partition(":")
    return model, version or None


def valid_model_name(name: str) -> str:
    """`name` itself, or NameInvalid."""
    if not is_model_name(name):
        raise NameInvalid(
            kind="model",
            name=name,
            rule="small letters, digits and '-', a letter first, at most 63 characters",
        )
    return name
