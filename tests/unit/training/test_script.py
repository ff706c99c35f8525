"""Training scripts of the user's own, as real processes: what they leave, how they end, how they are taken up again."""

import textwrap
import threading
from pathlib import Path

import pytest

from serin.errors import Preempted, SpecError, TrainingRefused, WorkerFailed
from serin.formats.trained import read_record
from serin.models.build import load_model
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.foreign.own_script import this_run
from serin.training.launch import launcher, processes
from serin.training.launch.job import Status
from serin.training.launch.processes import HostWork
from tests.fakes.datasets import make_dataset
from tests.logs import heard

# A linear model by least squares, written as ONNX without any framework: starts in a second.
FIT = """
import numpy as np, onnx
from onnx import helper, numpy_helper, TensorProto
from serin.training.foreign.own_script import this_run
run = this_run()
train = run.split("train")
weights, *_ = np.linalg.lstsq(train.num, train.target - 0.5, rcond=None)
def leave(columns=3, name="model.onnx"):
    node = helper.make_node("MatMul", ["num", "w"], ["logits"])
    given = helper.make_tensor_value_info("num", TensorProto.FLOAT, ["batch", columns])
    answer = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])
    w = numpy_helper.from_array(np.float32(np.resize(weights, (columns, 1))), "w")
    graph = helper.make_graph([node], "g", [given], [answer], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), run.output / name)
"""


def script(folder: Path, text: str) -> ModelSpec:
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(FIT + textwrap.dedent(text))
    return ModelSpec(script=str(path), options={"depth": 3})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("dataset"))


ENDINGS = [
    ("pass", TrainingRefused, "it exited with 0 and wrote nothing to SERIN_OUTPUT"),
    ("(run.output / 'model.onnx').write_bytes(b'weights, surely')", TrainingRefused, "is not an ONNX file"),
    ("leave(columns=4)", TrainingRefused, "its input num has 4 columns, but the dataset has 3"),
    ("weights = weights * np.nan; leave()", TrainingRefused, "its answer to row 0 of the valid rows is"),
    ("leave(name='weights.safetensors')", TrainingRefused, "wrote weights.safetensors"),
    ("raise MemoryError('no room for my table')", WorkerFailed, "MemoryError: no room for my table"),
]


