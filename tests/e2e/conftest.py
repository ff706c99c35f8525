"""The servers that most of these tests share within a file."""

from collections.abc import Iterator

import pytest

from tests.e2e.serving_stack import Stack, running_stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running
