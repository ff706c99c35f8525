import json
from pathlib import Path

import pytest

from serin.errors import BundleBroken
from serin.formats.gate import Runtime, read_runtime


def test_a_bundle_says_how_it_is_run_and_one_that_says_nothing_runs_with_one_thread(tmp_path: Path) -> None:
    assert read_runtime(tmp_path) == Runtime(threads=1)
    (tmp_path / "gate.json").write_text(json.dumps({"passed": True}))
    assert read_runtime(tmp_path) == Runtime(threads=1)
    section = {"threads": 4, "mix_us": {"1": 9.0, "4": 5.0}, "spread": 0.001}
    (tmp_path / "gate.json").write_text(json.dumps({"runtime": section}))
    assert read_runtime(tmp_path) == Runtime(threads=4, mix_us={"1": 9.0, "4": 5.0}, spread=0.001)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"runtime": {"threads": 0}}', '{"runtime": {"threads": "two"}}']
)
def test_what_cannot_be_a_runtime_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "gate.json").write_text(text)
    with pytest.raises(BundleBroken):
        read_runtime(tmp_path)
