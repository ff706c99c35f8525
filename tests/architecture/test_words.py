"""Prose in code and documentation uses the field's words: private idiom must not come back."""

from __future__ import annotations

import re

from tests.architecture.sources import ROOT, repository_files

# Not read: the log, which is history, and sources that are compiled, which a changed comment would build again.
READ = re.compile(
    r"(serin|flows|tasks|deployments|triton_models|benchmarks|examples)/.*\.(py|yaml|md|lua|pbtxt)"
    r"|(README|SECURITY|CONTRIBUTING)\.md|docs/(?!log\.md).*\.md|docker/.*|Makefile|pyproject\.toml"
)
COMPARED = (
    "longer|more|worse|less|better|faster|slower|different|larger|smaller|other|further|newer|older|later"
)
PRIVATE = [  # a part of each match, which is quick to look for; the pattern; what to write instead
    ("mend", r"\bmend(s|ed|ing)?\b", "fix"),
    ("anew", r"\banew\b", "again"),
    ("leavings", r"\bleavings\b", "leftovers"),
    ("meanwhile", r"\bmeanwhile\b", "in the meantime"),
    ("ever", r"\bwho(so)?ever\b", "anyone who"),
    ("for ever", r"\bfor ever\b", "forever"),
    (" on", r"\b(go|goes|went|going) on\b(?! to\b)", "continue, resume"),
    (" told", r"\b(is|are|was|were|be) told\b", "is reported, is asked"),
    (" own", r"\bof (its|our|one's|your|their|his) own\b(?=[,.;:)]|$)", "its own ..., a separate ..."),
    (" no ", rf"(?<!there )\b(is|are|was) no (?!({COMPARED})\b)(?=[a-z])", "is not a ..."),
    (" word", r"\bwithout a word\b|\blast words\b", "exited without output, last lines"),
    ("nothing", r"\b(came|comes?) to nothing\b", "failed"),
    ("me", r"\bbec(a|o)mes? of\b", "the outcome of"),
    ("whole number", r"\bwhole numbers?\b", "integers"),
    ("under way", r"\bunder way\b", "in flight, running"),
    (" against", r"\bheld against\b|\bholds? \w+ against\b", "is compared with"),
    (" back", r"\b(sent|sends?) (it )?back\b", "is rolled back"),
    ("lie", r"\blies? (in|there|at|beside|on|here|under|outside|inside)\b", "is in, is stored in"),
    ("all the same", r"\ball the same\b", "nevertheless"),
    ("h", r"\b(he|his|him)\b", "they"),
]


def test_prose_uses_no_private_idiom() -> None:
    private = [(part, re.compile(pattern), better) for part, pattern, better in PRIVATE]
    found = [
        f"{name}:{number}: {line.strip()}  <- write: {better}"
        for name in repository_files()
        if READ.fullmatch(name)
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        for part, pattern, better in private
        if part in line.lower() and pattern.search(line.lower())
    ]
    assert found == []
