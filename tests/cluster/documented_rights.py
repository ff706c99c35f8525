"""What dev-to-production.md and roles.md of docs/how-to let credentials do in a store, as actions of identities of
SeaweedFS."""

import json
import re

from tests.architecture.sources import ROOT
from tests.cluster.seaweedfs import BUCKET

URL = f"s3://{BUCKET}/serin"
ROLES_URL = f"{URL}-roles"
PAGE = ROOT / "docs" / "how-to" / "dev-to-production.md"
ROLES_PAGE = ROOT / "docs" / "how-to" / "roles.md"
ACTIONS = {"s3:GetObject": "Read", "s3:PutObject": "Write", "s3:ListBucket": "List"}


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def ci_rights() -> list[str]:
    """The policy in docs/how-to, as actions of SeaweedFS, for the bucket of the tests."""
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [
        f"{ACTIONS[action]}:{in_seaweedfs(resource)}"
        for statement in json.loads(text)["Statement"]
        for action in listed(statement["Action"])
        if action in ACTIONS
        for resource in listed(statement["Resource"])
    ]


def in_seaweedfs(resource: str) -> str:
    """It knows buckets and prefixes, no single objects."""
    bucket, _, key = resource.removeprefix("arn:aws:s3:::").partition("/")
    assert bucket == "prod"
    return f"{BUCKET}/{key.rstrip('*')}*" if key else BUCKET


def writing_rights(who: str) -> list[str]:
    """A row of the page's table: reads everything, and writes below the prefixes that the row names."""
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {who} |")]
    prefixes = re.findall(r"`([^`]+)`", row)
    return [f"Read:{BUCKET}", f"List:{BUCKET}", *(f"Write:{BUCKET}/serin/{prefix}*" for prefix in prefixes)]


def role_rights(who: str) -> list[str]:
    """The rows of docs/how-to/roles.md for the role view or release of fraud-*, or for release with the right to run
    stages."""
    rows = {"read": ("Read",)}
    if who != "view":
        rows["write as release"] = ("Write",)
    if who == "stages":
        rows["read and write to run stages"] = "Read", "Write"
    return [f"List:{BUCKET}"] + [
        f"{right}:{BUCKET}/{ROLES_URL.rpartition('/')[2]}/{key.rstrip('*')}*"
        for name, rights in rows.items()
        for key in words_of(name)
        for right in rights
    ]


def words_of(row: str) -> list[str]:
    """What a row of a table in docs/how-to/roles.md lists, which is the one that begins so."""
    (found,) = re.findall(rf"^\| {re.escape(row)} \| (.+) \|$", ROLES_PAGE.read_text(), re.MULTILINE)
    return re.findall(r"`([^`]+)`", found)


IDENTITIES = {
    "ci": ci_rights(),
    "worker": writing_rights("workers of stages"),
    "approver": writing_rights("who approves rollouts"),
}
