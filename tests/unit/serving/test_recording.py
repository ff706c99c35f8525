"""The Python backend's recording, with Triton's part played by a fake: ids, lots, and what it does when it cannot."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serin.formats.serving.spool import SpoolBlock, read_spool
from serin.formats.serving.spool_blocks import is_drawn
from serin.serving.triton.repository import build_repository
from serin.store.store import Store
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL
from tests.unit.serving.fake_triton import InferenceRequest, Logger, load_model


class Recorded:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, share: float, hidden: str = "") -> None:
        self.spool = folder / "spool" / f"{MODEL}-v1"
        monkeypatch.setenv("SERIN_SPOOL", str(self.spool))
        spec = f"monitoring: {{capture: {{share: {share}{hidden}}}}}\n"
        bundle = bundles.publish(Store(str(folder / "store")), bias=0.0, spec=spec)
        self.model: Any = load_model(build_repository(bundle, folder / "repository") / MODEL, bundle.version)

    def blocks(self) -> list[SpoolBlock]:
        """Every block, once the writer has ended."""
        self.model.finalize()
        files = [read_spool(path) for path in sorted(self.spool.glob("*/*.rows"))]
        return [block for file in files for block in file.blocks]


@pytest.fixture(autouse=True)
def _siblings() -> Iterator[None]:
    """In Triton every model has a separate process and path."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("recording", "spool_writer", "spool_blocks"):
        sys.modules.pop(name, None)


def _ask(id_: str | None, seed: int = 0, **more: str) -> InferenceRequest:
    given = {} if id_ is None else {"x-request-id": id_}
    return InferenceRequest(bundles.rows(2, seed=seed), json.dumps({**given, **more}), "of the body")


def test_drawn_requests_are_recorded_with_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(tmp_path, monkeypatch, 0.5)
    ids = [f"request-{number}" for number in range(40)]
    for id_ in ids:
        recorded.model.execute([_ask(id_), _ask(None), _ask(f"{id_}-2", **{"x-serin-client-id": "mine"})])
    (block,) = recorded.blocks()
    drawn = [each for id_ in ids for each in (id_, f"{id_}-2") if is_drawn(each, 0.5)]
    assert block.ids.to_list() == drawn
    assert block.client_ids.to_list() == ["mine" if each.endswith("-2") else "of the body" for each in drawn]
    assert (block.sent, block.dropped, block.rows) == (len(drawn), 0, 2 * len(drawn))


def test_hidden_columns_are_recorded_as_null_whatever_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = ", mask: [carrier, temp, missing], drop: [distance, night]"
    recorded = Recorded(tmp_path, monkeypatch, 1.0, hidden)
    (response,) = recorded.model.execute([_ask("a")])
    assert response.error is None
    (block,) = recorded.blocks()
    carrier, temp, distance, night = block.inputs
    assert carrier.to_list() == ["", ""]
    assert np.isnan(temp).all()
    assert (distance.tolist(), night.tolist()) == ([[-(2**63)]] * 2, [[-1]] * 2)
    assert np.array_equal(block.outputs[0], response.output_tensors[0].values)


@pytest.mark.parametrize(
    "given", ["[1]", '{"x-request-id": 7}', '{"x-request-id": ""}', "{", '{"other": "x"}']
)
def test_a_request_whose_id_is_not_one_is_answered_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    recorded = Recorded(tmp_path, monkeypatch, 1.0)
    (response,) = recorded.model.execute([InferenceRequest(bundles.rows(2), given)])
    assert response.error is None
    assert recorded.blocks() == []


def test_a_share_of_zero_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(tmp_path, monkeypatch, 0.0)
    (response,) = recorded.model.execute([_ask("a")])
    assert response.error is None
    assert recorded.blocks() == []
    assert not recorded.spool.parent.exists()


def test_requests_that_do_not_fit_into_memory_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(tmp_path, monkeypatch, 1.0)
    monkeypatch.setattr(sys.modules["spool_writer"], "_MOST_BYTES", 400)
    for number in range(30):
        recorded.model.execute([_ask(f"request-{number}")])
    blocks = recorded.blocks()
    assert sum(block.requests for block in blocks) == blocks[-1].sent - blocks[-1].dropped
    assert (blocks[-1].sent, blocks[-1].dropped > 0) == (30, True)


def test_an_output_of_another_type_is_dropped_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(tmp_path, monkeypatch, 1.0)
    session = recorded.model._session

    class Wider:
        def run(self, outputs: list[str], feed: dict[str, Any]) -> Any:
            return [values.astype(np.float64) for values in session.run(outputs, feed)]

    recorded.model._session = Wider()
    (response,) = recorded.model.execute([_ask("a")])
    assert response.error is None
    (block,) = recorded.blocks()
    assert (block.requests, block.sent, block.dropped) == (0, 1, 1)


def test_a_folder_that_is_a_file_costs_the_rows_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Logger.lines.clear()
    recorded = Recorded(tmp_path, monkeypatch, 1.0)
    recorded.spool.parent.write_text("in the way")
    (response,) = recorded.model.execute([_ask("a")])
    assert response.error is None
    recorded.model.finalize()
    assert [line for line in Logger.lines if line.startswith("recorded requests are dropped: ")]
