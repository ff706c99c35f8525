"""Random tables whose text is easily mistaken for something else, and the same rows as CSV, JSON lines, Parquet, Arrow.

Text formats leave a choice to whoever writes them (quotes, line ends, how a missing value is written); the choice is
drawn by chance, for it must not show.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from hypothesis import strategies as st

Values = dict[str, list[Any]]
Random = np.random.Generator

NULL_WORDS = ["NA", "N/A", "n/a", "null", "NULL", "nan", "NaN", "-nan", "#N/A", "#NA", "1.#IND"]
LIKE_ANOTHER_TYPE = [
    "0", "1", "007", "1e5", "-1.5", "0x1F", "inf", "true", "False", "2024-01-01", "12:30", "9" * 25,
]  # fmt: skip
UGLY = [
    "None", "<NA>", "na", "-", "--", ".", "?", "#", "=1+1", "undefined", "{}", "[]", "\\", "\\N", "\\n", "a,b", "a;b",
    " ", "  ", "\t", " NA", "NA ", "x ", "\u00a0", "\u200b", "\ufeff", "\ufeffNA", "\x7f", "\u2028", "\r", "\n", "a\nb",
    "a\r\nb", '"', '""', "'", 'a"b', "🐤", "👩\u200d🔬", "é", "e\u0301", "日本",
]  # fmt: skip
SUFFIXES = (".csv", ".jsonl", ".parquet", ".arrow")

texts = st.one_of(
    st.sampled_from(NULL_WORDS),
    st.sampled_from(LIKE_ANOTHER_TYPE),
    st.sampled_from(UGLY),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6),
)
vocabularies = st.lists(texts, min_size=1, max_size=12, unique=True)


def random_rows(rows: int, vocabulary: list[str], random: Random) -> tuple[Values, Values]:
    """A main table and one of places, keyed by text; None is a missing value. One word at a random row says that a
    column is text: without it, nothing in a CSV file tells the text "1" from a number."""
    words = [*vocabulary, "plain"]

    def some(values: Any) -> list[Any]:
        found = np.asarray(values, object)
        found[random.random(len(found)) < 0.15] = None
        return list(found)

    def text() -> list[Any]:
        drawn = some(random.choice(np.asarray(words, object), rows))
        drawn[int(random.integers(rows))] = "plain"
        return drawn

    main: Values = {
        "word": text(),
        "place": text(),
        "id": some([2**53 + int(n) for n in random.integers(0, 9, rows)]),
        "size": some([float(n) + 0.25 for n in random.integers(-50, 50, rows)]),
        "open": some([bool(n) for n in random.integers(0, 2, rows)]),
        "seen": some([f"2024-03-{n:02} 10:00:00" for n in random.integers(1, 29, rows)]),
        "y": [int(n) for n in random.integers(0, 2, rows)],
    }
    kinds = [*random.permutation(np.asarray(words, object)), "plain"][: len(words)]
    kinds[int(random.integers(len(kinds)))] = "plain"
    return main, {"place": words, "kind": [None if word == words[0] else word for word in kinds]}


def write_forms(folder: Path, name: str, values: Values, random: Random) -> None:
    """`name` with every suffix: the same rows."""
    rows = len(next(iter(values.values())))
    choice = random.random
    (folder / f"{name}.csv").write_bytes(_csv(values, rows, random))
    lines = []
    for row in range(rows):
        cells = {column: _json_cell(column, own[row], random) for column, own in values.items()}
        lines.append({column: cell for column, cell in cells.items() if cell is not None or choice() < 0.5})
    newline = "\r\n" if choice() < 0.5 else "\n"
    ascii_only = bool(choice() < 0.5)
    content = newline.join(json.dumps(line, ensure_ascii=ascii_only) for line in lines)
    (folder / f"{name}.jsonl").write_bytes(_mark(random) + content.encode())
    pq.write_table(_arrow(values, random), folder / f"{name}.parquet", row_group_size=rows // 2 + 1)
    feather.write_feather(_arrow(values, random), str(folder / f"{name}.arrow"), chunksize=rows // 3 + 1)


def _csv(values: Values, rows: int, random: Random) -> bytes:
    end = "\r\n" if random.random() < 0.5 else "\n"
    quote_all = bool(random.random() < 0.3)
    lines = [",".join(values)]
    for row in range(rows):
        cells = (_csv_cell(column, own[row], random) for column, own in values.items())
        lines.append(",".join(_quoted(cell, always=quote_all) for cell in cells))
    return _mark(random) + (end.join(lines) + end).encode()


def _csv_cell(column: str, value: Any, random: Random) -> str:
    if value is None:
        return "" if _is_text(column) or random.random() < 0.5 else str(random.choice(NULL_WORDS))
    if isinstance(value, bool):
        return str(random.choice(["true", "True", "TRUE"] if value else ["false", "False", "FALSE"]))
    return value if isinstance(value, str) else repr(value)


def _json_cell(column: str, value: Any, random: Random) -> Any:
    return "" if value is None and _is_text(column) and random.random() < 0.3 else value


def _quoted(cell: str, *, always: bool) -> str:
    special = any(char in cell for char in ',"\r\n')
    return '"' + cell.replace('"', '""') + '"' if special or always else cell


def _mark(random: Random) -> bytes:
    """A byte order mark, as some programs write one."""
    return b"\xef\xbb\xbf" if random.random() < 0.3 else b""


def _arrow(values: Values, random: Random) -> pa.Table:
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    columns = {}
    for name, own in values.items():
        if name == "seen":
            columns[name] = pa.array(own, pa.string()).cast(pa.timestamp("us"))
        elif _is_text(name):
            voids = ["" if value is None and random.random() < 0.3 else value for value in own]
            columns[name] = pa.array(voids, pa.string()).cast(kinds[int(random.integers(len(kinds)))])
        else:
            columns[name] = pa.array(own)
    return pa.table(columns)


def _is_text(column: str) -> bool:
    return column in ("word", "place", "kind")
