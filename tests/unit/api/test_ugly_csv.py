"""The ugly CSV from a drafted spec to an exported model, against scikit-learn on rows that were cleaned by hand."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.parquet as pq
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from serin.api.pipeline import Pipeline
from serin.formats.shards import read_split
from serin.metrics import auc
from serin.scoring.bulk import find_pieces, score_into_folder
from tests.fakes.ugly_csv import LEAK, TARGET, write_ugly_csv

ROWS = 30_000
Rows = npt.NDArray[np.int64]


def test_a_drafted_model_is_as_good_as_scikit_learn_after_cleaning_by_hand(
    tmp_path: Path, home: Path
) -> None:
    clean = write_ugly_csv(tmp_path / "ugly.csv", ROWS)
    pipeline = Pipeline.draft(tmp_path / "ugly.csv", target=TARGET)
    pipeline.check()
    dataset = pipeline.build_dataset()
    pipeline.train()
    model = pipeline.export()
    score_into_folder(
        Path(model.path), find_pieces(str(tmp_path / "ugly.csv")), tmp_path / "scored", workers=1
    )
    scores = pq.read_table(tmp_path / "scored").column("score").to_numpy()

    train, test = (
        np.concatenate([read_split(dataset.path, split).whole().rows for split in splits])
        for splits in (("train", "valid"), ("test",))
    )
    fraud = (clean[TARGET] == "ja").to_numpy()
    assert fraud[test].sum() > 5
    ours = float(auc(fraud[test].astype(np.float32), scores[test]))
    theirs = max(_scikit_learn(clean, fraud, train, test))
    print(f"AUC on {len(test):,} test rows: {ours:.4f}, scikit-learn {theirs:.4f}")
    assert ours > theirs - 0.02


def _scikit_learn(clean: pd.DataFrame, fraud: npt.NDArray[np.bool_], train: Rows, test: Rows) -> list[float]:
    """The AUC of trees and of a logistic regression."""
    columns = clean.drop(columns=[TARGET, LEAK, "kundennr", "datum"])
    columns = columns.assign(month=clean["datum"].dt.month, weekday=clean["datum"].dt.weekday)
    codes = {
        name: columns[name].astype("category").cat.codes.replace(-1, np.nan) for name in ("stadt", "kanal")
    }
    trees = HistGradientBoostingClassifier(
        categorical_features=["stadt", "kanal"], max_leaf_nodes=8, learning_rate=0.05, random_state=0
    )
    dummies = pd.get_dummies(columns, columns=["stadt", "kanal"], dummy_na=True)
    flat = dummies.assign(betrag=np.log(columns["betrag"])).fillna({"alter": columns["alter"].median()})
    line = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    found = []
    for judge, table in ((trees, columns.assign(**codes)), (line, flat.astype(float))):
        judge.fit(table.iloc[train], fraud[train])
        guessed = judge.predict_proba(table.iloc[test])[:, 1]
        found.append(float(auc(fraud[test].astype(np.float32), guessed.astype(np.float32))))
    return found
