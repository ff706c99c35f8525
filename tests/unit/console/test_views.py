"""Each view shows what is stored, in words, and what changes is sent live from a real server."""

import dataclasses
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from serin.console import app
from serin.console.app import VIEWS
from serin.console.views import machines, reasons
from serin.formats.serving.journal import NOT_PROMISED
from serin.host.console import account_secret, rotate_secret
from serin.monitoring.quality.view import ReleaseQuality, read_quality, write_quality
from serin.monitoring.retrain import RetrainBook
from serin.prefect.run_entries import RunEntry
from serin.spec.roles import NOTHING
from serin.store.store import Store
from tests.fakes.editions import LIVE, publish_edition
from tests.fakes.rollout import go_live
from tests.kit.commands import serin_main
from tests.unit.console.conftest import served, visitor
from tests.unit.console.scenes import fire
from tests.unit.serving.bundles import MODEL

SHOWN = {
    "/": [
        MODEL, "version 1", "shifting", "50%", "Open alerts", "test_auc 0.7", "s ago", "1 of 2 columns drifted",
        f'/models/{MODEL}/quality"', "auc 0.",
    ],
    "/rollouts": [f"{MODEL} version 2", "shifting", "50% of traffic"],
    f"/models/{MODEL}": [
        "test_auc", "0.7000", "carrier", "live", "Spec", "drift: carrier drifted &lt;fast&gt;",
        f"promoted</span> {MODEL}-v2", "A request to copy",
        f"curl -s http://127.0.0.1:8080/v2/models/{MODEL}/infer -d &#39;{{&#34;inputs&#34;: [",
        "{&#34;name&#34;: &#34;carrier&#34;, &#34;datatype&#34;: &#34;BYTES&#34;", "[&#34;text&#34;, null]",
        "not begun</span> the last one began less than",
    ],
    f"/models/{MODEL}/rollout": [
        "All 200 served scores are what the candidate&#39;s own bundle computes.",
        "carrier=1",
        f"{MODEL}-v2 against {MODEL}-v1", "The numbers of each guard",
        "all together", "promise latency", "othing speaks against it", "rolls back", "is enough", "p99",
        "rollback at 200", "start by ann", "its golden rows are answered",
    ],
    "/alerts": ["the disk is nearly full", "3% is left since yesterday &lt;b&gt;", "ticket", "carrier drifted"],
    f"/models/{MODEL}/traffic": ["1 hour", f"{MODEL}-v1", "stable", "candidate", "Slower than promised"],
    f"/models/{MODEL}/drift": ["drifted", "unseen values", "a year", "4,000", "no alarm", "(tolerance 5%)", "temp"],
    f"/models/{MODEL}/quality": [
        "3,200 of 4,000 recorded rows", "auc", "estimate", "judged by the", "carrier=DL",
        "The mean counts the first label of each of 3,200 rows", "count the newest 3,200 rows that are kept",
    ],
    f"/models/{MODEL}/captures": [
        "Recorded requests", "4,000", "Rows by hour", "100%", "Newest requests recorded on this host",
        f'href="/models/{MODEL}/request?id=',
    ],
    f"/models/{MODEL}/request": ["A recorded request", "Give the id of a request"],
    "/runs": ["training-1", "done"],
    "/runs/training-1": ["train", "compute", "80", "auc", "start of the training process 3.1 s"],
    "/experiments": ["training-1", "auc", "0.7500", "12 s"],
    "/experiments/compare?run=training-1": ["training-1", "compute", "0.7500"],
    "/gpus": ["Stand-in", "GPU-0", "Not leased"],
}  # fmt: skip


Change = Callable[[ReleaseQuality], tuple[ReleaseQuality, ...]]


