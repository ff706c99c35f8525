"""Explanations of published versions: they add up, and they are what the definitions and other libraries say."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost

from serin.api.explanation import Explanation
from serin.errors import ExplanationRefused, RowsUnfit
from serin.export.convert.trees2onnx import parse_trees
from serin.export.explain import trace_features
from serin.features.plan import FeaturePlan
from serin.formats.bundle import read_manifest, write_manifest
from serin.formats.dataset import DerivedDescription, read_dataset
from serin.formats.explain import ExplainRecord, FeatureColumns
from serin.formats.schema import Task
from serin.formats.shards import read_split
from serin.formats.trained import write_trained
from serin.formats.weights import write_weights
from serin.models.build import build_model
from serin.models.shape import TableShape, record_of, shape_of
from serin.models.trees import feature_table, joined, read_booster
from serin.scoring.explain.explainer import Explainer, open_trained, tree_shap
from serin.scoring.explain.explanation import Unexplained
from serin.scoring.explain.integrated_gradients import integrated_gradients
from serin.scoring.predict import Scorer
from serin.spec.model import ModelSpec
from serin.store.artifacts import Checkpoint
from tests.unit.export.exact_shapley import shapley_values
from tests.unit.export.small_dataset import Trained, columns_of, flights, make_dataset, make_trained, spec_for

OBJECTIVES = {"binary": "binary:logistic", "regression": "reg:squarederror", "multiclass": "multi:softprob"}
ROWS = flights().slice(310, 12)


def make_trees(folder: Path, task: Task, **sections: dict) -> Trained:
    """Trees of the small dataset, trained by XGBoost as the pipeline does, on fewer rounds."""
    (folder / "dataset").mkdir(parents=True)
    (folder / "result").mkdir()
    dataset = make_dataset(folder / "dataset", task)
    shape = shape_of(read_dataset(dataset.path))
    rows = read_split(dataset.path, "train").whole()
    table = feature_table(rows.num, rows.cat, shape.sizes)
    table.set_label(rows.target)
    settings = {"objective": OBJECTIVES[task], "max_depth": 3, "max_cat_to_onehot": 1, "seed": 1}
    settings |= {"num_class": 3} if task == "multiclass" else {}
    booster = xgboost.train(settings, table, num_boost_round=4)
    spec = spec_for(task, model={"kind": "xgboost"}, **sections)
    record = record_of(spec.model, read_dataset(dataset.path), "trees.ubj")
    write_trained(folder / "result", bytes(booster.save_raw("ubj")), record)
    checkpoint = Checkpoint(path=str(folder / "result"), step=4, metrics={"valid_auc": 0.5})
    return Trained(spec=spec, dataset=dataset, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    return Path(make_trees(folder, "multiclass").export(folder).path)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    return Path(make_trained(folder, "binary", model={"kind": "dcn", "hidden": [8]}).export(folder).path)


def features_of(bundle: Path) -> np.ndarray:
    """float32[rows, features], numeric ones first, as the ETL makes them."""
    plan = FeaturePlan.from_json(json.loads((bundle / "features.json").read_text()))
    return joined(*plan.transform(columns_of(ROWS)))


def softmax(margin: np.ndarray) -> np.ndarray:
    raised = np.exp(margin - margin.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def test_contributions_of_trees_are_the_shapley_values_of_their_raw_columns(trees: Path) -> None:
    found = Explainer(trees).explain(ROWS)
    booster = read_booster((trees / "explain" / "trees.ubj").read_bytes())
    document, rows = parse_trees(booster), features_of(trees)
    columns = json.loads((trees / "explain" / "columns.json").read_text())["columns"]
    owners = [*columns["numeric"], *columns["categorical"]]
    for at in range(2):
        wanted = shapley_values(document, rows[at], 3)
        for place, name in enumerate(found.columns):
            own = [feature for feature, owner in enumerate(owners) if owner == name]
            assert found.values[at, :, place] == pytest.approx(wanted[:, own].sum(axis=1), abs=1e-5)
    assert {"dep", "seats", "maker", "carrier"} <= set(found.columns)
    assert found.sources["seats"] == "lookup in planes by tailnum"
    assert owners.count("dep") == 2


def test_contributions_of_trees_add_up_to_the_score(trees: Path) -> None:
    found = Explainer(trees).explain(ROWS)
    assert found.base + found.values.sum(axis=2) == pytest.approx(found.margin, abs=1e-5)
    assert softmax(found.margin) == pytest.approx(found.score, abs=1e-5)
    assert found.score == pytest.approx(Scorer(trees).answers(ROWS)["probabilities"], abs=1e-7)
    assert (found.outputs, found.method) == (("early", "on time", "late"), "TreeSHAP")


@pytest.mark.parametrize("targets", [1, 2])
def test_trees_of_a_regression_with_one_or_two_targets_add_up(targets: int) -> None:
    random = np.random.default_rng(2)
    num, cat = random.normal(size=(300, 3)).astype(np.float32), random.integers(0, 9, (300, 1))
    signal = np.stack([num[:, 0] + (cat[:, 0] > 4), num[:, 1] * 3], axis=1)[:, :targets]
    table = feature_table(num, cat, (9,))
    table.set_label(signal)
    booster = xgboost.train({"objective": "reg:squarederror", "max_depth": 3}, table, num_boost_round=5)
    found = tree_shap(booster, num[:20], cat[:20], (9,))
    assert found.features.shape == (20, targets, 4)
    assert found.base + found.features.sum(axis=2) == pytest.approx(found.margin, abs=1e-5)
    wanted = shapley_values(parse_trees(booster), np.append(num[0], cat[0]), targets)
    assert found.features[0] == pytest.approx(wanted, abs=1e-5)


KINDS = [
    {"kind": "mlp", "hidden": [16, 8]},
    {"kind": "mlp", "hidden": [8], "ensemble_size": 2},
    {"kind": "dcn", "hidden": [8], "cross_layers": 2},
    {"kind": "ft_transformer", "blocks": 1, "embedding": 8, "heads": 2},
    {"kind": "mlp", "hidden": [8], "numeric_scaling": "robust", "numeric_embedding": "periodic"},
    {"kind": "tabm", "hidden": [8], "members": 3},
]


@pytest.mark.parametrize("model", KINDS, ids=lambda model: "_".join(map(str, model.values())))
def test_contributions_of_networks_are_those_of_captum_and_add_up_to_the_answer(
    model: dict[str, object],
) -> None:
    torch.manual_seed(4)
    shape = TableShape(numeric=3, sizes=(5, 9), outputs=2)
    net = build_model(ModelSpec.model_validate(model), shape).eval().double().requires_grad_(False)
    random = np.random.default_rng(1)
    num, cat = random.normal(size=(2, 3)), np.array([[4, 8], [0, 2]])
    base_num, base_cat = np.array([0.1, -0.2, 0.0]), np.array([1, 3])

    found = integrated_gradients(net, num, cat, base_num, base_cat)

    with torch.no_grad():
        answer = net(torch.from_numpy(num), torch.from_numpy(cat)).numpy()
        base = net(torch.from_numpy(base_num)[None], torch.from_numpy(base_cat)[None]).numpy()
    assert found.margin == pytest.approx(answer, abs=1e-9)
    assert found.base == pytest.approx(np.repeat(base, 2, axis=0), abs=1e-9)
    assert found.base + found.features.sum(axis=2) == pytest.approx(found.margin, abs=1e-5)
    wanted = by_captum(net, num[:1], cat[:1], base_num, base_cat, output=1)
    assert found.features[:1, 1] == pytest.approx(wanted, abs=1e-5)


def by_captum(
    net: torch.nn.Module, num: np.ndarray, cat: np.ndarray, base_num: np.ndarray, base_cat: np.ndarray, output: int
) -> np.ndarray:  # fmt: skip
    """So many steps that the kinks of ReLU do not show in the fifth digit."""
    from captum.attr import IntegratedGradients  # here, because each worker imports this file

    tables = [each for each in net.modules() if type(each).__name__ == "CategoryTable"]
    codes = torch.from_numpy(cat)

    def forward(numbers: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
        hooks = [
            table.register_forward_hook(lambda *_, given=given: given)
            for table, given in zip(tables, vectors, strict=True)
        ]
        answer = net(numbers, codes[:1].expand(len(numbers), -1))
        for hook in hooks:
            hook.remove()
        return answer[:, output]

    inputs = (torch.from_numpy(num), *(table(codes) for table in tables))
    starts = (
        torch.from_numpy(base_num)[None],
        *(table(torch.from_numpy(base_cat)[None]) for table in tables),
    )
    parts = IntegratedGradients(forward).attribute(inputs, starts, n_steps=20_000, method="riemann_middle")
    vectors = sum(part.sum(dim=2) for part in parts[1:])
    return torch.cat([parts[0], vectors], dim=1).detach().numpy()


def test_a_wide_network_with_many_kinks_adds_up() -> None:
    torch.manual_seed(4)
    shape = TableShape(numeric=6, sizes=(50, 90), outputs=1)
    net = build_model(ModelSpec(kind="mlp", hidden=(128, 64)), shape).eval().double().requires_grad_(False)
    random = np.random.default_rng(1)
    num, cat = random.normal(size=(10, 6)), random.integers(0, 50, (10, 2))
    found = integrated_gradients(net, num, cat, np.zeros(6), np.zeros(2, np.int64))
    assert found.base + found.features.sum(axis=2) == pytest.approx(found.margin, abs=1e-5)


OWN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, numeric, sizes, outputs, one_hot=False):
        super().__init__()
        self.one_hot, self.sizes = one_hot, sizes
        self.tables = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        width = numeric + (sum(sizes) if one_hot else 4 * len(sizes))
        self.layers = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, outputs))

    def forward(self, num, cat):
        if self.one_hot:
            vectors = [nn.functional.one_hot(cat[:, at], size).to(num) for at, size in enumerate(self.sizes)]
        else:
            vectors = [table(cat[:, at]) for at, table in enumerate(self.tables)]
        return self.layers(torch.cat([num, *vectors], dim=1))
"""


