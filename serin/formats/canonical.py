"""JSON with one spelling: equal documents give equal bytes, so their digests can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def canonical(document: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """The document as JSON with sorted keys and no spaces. `default` converts values that JSON does not know."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), default=default).encode()
