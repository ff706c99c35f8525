"""Every command that takes a model, for one that Serin does not run: it works, or says why it cannot."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from serin.cli import app
from serin.store.artifacts import Endpoint
from serin.store.store import Store
from tests.fakes.kserve import KServe
from tests.kit.elsewhere import register
from tests.kit.web import in_a_thread

MODEL = "sentiment"
ELSEWHERE = rf"needs the graph of {MODEL} version 1, which is served elsewhere"
NO_ROLLOUT = rf"no rollout of '{MODEL}'"
NOT_UP = "no stack is up"
NO_WINDOWS = "version 1 has no windows with source: online"
NOT_SERVED = "no version of it is served"

CASES: dict[str, str] = {
    "rollout start {model} --no-follow": NOT_UP,
    "rollout status {model}": NO_ROLLOUT,
    "rollout watch {model}": NO_ROLLOUT,
    "rollout pause {model}": NOT_UP,
    "rollout resume {model}": NOT_UP,
    "rollout approve {model}": NOT_UP,
    "rollout promote {model}": NOT_UP,
    "rollout abort {model}": NOT_UP,
    "rollout rollback {model}": NOT_UP,
    "rollout report {model}": NO_ROLLOUT,
    "rollout replay {model}": NO_ROLLOUT,
    "logs {model}": f"no log of model '{MODEL}'",
    "retire {model} --yes": NOT_UP,
    "models show {model}": "",
    "models diff {model}:1 {model}:1": "",
    "models verify {model}": "",
    "models sign {model}": "name the private key with --key",
    "models copy {model} --to {out}": ELSEWHERE,
    "models remove {model} --yes": "a process uses it",  # this one, which has published it
    "predict {model} {rows}": NOT_UP,
    "predict {model} {rows} --batch": ELSEWHERE,
    "explain {model} {rows}": ELSEWHERE,
    "score {model} {rows} --out {folder}": ELSEWHERE,
    "tune {model}": ELSEWHERE,
    "captures list {model}": "",
    "captures show {model}": NOT_SERVED,
    "captures export {model} --out {out}": NOT_SERVED,
    "captures forget {model} --where x=1": NOT_SERVED,
    "slo {model}": "no history",
    "drift {model}": "no version of it is served here",
    "labels add {model} {rows}": "no data.target",
    "labels show {model}": NOT_SERVED,
    "quality {model}": NOT_SERVED,
    "lookups show {model}": rf"no live version of model '{MODEL}'$",
    "lookups refresh {model}": NOT_UP,
    "events push {model} {rows}": NO_WINDOWS,
    "events backfill {model}": NO_WINDOWS,
    "events forget {model} x=1": NO_WINDOWS,
}
"""By command: what it says when it cannot do it; empty: it does it."""


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        words = f"{above}{name}"
        yield from commands(command, f"{words} ") if hasattr(command, "commands") else [(words, command)]


def takes_a_model(command: Any) -> bool:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    return any(each.name == "model" or "MODEL" in str(each.metavar) for each in arguments)


def test_the_table_has_every_command_that_takes_a_model() -> None:
    found = {words for words, command in commands(typer.main.get_command(app)) if takes_a_model(command)}
    assert found == {words.partition(" {model}")[0] for words in CASES}


@pytest.mark.parametrize("described", [True, False], ids=["described", "unknown"])
@pytest.mark.parametrize("words", CASES)
def test_it_works_or_names_the_reason(
    words: str, described: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with in_a_thread(KServe(model=MODEL)) as server:
        address = server.address if described else "127.0.0.1:1"
        register(Store.open(), MODEL, Endpoint(http=address, grpc=address, elsewhere=True))
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": [1.0]}), rows)
    places = {"model": MODEL, "rows": rows, "out": tmp_path / "out.parquet", "folder": tmp_path / "scores"}
    done = CliRunner().invoke(app, words.format(**places).split())
    said = done.output + (str(done.exception) if done.exit_code and done.exception else "")
    assert done.exit_code == (1 if CASES[words] else 0), said
    assert re.search(CASES[words], said), said
