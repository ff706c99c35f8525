"""The one ONNX operator that maps strings or integers to integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


def label_encoder(
    graph: GraphBuilder,
    values: str,
    *,
    keys: Sequence[str] | Sequence[int],
    places: Sequence[int],
    default: int,
) -> str:
    """int64: the place of the key that a value equals, else `default`. At least one key; all of one type."""
    attributes: dict[str, Any] = {
        "keys_strings" if isinstance(keys[0], str) else "keys_int64s": list(keys),
        "values_int64s": list(places),
        "default_int64": default,
    }
    places_found: str = graph.op("LabelEncoder", values, domain="ai.onnx.ml", **attributes)
    return places_found
