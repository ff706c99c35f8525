"""Writes one comment on a pull request or merge request and keeps it up to date.

python comment.py REPORT --pull-request 7      needs GITHUB_TOKEN, GITHUB_REPOSITORY and, elsewhere than on
                                               github.com, GITHUB_API_URL, as GitHub Actions sets them
python comment.py REPORT --merge-request 7     needs GITLAB_TOKEN, a token with the scope `api`, and CI_API_V4_URL and
                                               CI_PROJECT_ID, as GitLab CI sets them
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "<!-- serin: the model of this pull request -->"  # identifies the comment
_PAGE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Comments:
    """The comments of one request. `change`: the method that changes the comment at the address `one`/ID."""

    service: str
    all: str
    one: str
    change: str
    headers: dict[str, str]

    def call(self, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers, "Content-Type": "application/json"}
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def find(self) -> int | None:
        page = 1
        while True:
            found = self.call("GET", f"{self.all}?per_page={_PAGE}&page={page}")
            for comment in found:
                if MARK in comment["body"]:
                    return int(comment["id"])
            if len(found) < _PAGE:
                return None
            page += 1

    def write(self, report: str) -> str:
        """Writes the report into the comment; returns what was done."""
        body = {"body": f"{MARK}\n{report}"}
        known = self.find()
        if known is None:
            self.call("POST", self.all, body)
            return "written"
        self.call(self.change, f"{self.one}/{known}", body)
        return "updated"


def on_github(number: int) -> Comments:
    api = os.environ.get("GITHUB_API_URL", "https://api.github.com").rstrip("/")
    token, repository = _needed("GITHUB_TOKEN", "GITHUB_REPOSITORY")
    issues = f"{api}/repos/{repository}/issues"
    headers = {"Accept": "application/vnd.github+json", "Authorization": f"Bearer {token}"}
    every = f"{issues}/{number}/comments"
    return Comments(service="GitHub", all=every, one=f"{issues}/comments", change="PATCH", headers=headers)


def on_gitlab(number: int) -> Comments:
    token, api, project = _needed("GITLAB_TOKEN", "CI_API_V4_URL", "CI_PROJECT_ID")
    notes = f"{api.rstrip('/')}/projects/{project}/merge_requests/{number}/notes"
    return Comments(service="GitLab", all=notes, one=notes, change="PUT", headers={"PRIVATE-TOKEN": token})


def _needed(*names: str) -> list[str]:
    if missing := [name for name in names if not os.environ.get(name)]:
        sys.exit(f"{' and '.join(missing)} must be set")
    return [os.environ[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--pull-request", type=int)
    where.add_argument("--merge-request", type=int)
    options = parser.parse_args()
    request, on = options.pull_request, on_github
    if request is None:
        request, on = options.merge_request, on_gitlab
    comments = on(request)
    try:
        sys.stdout.write(f"comment {comments.write(options.report.read_text())}\n")
    except urllib.error.HTTPError as error:
        sys.exit(f"{comments.service} answered {error.code}: {error.read().decode(errors='replace')[:300]}")


if __name__ == "__main__":
    main()
