"""The feed-forward n-gram language model (Bengio et al., 2003).  B rows, T tokens, N order, D width, H hidden units."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.errors import ConfigError
from headstock.model.backbone import BACKBONES, Backbone, non_positive
from headstock.model.batch import Batch, DecodingState, Output

NO_TOKEN = -1  # before the beginning of a text


@dataclass(frozen=True)
class NGramConfig:
    vocabulary: int  # from the tokenizer
    order: int = 4  # tokens that a prediction depends on
    context: int | None = None  # maximum row length; unlimited unless given
    depth: int = 1  # number of hidden layers
    width: int = 128  # of embeddings and outputs
    hidden: int = 512  # width of the hidden layers
    dropout: float = 0.0  # of embeddings and outputs of layers
    tied: bool = True  # the language-model head shares the weight of the token embedding

    def __post_init__(self) -> None:
        problems = non_positive(self, "vocabulary", "order", "context", "depth", "width", "hidden")
        if not 0 <= self.dropout < 1:
            problems.append(("dropout", f"must be from 0 to below 1, not {self.dropout}"))
        if problems:
            raise ConfigError(problems)


@dataclass
class NGramState:
    """The last tokens of each row; immutable, so that reading on returns another."""

    lengths: Tensor  # (B,) real tokens read by each row
    recent: Tensor  # (B, N - 1)

    def select(self, rows: Tensor) -> "NGramState":
        return NGramState(self.lengths[rows], self.recent[rows])

    def append(self, other: "NGramState") -> "NGramState":
        return NGramState(torch.cat([self.lengths, other.lengths]), torch.cat([self.recent, other.recent]))

    def keep(self, rows: list[int]) -> "NGramState":
        return self.select(torch.tensor(rows, device=self.lengths.device))

    def make_static(self) -> bool:
        return False


class HiddenLayer(nn.Module):
    """W2 tanh(W1 x + b1) + b2, with dropout on the hidden units."""

    def __init__(self, inputs: int, hidden: int, outputs: int, dropout: float):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.up(x).tanh()))


@BACKBONES.add("ngram")
class NGram(Backbone):
    """The embeddings of the last N tokens, concatenated, through hidden layers: no recurrence and no attention."""

    Config = NGramConfig
    supports_onnx = False
    causal = True

    def __init__(self, config: NGramConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.context = c.width, c.depth, c.context
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        nn.init.normal_(self.tokens.weight, std=c.width**-0.5)
        inputs = [c.order * c.width] + [c.width] * (c.depth - 1)
        self.layers = nn.ModuleList(HiddenLayer(size, c.hidden, c.width, c.dropout) for size in inputs)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        return [list(self.tokens.parameters()), *(list(layer.parameters()) for layer in self.layers)]

    def new_state(self, rows: int, capacity: int) -> NGramState:
        """An empty state. It does not grow, so `capacity` is ignored."""
        device = self.tokens.weight.device
        recent = torch.full((rows, self.config.order - 1), NO_TOKEN, device=device)
        return NGramState(torch.zeros(rows, dtype=torch.long, device=device), recent)

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        assert state is None or isinstance(state, NGramState)
        before = self.new_state(len(batch.tokens), 0) if state is None else state
        history = torch.cat([before.recent, batch.tokens], 1)  # (B, N - 1 + T)
        x = self.concatenated(history, batch)  # (B, T, N D)
        layers = [x[..., -self.width :]]
        for layer in self.layers:
            x = layer(x)  # (B, T, D)
            layers.append(x)
        return Output(x, layers if keep_layers else [], None if state is None else self.advance(before, history, batch))

    def concatenated(self, history: Tensor, batch: Batch) -> Tensor:
        """(B, T, N D): the vectors of the last N tokens of each position, zero before the document's first token."""
        order = self.config.order
        known = (history != NO_TOKEN).unfold(1, order, 1)  # (B, T, N)
        if batch.document_ids is not None:
            documents = F.pad(batch.document_ids, (order - 1, 0), value=-2).unfold(1, order, 1)
            known = known & (documents == documents[..., -1:])
        vectors = self.tokens(history.clamp(min=0)).unfold(1, order, 1).transpose(2, 3)  # (B, T, N, D)
        return (vectors * known[..., None]).flatten(2)

    def advance(self, state: NGramState, history: Tensor, batch: Batch) -> NGramState:
        """The state after the real tokens of each row."""
        new = history.new_full((len(history),), batch.tokens.size(1))
        if batch.padding is not None:
            new = (~batch.padding).sum(1)
        last = new[:, None] + torch.arange(self.config.order - 1, device=history.device)  # (B, N - 1)
        return NGramState(state.lengths + new, history.gather(1, last))
