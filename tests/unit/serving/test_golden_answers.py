"""How far a release may be from its bundle's answers, and servers that are not ours."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serin.cluster.version_settings import check_trusted, stored_timeouts
from serin.errors import BundleBroken, BundleUntrusted, ReleaseNotReady, RolloutRefused, VerificationFailed
from serin.formats.bundle import Golden, read_golden
from serin.formats.wire import Array
from serin.serving.envoy.routes import Timeouts
from serin.serving.external import External, parse_address
from serin.serving.triton import verify as verifying
from serin.serving.triton.releases import Releases
from serin.serving.triton.verify import Allowed, difference_found
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store
from tests.fakes.kserve import MODEL, serving
from tests.kit.elsewhere import register
from tests.unit.serving import bundles
from tests.unit.serving.test_releases import INSTALL, V1, FakeHost

ALLOWED = 0.05  # the default of export.variant_tolerance


def moved(answers: dict[str, Array], by: float) -> dict[str, Array]:
    """Away from the bounds of a probability, so that nothing is cut off."""
    score = answers["score"]
    return answers | {"score": np.where(score < 0.5, score + by, score - by).astype(np.float32)}


def verify(folder: Path, monkeypatch: pytest.MonkeyPatch, gate: dict[str, Any] | None, by: float) -> None:
    """A release of a bundle with this gate.json, whose server answers so far from the golden scores."""
    store = Store(str(folder / "store"))
    extra = {} if gate is None else {"gate.json": json.dumps(gate).encode()}
    bundle = bundles.publish(store, bias=0.0, extra=extra)
    golden = read_golden(Path(bundle.path))
    (folder / "backends" / "python").mkdir(parents=True)
    install = replace(INSTALL, backends=folder / "backends")
    releases = Releases(
        folder / "releases", host=FakeHost(), store=store, install=install, devices=lambda: ()
    )
    releases.start(V1)

    def predict(_: str, __: str, rows: dict[str, Array], *___: object, **____: object) -> dict[str, Array]:
        count = len(rows["temp"])
        return moved({name: np.resize(values, (count, 1)) for name, values in golden.outputs.items()}, by)

    monkeypatch.setattr("serin.serving.triton.verify.predict", predict)
    releases.verify(V1)


def gate(
    *, apart: float | None = None, spread: float = 0.0, allowed: float = 1e-4, **more: Any
) -> dict[str, Any]:
    found = {"front_core_difference": apart, "allowed_difference": allowed, "runtime": {"spread": spread}}
    return {**found, **more}


@pytest.mark.parametrize(
    ("found", "by"),
    [
        (gate(apart=0.05, allowed=ALLOWED), 0.045),
        (gate(apart=1e-3, allowed=ALLOWED), 3.5e-3),
        (gate(spread=1e-5, allowed=1e-4), 3.5e-5),
        (gate(), 5e-6),
        (None, 5e-6),
    ],
)
def test_a_release_may_differ_by_what_the_gate_has_seen_and_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None, by: float
) -> None:
    verify(tmp_path, monkeypatch, found, by)


@pytest.mark.parametrize(
    ("found", "by"),
    [
        (gate(apart=0.05, allowed=ALLOWED), 0.06),
        (gate(apart=0.05, allowed=ALLOWED), 0.19),
        (gate(apart=1e-3, allowed=ALLOWED), 4.5e-3),
        (gate(spread=0.1, allowed=ALLOWED), 0.06),
        (gate(spread=1e-3, allowed=1e-4), 1.5e-4),
        (gate(spread=0.1), 1.5e-4),
        (gate(), 1.5e-5),
        (None, 1.5e-5),
    ],
)
def test_a_release_that_differs_further_than_the_gate_allowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None, by: float
) -> None:
    with pytest.raises(VerificationFailed, match=r"http: 3 of 3 rows differ in 'score' by more than"):
        verify(tmp_path, monkeypatch, found, by)


def test_a_release_answers_once_in_each_batch_size_of_its_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may be right for one row and wrong for nine. More rows than there are golden ones repeat them."""
    asked, real = list[int](), verifying.difference_found

    def seen(golden: Golden, answer: dict[str, Array], allowed: Allowed) -> str | None:
        asked.append(len(golden))
        return "wrong for 9 rows" if len(golden) == 9 and broken else real(golden, answer, allowed)

    monkeypatch.setattr(verifying, "difference_found", seen)
    sizes, broken = [1, 2, 9, 40, 64, 1024], False
    verify(tmp_path / "right", monkeypatch, gate(batch_rows=sizes), 0.0)
    assert asked == [3, 40, 1, 2, 9, 40, 64, 3, 40], "by HTTP, up to 65 rows; then by gRPC"
    broken = True
    with pytest.raises(VerificationFailed, match=r"http: wrong for 9 rows \(in batches of 9\)"):
        verify(tmp_path / "wrong", monkeypatch, gate(batch_rows=sizes), 0.0)


def test_a_gate_document_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BundleBroken, match=r"gate\.json"):
        verify(tmp_path, monkeypatch, {"front_core_difference": "near"}, 0.0)


