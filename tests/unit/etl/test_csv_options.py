"""CSV files as they come: options, what `serin init` finds out, and a dataset as from plain CSV."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.draft.guess import draft_table
from serin.draft.sniff_csv import sniff_table
from serin.errors import SourceUnreadable, SpecError
from serin.etl.identity import current_key
from serin.etl.sources.convert import convert
from serin.etl.sources.file_cache import conversion_of
from serin.etl.sources.find import find_table
from serin.export.convert.fuse import features2onnx
from serin.features.plan import FeaturePlan
from serin.formats.dataset import FEATURES, read_dataset
from serin.formats.schema import Schema, outputs_of, read_schema, write_schema
from serin.formats.shards import read_split
from serin.pipeline.check import check_spec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.tables import FileTable
from serin.store.stage_keys import said
from serin.store.store import Store
from tests.fakes.ugly_csv import LEAK, TARGET, write_ugly_csv
from tests.unit.etl.trips import build, spec_of, trips

Write = Callable[[pd.DataFrame, Path], Any]
FEATURE_GROUPS = [
    {"columns": ["fare", "people"], "steps": ["fill_median", "normalize"]},
    {"columns": ["taxi", "zone"], "steps": ["categorify"]},
    {"columns": ["start"], "steps": [{"date_parts": ["hour", "weekday"]}]},
]
CSV: dict[str, tuple[Write, dict[str, Any]]] = {
    "semicolons and decimal commas": (
        lambda frame, path: frame.to_csv(path, index=False, sep=";", decimal=","),
        {"delimiter": ";", "decimal": ","},
    ),
    "vertical bars and other quotes": (
        lambda frame, path: frame.to_csv(path, index=False, sep="|", quotechar="'", quoting=1),
        {"delimiter": "|", "quote": "'"},
    ),
    "tabs in Latin-1": (
        lambda frame, path: frame.to_csv(path, index=False, sep="\t", encoding="latin-1"),
        {"delimiter": "\\t", "encoding": "latin-1"},
    ),
    "UTF-16": (lambda frame, path: frame.to_csv(path, index=False, encoding="utf-16"), {"encoding": "utf-16"}),
    "no header": (
        lambda frame, path: frame.to_csv(path, index=False, header=False),
        {"header": False, "names": list(trips(2).columns)},
    ),
    "other names in the header": (
        lambda frame, path: frame.add_prefix("x").to_csv(path, index=False),
        {"names": list(trips(2).columns)},
    ),
    "dates with the day first": (
        lambda frame, path: frame.to_csv(path, index=False, date_format="%d.%m.%Y %H:%M"),
        {"date_formats": "%d.%m.%Y %H:%M"},
    ),
    "dates of one column with the month first": (
        lambda frame, path: frame.to_csv(path, index=False, date_format="%m/%d/%Y %H:%M"),
        {"date_formats": {"start": ["%m/%d/%Y %H:%M"]}},
    ),
    "thousands": (
        lambda frame, path: frame.assign(
            fare=[None if np.isnan(fare) else f"{float(fare):,}" for fare in frame["fare"]]
        ).to_csv(path, index=False),
        {"thousands": ","},
    ),
}  # fmt: skip


def spec_over(folder: Path, name: str, options: dict[str, Any]) -> PipelineSpec:
    table = {"path": str(folder / name), **options} if options else str(folder / name)
    return spec_of(folder, tables={"trips": table}, features=FEATURE_GROUPS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the dataset that plain CSV gives."""
    folder = tmp_path_factory.mktemp("plain")
    trips().to_csv(folder / "t.csv", index=False)
    return str(build(spec_over(folder, "t.csv", {}), Store(str(folder / "store"))).digest)


