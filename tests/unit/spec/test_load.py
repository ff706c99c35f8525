from pathlib import Path

import pytest

from serin.errors import SpecError
from serin.spec.load import load_spec, written_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.rollout import RolloutSpec
from serin.spec.yaml_file import read_yaml

GOOD = """
name: flight-delays
data:
  tables: {flights: data/flights.parquet, weather: weather.parquet, planes: "s3://lake/planes.parquet"}
  joins:
    - {with: weather, on: [origin, time_hour], columns: [temp, visib], source: request}
    - {with: planes, on: tailnum, columns: {year: built}, source: lookup}
  target: {expression: "arr_delay > 15", task: binary}
  time: time_hour
  training_only: [dep_time]
features:
  - {columns: [distance, temp, built], steps: [fill_median, clip: {q: [0.001, 0.999]}, normalize]}
  - {columns: [carrier, tailnum], steps: [categorify: {min_count: 10}]}
  - {columns: [time_hour], steps: [date_parts: [hour, month]]}
rollout: {bake: 10m, step_time: 1.5h}
"""


def problems_of(text: str) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        written_spec(read_yaml(text), where="spec.yaml", base=Path("/base")).resolved()
    assert str(caught.value).startswith("spec.yaml: ")
    assert caught.value.exit_code == 2
    return dict(caught.value.fields["problems"])


def good() -> PipelineSpec:
    return written_spec(read_yaml(GOOD), where="spec.yaml", base=Path("/base")).resolved()


@pytest.mark.parametrize("text", ["a: " + "[" * 2_000, "- " * 2_000 + "x"])
def test_yaml_that_is_nested_too_deeply_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(SpecError, match="is not YAML") as refusal:
        load_spec(tmp_path / "spec.yaml")
    assert len(str(refusal.value)) < 1_000


def test_a_spec_survives_the_way_to_yaml_and_back() -> None:
    again = written_spec(read_yaml(good().to_yaml()), where="again", base=Path("/elsewhere")).resolved()
    assert again == good()
    assert again.digest() == good().digest()


def test_paths_are_relative_to_the_file_and_urls_stay(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(GOOD)
    tables = load_spec(tmp_path / "spec.yaml").data.tables
    assert tables["flights"] == str(tmp_path / "data/flights.parquet")
    assert tables["planes"] == "s3://lake/planes.parquet"


def test_durations_are_seconds_in_python() -> None:
    assert (good().rollout.bake, good().rollout.step_time) == (600.0, 5400.0)


def test_sources_follow_joins_target_and_training_only() -> None:
    data = good().data
    found = {
        column: data.source_of(column) for column in ("distance", "temp", "built", "dep_time", "arr_delay")
    }
    assert found == {
        "distance": "request",
        "temp": "request",
        "built": "lookup",
        "dep_time": "training_only",
        "arr_delay": "training_only",
    }


def test_all_problems_are_reported_at_once_with_key_and_fix() -> None:
    text = (
        GOOD.replace("bake:", "bkae:")
        .replace("normalize]", "normalise]")
        .replace("source: request", "sorce: request")
    )
    found = problems_of(text + "training: {epochs: 0, batch_rows: many}\nmodle: {}\n")
    assert found["rollout.bkae"] == "unknown key; did you mean 'bake'?"
    assert found["features[0].steps[2]"] == "unknown step 'normalise'; did you mean 'normalize'?"
    assert found["data.joins[0].sorce"] == "unknown key; did you mean 'source'?"
    assert found["modle"] == "unknown key; did you mean 'model'?"
    assert "greater than or equal to 1" in found["training.epochs"]
    assert "'auto'" in found["training.batch_rows"]


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        (("[carrier, tailnum]", "[carrier, dep_time]"), "features[1].columns", "training_only"),
        (("[carrier, tailnum]", "[carrier, arr_delay]"), "features[1].columns", "makes the target"),
        (("[carrier, tailnum]", "[carrier, carrier]"), "features[1]", "names a column twice"),
        (("on: tailnum", "on: [tailnum, origin]"), "data.joins[1]", "one key column"),
        (("on: tailnum", "on: dep_time"), "data.joins[1].on", "must come with the request"),
        (("with: planes", "with: plane"), "data.joins[1].with", "no table 'plane'"),
        (("{year: built}", "{year: temp}"), "data.joins[1].columns", "rename it"),
        (('"arr_delay > 15"', '"arr_delay >"'), "data.target.expression", "expected at character"),
        (("[0.001, 0.999]", "[0.9, 0.1]"), "features[0].steps[1]", "increasing"),
        (("step_time: 1.5h", "step_time: soon"), "rollout.step_time", "not a valid duration"),
        (("step_time: 1.5h", "steps: [5, 1]"), "rollout.steps", "must increase"),
        (("step_time: 1.5h", "steps: [1, shadow, 100]"), "rollout.steps", "as the first step"),
        (("step_time: 1.5h", "steps: [shadow]"), "rollout.steps", "end with 100"),
        (("step_time: 1.5h", "steps: [dark, 100]"), "rollout.steps[0]", "must be 'shadow', not 'dark'"),
        (("step_time: 1.5h", "shadow: {rows: 7}"), "rollout", "do not begin with shadow"),
        (("step_time: 1.5h", "steps: [shadow, 100]"), "rollout.steps", "set it, such as 0.1, or leave shadow out"),
        (("name: flight-delays", "name: ../etc"), "name", "not a valid model name"),
        (('expression: "arr_delay > 15"', "column: x, expression: y"), "data.target", "one of column, expression"),
        (("time: time_hour", "split: {train: 0.5, valid: 0.1, test: 0.1}"), "data.split", "add up to 1"),
    ],
)  # fmt: skip
def test_each_mistake_is_named_by_its_key(change: tuple[str, str], key: str, says: str) -> None:
    assert change[0] in GOOD
    assert says in problems_of(GOOD.replace(*change))[key]


