import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_group

from serin import cli
from serin.commands.suggest import PANELS
from serin.errors import LeaseUnavailable, Preempted
from serin.host.supervisor import Supervisor
from serin.machine.leases import lease
from tests.fakes.gpus import pretend_gpus
from tests.kit.commands import serin_main
from tests.kit.stacks import stack_in
from tests.logs import heard

# What people and scripts type. A change here breaks somebody: say so in CHANGELOG.md.
COMMAND_LINE = {
    "": "[--debug] [--version]",
    "init": "[FOLDER] [--table] [--target]",
    "check": "[SPEC] [--data --no-data] [--json]",
    "schema": "[--out]",
    "run": (
        "[SPEC] [--placed] [--fresh] [--no-serve --serve] [--resume] [--approved-by] [--follow --no-follow] [--as-of]"
        " [--dry-run]"
    ),
    "etl": "[SPEC] [--fresh] [--as-of] [--json]",
    "train": "[SPEC] [--machines] [--rendezvous] [--as-of] [--json]",
    "search": "[SPEC] [--out] [--trials] [--json]",
    "export": "[SPEC] [--fresh] [--approved-by] [--as-of] [--json]",
    "up": "[--address] [--port] [--ui-port] [--tls-cert] [--tls-key] [--envoy] [--json]",
    "agent": (
        "[--port] [--address] [--advertise] [--peer-port] [--peer-cert] [--peer-key] [--peer-ca] [--insecure-peers]"
        " [--gateway-only] [--alone] [--tls-cert] [--tls-key] [--envoy]"
    ),
    "down": "",
    "controller": "[--fleet]",
    "status": "[--json]",
    "tune": "[MODEL] [--rows] [--max-rows] [--gpu-price] [--json]",
    "deploy": "[FILE] [--slurm]",
    "drift": "[MODEL] [--report] [--json]",
    "doctor": "[--json]",
    "env": "",
    "hosts remove": "[HOST] [--yes -y]",
    "hosts list": "[--json]",
    "worker": "[POOL] [--limit]",
    "install gateway": "",
    "install kernels": "",
    "install triton": "",
    "runs cancel": "[RUN]",
    "runs fetch": "[RUN] [--to]",
    "runs list": "[--limit] [--json]",
    "runs logs": "[RUN] [--follow -f] [--lines -n]",
    "runs report": "[RUN] [--to]",
    "runs show": "[RUN] [--json]",
    "tables list": "[--json]",
    "tables push": "[FOLDER] [--json]",
    "tables remove": "[TABLES] [--yes -y]",
    "lookups refresh": "[MODEL] [--max-row-change] [--canary] [--follow --no-follow] [--why]",
    "lookups show": "[MODEL] [--json]",
    "rollout start": "[NAME] [--stable] [--candidate] [--spec] [--reference] [--request-timeout] "
    "[--follow --no-follow] [--why]",
    "rollout status": "[MODEL] [--json]",
    "rollout watch": "[MODEL]",
    "rollout pause": "[NAME] [--why]",
    "rollout resume": "[NAME] [--why]",
    "rollout approve": "[NAME] [--why]",
    "rollout promote": "[NAME] [--why]",
    "rollout abort": "[NAME] [--why]",
    "rollout report": "[NAME] [--out]",
    "rollout replay": "[NAME] [--spec] [--log] [--json]",
    "rollout rollback": "[NAME] [--why] [--follow --no-follow]",
    "labels show": "[MODEL] [--json]",
    "quality": "[MODEL] [--json]",
    "labels add": "[NAME] [TABLE] [--id] [--row] [--client-id] [--on] [--value] [--time] [--json]",
    "captures list": "[MODEL] [--json]",
    "captures show": "[NAME] [--rows -n] [--json]",
    "captures export": "[NAME] [--out -o] [--since] [--until]",
    "captures forget": "[MODEL] [--where] [--wait] [--yes -y] [--json]",
    "events push": "[NAME] [FILE] [--json]",
    "events backfill": "[NAME] [--json]",
    "events show": "[--json]",
    "events forget": "[MODEL] [KEYS] [--yes -y]",
    "models list": "[--json]",
    "models diff": "[LEFT] [RIGHT] [--json]",
    "models copy": "[NAME] [--to] [--rollout] [--why]",
    "models import": "[FOLDER] [--name] [--entry] [--with-code] [--task] [--answer] [--golden]",
    "models show": "[NAME] [--json]",
    "models verify": "[NAME]",
    "models sign": "[NAME] [--key]",
    "trust create": "[FILE]",
    "trust add": "[NAME] [FILE]",
    "trust list": "[--json]",
    "trust remove": "[NAME]",
    "trust off": "",
    "trust policy": "[--signer] [--check] [--approval] [--off] [--json]",
    "models remove": "[NAME] [--yes -y]",
    "logs": "[MODEL] [--lines -n] [--follow -f]",
    "retire": "[MODEL] [--yes -y] [--why]",
    "predict": "[NAME] [ROWS] [--out -o] [--batch] [--scheduler] [--device] [--grpc] [--ids]",
    "explain": "[MODEL] [ROWS] [--id] [--row] [--where] [--since] [--until] [--out -o] [--rows -n] [--json]",
    "score": "[MODEL] [ROWS] [--out -o] [--since] [--late] [--scheduler] [--device] [--json]",
    "gpus": "[--json]",
    "keys create": "[NAME] [--model] [--role] [--lasts] [--rate] [--burst] [--json]",
    "keys list": "[--json]",
    "keys remove": "[NAME]",
    "keys require": "[--off --on]",
    "keys share": "",
    "keys issuer add": (
        "[NAME] [--url] [--audience] [--jwks-url] [--jwks-file] [--model] [--models-claim] [--rate] [--burst]"
    ),
    "keys issuer list": "[--json]",
    "keys issuer remove": "[NAME]",
    "gc": "[--keep-versions] [--keep] [--remove] [--json]",
    "backup create": "[FILE] [--captures --no-captures]",
    "backup restore": "[FILE]",
    "console run": "",
    "console secret": "[ACCOUNT] [--rotate] [--json]",
    "slo": "[MODEL] [--json]",
    "alerts list": "[--model] [--resolved] [--journal] [--json]",
    "alerts ack": "[KEY] [--note]",
    "alerts silence": "[PATTERN] [--model] [--lasts] [--why]",
    "alerts unsilence": "[NUMBER]",
    "alerts test": "[NAME]",
    "alerts receivers add": "[NAME] [URL]",
    "alerts receivers list": "[--json]",
    "alerts receivers remove": "[NAME]",
}


