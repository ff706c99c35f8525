"""Other names for columns whose names are reserved, so that a drafted spec passes its check."""

from __future__ import annotations

from collections.abc import Collection

from serin.spec.rename import is_reserved


def free_names(columns: Collection[str], *, kept: Collection[str]) -> dict[str, str]:
    """Reserved name -> a new name that no column has. `kept`: what the target reads, which no client sends."""
    found: dict[str, str] = {}
    for name in columns:
        if is_reserved(name) and name not in kept:
            new = f"input_{name or 'without_name'}"
            while new in columns or new in found.values():
                new = f"input_{new}"
            found[name] = new
    return found