@pytest.mark.parametrize(
    ("label", "allowed", "differs"),
    [
        (2, 0.0, False),
        (1, 0.05, False),  # 0.30 against 0.38: both may have moved
        (1, 0.01, True),
        (0, 0.05, True),
        (3, 0.05, True),
        (-1, 0.05, True),
    ],
)
def test_a_label_may_be_another_only_where_its_class_ties_with_the_golden_one(
    label: int, allowed: float, differs: bool
) -> None:
    probabilities = np.asarray([[0.02, 0.30, 0.38]], np.float32)
    golden = Golden(
        inputs={}, outputs={"label": np.asarray([[2]]), "probabilities": probabilities}, row=np.asarray([7])
    )
    answer = {"label": np.asarray([[label]]), "probabilities": probabilities}
    assert bool(difference_found(golden, answer, Allowed(difference=allowed))) == differs


def place(address: str) -> Endpoint:
    return Endpoint(http=address, grpc=address, elsewhere=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://models.example:8000", place("models.example:8000")),
        ("127.0.0.1:80", place("127.0.0.1:80")),
        ("http://a:80/,grpc://b:81", Endpoint(http="a:80", grpc="b:81", elsewhere=True)),
        ("http://[fd00::7]:8000", place("[fd00::7]:8000")),
    ],
)
def test_an_address_is_read(text: str, expected: Endpoint) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "host", "http://host", "host:0", "host:99999", "http://host:80/v2", ":80"]
)
def test_an_invalid_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        parse_address(text)


def test_a_server_behind_tls_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="without TLS"):
        parse_address("https://models.example:443")


def test_an_address_keeps_its_version_and_a_new_one_gets_the_next(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    versions = [register(store, MODEL, place(f"127.0.0.1:{port}")).version for port in (1, 2, 1, 3)]
    assert versions == [1, 2, 1, 3]
    assert store.versions(MODEL) == [1, 2, 3]
    assert External(store).endpoint(Release(model=MODEL, version=2)) == place("127.0.0.1:2")


def test_requests_to_servers_elsewhere_have_the_time_that_was_set_last(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    find = stored_timeouts(store)
    assert find(register(store, MODEL, place("127.0.0.1:1"))) == Timeouts(request_s=5.0)
    other = register(store, MODEL, place("127.0.0.1:2"), timeout_s=30.0)
    assert find(other) == find(register(store, MODEL, place("127.0.0.1:3"))) == Timeouts(request_s=30.0)
    ours = bundles.publish(store, bias=0.0, spec="serving: {request_timeout: 2m, max_string: 9B}\n")
    assert find(Release(model=ours.model, version=1)) == Timeouts(
        request_s=120.0, promised_s=0.05, max_text_bytes=9
    )


def test_a_model_that_nobody_registered_is_not_external(tmp_path: Path) -> None:
    assert not External(Store(str(tmp_path))).has(Release(model=MODEL, version=1))


def test_a_server_is_ready_when_it_reports_ready(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    external = External(store)
    with serving() as server:
        release = register(store, MODEL, place(server.address))
        assert external.state(release) == "ready"
        server.ready = False
        assert external.state(release) == "starting"
    assert external.state(release) == "starting"


@pytest.mark.parametrize(
    ("how", "seen"), [({"datatype": "INT64"}, "'x' INT64"), ({"columns": 2}, r"\[-1, 2\]")]
)
def test_a_server_with_other_tensors_does_not_fit(tmp_path: Path, how: dict[str, Any], seen: str) -> None:
    store = Store(str(tmp_path))
    external = External(store)
    with serving() as one, serving() as same, serving(columns=-1) as vague, serving(**how) as other:
        wrong, live, *alike = (
            register(store, MODEL, place(server.address)) for server in (other, one, same, vague)
        )
        for release in alike:
            external.check_fits(release, live)
        with pytest.raises(ReleaseNotReady, match=f"{seen}.* differ from those of sentiment-v2"):
            external.check_fits(wrong, live)


def test_a_server_that_describes_nothing_does_not_fit(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    external = External(store)
    with serving() as server:
        server.ready = False
        with pytest.raises(ReleaseNotReady, match="does not describe"):
            external.verify(register(store, MODEL, place(server.address)))


def test_a_start_is_refused_at_once_with_the_address_that_does_not_answer(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    external = External(store)
    with serving() as server:
        server.ready = False
        release = register(store, MODEL, place(server.address))
        external.check_answers(release)  # not ready, but there
    with pytest.raises(RolloutRefused, match=rf"http://{server.address} does not answer .*network policy"):
        external.check_answers(release)
    with pytest.raises(RolloutRefused, match="does not answer"):
        check_trusted(store, external)(release)


def test_a_model_of_serin_s_does_not_leave_for_a_server_that_nobody_signed(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    with serving() as server:
        release = register(store, MODEL, place(server.address))
        check = check_trusted(store, External(store))
        (tmp_path / "home" / "trusted-keys").mkdir(parents=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SERIN_HOME", str(tmp_path / "home"))
            check(release)
            bundles.publish(store, bias=0.0, model=MODEL)
            with pytest.raises(BundleUntrusted):
                check(release)
