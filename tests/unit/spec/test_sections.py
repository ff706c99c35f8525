"""Single sections of the spec: environment, serving and its rates, export, champion, monitoring."""

from typing import Any

import pytest
from pydantic import ValidationError

from serin.errors import SpecError
from serin.spec.environment import EnvironmentSpec
from serin.spec.export import ChampionSpec, ExportSpec
from serin.spec.load import load_spec
from serin.spec.rate import read_rate
from serin.spec.serving import ServingSpec

SPEC: dict[str, Any] = {
    "name": "parcels",
    "data": {"tables": {"t": "parcels.parquet"}, "target": {"expression": "hours > 3", "task": "binary"}},
    "features": [{"columns": ["weight", "height"], "steps": ["normalize"]}],
}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"backend": "openvino"}, "backend"),
        ({"device": "tpu"}, "device"),
        ({"accelerator": "rocm"}, "accelerator"),
        ({"gpus": 0}, "gpus"),
        ({"gpu_memory": "0MB"}, "gpu_memory"),
        ({"instances": 0}, "instances"),
        ({"threads": 0}, "threads"),
        ({"queue_delay": -1}, "queue_delay"),
        ({"max_string": "0kB"}, "max_string"),
        ({"device": "cpu", "backend": "tensorrt_plan"}, "device=cpu does not go with backend=tensorrt_plan"),
        ({"device": "cpu", "gpus": 2}, "device=cpu does not go with gpus=2"),
    ],
)
def test_a_wrong_value_of_serving_is_refused_by_the_name_of_its_key(
    section: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        ServingSpec.model_validate(section)


def test_without_settings_server_and_machine_decide_everything() -> None:
    spec = ServingSpec()
    assert (spec.backend, spec.device, spec.threads, spec.gpu_memory) == ("auto", "auto", None, None)


def test_a_rate_is_a_number_per_unit_with_a_burst() -> None:
    rate = read_rate("600/m")
    assert (rate.count, rate.period_s, rate.burst) == (600, 60, 600)
    assert (str(read_rate("100/s")), str(read_rate("5/h", 2))) == ("100/s", "5/h, 2 at once")


@pytest.mark.parametrize(
    ("text", "wait_s"), [("100/s", 1), ("1/s", 1), ("30/m", 2), ("7/m", 9), ("1/h", 3600)]
)
def test_a_refused_caller_is_told_to_wait_until_there_may_be_a_token(text: str, wait_s: int) -> None:
    assert read_rate(text).wait_s == wait_s


@pytest.mark.parametrize(
    "text", ["", "100", "0/s", "-1/s", "1.5/s", "100/d", "100/s ", "1e3/s", "9999999999/s", "١/s"]
)
def test_anything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid rate: use a number per s, m or h, such as 100/s"):
        read_rate(text)
    with pytest.raises(ValidationError, match="is not a valid rate"):
        ServingSpec(rate_limit=text)


def test_a_burst_needs_a_rate_and_at_least_one_request() -> None:
    assert ServingSpec(rate_limit="100/s", rate_burst=7).rate_burst == 7
    with pytest.raises(ValidationError, match="rate_burst needs a rate_limit, such as 100/s"):
        ServingSpec(rate_burst=7)
    with pytest.raises(ValueError, match="0 is not a valid burst"):
        read_rate("1/s", 0)


def test_the_defaults_ask_for_one_variant_and_a_candidate_that_is_not_worse() -> None:
    export, champion = ExportSpec(), ChampionSpec()
    assert (export.variants, export.target, export.budget.max_drop) == (("fp32",), "auto", 0.002)
    assert (champion.metric, champion.max_loss, champion.confidence) == (None, 0.0, 0.95)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"variants": ["fp16"]}, "add fp32; the others are judged against it"),
        ({"variants": ["fp32", "fp8"]}, "'int8_embeddings'"),
        ({"batch_mix": {1: 0.5, 8: 0.2}}, "shares must be above 0 and add up to 1"),
        ({"batch_mix": {0: 1.0}}, "rows must be at least 1"),
        ({"budget": {"max_drop": -1}}, "greater than or equal to 0"),
        ({"budget": {"metric": "f1"}}, "'auc'"),
        ({"target": "tpu"}, "'gpu'"),
    ],
)
def test_what_no_export_can_do_is_refused_with_what_it_can(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ExportSpec.model_validate(given)


def test_a_confidence_below_a_coin_toss_is_none() -> None:
    with pytest.raises(ValidationError, match=r"greater than 0\.5"):
        ChampionSpec(confidence=0.4)


def test_a_segment_is_a_column_that_requests_hold() -> None:
    with pytest.raises(
        SpecError, match=r"export.segments: 'wheight' is not a column of a request; .*'weight'"
    ):
        load_spec({**SPEC, "export": {"segments": ["wheight"]}})


@pytest.mark.parametrize("key", ["mask", "drop"])
def test_a_hidden_column_is_a_column_that_requests_hold(key: str) -> None:
    good = load_spec({**SPEC, "monitoring": {"capture": {key: ["weight"]}}})
    assert getattr(good.monitoring.capture, key) == ("weight",)
    with pytest.raises(
        SpecError,
        match=rf"monitoring.capture.{key}: 'name' is not a column of a request; known: height, weight",
    ):
        load_spec({**SPEC, "monitoring": {"capture": {key: ["name"]}}})


def test_a_quality_objective_needs_recorded_requests() -> None:
    good = {"capture": {"share": 0.5}, "quality": {"margin": 0.01}}
    assert load_spec({**SPEC, "monitoring": good}).monitoring.quality is not None
    with pytest.raises(SpecError, match=r"monitoring\.quality: needs recorded requests: set"):
        load_spec({**SPEC, "monitoring": {"quality": {"margin": 0.01}}})


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("pkg @ https://bob:hunter2@host/pkg.whl", True),
        ("pkg @ git+https://oauth2:hunter2@host/pkg.git", True),
        ("pkg @ git+https://hunter2@host/pkg.git", True),
        ("pkg @ git+https://hunter2:@host/pkg.git", True),
        ("pkg @ git+ssh://bob:hunter2@host/pkg.git", True),
        ("git+https://oauth2:hunter2@host/pkg.git", True),
        ("pkg @ git+ssh://git@host/pkg.git@v1", False),
        ("pkg @ https://host/pkg@1.whl", False),
        ("pkg @ git+https://bob:${TOKEN}@host/pkg.git", False),
        ("pkg @ git+https://${TOKEN}@host/pkg.git", False),
    ],
)
def test_a_requirement_with_a_password_is_refused_without_showing_it(url: str, secret: bool) -> None:
    section = {"requirements": [url]}
    if not secret:
        assert EnvironmentSpec(**section).requirements == (url,)
        return
    with pytest.raises(
        SpecError, match=r"holds a password or a token, .* write \$\{NAME\} for it"
    ) as refused:
        load_spec(SPEC | {"environment": section})
    assert "hunter2" not in str(refused.value)
