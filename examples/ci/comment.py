"""Writes one comment on a pull request and keeps it up to date.

python comment.py REPORT --pull-request 7      needs GITHUB_TOKEN, GITHUB_REPOSITORY and, elsewhere than on
github.com,
                                               GITHUB_API_URL, as GitHub Actions sets them
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MARK = "<!-- serin: the model of this pull request -->"  # identifies the comment
_PAGE = 100


class GitHub:
    """The two calls of GitHub's API that are needed here."""

    def __init__(self, url: str, repository: str, token: str) -> None:
        self._url = f"{url.rstrip('/')}/repos/{repository}"
        self._headers = {
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        }

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def find_comment(self, number: int) -> int | None:
        page = 1
        while True:
            found = self.call("GET", f"/issues/{number}/comments?per_page={_PAGE}&page={page}")
            for comment in found:
                if MARK in comment["body"]:
                    return int(comment["id"])
            if len(found) < _PAGE:
                return None
            page += 1


def comment(github: GitHub, number: int, report: str) -> str:
    """Writes the report into the comment; returns what was done."""
    body = {"body": f"{MARK}\n{report}"}
    known = github.find_comment(number)
    if known is None:
        github.call("POST", f"/issues/{number}/comments", body)
        return "written"
    github.call("PATCH", f"/issues/comments/{known}", body)
    return "updated"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--pull-request", type=int, required=True)
    options = parser.parse_args()
    missing = [name for name in ("GITHUB_TOKEN", "GITHUB_REPOSITORY") if not os.environ.get(name)]
    if missing:
        sys.exit(f"{' and '.join(missing)} must be set, as GitHub Actions does")
    url = os.environ.get("GITHUB_API_URL", "https://api.github.com")
    github = GitHub(url, os.environ["GITHUB_REPOSITORY"], os.environ["GITHUB_TOKEN"])
    try:
        sys.stdout.write(f"comment {comment(github, options.pull_request, options.report.read_text())}\n")
    except urllib.error.HTTPError as error:
        sys.exit(f"GitHub answered {error.code}: {error.read().decode(errors='replace')[:300]}")


if __name__ == "__main__":
    main()