def test_recorded_requests_without_some_of_their_columns_cannot_be_replayed() -> None:
    text = GOOD.replace("step_time: 1.5h", "steps: [shadow, 5, 100]")
    good_one = read_yaml(text + "monitoring: {capture: {share: 0.1}}\n")
    assert written_spec(good_one, where="spec.yaml", base=Path("/base")).resolved().rollout.shares == (5, 100)
    found = problems_of(text + "monitoring: {capture: {share: 0.1, mask: [carrier], drop: [temp]}}\n")
    assert "they lack carrier, temp (monitoring.capture.mask and drop)" in found["rollout.steps"]


def test_a_hidden_column_that_no_request_has_is_not_advised_to_be_recorded() -> None:
    text = GOOD.replace("step_time: 1.5h", "steps: [shadow, 5, 100]")
    found = problems_of(text + "monitoring: {capture: {share: 0.1, mask: [email]}}\n")
    assert list(found) == ["monitoring.capture.mask"]
    found = problems_of(text + "monitoring: {capture: {share: 0.1, mask: [email], drop: [temp]}}\n")
    assert "they lack temp (monitoring.capture.drop); record" in found["rollout.steps"]


def test_a_batch_that_does_not_divide_names_the_nearest_that_does() -> None:
    found = problems_of(GOOD + "training: {batch_rows: 1000, processes: 3}\n")
    assert "nearest that does: 999" in found["training"]


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="serin init"):
        load_spec(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("text", ["a: [1,", "- 1\n- 2", "", "name: a\nname: b"])
def test_a_value_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"spec\.yaml"):
        load_spec(path)


def test_the_spec_is_a_python_api() -> None:
    assert RolloutSpec(steps=(10, 100)).steps == (10, 100)
    with pytest.raises(ValueError, match="frozen"):
        good().rollout.bake = 1.0  # type: ignore[misc]


def test_a_wrong_step_is_one_problem_that_names_every_step() -> None:
    found = problems_of(GOOD.replace("[date_parts: [hour, month]]", "[tokenize]"))
    assert list(found) == ["features[2].steps[0]"]
    assert all(
        step in found["features[2].steps[0]"] for step in ("bucketize", "hash_bucket", "target_encode")
    )


def test_a_misspelled_choice_is_answered_with_the_nearest_one() -> None:
    found = problems_of(GOOD.replace("task: binary", "task: binry"))
    assert "must be 'binary'" in found["data.target.task"]
    assert "did you mean 'binary'?" in found["data.target.task"]
