import pytest
from pydantic import ValidationError

from serin.spec.serving import ServingSpec


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
def test_a_wrong_value_is_refused_by_the_name_of_its_key(section: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ServingSpec.model_validate(section)


def test_without_settings_server_and_machine_decide_everything() -> None:
    spec = ServingSpec()
    assert (spec.backend, spec.device, spec.threads, spec.gpu_memory) == ("auto", "auto", None, None)
