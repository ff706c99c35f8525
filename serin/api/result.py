"""What the results of all stages have in common: whether the work was done, why, and what it cost."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from serin.api.page import facts_table
from serin.pipeline.stage import StageResult
from serin.store.receipt import Receipt


class Result:
    """The result of a stage. `ran`: False when an earlier result was found. `why`: why it ran, or what was found.
    `receipt`: what the work cost; None when nothing was done."""

    path: Path
    ran: bool
    why: str
    receipt: Receipt | None

    def __init__(self, result: StageResult[Any]) -> None:
        self.path = Path(result.value.path)
        self.ran, self.why, self.receipt = result.ran, result.why, result.receipt

    @abstractmethod
    def _title(self) -> str: ...

    @abstractmethod
    def _facts(self) -> dict[str, object]: ...

    def _story(self) -> dict[str, object]:
        done: dict[str, object] = {"ran" if self.ran else "found": self.why}
        if self.receipt is not None:
            done["seconds"] = f"{self.receipt.seconds:.1f}"
            if self.receipt.advice:
                done["advice"] = self.receipt.advice
        return done

    def __repr__(self) -> str:
        facts = {**self._facts(), **self._story(), "path": self.path}
        width = max(map(len, facts))
        return "\n".join([self._title(), *(f"  {name:<{width}}  {value}" for name, value in facts.items())])

    def _repr_html_(self) -> str:
        return facts_table(self._title(), {**self._facts(), **self._story(), "path": self.path})
