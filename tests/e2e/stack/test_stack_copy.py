"""A version goes from development through staging to production, which is a whole stack that serves it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.rollout.run.access import home_rollouts
from serin.store.store import Store
from tests.e2e.whole_stack import Stack, until
from tests.kit.commands import serin
from tests.unit.serving import bundles

MODEL = "moved"
SPEC = f"""
name: {MODEL}
data: {{tables: {{rows: rows.parquet}}, target: {{column: late, task: binary}}}}
features: [{{columns: [temp], steps: [normalize]}}]
rollout: {{bake: 0s}}
"""
GATE = {
    "passed": True,
    "tolerance": 1e-4,
    "allowed_difference": 1e-4,
    "batch_rows": [1, 2, 7, 8, 9, 40, 64, 1024],
}


@pytest.fixture
def prod(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The store of the stack, whose policy is taken back for the other tests."""
    url = str(stack.home / "store")
    yield url
    monkeypatch.setenv("SERIN_STORE", url)
    serin("trust", "policy", "--off")


def test_a_version_is_made_once_tried_in_staging_and_rolled_out_in_production(
    stack: Stack, prod: str, bucket: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev, keys = tmp_path / "dev", {name: str(tmp_path / f"{name}.key") for name in ("ci", "staging")}
    for path in keys.values():
        serin("trust", "create", path)

    monkeypatch.setenv("SERIN_STORE", prod)
    serin("trust", "policy", "--signer", f"staging={keys['staging']}.pub", "--check", "gate")
    monkeypatch.setenv("SERIN_STORE", bucket)
    serin("trust", "policy", "--signer", f"ci={keys['ci']}.pub", "--check", "gate")

    monkeypatch.setenv("SERIN_STORE", str(dev))
    made = bundles.publish(
        Store(str(dev)), bias=0.0, model=MODEL, spec=SPEC, extra={"gate.json": json.dumps(GATE).encode()}
    )
    assert "it is not signed; let ci sign it" in serin("models", "copy", MODEL, "--to", bucket, code=1)
    serin("models", "sign", MODEL, "--key", keys["ci"])
    serin("models", "copy", MODEL, "--to", bucket)

    monkeypatch.setenv("SERIN_STORE", bucket)
    assert "let staging sign it" in serin("models", "copy", MODEL, "--to", prod, "--rollout", code=1)
    serin("models", "sign", MODEL, "--key", keys["staging"])
    said = serin("models", "copy", MODEL, "--to", prod, "--rollout", "--why", "a week in staging")
    assert made.digest[:12] in said

    rollouts = home_rollouts(stack.home)
    first = rollouts.decisions(MODEL)[0]
    assert first.reason == "a week in staging"
    until(lambda: rollouts.decisions(MODEL)[-1].phase in ("promoted", "rolled_back"), "the rollout's end")
    assert rollouts.decisions(MODEL)[-1].phase == "promoted", [
        each.reason for each in rollouts.decisions(MODEL)
    ]
    until(lambda: Store(prod).aliases(MODEL).get("live") == 1, "its alias")
    assert "is live there already" in serin("models", "copy", MODEL, "--to", prod, "--rollout")
    shown = stack.ask("models", "show", MODEL)
    assert [stop["store"] for stop in shown["copied"]] == [str(dev), bucket]
    assert shown["manifest"]["digest"] == made.digest
    stack.serin("retire", MODEL, "--yes")
