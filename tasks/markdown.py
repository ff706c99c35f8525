"""Markdown for Prefect's pages: tables whose cells cannot break them, receipts, images."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [_row(columns), _row(["---"] * len(columns)), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def drawing(svg: str, title: str) -> str:
    """Returns the image embedded in the page, because Prefect stores no files; "" for none."""
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})\n" if svg else ""


def receipt_table(receipt: Mapping[str, Any]) -> str:
    """Returns a stage's costs from a receipt's JSON. Values that were not measured are left out."""
    rows: list[tuple[str, str]] = [("seconds", f"{receipt['seconds']:,.1f}")]
    if receipt["rows"]:
        rows.append(("rows", f"{receipt['rows']:,}"))
        rows.append(("rows/s", f"{receipt['rows_per_s']:,.0f}"))
    if receipt["data_wait_share"] is not None:
        rows.append(("waiting for data", f"{receipt['data_wait_share']:.0%}"))
    if receipt.get("mfu") is not None:
        rows.append(("model FLOPs utilisation (MFU)", f"{receipt['mfu']:.1%}"))
    for device in receipt["device"]:
        busy = "" if device["busy_share"] is None else f", busy {device['busy_share']:.0%}"
        energy = "" if device["joules"] is None else f", {device['joules']:,.0f} J"
        memory = "" if device["peak_bytes"] is None else f", {device['peak_bytes'] / 1e9:,.1f} GB at most"
        rows.append((device["name"], f"booked {device['booked_s']:,.1f} s{busy}{memory}{energy}"))
    rows += [("waited", f"{wait['what']} {wait['seconds']:,.1f} s") for wait in receipt["waits"]]
    if receipt.get("cost") is not None:
        rows.append(("cost", f"{receipt['cost']:,.4f}"))
    if receipt.get("environment"):
        rows.append(("environment", receipt["environment"]))
    if receipt["bound"]:
        rows.append(("bound by", receipt["bound"]))
    if receipt["advice"]:
        rows.append(("advice", receipt["advice"]))
    return table(("cost", ""), rows)


def number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: object) -> str:
    match value:
        case float():
            text = number(value)
        case int():
            text = f"{value:,}"
        case _:
            text = str(value)
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
