"""LSTM, GRU and plain (Elman) recurrent language models, the baseline for Transformers.

B rows, T tokens, D width, H cells. Packed rows are split into N documents of at most L tokens.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from headstock.errors import ConfigError
from headstock.model.backbone import BACKBONES, Backbone, non_positive
from headstock.model.batch import Batch, DecodingState, Output

CELLS: dict[str, type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
MIN_FILLED = 0.5  # minimum share of real tokens in a group of documents that is processed together
CellState = tuple[Tensor, ...]  # of one layer, each (1, B, H): an LSTM's output and cell state, or the output alone


@dataclass(frozen=True)
class RecurrentConfig:
    vocabulary: int  # from the tokenizer
    cell: Literal["lstm", "gru", "rnn"] = "lstm"  # rnn: plain tanh cells (Elman)
    context: int | None = None  # maximum row length; unlimited unless given
    depth: int = 2  # number of layers
    width: int = 128  # of embeddings and outputs
    hidden: int = 256  # number of cells; each layer projects back to the width if they differ
    dropout: float = 0.0  # of embeddings and outputs of layers
    dropout_kind: Literal["plain", "locked"] = "plain"  # locked: one mask per row for all steps
    tied: bool = True  # the language-model head shares the weight of the token embedding

    def __post_init__(self) -> None:
        problems = non_positive(self, "vocabulary", "context", "depth", "width", "hidden")
        if not 0 <= self.dropout < 1:
            problems.append(("dropout", f"must be from 0 to below 1, not {self.dropout}"))
        if problems:
            raise ConfigError(problems)


@dataclass
class RecurrentState:
    """The state of the cells after the tokens read so far; immutable, so that reading on returns another."""

    lengths: Tensor  # (B,) real tokens read by each row
    cells: list[CellState]  # by layer

    def select(self, rows: Tensor) -> "RecurrentState":
        return RecurrentState(self.lengths[rows], [tuple(part[:, rows] for part in layer) for layer in self.cells])

    def append(self, other: "RecurrentState") -> "RecurrentState":
        layers = zip(self.cells, other.cells, strict=True)
        cells = [tuple(torch.cat(parts, 1) for parts in zip(*layer, strict=True)) for layer in layers]
        return RecurrentState(torch.cat([self.lengths, other.lengths]), cells)

    def keep(self, rows: list[int]) -> "RecurrentState":
        return self.select(torch.tensor(rows, device=self.lengths.device))

    def make_static(self) -> bool:
        return False


class LockedDropout(nn.Module):
    """Variational dropout: the same mask at every step of a row (Gal and Ghahramani, 2016)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return x * F.dropout(x.new_ones(x.size(0), 1, x.size(2)), self.p)  # (B, T, D) * (B, 1, D)


def make_dropout(config: RecurrentConfig) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout_kind == "plain" else LockedDropout(config.dropout)


def make_embedding(config: RecurrentConfig) -> nn.Embedding:
    tokens = nn.Embedding(config.vocabulary, config.width)
    nn.init.uniform_(tokens.weight, -0.1, 0.1)  # larger than a Transformer's, since no norm follows
    return tokens


class RecurrentLayer(nn.Module):
    """One layer of cells, a projection back to the width, and dropout on the output."""

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.cells = CELLS[config.cell](config.width, config.hidden, batch_first=True)
        self.project = nn.Linear(config.hidden, config.width) if config.hidden != config.width else None
        self.dropout = make_dropout(config)

    def forward(self, x: Tensor, state: CellState | None, lengths: Tensor | None) -> tuple[Tensor, CellState]:
        """(B, T, D) -> (B, T, D), and the state after `lengths` tokens of each row, or after all."""
        initial = None if state is None else state if len(state) > 1 else state[0]
        # cuDNN saves what gradients need in training mode only, and gradients underflow in the half precision of
        # autocast
        needs_grad_in_eval = x.is_cuda and torch.is_grad_enabled() and not self.training
        with (
            torch.backends.cudnn.flags(enabled=False) if needs_grad_in_eval else nullcontext(),
            torch.autocast(x.device.type, enabled=False),
        ):
            if lengths is None:
                x, final = self.cells(x.float(), initial)
            else:
                packed = pack_padded_sequence(x.float(), lengths, batch_first=True, enforce_sorted=False)
                packed, final = self.cells(packed, initial)
                x, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.size(1))
        if self.project is not None:
            x = self.project(x)  # (B, T, H) -> (B, T, D)
        return self.dropout(x), final if isinstance(final, tuple) else (final,)


