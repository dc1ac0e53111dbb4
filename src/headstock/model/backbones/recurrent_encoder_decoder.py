"""A recurrent encoder-decoder with attention (Luong et al., 2015).  B rows, T target tokens, S source tokens, D width.

Attention follows the decoder's cells instead of feeding them, so that all target positions are computed at once.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from headstock.errors import ConfigError
from headstock.model.backbone import BACKBONES, Backbone, non_positive
from headstock.model.backbones.recurrent import (
    CellState,
    RecurrentConfig,
    RecurrentStack,
    RecurrentState,
    continue_stack,
    empty_cells,
    make_dropout,
    make_embedding,
    run_by_document,
)
from headstock.model.batch import Batch, DecodingState, Output


@dataclass(frozen=True)
class RecurrentEncoderDecoderConfig:
    vocabulary: int  # of the target, from its tokenizer
    source_vocabulary: int | None = None  # of the source; that of the target unless given
    cell: Literal["lstm", "gru", "rnn"] = "gru"  # rnn: plain tanh cells (Elman)
    context: int | None = None  # maximum length of source and target rows; unlimited unless given
    depth: int = 2  # of the decoder
    encoder_depth: int | None = None  # layers of each direction of the encoder; as the decoder's unless given
    width: int = 128  # of embeddings and outputs
    hidden: int = 256  # number of cells
    dropout: float = 0.0  # of embeddings and outputs of layers
    dropout_kind: Literal["plain", "locked"] = "plain"  # locked: one mask per row for all steps
    tied: bool = True  # the language-model head shares the weight of the target embedding
    shared: bool = True  # one embedding for source and target, where they have the same vocabulary

    def __post_init__(self) -> None:
        problems = non_positive(self, "source_vocabulary", "encoder_depth")
        try:
            self.stack()
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

    def stack(self) -> RecurrentConfig:
        own = {"source_vocabulary", "encoder_depth", "shared"}
        return RecurrentConfig(**{name: value for name, value in vars(self).items() if name not in own})


@dataclass
class AttendingState(RecurrentState):
    """The decoder's cells, with the encoded sources."""

    memory: Tensor | None = None  # (B, S, D)
    memory_padding: Tensor | None = None  # (B, S) True at padding positions

    def select(self, rows: Tensor) -> "AttendingState":
        plain = super().select(rows)
        memory = None if self.memory is None else self.memory[rows]
        padding = None if self.memory_padding is None else self.memory_padding[rows]
        return AttendingState(plain.lengths, plain.cells, memory, padding)

    def append(self, other: RecurrentState) -> RecurrentState:
        raise ValueError("rows with sources of their own cannot be joined")


class GlobalAttention(nn.Module):
    """Attention of every decoder output over the source: tanh(Wc [softmax(Q Kᵀ / sqrt(D)) V, h])."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.output = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, memory: Tensor, padding: Tensor | None) -> Tensor:
        """(B, T, D), (B, S, D) -> (B, T, D)"""
        scores = self.query(hidden) @ memory.transpose(1, 2) / math.sqrt(hidden.size(-1))  # (B, T, S)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None], -torch.inf)
        return self.output(torch.cat([scores.softmax(-1) @ memory, hidden], -1)).tanh()


@BACKBONES.add("rnn-seq2seq")
class RecurrentEncoderDecoder(Backbone):
    """A bidirectional recurrent encoder, a recurrent decoder, and attention between their outputs."""

    Config = RecurrentEncoderDecoderConfig
    supports_onnx = False
    supports_compile = False
    supports_fsdp = False  # torch's recurrent layers keep references to whole weights
    causal = True
    is_encoder_decoder: ClassVar[bool] = True

    def __init__(self, config: RecurrentEncoderDecoderConfig):
        super().__init__()
        c = self.config = config
        stack = c.stack()
        self.width, self.depth, self.context = c.width, c.depth, c.context
        self.tokens = make_embedding(stack)
        source = replace(stack, vocabulary=c.source_vocabulary or c.vocabulary, depth=c.encoder_depth or c.depth)
        self.source_tokens = self.tokens if c.shared and c.source_vocabulary is None else make_embedding(source)
        self.dropout = make_dropout(stack)
        self.forwards, self.backwards = RecurrentStack(source), RecurrentStack(source)
        self.join = nn.Linear(2 * c.width, c.width)  # the encoder's two directions
        self.decoder, self.attention = RecurrentStack(stack), GlobalAttention(c.width)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        """The embeddings, then the encoder's layers, then the decoder's."""
        embeddings = dict.fromkeys([*self.tokens.parameters(), *self.source_tokens.parameters()])
        encoder = [
            [*one.parameters(), *other.parameters()]
            for one, other in zip(self.forwards.layers, self.backwards.layers, strict=True)
        ]
        encoder[-1] += self.join.parameters()
        decoder = [list(layer.parameters()) for layer in self.decoder.layers]
        decoder[-1] += self.attention.parameters()
        return [list(embeddings), *encoder, *decoder]

    def encode(self, source: Batch) -> Tensor:
        """(B, S, D): the vectors that the decoder attends to."""
        x = self.dropout(self.source_tokens(source.tokens))
        forwards = self.forwards(x)[0][-1]  # padding is on the right, after everything that counts
        if source.padding is None:
            backwards = self.backwards(x.flip(1))[0][-1].flip(1)
        else:
            (backwards,) = run_by_document(self.backwards, x, source, top_only=True, backward=True)
        return self.join(torch.cat([forwards, backwards.to(forwards)], -1))

    def new_state(self, rows: int, capacity: int) -> AttendingState:
        """An empty state. It does not grow, so `capacity` is ignored."""
        weight = self.tokens.weight
        lengths = torch.zeros(rows, dtype=torch.long, device=weight.device)
        return AttendingState(lengths, empty_cells(self.config.stack(), rows, weight))

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        """Process targets with their sources; a state that already contains the encoded sources needs them no more."""
        assert state is None or isinstance(state, AttendingState)
        x = self.dropout(self.tokens(batch.tokens))  # (B, T, D)
        if state is not None and state.memory is not None:
            memory, padding = state.memory, state.memory_padding
        elif batch.source is None:
            raise ValueError("an encoder-decoder needs Batch.source")
        else:
            memory, padding = self.encode(batch.source), batch.source.padding
        cells: list[CellState] | None = None
        if state is None:
            layers, _ = self.decoder(x)
        else:
            layers, cells, lengths = continue_stack(self.decoder, x, batch.padding, state)
            state = AttendingState(lengths, cells, memory, padding)
        layers = [*layers[:-1], self.attention(layers[-1], memory, padding)]
        return Output(layers[-1], [x, *layers] if keep_layers else [], state)