@pytest.mark.parametrize(("text", "error", "words"), ENDINGS, ids=[words[:24] for _, _, words in ENDINGS])
def test_a_script_without_a_model_is_refused_with_what_is_missing(
    tmp_path: Path, dataset: Dataset, text: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        launcher.train(script(tmp_path / "own", text), TrainingSpec(), dataset, folder=tmp_path / "run")
    assert not (tmp_path / "run" / "result").exists()


def test_a_script_is_stopped_killed_and_resumed_with_what_it_saved(tmp_path: Path, dataset: Dataset) -> None:
    """One run, four attempts: told to stop, killed, ended by itself with 75, done."""
    model = script(
        tmp_path / "own",
        """
        import os, signal, sys
        seen = run.checkpoints / "attempts"
        attempt = len(seen.read_text()) if run.resume else 0
        seen.write_text("x" * (attempt + 1))
        assert run.options == {"depth": 3} and run.epochs == 4 and run.seed == 9
        if attempt == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
            run.say("ready to be stopped")
            signal.sigtimedwait([signal.SIGUSR1], 60)
            sys.exit("nobody stopped me")
        if attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 2:
            sys.exit(75)
        leave()
        run.leave_metrics({"mine": attempt})
        """,
    )
    training, folder, stop = TrainingSpec(epochs=4, seed=9), tmp_path / "run", threading.Event()

    def stop_when_ready(line: str) -> None:
        if line == "ready to be stopped":
            stop.set()

    with pytest.raises(Preempted), heard(stop_when_ready):
        launcher.train(model, training, dataset, folder=folder, stop=stop)
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        launcher.train(model, training, dataset, folder=folder)
    with pytest.raises(Preempted):
        launcher.train(model, training, dataset, folder=folder)
    checkpoint = launcher.train(model, training, dataset, folder=folder)

    assert checkpoint.metrics["mine"] == 3
    assert checkpoint.metrics["test_auc"] > 0.6
    assert read_record(checkpoint.path).file == "model.onnx"
    assert sorted(file.name for file in (folder / "logs").iterdir()) == [
        f"attempt-00{n}.log" for n in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_a_script_that_does_not_save_when_it_is_stopped_does_not_keep_others_waiting(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    monkeypatch.setattr(processes, "_SAVES_IN_S", 0.2)
    model = script(
        tmp_path / "own",
        f"""
        import signal
        signal.signal(signal.SIGTERM, signal.{handler})
        run.say("ready to be stopped")
        signal.sigtimedwait([signal.SIGUSR1], 60)
        """,
    )
    stop = threading.Event()

    def stop_when_ready(line: str) -> None:
        if line == "ready to be stopped":
            stop.set()

    with pytest.raises(Preempted), heard(stop_when_ready):
        launcher.train(model, TrainingSpec(), dataset, folder=tmp_path / "run", stop=stop)


def test_a_stop_while_the_processes_start_again_is_no_failure(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()

    def start_again(work: HostWork) -> launcher._End:
        stop.set()
        status = Status(state="again", reason="with another precision")
        return launcher._End(status=status, exit_code=1, stop_asked=stop.is_set(), log=tmp_path / "log")

    monkeypatch.setattr(launcher, "_run", start_again)
    with pytest.raises(Preempted):
        launcher.train(ModelSpec(hidden=(4,)), TrainingSpec(), dataset, folder=tmp_path / "run", stop=stop)


def test_weights_with_a_factory_become_what_a_module_would_have_left(
    tmp_path: Path, dataset: Dataset
) -> None:
    model = script(
        tmp_path / "own",
        """
        import json, torch
        from safetensors.torch import save_file
        from net import Net
        net = Net(numeric=3, sizes=(7, 40), outputs=1, width=2)
        save_file(net.state_dict(), run.output / "weights.safetensors")
        (run.output / "factory.json").write_text(json.dumps({"module": "net.py:Net", "options": {"width": 2}}))
        """,
    )
    (tmp_path / "own" / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, numeric, sizes, outputs, width):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.Sequential(torch.nn.Linear(numeric, width), torch.nn.Linear(width, outputs))\n"
        "    def forward(self, num, cat):\n"
        "        return self.layers(num)\n"
    )

    checkpoint = launcher.train(model, TrainingSpec(), dataset, folder=tmp_path / "run")

    network = load_model(Path(checkpoint.path))
    assert read_record(checkpoint.path).model.kind == "module"
    assert {"test_auc", "test_logloss", "valid_auc"} <= checkpoint.metrics.keys()
    assert network.get_submodule("network.layers.0").weight.shape == (2, 3)


def test_several_processes_are_ranks_of_torchrun_and_75_means_run_again(
    tmp_path: Path, dataset: Dataset
) -> None:
    model = script(
        tmp_path / "own",
        """
        import os, sys
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        (run.checkpoints / f"rank-{rank}-of-{size}").touch()
        sys.exit(75)
        """,
    )

    with pytest.raises(Preempted):
        launcher.train(model, TrainingSpec(processes=2), dataset, folder=tmp_path / "run")

    seen = {file.name for file in (tmp_path / "run" / "checkpoints").iterdir()}
    assert seen  # the first to end may take the other one with it
    assert seen <= {"rank-0-of-2", "rank-1-of-2"}


def test_an_onnx_file_is_measured_and_taken_as_it_is(tmp_path: Path, dataset: Dataset) -> None:
    fitted = launcher.train(
        script(tmp_path / "own", "leave()"), TrainingSpec(), dataset, folder=tmp_path / "run"
    )
    file = tmp_path / "run" / "output" / "model.onnx"

    taken = launcher.train(ModelSpec(onnx=str(file)), TrainingSpec(), dataset, folder=tmp_path / "taken")
    with pytest.raises(TrainingRefused, match="no such file"):
        launcher.train(ModelSpec(onnx=str(file) + "x"), TrainingSpec(), dataset, folder=tmp_path / "none")

    assert taken.metrics == fitted.metrics


def test_a_script_started_by_hand_says_how_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERIN_OUTPUT", raising=False)

    with pytest.raises(SpecError, match="serin train SPEC"):
        this_run()


def test_a_script_that_is_not_there_is_refused(tmp_path: Path, dataset: Dataset) -> None:
    with pytest.raises(TrainingRefused, match="no file"):
        launcher.train(ModelSpec(script="nowhere.py"), TrainingSpec(), dataset, folder=tmp_path / "run")