def commands(command: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if name == "" or not hasattr(command, "commands"):
        yield name, " ".join(f"[{parameter(each)}]" for each in command.params)
    for inner, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{name} {inner}".strip())


def parameter(found: Any) -> str:
    if found.param_type_name == "argument":
        return str(found.name).upper()
    return " ".join(sorted([*found.opts, *found.secondary_opts]))


def test_the_command_line_is_what_it_was() -> None:
    assert dict(commands(typer.main.get_command(cli.app))) == COMMAND_LINE


def test_the_first_page_of_the_help_has_at_most_30_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.app(["--help"])
    page = capsys.readouterr().out
    names = [name for panel in PANELS.values() for name in panel]
    assert len(names) <= 30
    assert [line.split()[0] for line in page.splitlines() if re.match(r"  [a-z]+  ", line)] == names


Serin = Callable[..., int]


@pytest.fixture
def serin(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> Serin:
    monkeypatch.chdir(tmp_path)
    return serin_main


@pytest.mark.parametrize("module", cli.MODULES)
def test_a_module_registers_the_commands_that_are_listed_for_it(module: str) -> None:
    part = typer.Typer()
    part.callback()(lambda: None)
    import_module(f"serin.commands.{module}").register(part)
    assert sorted(get_group(part).commands) == sorted(cli.MODULES[module].split())


def test_every_command_explains_itself(serin: Serin, capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMAND_LINE:
        assert serin(*name.split(), "--help") == 0
        assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["check", "none.yaml"], 2, "none.yaml: 1 problem"),
        (["check"], 2, "Missing argument"),
        (["run", "none.yaml"], 2, "no such file"),
        (["run", "s3://specs/flights.yaml"], 2, "--param spec=s3://specs/flights.yaml"),
        (["check", "s3://specs/flights.yaml"], 2, "s3://specs/flights.yaml: 1 problem\n  is a URL"),
        (["chek"], 2, "Did you mean 'check'"),
        (
            ["init", "--table", "none.csv"],
            2,
            "serin init: 1 problem\n  --table: nothing at none.csv; name a file",
        ),
        (["stop"], 2, "`serin down` stops the stack"),
        (["run", "."], 2, "is a folder without a pipeline.yaml"),
        (["runs", "cancel", "no-such-run"], 1, "serin up"),
        (["runs", "logs", "no-such-run"], 1, "serin up"),
        (["up", "--port", "70000"], 2, "65535"),
        (["rollout", "start", "flights:0"], 2, "no model 'flights'"),
        (["rollout", "start", "Flights:1"], 2, "'Flights' is not a valid model name"),
        (["rollout", "start", "flights:1", "--request-timeout", "9s"], 2, "is for servers elsewhere"),
        (
            ["rollout", "start", "m", "--stable", "a:1", "--candidate", "b:1", "--request-timeout", "9x"],
            2,
            "'9x' is not a valid duration",
        ),
        (
            ["rollout", "start", "m", "--stable", "a:1", "--candidate", "b:1", "--request-timeout", "0s"],
            2,
            "must be longer than 0",
        ),
        (["env"], 1, "start one with `serin up`"),
        (["down"], 1, "no stack is up"),
        (["models", "show", "flights"], 2, "no model 'flights'"),
        (["models", "verify", "flights:live"], 2, "no model 'flights'"),
        (["runs", "show", "nothing"], 2, "no run 'nothing'"),
        (["rollout", "pause", "flights"], 1, "no stack is up"),
        (["rollout", "watch", "flights"], 2, "no rollout of 'flights'"),
        (
            ["predict", "flights", "rows.csv", "--batch", "--ids"],
            2,
            "--ids is for requests through the gateway",
        ),
        (["labels", "add", "flights", "labels.csv"], 2, "no model 'flights'"),
        (["predict", "flights", "rows.csv"], 2, "flights"),
        (["run"], 2, "SPEC: name the pipeline's file, or a run: --resume RUN"),
        (
            ["run", "spec.yaml", "--resume", "calm-owl"],
            2,
            "--resume: resumes a run with its own parameters",
        ),
        (["run", "--resume", "calm-owl"], 1, "no stack is up"),
    ],
)
def test_a_mistake_is_one_message_and_an_exit_code(
    serin: Serin, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert serin(*arguments) == code
    told = capsys.readouterr()
    assert words in told.err
    assert told.out == ""
    assert "Traceback" not in told.err


@pytest.mark.parametrize("command", ["pause", "resume", "approve", "promote", "abort", "rollback"])
def test_a_command_for_a_model_without_a_rollout_names_it(
    serin: Serin, home: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    stack_in(home)
    assert serin("rollout", command, "nosuch") == 2
    assert "no rollout of 'nosuch'" in capsys.readouterr().err


def test_asking_leaves_no_trace(serin: Serin, tmp_path: Path) -> None:
    for question in ("models list", "runs list", "gpus", "rollout status", "gc", "doctor"):
        assert serin(*question.split()) == 0
    assert serin("status") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("question", ["models list", "runs list", "rollout status", "gc", "doctor"])
def test_json_is_json(serin: Serin, capsys: pytest.CaptureFixture[str], question: str) -> None:
    assert serin(*question.split(), "--json") == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)


def test_status_of_nothing_is_not_well(serin: Serin, capsys: pytest.CaptureFixture[str]) -> None:
    assert serin("status", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["up"], found["well"], found["processes"], found["models"]) == (False, False, [], [])


def test_gpus_names_the_holder(
    serin: Serin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices = [{"id": "GPU-1", "name": "H200", "memory_bytes": 150_000_000_000}, {"id": "GPU-2"}]
    inventory = tmp_path / "inventory.json"
    inventory.write_text(json.dumps({"format": "serin.inventory", "version": 1, "devices": devices}))
    monkeypatch.setenv("SERIN_INVENTORY", str(inventory))
    with lease(1, home=tmp_path / "home", purpose="training of flights"):
        assert serin("gpus") == 0
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "training of flights" in first
    assert second.endswith("free")


def test_gpus_names_the_releases_that_are_served_and_not_those_of_a_stack_that_is_down(
    serin: Serin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-1", "GPU-2"])
    record = tmp_path / "home" / "releases" / "flights-v3" / "release.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"served": {"devices": ["GPU-2"], "bytes": 1_281_000_000}}))
    assert serin("gpus") == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["free", "free"]
    monkeypatch.setattr(Supervisor, "pid", lambda _, name: 4711 if name == "flights-v3" else None)
    assert serin("gpus") == 0
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.endswith("free")
    assert second.endswith("flights-v3: served by process 4711, 1,281 MB reserved")
    assert serin("gpus", "--json") == 0
    (release,) = json.loads(capsys.readouterr().out)["devices"][1]["releases"]
    assert (release["release"], release["reserved_bytes"]) == ("flights-v3", 1_281_000_000)


def test_gpus_names_who_waits(
    serin: Serin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-1"])
    home, seen = tmp_path / "home", []

    def look(_: str) -> None:
        seen.extend([serin("gpus"), serin("gpus", "--json")])

    with (
        lease(1, home=home, purpose="training of flights"),
        pytest.raises(LeaseUnavailable),
        heard(look),
        lease(1, home=home, purpose="training of parcels", wait_s=0.1),
    ):
        pass
    assert seen == [0, 0]
    told, _, as_json = capsys.readouterr().out.partition("{")
    assert "1. process" in told.splitlines()[-1]
    assert "(training of parcels) waits for 1 GPU(s)" in told.splitlines()[-1]
    found = json.loads("{" + as_json)
    assert [holder["purpose"] for holder in found["devices"][0]["holders"]] == ["training of flights"]
    assert [waiter["purpose"] for waiter in found["waiting"]] == ["training of parcels"]


def test_gpus_names_who_is_asked_to_give_way(
    serin: Serin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-1"])
    home = tmp_path / "home"

    def look(_: str) -> None:
        serin("gpus")
        serin("gpus", "--json")

    with (
        lease(1, home=home, purpose="training of flights", priority="idle", gives_way=True),
        pytest.raises(LeaseUnavailable),
        heard(look),
        lease(1, home=home, purpose="training of parcels", priority="urgent", wait_s=0.1),
    ):
        pass
    told, _, as_json = capsys.readouterr().out.partition("{")
    assert told.splitlines()[-1].endswith("; the holder of GPU-1 is asked to give way")
    (waiter,) = json.loads("{" + as_json)["waiting"]
    assert (waiter["counts_as"], waiter["asked"]) == ("urgent", ["GPU-1"])


def test_preempted_means_75(serin: Serin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def preempted() -> None:
        raise Preempted(step=7, folder=tmp_path)

    monkeypatch.setattr(cli, "app", preempted)
    assert serin("train", "spec.yaml") == 75


def test_a_fault_of_our_own_is_admitted_and_shown_with_debug(
    serin: Serin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "app", broken)
    assert serin("status") == 1
    assert "unexpected ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["serin", "--debug", "status"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_help_costs_little() -> None:
    """0.6 s is the promise. Processor time is measured, and the best of three: a busy machine is not to blame."""
    costs = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "serin.cli", "--help"], check=True, capture_output=True, timeout=150
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"serin --help: {min(costs):.2f} s")
    assert min(costs) < 0.6
