"""Serin's networks; how one is built from a model section, with random or trained weights; and a trained model as a
function from features to margins: logits, or a regression's values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from serin.formats.shards import Array
from serin.formats.trained import TREES, read_record
from serin.formats.weights import read_weights
from serin.models.foreign.module import OwnNetwork
from serin.models.shape import TableShape, shape_of_record
from serin.models.table import Cut, Divisible, TableNetwork, chain_cuts, dense_layers, linear_chain
from serin.models.trees import Margins, tree_margins
from serin.spec.model import ModelSpec

_LARGEST_RANK = 256  # of a cross layer: wider rows use two low-rank matrices, as the paper proposes
_AUTO_WIDTH = 64
_WIDER_INSIDE = 2


class Mlp(TableNetwork):
    """Embeddings and a multi-layer perceptron: a strong first network for a table."""

    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        super().__init__(shape, spec)
        self.layers = dense_layers(self.width, spec.hidden, spec.dropout)
        self.head = nn.Linear(spec.hidden[-1], shape.outputs)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        return self.in_units(self.head(self.layers(self.flat(num, cat))))

    def cuts(self, ranks: int) -> dict[str, Cut]:
        chain = [*linear_chain("layers", self.layers), ("head", self.head)]
        return super().cuts(ranks) | chain_cuts(chain, ranks)


class Cross(nn.Module):
    """x -> row * (W x + b) + x, where `row` is the network's input: one more degree of interaction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        full = nn.Linear(width, width)
        thin = nn.Sequential(nn.Linear(width, _LARGEST_RANK, bias=False), nn.Linear(_LARGEST_RANK, width))
        self.mix = full if width <= 2 * _LARGEST_RANK else thin

    def forward(self, row: Tensor, x: Tensor) -> Tensor:
        result: Tensor = row * self.mix(x) + x
        return result


class Dcn(TableNetwork):
    """Deep and cross network, version 2 (Wang et al., 2020): products of columns of bounded degree beside an MLP."""

    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        super().__init__(shape, spec)
        self.crosses = nn.ModuleList(Cross(self.width) for _ in range(spec.cross_layers))
        self.layers = dense_layers(self.width, spec.hidden, spec.dropout)
        self.head = nn.Linear(self.width + spec.hidden[-1], shape.outputs)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        row = self.flat(num, cat)
        crossed = row
        for cross in self.crosses:
            crossed = cross(row, crossed)
        return self.in_units(self.head(torch.cat([crossed, self.layers(row)], dim=1)))

    def cuts(self, ranks: int) -> dict[str, Cut]:
        cuts = super().cuts(ranks) | chain_cuts(linear_chain("layers", self.layers), ranks)
        for number, cross in enumerate(self.crosses):
            name = f"crosses.{number}.mix"
            mix = cross.get_submodule("mix")
            chain = (
                [(name, mix)]
                if isinstance(mix, nn.Linear)
                else linear_chain(name, cast("nn.Sequential", mix))
            )
            cuts |= chain_cuts(chain, ranks)
        return cuts


