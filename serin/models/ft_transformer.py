"""FT-Transformer (Gorishniy et al., 2021): every column is a token, and a transformer attends to all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from serin.models.shape import TableShape
from serin.models.stages import Stage
from serin.models.table import Cut, TableNetwork
from serin.spec.model import ModelSpec

_AUTO_WIDTH = 64
_WIDER_INSIDE = 2


class Block(nn.Module):
    """Attention over the columns, then an MLP per column; both with pre-normalisation and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_width, self.dropout = heads, width // heads, dropout
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.inside = inside = _WIDER_INSIDE * width
        self.dense = nn.Sequential(
            nn.Linear(width, inside), nn.GELU(), nn.Dropout(dropout), nn.Linear(inside, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.out(self._attend(self.before_attention(tokens)))
        result: Tensor = tokens + self.dense(self.before_dense(tokens))
        return result

    def _attend(self, tokens: Tensor) -> Tensor:
        # Ordered by head: a rank that has some of the heads has complete ones.
        split = self.queries_keys_values(tokens).unflatten(2, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = nn.functional.scaled_dot_product_attention(split[0], split[1], split[2], dropout_p=dropout)
        return seen.transpose(1, 2).flatten(2)


class FtTransformer(TableNetwork):
    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        width = _AUTO_WIDTH if spec.embedding == "auto" else spec.embedding
        super().__init__(shape, spec, token_width=width)
        if shape.numeric:
            self.slopes = nn.Parameter(torch.randn(shape.numeric, width) * width**-0.5)
        self.biases = nn.Parameter(torch.randn(shape.numeric + len(shape.sizes), width) * width**-0.5)
        self.reader = nn.Parameter(torch.randn(1, 1, width) * width**-0.5)  # the token that answers
        self.blocks = nn.Sequential(*(Block(width, spec.heads, spec.dropout) for _ in range(spec.blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, shape.outputs))

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        return self.answer(self.blocks(self.tokens(num, cat)))

    def tokens(self, num: Tensor, cat: Tensor) -> Tensor:
        columns = [self.scaled(num).unsqueeze(2) * self.slopes] if self.numeric else []
        if self.categories is not None:
            columns.append(self.categories(cat))
        tokens = torch.cat(columns, dim=1) + self.biases
        return torch.cat([self.reader.expand(tokens.shape[0], -1, -1), tokens], dim=1)

    def answer(self, tokens: Tensor) -> Tensor:
        return self.in_units(self.head(tokens[:, 0]))

    def stages(self) -> list[Stage]:
        blocks = [Stage(run=block, owns=(f"blocks.{number}.",)) for number, block in enumerate(self.blocks)]
        first = Stage(run=self.tokens, owns=("numbers.", "slopes", "biases", "reader", "categories."))
        return [first, *blocks, Stage(run=self.answer, owns=("head.",))]

    def cuts(self, ranks: int) -> dict[str, Cut]:
        cuts = super().cuts(ranks)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if block.heads % ranks == 0:
                cuts[f"blocks.{number}.queries_keys_values"] = "outputs"
                cuts[f"blocks.{number}.out"] = "inputs"
            if block.inside % ranks == 0:
                cuts |= {f"blocks.{number}.dense.0": "outputs", f"blocks.{number}.dense.3": "inputs"}
        return cuts