class Page(HTMLParser):
    """Collects what a strict policy forbids, and elements that were left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img", "input", "br", "rect", "line", "circle", "polyline", "polygon"):
            self.open.append(tag)
        self.inline += [f"{tag} {name}" for name, _ in attrs if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in dict(attrs)):
            self.inline.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag, f"</{tag}> closes another element"


@pytest.mark.parametrize("path", SHOWN)
def test_a_view_shows_what_is_stored(full: Path, path: str) -> None:
    page = visitor(full).login("viewer").get(path)
    assert page.status_code == 200
    text = re.sub(r"\s+", " ", page.text)
    assert [words for words in SHOWN[path] if words not in text] == []


def test_pages_name_the_edition_of_the_lookups_and_how_old_its_tables_are(home: Path) -> None:
    now, second = time.time(), dataclasses.replace(LIVE, edition=2)
    store = Store.open()
    store.reserve_version(LIVE.model)
    publish_edition(store, 1, now - 3 * 86_400)
    publish_edition(store, 2, now - 2 * 86_400)
    store.set_alias(LIVE.model, "live", second.label)
    go_live(home, second, now, stable=LIVE)
    viewer = visitor(home).login("operator")
    pages = {
        "/": ["version 1e2"],
        "/rollouts": ["1e2"],
        "/models/flights": [
            "<dd>version 1e2</dd>", "live (1e2)", "Lookups", "flights-v1e2", "planes", "2 days ago", "too old",
        ],
        "/models/flights/rollout": ["flights-v1e2 against flights-v1", "version 1e2 (stable) 100%"],
        "/models/flights/rollout/rollback": ["<dd>1e2</dd>", '<option value="1">version 1</option>'],
    }  # fmt: skip
    for path, words in pages.items():
        text = re.sub(r"\s+", " ", viewer.get(path).text)
        assert [each for each in words if each not in text] == [], path
    assert viewer.get("/models/flights").text.count("too old") == 1  # of the live edition alone


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.template)
def test_a_view_needs_no_inline_script_or_style_and_closes_its_elements(full: Path, view: object) -> None:
    run = "search-1" if "searches" in view.path else "training-1"  # type: ignore[attr-defined]
    path = view.path.format(model=MODEL, run=run)  # type: ignore[attr-defined]
    answer = visitor(full).login("operator").get(path)
    page = Page(answer.text)
    assert answer.status_code == 200
    assert page.inline == []
    assert page.open == []


@pytest.mark.parametrize(
    "path", ["/", "/rollouts", "/alerts", "/runs", "/gpus", "/experiments", "/experiments/searches"]
)
def test_a_view_of_an_empty_home_says_what_to_do(home: Path, path: str) -> None:
    page = visitor(home).login("viewer").get(path)
    assert page.status_code == 200
    assert 'class="empty"' in page.text


def test_the_list_of_models_is_at_models_too(full: Path) -> None:
    answer = visitor(full).login("viewer").get("/models")
    assert (answer.status_code, answer.headers["location"]) == (308, "/")


def test_no_page_shows_a_chance_that_says_nothing(full: Path) -> None:
    page = visitor(full).login("viewer").get(f"/models/{MODEL}/rollout").text
    shown, _, folded = page.partition('<details id="guards">')
    assert "100% of rollouts" not in page
    assert "rolls back</span>" in folded
    assert "rolls back</span>" not in shown


def test_an_unknown_model_and_an_unknown_run_are_named(full: Path) -> None:
    somebody = visitor(full).login("viewer")
    for path, words in (("/models/nothing", "nothing"), ("/runs/none", "none"), ("/models/No!", "No!")):
        answer = somebody.get(path)
        assert answer.status_code == 404
        assert words in answer.text


def test_a_page_that_is_not_there_is_called_not_found(full: Path) -> None:
    somebody = visitor(full).login("viewer")
    for path in ("/nothing", "/models/nothing", "/runs/none"):
        assert "<h1>Not found</h1>" in somebody.get(path).text, path
    assert "the console has no page /nothing" in somebody.get("/nothing").text


def test_an_unknown_run_is_compared_with_flow_runs_too(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = RunEntry(name="cyan-hamster", kind="deploy", state="completed", began=2.0, seconds=1.0)
    monkeypatch.setattr(machines, "flow_run_entries", lambda _: [flow])
    assert "cyan-hamster" in visitor(full).login("viewer").get("/runs/cyan-hamste").text


def test_a_damaged_record_of_retrainings_is_reported_and_the_versions_are_shown(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    shutil.copytree(full, home)
    monkeypatch.setenv("SERIN_HOME", str(home))
    RetrainBook(home, MODEL).path.write_text("{")
    page = visitor(home).login("viewer").get(f"/models/{MODEL}")
    assert page.status_code == 200
    assert "delays.json cannot be used" in page.text
    assert "test_auc" in page.text


def test_a_damaged_decision_is_named_wherever_the_state_of_its_model_is_shown(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(full, home)
    monkeypatch.setenv("SERIN_HOME", str(home))
    newest = max((home / "rollouts" / MODEL / "decisions").iterdir())
    newest.write_bytes(newest.read_bytes()[:-40])
    guest = visitor(home).login("viewer")
    tabs = ("", "/rollout", "/traffic", "/drift", "/quality", "/captures")
    for page in ("/", "/rollouts", *(f"/models/{MODEL}{tab}" for tab in tabs)):
        assert f"{newest} is not a decision" in guest.get(page).text, page
    for asked in ((), (MODEL,), ("--json",), (MODEL, "--json")):
        assert serin_main("rollout", "status", *asked) == 1
        assert f"{newest} is not a decision" in capsys.readouterr().err
    assert serin_main("rollout", "status", "nosuch") != 0
    assert "PROBLEM" not in capsys.readouterr().err  # of another model


def test_the_page_of_a_rollout_says_where_its_promise_ends(full: Path) -> None:
    assert NOT_PROMISED in visitor(full).login("viewer").get(f"/models/{MODEL}/rollout").text


def quality_page(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change) -> str:
    """The page of a home whose stored quality has been changed."""
    home = tmp_path / "home"
    shutil.copytree(full, home)
    monkeypatch.setenv("SERIN_HOME", str(home))
    found = read_quality(home, MODEL)
    write_quality(home, replace(found, releases=change(found.releases[0])))
    text = visitor(home).login("viewer").get(f"/models/{MODEL}/quality").text
    return re.sub(r"\s+", " ", text)


def test_metrics_have_one_order_in_all_releases_and_a_segment_one_cell_for_each(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(release: ReleaseQuality) -> tuple[ReleaseQuality, ...]:
        turned = dict(reversed(release.metrics.items()))
        first = replace(release.segments[0], offline=release.offline)
        return replace(release, release="other", metrics=turned, segments=(first,)), release

    shown = quality_page(full, tmp_path, monkeypatch, two)
    orders = {tuple(re.findall(r"<h4>(\w+)</h4>", part)) for part in shown.split("<section")[1:]}
    heads = {
        tuple(re.findall(r">(\w+)</th>", head)) for head in re.findall(r">Segment</th>.*?</thead>", shown)
    }
    (order,) = orders
    assert len(order) > 2
    assert heads == {("Segment", "Rows", *order)}
    assert "estimate</span>" not in shown
    assert shown.count(">offline 0.") == len(order)  # only where it is known


def test_a_release_without_labels_is_not_said_to_keep_its_objective(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlabelled(release: ReleaseQuality) -> tuple[ReleaseQuality, ...]:
        assert release.objective is not None
        objective = replace(release.objective, used=0, mean=None, evidence=1.0)
        return (replace(release, labelled=0, measured_on=0, metrics={}, objective=objective),)

    shown = quality_page(full, tmp_path, monkeypatch, unlabelled)
    assert "no labels yet" in shown
    assert "objective kept" not in shown


def test_every_page_of_others_files_has_its_licence_beside_it() -> None:
    import serin.console.state as state

    folders = [path for path in (state.STATIC / "vendor").iterdir() if path.is_dir()]
    assert len(folders) >= 4
    assert [folder.name for folder in folders if not (folder / "LICENSE").is_file()] == []


def events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    name, data = "", list[str]()
    for line in lines:
        if line.startswith("event: "):
            name, data = line.removeprefix("event: "), []
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and name:
            yield name, "\n".join(data)
            name = ""


def test_a_stream_sends_a_view_when_it_changes_and_ends_with_the_session(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "VIEWS", [replace(view, every_s=0.05) for view in app.VIEWS])
    with served(home) as url, httpx.Client(base_url=url, timeout=30) as browser:
        fields = {"secret": account_secret(home, "viewer")}
        browser.post("/login", data=fields, headers={"origin": url})
        page = browser.get("/alerts").text
        place = page.partition('sse-connect="')[2].partition('"')[0].replace("&amp;", "&")
        with browser.stream("GET", place) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            found = events(stream.iter_lines())
            fire(home)
            name, html = next(found)  # the page that was loaded is not sent again
            assert name == "view"
            assert "the disk is nearly full" in html
            rotate_secret(home, "viewer")
            assert next(found) == ("ended", "")
            assert next(found, None) is None


@pytest.mark.parametrize("content", ["not JSON", None])
def test_a_view_that_cannot_be_read_is_reported_and_the_others_are_shown(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    inventory = tmp_path / "inventory.json"
    if content is not None:
        inventory.write_text(content)
    monkeypatch.setenv("SERIN_INVENTORY", str(inventory))
    somebody = visitor(full).login("viewer")
    answer = somebody.get("/gpus")
    assert answer.status_code in (500, 503)
    assert "<h1>Not shown</h1>" in answer.text
    assert somebody.get("/alerts").status_code == 200


def test_the_charts_data_has_a_column_for_each_line_and_gaps_where_nothing_was_asked(full: Path) -> None:
    somebody = visitor(full).login("viewer")
    for what, lines in (("latency", 4), ("failures", 2), ("requests", 2)):
        data = somebody.get(f"/models/{MODEL}/history.json?what={what}&span=1h").json()
        times, *columns = data["columns"]
        assert len(data["series"]) == len(columns) == lines
        assert times == sorted(set(times))
        assert all(len(column) == len(times) for column in columns)
        assert all(any(value is None for value in column) for column in columns)
        assert all(any(value is not None for value in column) for column in columns)
    assert somebody.get(f"/models/{MODEL}/history.json?what=else").status_code == 404
    assert visitor(full).get(f"/models/{MODEL}/history.json?what=latency").status_code == 401


def test_pages_that_take_long_hold_up_no_other_page(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has few threads, and an explanation takes minutes."""
    begun, may_end, pool = threading.Event(), threading.Event(), ThreadPoolExecutor(60)

    def explain(_: list[str]) -> list[dict[str, Any]]:
        begun.set()
        assert may_end.wait(60)
        return []

    monkeypatch.setattr(reasons, "_run", explain)
    with (
        served(full) as url,
        pool,
        httpx.Client(base_url=url, headers={"origin": url}, timeout=60) as browser,
    ):
        browser.post("/login", data={"secret": account_secret(full, "viewer")})
        cookies = dict(browser.cookies)

        def ask(number: int) -> httpx.Response:
            return httpx.get(f"{url}/models/{MODEL}/request?id=r{number}", cookies=cookies, timeout=60)

        try:
            first = pool.submit(ask, 0)
            assert begun.wait(60)
            others = [pool.submit(ask, number) for number in range(1, 60)]
            assert browser.get("/alerts").status_code == 200
            answers = [each.result() for each in others]
            assert not first.done()
        finally:
            may_end.set()
        assert {each.status_code for each in answers} == {503}
        assert all("try again in a moment" in each.text for each in answers)
        assert first.result().status_code == 200