class SharedLinear(nn.Module):
    """float[n, members, inputs] -> float[n, members, outputs]: out * (W (into * x)) + b, with one W for all."""

    def __init__(self, inputs: int, outputs: int, members: int, *, varied: bool) -> None:
        """`varied`: members begin with other signs of their inputs; the rest of them begins equal."""
        super().__init__()
        self.shared = nn.Linear(inputs, outputs, bias=False)
        signs = torch.randint(0, 2, (members, inputs)) * 2.0 - 1.0
        self.into = nn.Parameter(signs if varied else torch.ones(members, inputs))
        self.out = nn.Parameter(torch.ones(members, outputs))
        bound = inputs**-0.5
        self.bias = nn.Parameter((torch.rand(outputs) * 2 - 1).mul(bound).repeat(members, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.shared(x * self.into) * self.out + self.bias
        return result


class TabM(TableNetwork):
    """TabM (Gorishniy et al., 2024): an ensemble of multi-layer perceptrons that share their matrices.

    Each member has its own scale of every layer's inputs and outputs, its own biases and its own head. They learn side
    by side, each judged by itself, and answer with the mean of their probabilities.
    """

    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        super().__init__(shape, spec)
        members, width = spec.members, self.width
        layers: list[nn.Module] = []
        for number, units in enumerate(spec.hidden):
            layers += [SharedLinear(width, units, members, varied=number == 0), nn.ReLU()]
            if spec.dropout:
                layers.append(nn.Dropout(spec.dropout))
            width = units
        self.layers = nn.Sequential(*layers)
        bound = width**-0.5
        self.heads = nn.Parameter((torch.rand(members, width, shape.outputs) * 2 - 1) * bound)
        self.head_bias = nn.Parameter((torch.rand(members, shape.outputs) * 2 - 1) * bound)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        """Returns float32[n, members, outputs] during training, afterwards float32[n, outputs]."""
        hidden = self.layers(self.flat(num, cat).unsqueeze(1))
        answers = torch.matmul(hidden.transpose(0, 1), self.heads).transpose(0, 1) + self.head_bias
        if self.training:
            return self.in_units(answers)
        return self.in_units(answers.mean(dim=1)) if self.has_units else mean_probability(answers)


def mean_probability(logits: Tensor) -> Tensor:
    """float[n, members, outputs] -> the logits of the members' mean probability: of one output, or of classes."""
    if logits.shape[2] > 1:
        return _log_mean(functional.log_softmax(logits, dim=2))
    return _log_mean(functional.logsigmoid(logits)) - _log_mean(functional.logsigmoid(-logits))


def _log_mean(logs: Tensor) -> Tensor:
    return torch.logsumexp(logs, dim=1) - math.log(logs.shape[1])


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
    """FT-Transformer (Gorishniy et al., 2021): every column is a token, and a transformer attends to all of them."""

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
        tokens = self.blocks(self.tokens(num, cat))
        return self.in_units(self.head(tokens[:, 0]))

    def tokens(self, num: Tensor, cat: Tensor) -> Tensor:
        columns = [self.scaled(num).unsqueeze(2) * self.slopes] if self.numeric else []
        if self.categories is not None:
            columns.append(self.categories(cat))
        tokens = torch.cat(columns, dim=1) + self.biases
        return torch.cat([self.reader.expand(tokens.shape[0], -1, -1), tokens], dim=1)

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


class Ensemble(Divisible):
    """Several networks of one kind that see the same rows in the same steps and share nothing else, so that their
    errors differ: `model: {ensemble_size: 4}`.

    (num, cat) -> float32[n, members, outputs] during training, so that each member is judged by itself. Afterwards it
    returns their mean, float32[n, outputs]: of logits, or of values in a regression.
    """

    def __init__(self, members: Iterable[nn.Module], shape: TableShape) -> None:
        """Combines `members`, which answer in standard units: the target's unit is applied to all of them together."""
        super().__init__(shape)
        self.members = nn.ModuleList(members)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        answers = torch.stack([member(num, cat) for member in self.members], dim=1)
        return self.in_units(answers if self.training else answers.mean(dim=1))

    def cuts(self, ranks: int) -> dict[str, Cut]:
        return {
            f"members.{number}.{name}": cut
            for number, member in enumerate(self.members)
            for name, cut in cast("Divisible", member).cuts(ranks).items()
        }


_NETWORKS: Mapping[str, Callable[[ModelSpec, TableShape], nn.Module]] = {
    "mlp": Mlp,
    "dcn": Dcn,
    "ft_transformer": FtTransformer,
    "tabm": TabM,
    "module": OwnNetwork,
}


def build_model(spec: ModelSpec, shape: TableShape) -> nn.Module:
    """Returns a network with random weights, drawn from torch's global generator: seed it first."""
    if spec.ensemble_size == 1:
        return _one(spec, shape)
    without_unit = replace(shape, units=False)
    return Ensemble((_one(spec, without_unit) for _ in range(spec.ensemble_size)), shape)


def load_model(folder: Path) -> nn.Module:
    """Returns the trained network of a result folder, on the CPU, ready to score."""
    weights = read_weights(folder)
    network = undrawn_model(weights.model.model, shape_of_record(weights.model))
    load_state(network, weights.state, assign=weights.model.model.kind != "module")
    return network.eval()


def undrawn_model(spec: ModelSpec, shape: TableShape) -> nn.Module:
    """Returns a network whose tables take no memory and no time yet: they are to be loaded, or only counted. A user's
    network, whose code may need its weights, gets random ones."""
    with nullcontext() if spec.kind == "module" else _Undrawn(), torch.random.fork_rng(devices=[]):
        return build_model(spec, shape)


class _Undrawn(TorchFunctionMode):
    """Weights are left as they are allocated, in memory that nothing has touched. On torch's `meta` device, which has
    no memory at all, initializing them imports a compiler: 3 s."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(function, "__module__", None) == nn.init.__name__:
            return named["tensor"] if "tensor" in named else args[0]
        return function(*args, **named)


def _one(spec: ModelSpec, shape: TableShape) -> nn.Module:
    if spec.kind not in _NETWORKS:
        raise ValueError(f"{spec.kind} is not one of Serin's networks")
    return _NETWORKS[spec.kind](spec, shape)


# All tensors that a network's answers depend on: torch's state_dict and, for a user's module, also the buffers that are
# registered with `persistent=False`. state_dict leaves those out, so a reloaded module would have their initial values:
# wrong for one that training changes, and different where they are drawn at random.
def state_of(network: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors themselves, not copies."""
    transient = {name: buffer for name, buffer in _transient(network) if buffer is not None}
    return {**network.state_dict(), **transient}


@torch.no_grad()
def load_state(network: nn.Module, state: Mapping[str, Tensor], *, assign: bool = False) -> None:
    """Fills the network with the result of `state_of` for one of the same form. `assign`: with the tensors themselves,
    not with copies.

    A non-persistent buffer that is missing on one side, or has another shape there, is a cache that the network makes
    at its first call or grows: it is left unchanged.
    """
    transient = dict(_transient(network))
    persistent = {name: tensor for name, tensor in state.items() if name not in transient}
    network.load_state_dict(persistent, assign=assign)
    for name, buffer in transient.items():
        if buffer is not None and name in state and state[name].shape == buffer.shape:
            buffer.copy_(state[name])


def _transient(network: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Returns the non-persistent buffers of users' modules; None is one that does not exist yet."""
    for path, own in network.named_modules():
        if isinstance(own, OwnNetwork):
            for within, module in own.named_modules(prefix=path):
                for name in sorted(module._non_persistent_buffers_set):  # noqa: SLF001
                    yield f"{within}.{name}".lstrip("."), module._buffers[name]  # noqa: SLF001


_BATCH_ROWS = 16_384


def open_margins(folder: Path) -> Margins:
    """Returns the trees or the network of a result folder, on the CPU."""
    if read_record(folder).file != TREES:
        return network_margins(load_model(folder))
    return tree_margins(folder)


def network_margins(network: nn.Module) -> Margins:
    """Returns a network on the CPU as a function of arrays."""

    def ask(num: Array, cat: Array) -> Array:
        found = []
        with torch.inference_mode():
            for at in range(0, max(len(num), 1), _BATCH_ROWS):
                rows = slice(at, at + _BATCH_ROWS)
                numbers = torch.from_numpy(np.array(num[rows], np.float32))
                codes = torch.from_numpy(np.array(cat[rows], np.int64))
                found.append(network(numbers, codes).numpy())
        return np.concatenate(found)

    return ask