@pytest.mark.parametrize("one_hot", [False, True])
def test_a_user_s_network_is_explained_if_categories_enter_through_embeddings(
    tmp_path: Path, one_hot: bool
) -> None:
    (tmp_path / "net.py").write_text(OWN)
    model = ModelSpec(kind="module", module=f"{tmp_path}/net.py:Net", options={"one_hot": one_hot})
    shape = TableShape(numeric=2, sizes=(5, 9), outputs=1)
    net = build_model(model, shape)
    write_weights(
        tmp_path,
        net.state_dict(),
        {"model": model, "shape": {"numeric": 2, "sizes": (5, 9), "outputs": 1}, "task": "binary"},
    )
    columns = FeatureColumns(numeric=("a", "b"), categorical=("c", "d"), sources={})
    record = ExplainRecord(
        num_tensor="", cat_tensor="", columns=columns, baseline_num=(0, 0), baseline_cat=(1, 1)
    )
    trained = open_trained(tmp_path, record)
    num, cat = np.array([[0.5, -1.0], [2.0, 0.3]], np.float32), np.array([[4, 1], [1, 8]])
    if one_hot:
        with pytest.raises(Unexplained, match=r"in another way than through nn\.Embedding"):
            trained.explain(num, cat)
        return
    found = trained.explain(num, cat)
    assert found.base + found.features.sum(axis=2) == pytest.approx(found.margin, abs=1e-5)
    assert found.margin == pytest.approx(trained.margins(num, cat), abs=1e-5)
    assert found.features[0, 0, 3] == found.features[1, 0, 2] == 0, "the baseline's own code adds nothing"
    assert abs(found.features[0, 0, 2]) > 1e-3