def test_an_explained_row_is_not_kept_after_it_was_forgotten(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`captures forget` does not reach what the console has."""
    found: list[list[dict[str, Any]]] = [[{"age": 41}], []]
    monkeypatch.setattr(reasons, "_run", lambda _: found.pop(0))
    monkeypatch.setattr(reasons, "_output", dict)
    shown = [reasons.read_request(full, {"model": MODEL, "id": "r1"}, NOTHING)["outputs"] for _ in range(2)]
    assert shown == [[{"age": 41}], []]


ODD = [
    "a%00b",
    "a%0Ab",
    "%F0%9F%92%A9",
    "%ED%A0%80",
    "9" * 5000,
    "2147483648",
    "-1",
    "1e9",
    "%C2%B2",
    "../..",
    "",
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:12])
def test_no_odd_value_in_an_address_makes_a_page_fail(
    full: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setattr(reasons, "_run", lambda _: [])
    somebody = visitor(full).login("viewer")
    paths = [view.path.format(model=odd or "_", run=odd or "_") for view in VIEWS if "{" in view.path]
    for view in VIEWS:
        paths += [f"{view.path.format(model=MODEL, run='none')}?{name}={odd}" for name in view.query]
    assert [path for path in paths if somebody.get(path).status_code >= 500] == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("id=a%00b", "an id has at most 300 characters, all of them printable"),
        (f"id={'a' * 301}", "an id has at most 300 characters"),
        (f"id=a&row={'9' * 5000}", "a row is an integer from 0 to 2147483647"),
        ("id=a&row=2147483648", "a row is an integer"),
        ("id=a&row=x", "a row is an integer"),
    ],
)
def test_a_request_that_cannot_be_one_is_refused_with_a_sentence(
    full: Path, query: str, problem: str
) -> None:
    answer = visitor(full).login("viewer").get(f"/models/{MODEL}/request?{query}")
    assert answer.status_code == 400
    assert problem in answer.text


@pytest.mark.parametrize("name", ["nothing", "No!", "%2e%2e", "a%00b", "a" * 300])
def test_every_page_of_a_model_that_is_not_there_is_not_found(full: Path, name: str) -> None:
    somebody = visitor(full).login("viewer")
    paths = [view.path.format(model=name) for view in VIEWS if "{model}" in view.path]
    paths.append(f"/models/{name}/history.json?what=latency")
    assert [path for path in paths if somebody.get(path).status_code != 404] == []
