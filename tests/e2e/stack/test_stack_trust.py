"""A whole stack that trusts a key: its controller refuses a version that the key has not signed."""

from pathlib import Path

from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.status import model_status
from serin.store.store import Store
from serin.store.trust import Trust, create_key, public_pem
from tests.e2e.whole_stack import Stack
from tests.unit.serving import bundles


def test_a_rollout_of_an_unsigned_version_is_refused_before_it_begins(stack: Stack, tmp_path: Path) -> None:
    bundle = bundles.publish(Store(str(stack.home / "store")), bias=0.0)
    (tmp_path / "key.pub").write_text(public_pem(create_key(tmp_path / "key")))
    trust = Trust(stack.home / "trusted-keys")
    trust.add("ci", tmp_path / "key.pub")
    try:
        start = Command(kind="start", model=bundle.model, version=bundle.version, by="ann")
        answer = home_rollouts(stack.home).mailbox.ask(start)
    finally:
        trust.end()
    assert not answer.accepted
    assert "cannot be loaded: it is not signed; sign it with" in answer.reason
    assert model_status(stack.home, bundle.model) is None
    assert not (stack.home / "releases" / f"{bundle.model}-v{bundle.version}").exists()
