"""What nvidia-smi prints about cards, judged. The texts have the form of real ones (driver 580)."""

import pytest

from serin.stack.doctor import Finding, examine_gpus, judge_cards

CARDS = """\
0, NVIDIA H200, 580.159.03, 4, 143771, Enabled, Disabled, 0
1, NVIDIA H200, 580.159.03, 71000, 143771, Enabled, Disabled, 0
"""


def judged(cards: str = CARDS) -> dict[str, Finding]:
    return {finding.what: finding for finding in judge_cards(cards)}


def test_a_good_machine_is_good() -> None:
    assert {name: (each.verdict, each.found) for name, each in judged().items()} == {
        "GPU 0": ("ok", "NVIDIA H200, driver 580.159.03, 0% of memory used"),
        "GPU 1": ("ok", "NVIDIA H200, driver 580.159.03, 49% of memory used"),
    }


@pytest.mark.parametrize(
    ("what", "advice", "cards"),
    [
        ("GPU 0", "persistence mode", CARDS.replace("Enabled", "Disabled")),
        ("GPU 1", "MIG", CARDS.replace("Disabled, 0", "Enabled, 0")),
    ],
)
def test_what_fits_badly_is_noted_with_what_to_do(what: str, advice: str, cards: str) -> None:
    finding = judged(cards)[what]
    assert finding.verdict == "note"
    assert advice in finding.advice


def test_memory_that_is_broken_is_missing() -> None:
    assert judged(CARDS.replace("Disabled, 0", "Disabled, 2"))["GPU 0"].verdict == "missing"


def test_a_card_that_reports_little_is_shown_with_what_it_reports() -> None:
    (finding,) = judge_cards("0, Tesla, 1.0, [N/A], [N/A], [N/A], [N/A], [N/A]\n")
    assert (finding.verdict, finding.found) == ("ok", "Tesla, driver 1.0")


def test_a_machine_without_a_driver_says_what_it_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = examine_gpus()
    assert finding.verdict == "note"
    assert "cannot be seen" in finding.advice