class RecurrentStack(nn.Module):
    """Layers of cells that read in one direction."""

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.layers = nn.ModuleList(RecurrentLayer(config) for _ in range(config.depth))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's defaults, with zero biases except for open forget gates."""
        for layer in self.layers:
            assert isinstance(layer, RecurrentLayer)
            for name, parameter in layer.cells.named_parameters():
                if name.startswith("bias"):
                    nn.init.zeros_(parameter)
            if isinstance(layer.cells, nn.LSTM):
                forget = dict(layer.cells.named_parameters())["bias_ih_l0"].data.chunk(4)[1]
                forget.fill_(1.0)
            if layer.project is not None:
                nn.init.zeros_(layer.project.bias)

    def forward(
        self, x: Tensor, states: list[CellState] | None = None, lengths: Tensor | None = None
    ) -> tuple[list[Tensor], list[CellState]]:
        """The output of every layer from the bottom up, and their final states."""
        outputs, finals = [], []
        for i, layer in enumerate(self.layers):
            x, final = layer(x, None if states is None else states[i], lengths)
            outputs.append(x)
            finals.append(final)
        return outputs, finals


def empty_cells(config: RecurrentConfig, rows: int, like: Tensor) -> list[CellState]:
    """The cells of every layer before the first token."""
    zeros = like.new_zeros(1, rows, config.hidden)
    return [(zeros, zeros) if config.cell == "lstm" else (zeros,)] * config.depth


def continue_stack(
    stack: RecurrentStack, x: Tensor, padding: Tensor | None, state: RecurrentState
) -> tuple[list[Tensor], list[CellState], Tensor]:
    """The outputs of every layer from a state on, and its new cells and lengths; padding does not change these."""
    if padding is None:
        layers, final = stack(x, state.cells)
        return layers, final, state.lengths + x.size(1)
    real = (~padding).sum(1)
    lengths = real.cpu()
    if not bool(lengths.any()):
        return [x.new_zeros(x.shape)] * len(stack.layers), state.cells, state.lengths
    layers, final = stack(x, state.cells, lengths.clamp(min=1))
    empty = (real == 0)[None, :, None]  # torch packs no empty rows, so these have read one token of padding
    cells = [
        tuple(torch.where(empty, old, new) for old, new in zip(olds, news, strict=True))
        for olds, news in zip(state.cells, final, strict=True)
    ]
    return layers, cells, state.lengths + real


@BACKBONES.add("recurrent")
class Recurrent(Backbone):
    """An embedding and layers of cells that read from left to right."""

    Config = RecurrentConfig
    supports_onnx = False
    supports_compile = False  # packed rows are split into other shapes in every batch
    supports_fsdp = False  # torch's recurrent layers keep references to whole weights
    causal = True
    carries_state = True

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.context = c.width, c.depth, c.context
        self.tokens = make_embedding(c)
        self.dropout = make_dropout(c)
        self.stack = RecurrentStack(c)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        return [list(self.tokens.parameters()), *(list(layer.parameters()) for layer in self.stack.layers)]

    def new_state(self, rows: int, capacity: int) -> RecurrentState:
        """An empty state. It does not grow, so `capacity` is ignored."""
        weight = self.tokens.weight
        lengths = torch.zeros(rows, dtype=torch.long, device=weight.device)
        return RecurrentState(lengths, empty_cells(self.config, rows, weight))

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        assert state is None or isinstance(state, RecurrentState)
        x = self.dropout(self.tokens(batch.tokens))  # (B, T) -> (B, T, D)
        if state is not None:
            assert batch.document_ids is None and batch.prefix is None, "a state continues one text per row"
            layers, cells, lengths = continue_stack(self.stack, x, batch.padding, state)
            state = RecurrentState(lengths, cells)
        elif batch.document_ids is None:  # padding is on the right, after everything that counts
            layers, _ = self.stack(x, self.prefix_state(batch))
        else:
            layers = run_by_document(self.stack, x, batch, initial=self.prefix_state(batch), top_only=not keep_layers)
        return Output(layers[-1], [x, *layers] if keep_layers else [], state)

    def prefix_state(self, batch: Batch) -> list[CellState] | None:
        """The state after `Batch.prefix`, without gradient."""
        if batch.prefix is None:
            return None
        with torch.no_grad():
            state = self.forward(batch.prefix, self.new_state(len(batch.tokens), 0)).state
        assert isinstance(state, RecurrentState)
        return state.cells


