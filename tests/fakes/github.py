"""A GitHub or GitLab that keeps the comments of one request and remembers what it was asked to change."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.web import Handler, WebServer, in_a_thread

TOKEN = "t0ken"


class FakeGitHub:
    """Comments of one request, as both keep them: 100 on a page."""

    def __init__(self, comments: list[dict[str, Any]]) -> None:
        self.comments = comments
        self.changes: list[tuple[str, str, str]] = []
        outer = self

        class Answering(Handler):
            def _answer(self) -> None:
                given = (self.headers["Authorization"], self.headers["PRIVATE-TOKEN"])
                if given not in ((f"Bearer {TOKEN}", None), (None, TOKEN)):
                    self._say(401, {"message": "Bad credentials"})
                    return
                if self.command == "GET":
                    page = int(re.search(r"[?&]page=(\d+)", self.path)[1])  # type: ignore[index]
                    self._say(200, outer.comments[(page - 1) * 100 : page * 100])
                    return
                body = json.loads(self.read_body())["body"]
                outer.changes.append((self.command, self.path, body))
                if self.command == "POST":
                    outer.comments.append({"id": 1 + len(outer.comments), "body": body})
                self._say(201, {"id": 1})

            do_GET = do_POST = do_PATCH = do_PUT = _answer  # noqa: N815 (names that http.server looks for)

            def _say(self, code: int, content: Any) -> None:
                self.answer(json.dumps(content).encode(), code)

        self.http = WebServer(Answering)

    @property
    def environment(self) -> dict[str, str]:
        """As GitHub Actions sets it."""
        url = f"http://127.0.0.1:{self.http.server_port}"
        return {"GITHUB_TOKEN": TOKEN, "GITHUB_REPOSITORY": "birds/models", "GITHUB_API_URL": url}

    @property
    def gitlab_environment(self) -> dict[str, str]:
        """As GitLab CI sets it, and the token of the project."""
        url = f"http://127.0.0.1:{self.http.server_port}"
        return {"GITLAB_TOKEN": TOKEN, "CI_PROJECT_ID": "42", "CI_API_V4_URL": url}


@contextmanager
def running_github() -> Iterator[FakeGitHub]:
    made = FakeGitHub([])
    with in_a_thread(made.http):
        yield made
