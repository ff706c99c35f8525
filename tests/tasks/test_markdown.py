"""Pages for Prefect's interface."""

from __future__ import annotations

from serin.store.receipt import measure
from tasks.markdown import drawing, receipt_table, table


def test_a_cell_cannot_break_its_table() -> None:
    assert table(("a", "b"), [("x|y", "two\nlines"), ("<img src=x>", 1234567)]) == (
        "| a | b |\n| --- | --- |\n| x\\|y | two lines |\n| &lt;img src=x> | 1,234,567 |\n"
    )


def test_numbers_are_shown_with_four_digits_and_no_false_precision() -> None:
    assert table(("n",), [(0.123456789,), (12345.678,)]) == "| n |\n| --- |\n| 0.1235 |\n| 12,346 |\n"


def test_a_receipt_shows_what_was_measured_and_nothing_else() -> None:
    with measure("etl") as measurement:
        measurement.rows, measurement.work_s = 1000, 2.0
    assert measurement.receipt is not None
    page = receipt_table(measurement.receipt.to_json())
    assert "| rows/s | 500 |" in page
    assert "waiting" not in page
    assert "None" not in page


def test_a_drawing_travels_inside_its_page_and_none_leaves_nothing() -> None:
    assert drawing("<svg/>", "loss").startswith("![loss](data:image/svg+xml;base64,")
    assert drawing("", "loss") == ""