@pytest.mark.parametrize("form", CSV)
def test_options_give_the_dataset_of_plain_csv(
    tmp_path: Path, plain: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, options = CSV[form]
    name = "t.data" if "delimiter" in options else "t.csv"
    write(trips(), tmp_path / name)
    spec = spec_over(tmp_path, name, options)
    assert build(spec, Store(str(tmp_path / "store")), piece_rows=200).digest == plain
    (file,) = find_table("trips", spec.data.tables["trips"])
    convert(file, tmp_path / "whole")
    # the first block says little about the columns
    monkeypatch.setattr("serin.etl.sources.convert._BLOCK_BYTES", 4000)
    convert(file, tmp_path / "blocks")
    kinds = [
        pa.timestamp("us") if pa.types.is_temporal(each.type) else each.type
        for each in pq.read_schema(tmp_path / "whole")
    ]
    one, other = (pq.read_table(tmp_path / each) for each in ("whole", "blocks"))
    assert [column.cast(kind) for column, kind in zip(one.columns, kinds, strict=True)] == [
        column.cast(kind) for column, kind in zip(other.columns, kinds, strict=True)
    ]


def read(folder: Path, text: str, **options: Any) -> dict[str, list[Any]]:
    (folder / "t.csv").write_text(text, encoding="utf-8")
    found = find_table("t", FileTable(path=str(folder / "t.csv"), **options))
    convert(found[0], folder / "t.parquet")
    return dict(pq.read_table(folder / "t.parquet").to_pydict())


def test_a_column_may_hold_dates_in_several_formats(tmp_path: Path) -> None:
    text = "when,id\n31.12.2024,a\n2024-12-30,b\n1/2/2023,c\nNA,d\n24.12.98,e\n"
    found = read(tmp_path, text, date_formats={"when": ["%d.%m.%Y", "%m/%d/%Y", "%d.%m.%y"]})
    wanted = ["2024-12-31", "2024-12-30", "2023-01-02", None, "1998-12-24"]
    assert found["when"] == [None if day is None else pd.Timestamp(day) for day in wanted]


def test_a_year_of_two_digits_is_never_in_the_future(tmp_path: Path) -> None:
    this_year = datetime.now(UTC).year
    days = [f"01/01/{year % 100:02}" for year in range(this_year - 99, this_year + 1)]
    found = read(tmp_path, "\n".join(["born,id", *(f"{day},a" for day in days)]), date_formats=["%m/%d/%y"])
    assert [moment.year for moment in found["born"]] == list(range(this_year - 99, this_year + 1))
    leap = read(tmp_path, "born,id\n02/29/68 23:59,a\n", date_formats=["%m/%d/%y %H:%M"])
    assert leap["born"] == [pd.Timestamp("1968-02-29 23:59")]


def test_single_columns_may_have_a_decimal_comma(tmp_path: Path) -> None:
    text = "a;b;c\n1,5;1.5;1.234\n2;2;12\n"
    found = read(tmp_path, text, delimiter=";", decimal={"a": ","})
    assert found == {"a": [1.5, 2.0], "b": [1.5, 2.0], "c": [1.234, 12.0]}
    with pytest.raises(SourceUnreadable, match="no column 'z', which decimal names"):
        read(tmp_path, text, delimiter=";", decimal={"z": ","})
    grouped = read(tmp_path, "a;b\n1.234,5;1.5\n2;2\n", delimiter=";", decimal={"a": ","}, thousands=".")
    assert grouped == {"a": [1234.5, 2.0], "b": [1.5, 2.0]}


def test_null_texts_of_one_column_are_texts_in_another(tmp_path: Path) -> None:
    text = "land,city,size\nNA,NA,-999\nDE,Köln,-999\nFR,NA,7\n"
    found = read(tmp_path, text, null_values={"city": ["NA"], "size": [-999]})
    assert found == {"land": ["NA", "DE", "FR"], "city": [None, "Köln", None], "size": [None, None, 7]}
    everywhere = read(tmp_path, text, null_values=["NA"])
    assert everywhere["land"] == [None, "DE", "FR"]
    assert everywhere["size"] == [-999, -999, 7]


def test_a_mark_in_the_wrong_place_makes_no_number(tmp_path: Path) -> None:
    found = read(tmp_path, "a;b\n1.234,5;1.5\n12;2\n", delimiter=";", decimal=",", thousands=".")
    assert found == {"a": [1234.5, 12.0], "b": ["1.5", "2"]}


def test_integers_keep_every_digit(tmp_path: Path) -> None:
    found = read(tmp_path, "a;b\n9.007.199.254.740.993;1\n?;2\n", delimiter=";", decimal=",", thousands=".",
                 null_values="?")  # fmt: skip
    assert found["a"] == [2**53 + 1, None]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("a;b;c\n1;2;3\n4;5;6\n", {},
         "the header has 1 field: 'a;b;c'; is the delimiter ';'? Set data.tables.t.delimiter"),
        ("a;b\n1,5;2,5\n4,5;5,5\n", {},
         "line 2 has 3 fields but the header has 1: '1,5;2,5'; is the delimiter ';'? Set data.tables.t.delimiter"),
        ("a,b\n1,2\n4,5,6\n", {}, "line 3 has 3 fields but the header has 2: '4,5,6'; correct or remove that line"),
        ("1,2\n4,5\n", {"header": False, "names": ["a"]},
         "line 1 has 2 fields but data.tables.t.names has 1"),
        ("day\n31.12.2024\n2024-12-31\n12/31/2024\n", {"date_formats": {"day": "%d.%m.%Y"}},
         "row 2: '12/31/2024' in column 'day' fits none of its date formats (%d.%m.%Y)"),
        ("day\n31.12.2024\n", {"date_formats": {"days": "%d.%m.%Y"}}, "it has no column 'days', which date_formats"),
        ("a\né\n", {"encoding": "ascii"}, "it is not ascii text"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_its_options_is_explained(
    tmp_path: Path, text: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(SourceUnreadable) as caught:
        read(tmp_path, text, **options)
    assert says in str(caught.value)


def test_options_for_csv_are_refused_for_other_formats(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t.parquet")
    with pytest.raises(SourceUnreadable, match="it is parquet, and the table has options for CSV files"):
        find_table("t", FileTable(path=str(tmp_path / "t.parquet"), delimiter=";"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"delimiter": "::"}, "data.tables.trips.delimiter: '::' is not a delimiter: use one character"),
        ({"delimitr": ";"}, "data.tables.trips.delimitr: unknown key; did you mean 'delimiter'?"),
        ({"encoding": "utf-5"}, "'utf-5' is not an encoding"),
        ({"decimal": ",", "thousands": ","}, "decimal and thousands are both ','"),
        ({"null_values": [None]}, "put each text in quotes"),
        ({"date_formats": "%d.%m.%Y %z"}, "%z is not supported"),
        ({"date_formats": "dd.mm.yyyy"}, "it names no part of a date"),
        ({"names": ["a", "a"]}, "'a' is named twice"),
    ],
)
def test_wrong_options_are_refused_with_their_key(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_over(tmp_path, "t.csv", options)
    assert says in str(caught.value)


def test_every_option_is_part_of_the_keys_and_none_means_the_key_of_before(tmp_path: Path) -> None:
    trips().to_csv(tmp_path / "t.csv", index=False)
    store = Store(str(tmp_path / "store"))
    path = str(tmp_path / "t.csv")
    other = {"delimiter": ";", "quote": "'", "encoding": "latin-1", "decimal": ",", "thousands": " ",
             "null_values": ["-"], "date_formats": ["%Y"], "header": False, "names": ["x"]}  # fmt: skip
    assert set(other) == set(FileTable.model_fields) - {"path"}
    forms = [{}, *({key: value} for key, value in other.items())]
    specs = [spec_over(tmp_path, "t.csv", options) for options in forms]
    assert len({current_key(spec.data, spec.features, store) for spec in specs}) == len(specs)
    tables = [FileTable(path=path, **options) for options in forms]
    assert len({json.dumps(conversion_of(find_table("t", table)[0])) for table in tables}) == len(tables)
    assert json.loads(said(specs[0].data))["tables"] == {"trips": path}
    assert find_table("t", path) == find_table("t", FileTable(path=path))


def test_the_served_graph_reads_null_texts_as_null(tmp_path: Path) -> None:
    frame = trips()
    frame["taxi"] = frame["taxi"].fillna("NA").where(frame.index % 9 > 0, "None")
    frame.to_csv(tmp_path / "t.csv", index=False)
    features = [
        {"columns": ["taxi"], "steps": ["categorify"]},
        {"columns": ["unknown"], "steps": ["categorify"]},
    ]
    table = {"path": str(tmp_path / "t.csv"), "null_values": ["NA", "None"]}
    spec = spec_of(tmp_path, tables={"trips": table}, features=features, derived={"unknown": "is_null(taxi)"})
    dataset = build(spec, Store(str(tmp_path / "store")))
    described, folder = read_dataset(dataset.path), Path(dataset.path)
    assert [column.null_texts for column in described.inputs] == [("NA", "None")]
    assert described.sources[0].csv is not None
    write_schema(tmp_path, Schema(task="binary", inputs=described.inputs, outputs=outputs_of("binary")))
    assert read_schema(tmp_path).inputs == described.inputs
    plan = FeaturePlan.from_json(json.loads((folder / FEATURES).read_text(encoding="utf-8")))
    graph = features2onnx(plan, described, folder)
    session = ort.InferenceSession(graph.model.SerializeToString(), providers=["CPUExecutionProvider"])
    sent = np.array([["NA"], ["None"], [""], ["t1"], ["na"]], dtype=object)
    (codes,) = session.run([graph.cat], {"taxi": sent})
    assert codes[0].tolist() == codes[1].tolist() == codes[2].tolist()
    assert codes[0, 0] == 0
    assert codes[3, 0] > codes[4, 0] > 0  # known, unknown
    assert codes[0, 1] != codes[3, 1]


def test_a_stored_spec_says_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    for table in ({"path": "/t.parquet"}, {"path": "/t.csv", "null_values": {"a": "x"}, "delimiter": "\\t"}):
        spec = spec_of(tmp_path, tables={"trips": table})
        again = load_spec(json.loads(spec.model_dump_json(by_alias=True)))
        assert again == spec


DAYS = ["31.12.2024", "2024-12-30", "01.02.2024"]


def lines(*rows: str, repeat: int = 30) -> str:
    """A header and rows that are repeated."""
    return "\n".join([rows[0], *(rows[1:] * repeat)]) + "\n"


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (lines("a,b", "1,x", "2,y").encode(), {}),
        (lines("a,b", "1,x", "2,y").encode("utf-8-sig"), {}),
        (lines("a;b", "1,5;x", "2;y").encode(), {"delimiter": ";", "decimal": ","}),
        (lines("a\tb", "1\tx, y", "2\tz").encode(), {"delimiter": "\t"}),
        (lines("a|b", "1|x", "2|y").encode(), {"delimiter": "|"}),
        (lines("a,b", '1,"x;y"', '2,"y;z;1"').encode(), {}),
        (lines("a;b", "1;'x;y'", "2;'it''s'").encode(), {"delimiter": ";", "quote": "'"}),
        (lines("a,b", '1,5" pipe', '2,6" pipe').encode(), {}),
        (lines("a,b", "1,é", "2,y").encode("latin-1"), {"encoding": "latin-1"}),
        (lines("a,b", "1,“é”", "2,y").encode("cp1252"), {"encoding": "cp1252"}),
        (lines("a,b", "1,é", "2,y").encode("utf-16"), {"encoding": "utf-16"}),
        (lines("a,b", "1,é", "2,y").encode("utf-16-le"), {"encoding": "utf-16-le"}),
        (lines("39, State", "50, Private").encode(), {"header": False, "names": ["column_1", "column_2"]}),
        (lines("region,2019,2020", "north,1,2", "south,3,4").encode(), {}),
        (lines("a;b", "1.234,5;x", "12;y").encode(), {"delimiter": ";", "decimal": ",", "thousands": "."}),
        (lines("a;b", "1.234;1,5", "12;2").encode(), {"delimiter": ";", "decimal": ",", "thousands": "."}),
        (lines("a,b", '"1,234,567.5",x', "12,y").encode(), {"thousands": ","}),
        (lines("a,b", "1,x", "None,y", "?,z").encode(), {"null_values": ["?", "None"]}),
        (lines("a,b", "k.A.,x", "k.A.,y", *(f"{row},z" for row in range(40))).encode(),
         {"null_values": ["k.A."]}),
        (lines("a,b", "1,k.A.", "2,k.A.", *(f"{row},{row}X" for row in range(40))).encode(), {}),
        (lines("a,b", "1,x", "NA,y", "3,z").encode(), {}),  # null beside numbers without being named
        (lines("a,city", "1,Köln", "2,NA", "3,None").encode(), {"null_values": ["NA", "None"]}),
        (lines("land,city", "NA,NA", "DE,Köln", "FR,Lyon").encode(), {"null_values": {"city": ["NA"]}}),
        (lines("a,b", *(f"{row},{day}" for row, day in enumerate(DAYS))).encode(),
         {"date_formats": {"b": ["%d.%m.%Y"]}}),
        (lines("a,b", "1,12/31/2024 10:30", "2,1/2/2024 9:05").encode(),
         {"date_formats": {"b": ["%m/%d/%Y %H:%M"]}}),
        (lines("a,b", "1,31/12/2024", "2,1/2/2024").encode(), {"date_formats": {"b": ["%d/%m/%Y"]}}),
        (lines("a,b", "1,03-Mar-2026 07:12 PM", "2,11-Dec-2025 12:00 AM").encode(),
         {"date_formats": {"b": ["%d-%b-%Y %I:%M %p"]}}),
        (lines("a,b", "1,24.08.1963 09:30 Uhr", "2,01.02.1999 23:59 Uhr").encode(),
         {"date_formats": {"b": ["%d.%m.%Y %H:%M Uhr"]}}),
        (lines("a,b", "1,3 March 2026 7:12:05pm", "2,14 december 2025 1:00:00AM").encode(),
         {"date_formats": {"b": ["%d %B %Y %I:%M:%S%p"]}}),
        (lines("a,b", "1,05/19/68", "2,12/31/01").encode(), {"date_formats": {"b": ["%m/%d/%y"]}}),
        (lines("a;b", "1,5;1.25", "2,5;3.5").encode(), {"delimiter": ";", "decimal": {"a": ","}}),
        (lines("a,b", "1,2024-12-31T10:00:00Z", "2,2024-12-31T10:00:00+01:00").encode(), {}),
        (lines("version,b", "1.2.3,x", "1.2.4,y").encode(), {}),
    ],
)  # fmt: skip
def test_what_a_file_is_like_is_found_and_reads_it(
    tmp_path: Path, content: bytes, options: dict[str, Any]
) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    found = sniff_table(str(tmp_path / "t.csv"))
    assert found.options == options
    assert len(found.seen) >= len(set(options) - {"names"})
    (file,) = find_table("main", found.source(str(tmp_path / "t.csv")))
    convert(file, tmp_path / "t.parquet")
    texts = [field.name for field in pq.read_schema(tmp_path / "t.parquet") if pa.types.is_string(field.type)]
    dates = options.get("date_formats", {})
    assert not set(texts) & {"a", *dates}


def test_a_written_spec_reads_the_file_and_says_what_was_seen(tmp_path: Path) -> None:
    rows = [f"{row};{row % 7},5;{DAYS[row % 3]};{['NA', 'Köln 🐤'][row % 2]};{row % 2}" for row in range(300)]
    (tmp_path / "t.txt").write_text("\n".join(["id;preis;tag;stadt;ziel", *rows]), encoding="utf-8-sig")
    text = draft_table(tmp_path / "t.txt", "ziel", path_in_spec="t.txt").text
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    for sentence in (
        "# the file starts with a byte order mark: UTF-8",
        "# fields are separated by semicolons",
        "# numbers have a decimal comma in preis, such as 0,5",
        "# read as null, also by the served model: 'NA' (150 cells) in stadt",
        "# tag holds 2 formats of dates, such as 31.12.2024 and 2024-12-30",
    ):
        assert sentence in text
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.data.time == "tag"
    assert spec.data.null_texts("main", "stadt") == ("NA",)


@pytest.mark.parametrize("name", ["t.parquet", "t"])
def test_other_formats_need_no_options(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / name)
    assert sniff_table(str(tmp_path / name)).options == {}


ROWS = 8000


@pytest.fixture(scope="module")
def ugly(tmp_path_factory: pytest.TempPathFactory) -> tuple[PipelineSpec, pd.DataFrame, str]:
    """The drafted spec, the clean rows, and the spec's text."""
    folder = tmp_path_factory.mktemp("ugly")
    clean = write_ugly_csv(folder / "ugly.csv", ROWS)
    text = draft_table(folder / "ugly.csv", TARGET, path_in_spec="ugly.csv").text
    (folder / "pipeline.yaml").write_text(text, encoding="utf-8")
    return load_spec(folder / "pipeline.yaml"), clean, text


def test_every_cell_is_read_as_it_is_meant(
    tmp_path: Path, ugly: tuple[PipelineSpec, pd.DataFrame, str]
) -> None:
    spec, clean, _ = ugly
    (file,) = find_table("main", spec.data.tables["main"])
    convert(file, tmp_path / "t.parquet")
    found = pq.read_table(tmp_path / "t.parquet").to_pandas()
    assert list(found.columns) == list(clean.columns)
    assert (found["kundennr"] == clean["kundennr"]).all()
    assert found["kundennr"].max() > 2**53
    assert (found["datum"] == clean["datum"]).all()
    for name in ("betrag", "alter", "versuche", LEAK):
        assert np.array_equal(found[name].astype(float), clean[name].astype(float), equal_nan=True), name
    for name in ("stadt", "kanal", TARGET):
        assert found[name].fillna("").tolist() == clean[name].fillna("").tolist(), name


def test_a_drafted_spec_passes_the_check_and_gives_a_dataset(
    tmp_path: Path, ugly: tuple[PipelineSpec, pd.DataFrame, str], home: Path
) -> None:
    spec, clean, text = ugly
    inputs = {column.name: column for column in check_spec(spec).inputs}
    assert not {LEAK, "kundennr", TARGET} & inputs.keys()
    assert inputs["stadt"].null_texts == ("NA", "None")
    assert (inputs["betrag"].kind, inputs["alter"].kind, inputs["datum"].kind) == (
        "float",
        "int",
        "timestamp",
    )
    assert f"#   {LEAK}: alone gives the answer away" in text
    dataset = build(spec, Store(str(tmp_path / "store")))
    assert sum(dataset.rows.values()) == ROWS  # each of the repeated rows once
    targets = np.concatenate([read_split(dataset.path, split).whole().target for split in dataset.rows])
    assert targets.sum() == (clean.drop_duplicates()[TARGET] == "ja").sum()
    assert read_dataset(dataset.path).sources[0].csv is not None