@dataclass
class DocumentGroup:
    """Documents of similar length as rows. An index counts tokens in the batch's rows end to end."""

    index: Tensor  # (N, L) of each token; shorter documents repeat their last one
    rows: Tensor  # (N,) row of the batch
    begins_row: Tensor  # (N,) True for the first document of a row


def group_documents(batch: Batch, *, backward: bool = False) -> tuple[list[DocumentGroup], Tensor]:
    """The documents of all rows, reversed if `backward`; and (B T) where each token is in all groups end to end.

    Padding is at one more position after all groups.
    """
    ids = torch.zeros(batch.tokens.shape, dtype=torch.long) if batch.document_ids is None else batch.document_ids.cpu()
    if batch.padding is not None:
        ids = ids.masked_fill(batch.padding.cpu(), -1)
    length = ids.size(1)
    previous = F.pad(ids[:, :-1], (1, 0), value=-1)
    real = (ids >= 0).flatten()
    is_first = ((ids != previous) & (ids >= 0)).flatten()
    begins = is_first.nonzero().squeeze(1)  # (N,)
    sizes = (is_first.cumsum(0) - 1)[real].bincount(minlength=len(begins))
    order = sizes.argsort(descending=True, stable=True)
    location = torch.zeros(len(real), dtype=torch.long)
    groups, total = [], 0
    for part in similar_sizes(sizes[order].tolist()):
        begin, size = begins[order[part]], sizes[order[part]]  # (N,), (N,)
        step = torch.arange(int(size[0])).expand(len(begin), -1)  # (N, L)
        inside = step < size[:, None]
        step = torch.minimum(step, size[:, None] - 1)
        index = begin[:, None] + (size[:, None] - 1 - step if backward else step)
        location[index[inside]] = total + inside.flatten().nonzero().squeeze(1)
        total += index.numel()
        groups.append(DocumentGroup(index, begin // length, begin % length == 0))
    location[~real] = total
    return groups, location


def similar_sizes(sizes: list[int]) -> list[slice]:
    """Groups of descending sizes, each at least `MIN_FILLED` full when padded to its largest."""
    groups, begin, total = [], 0, 0
    for i, size in enumerate(sizes):
        if total + size < MIN_FILLED * sizes[begin] * (i + 1 - begin):
            groups.append(slice(begin, i))
            begin, total = i, 0
        total += size
    return [*groups, slice(begin, len(sizes))] if sizes else []


def run_by_document(
    stack: Callable[..., tuple[list[Tensor], list[CellState]]],
    x: Tensor,
    batch: Batch,
    *,
    initial: list[CellState] | None = None,
    top_only: bool = False,
    backward: bool = False,
) -> list[Tensor]:
    """The outputs of every layer, or the top one only, for packed rows whose documents are processed separately.

    The first document of a row starts from the `initial` state, every other one from zero. Padding gives zeros.
    """
    groups, location = group_documents(batch, backward=backward)
    flat = x.flatten(0, 1)  # (B, T, D) -> (B T, D)
    outputs: list[list[Tensor]] = []
    for group in groups:
        rows = flat.index_select(0, group.index.flatten().to(x.device)).view(*group.index.shape, -1)  # (N, L, D)
        layers, _ = stack(rows, None if initial is None else select_initial(initial, group, x.device))
        outputs.append([layer.flatten(0, 1) for layer in (layers[-1:] if top_only else layers)])
    zeros = x.new_zeros(1, x.size(2))
    location = location.to(x.device)
    by_layer = zip(*outputs, strict=True)
    return [torch.cat([*parts, zeros.to(parts[0])]).index_select(0, location).view_as(x) for parts in by_layer]


def select_initial(states: list[CellState], group: DocumentGroup, device: torch.device) -> list[CellState]:
    rows, first = group.rows.to(device), group.begins_row.to(device)[None, :, None]
    return [tuple(state[:, rows] * first for state in layer) for layer in states]