def test_code_that_came_with_an_imported_version_is_not_run(network: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(network, folder)
    record = json.loads((folder / "explain" / "model.json").read_text())
    record["model"] = {"kind": "module", "module": f"{tmp_path}/never.py:Net"}
    (folder / "explain" / "model.json").write_text(json.dumps(record))
    with pytest.raises(
        ExplanationRefused, match=r"is code \(.*never.py:Net\) that came with an imported version"
    ):
        Explainer(resealed(network, folder, {"imported": {"release": "flights-v1"}}))


def test_a_published_network_s_contributions_add_up_to_its_score(network: Path) -> None:
    found = Explainer(network).explain(ROWS)
    assert found.base + found.values.sum(axis=2) == pytest.approx(found.margin, abs=1e-5)
    assert 1 / (1 + np.exp(-found.margin)) == pytest.approx(found.score, abs=1e-5)
    assert found.score == pytest.approx(Scorer(network).answers(ROWS)["score"], abs=1e-7)
    assert (found.method, found.scale, found.note) == ("integrated gradients", "log-odds", "")
    assert np.ptp(found.base) == 0


def test_a_derived_column_belongs_to_the_one_column_it_reads_or_to_itself(tmp_path: Path) -> None:
    description = read_dataset(make_dataset(tmp_path, "binary").path)
    plan = FeaturePlan.from_json(json.loads((tmp_path / "features.json").read_text()))
    derived = (
        DerivedDescription(name="distance", expression="miles * 1.6", kinds={"miles": "float"}),
        DerivedDescription(name="num", expression="distance / hours", kinds={"distance": "float", "hours": "float"}),
    )  # fmt: skip
    found = trace_features(plan, replace(description, derived=derived))
    owners = dict(zip(plan.numeric, found.numeric, strict=True))
    assert (owners["distance"], owners["num"], owners["seats"]) == ("miles", "num", "seats")
    assert found.sources["num"] == "derived: distance / hours"
    assert found.sources["miles"] == "request"


def test_an_explanation_is_a_frame_that_adds_up_and_shows_the_largest_first(
    trees: Path, network: Path
) -> None:
    frame = ROWS.to_pandas().set_index(np.arange(100, 112))
    one = Explanation(Explainer(network).explain(frame), frame)
    assert list(one.frame.index) == list(frame.index)
    assert list(one.frame.columns[-3:]) == ["base", "margin", "score"]
    total = one.frame.drop(columns=["margin", "score"]).sum(axis=1)
    assert total.to_numpy() == pytest.approx(one.frame["margin"].to_numpy(), abs=1e-5)
    first = next(one.rows())
    sizes = [abs(each.adds) for each in first.contributions]
    assert sizes == sorted(sizes, reverse=True)
    assert first.row == 100
    text = one._repr_html_()
    assert text.index(first.contributions[0].column) < text.index(first.contributions[1].column)
    assert "7 more rows" in text
    several = Explanation(Explainer(trees).explain(frame), frame).frame
    assert several.index.names == ["row", "output"]
    assert several.xs("late", level="output")["score"].between(0, 1).all()
    assert several.shape[0] == 36


def test_no_rows_have_no_explanation_and_a_missing_column_is_named(network: Path) -> None:
    explainer = Explainer(network)
    assert Explanation(explainer.explain(ROWS.slice(0, 0)), ROWS.slice(0, 0).to_pandas()).frame.empty
    with pytest.raises(RowsUnfit, match="'distance' is missing"):
        explainer.explain(ROWS.drop_columns(["distance"]))


def resealed(bundle: Path, folder: Path, lineage: dict[str, Any] | None = None) -> Path:
    manifest = read_manifest(bundle)
    names = {"name": manifest.name, "model_version": 1, "spec_digest": manifest.spec_digest}
    write_manifest(folder, **names, lineage=lineage or {}, metrics={})
    return folder


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mlp", "it was exported without what explanations need"),
        ("onnx", "it is an ONNX graph from model.onnx"),
        ("script", "it is an ONNX graph from model.script"),
        ("auto", "it is a blend of several models"),
    ],
)
def test_what_has_no_trees_or_weights_is_refused_by_name(
    network: Path, tmp_path: Path, kind: str, reason: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(network, folder)
    shutil.rmtree(folder / "explain")
    (folder / "spec.yaml").write_text(f"model: {{kind: {kind}}}\n")
    with pytest.raises(ExplanationRefused, match=f"flights version 1 cannot be explained: {reason}"):
        Explainer(resealed(network, folder))


def test_a_triton_repository_is_refused_by_name(network: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    (folder / "repository" / "flights").mkdir(parents=True)
    (folder / "repository" / "flights" / "config.pbtxt").write_text("")
    for name in ("schema.json", "golden.parquet"):
        shutil.copyfile(network / name, folder / name)
    with pytest.raises(ExplanationRefused, match=r"flights version 1 .* it is a Triton repository"):
        Explainer(resealed(network, folder))


def test_a_trained_model_that_is_not_the_published_one_is_refused(network: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(network, folder)
    other = make_trained(
        tmp_path / "other", "binary", model={"kind": "dcn", "hidden": [8]}, training={"seed": 9}
    )
    torch.manual_seed(99)
    shape = shape_of(read_dataset(other.dataset.path))
    record = json.loads((folder / "explain" / "model.json").read_text())
    state = build_model(other.spec.model, shape).state_dict()
    write_weights(folder / "explain", state, record)
    with pytest.raises(ExplanationRefused, match="answers the golden rows differently, by up to"):
        Explainer(resealed(network, folder))
