"""The policy of a store: what a version must have to be copied there, or to be rolled out from there.

It is the object `policy.json` of the store. It adds to the trusted keys of each host (store/trust.py) and replaces none
of them: who may write to the store may change its policy, unless the store's own rules forbid it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from serin.errors import PolicyRefused
from serin.formats.gate import GATE
from serin.machine.documents import parse_json, read_if_any
from serin.machine.typed_json import Document
from serin.store.artifacts import Bundle
from serin.store.places import writing_to
from serin.store.store import Store
from serin.store.trust import Signature, fingerprint, read_public_key, signatures_of, signer, why_untrusted

FILE: Final = "policy.json"
Check = Literal["gate", "champion", "groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Document, form="serin.policy"):
    """`signers`: public keys in PEM by name, one of which must have signed a version; empty: nobody has to. `checks`:
    what it must have passed where it was made. `approval`: a rollout waits for an approval before its version gets any
    traffic, whatever its plan says."""

    signers: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    approval: bool = False

    def problem(self, bundle: Bundle, signatures: tuple[Signature, ...] | None) -> str | None:
        """Returns why a version is refused, with what to do; None when it is not."""
        folder = Path(bundle.path)
        for check in self.checks:
            if reason := CHECKS[check](folder):
                return f"{reason}; the policy asks for the check {check!r}"
        found = [read_public_key(pem.encode(), Path(name)) for name, pem in self.signers.items()]
        keys = {fingerprint(key): key for key in found}
        if not keys or signer(bundle, signatures or (), keys):
            return None
        who = " or ".join(sorted(self.signers))
        command = f"`serin models sign {bundle.model}:{bundle.version} --key FILE`"
        return f"{why_untrusted(signatures, keys)}; let {who} sign it: {command}"


def read_policy(store: Store) -> Policy:
    """Returns the policy of a store; an empty one when it has none."""
    found = store.shared_files().read(FILE)
    if found is None:
        return Policy()
    advice = "set it again with `serin trust policy`"
    return parse_json(f"{store.url}/{FILE}", found.content, Policy.from_json, advice=advice)


def write_policy(store: Store, policy: Policy) -> None:
    with writing_to(store.url):
        store.shared_files().put(FILE, policy.dump())


def check_policy(store: Store, bundle: Bundle, *, of: Store | None = None) -> None:
    """Raises PolicyRefused for a version that may not be copied to this store or rolled out from it. `of`: the store
    that has the version; by default this one."""
    problem = read_policy(store).problem(bundle, signatures_of(of or store, bundle))
    if problem is not None:
        raise PolicyRefused(url=store.url, release=bundle.release.name, reason=problem)


def _gate(folder: Path) -> str:
    return "" if read_if_any(folder / GATE).get("passed") is True else "it has passed no gate of an export"


def _champion(folder: Path) -> str:
    report = read_if_any(folder / "champion.json")
    if report.get("verdict") == "approved":
        return f"{report.get('approved_by')} published it although {report.get('reason')}"
    return "" if report else "it has no report of a comparison with a live version"


def _groups(folder: Path) -> str:
    groups: dict[str, Any] = read_if_any(folder / GATE).get("groups") or {}
    limits = [groups.get("max_gap"), groups.get("max_rate_gap")]
    return "" if limits != [None, None] else "its groups were held to no limit (export.groups)"


CHECKS: Final[dict[Check, Callable[[Path], str]]] = {
    "gate": _gate,
    "champion": _champion,
    "groups": _groups,
}
