"""LSTM and GRU language models, the baseline that Transformers are measured by.

B rows, T tokens, D width, H size of the cells; a row is read in N stretches of at most L tokens, one a document.
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
from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.formulas import Dimensions, ExecutionContext, ModuleCost, recurrent_layers, table

CELLS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
FILLED = 0.5  # share of real tokens, at the least, in stretches that are read together
CellState = tuple[
    Tensor, ...
]  # what one layer's cells hold, each (1, B, H): an LSTM's output and memory, a GRU's output


@dataclass(frozen=True)
class RecurrentConfig:
    vocabulary: int
    cell: Literal["lstm", "gru"] = "lstm"
    context: int | None = None  # the longest row it is made for; it can go on without end where that is not set
    depth: int = 2
    width: int = 128
    hidden: int = 256  # size of the cells; each layer brings it back to the width where they differ
    dropout: float = 0.0
    dropout_kind: Literal["plain", "locked"] = "plain"  # locked: the same features of a row at every step
    tied: bool = True  # the language-model head shares the embedding's weights

    def __post_init__(self) -> None:
        problems = [
            (name, f"must be at least 1, not {getattr(self, name)}")
            for name in ("vocabulary", "context", "depth", "width", "hidden")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        if not 0 <= self.dropout < 1:
            problems.append(("dropout", f"must be from 0 to below 1, not {self.dropout}"))
        if problems:
            raise ConfigError(problems)


@dataclass
class RecurrentState:
    """What the cells hold after the tokens read so far. It is never changed: reading on makes another."""

    lengths: Tensor  # (B,) how many real tokens each row has read
    cells: list[CellState]  # by layer

    def select(self, rows: Tensor) -> "RecurrentState":
        return RecurrentState(self.lengths[rows], [tuple(part[:, rows] for part in layer) for layer in self.cells])

    def make_static(self) -> bool:
        return False


class LockedDropout(nn.Module):
    """Dropout that leaves out the same features of a row at every step, so that its noise cannot average out."""

    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.share:
            return x
        return x * F.dropout(x.new_ones(x.size(0), 1, x.size(2)), self.share)  # (B, T, D) * (B, 1, D)


def make_dropout(config: RecurrentConfig) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout_kind == "plain" else LockedDropout(config.dropout)


class RecurrentLayer(nn.Module):
    """One layer of cells, brought back to the width, and dropout on what it gives."""

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.cells = CELLS[config.cell](config.width, config.hidden, batch_first=True)
        self.project = nn.Linear(config.hidden, config.width) if config.hidden != config.width else None
        self.dropout = make_dropout(config)

    def forward(self, x: Tensor, held: CellState | None, lengths: Tensor | None) -> tuple[Tensor, CellState]:
        """(B, T, D) -> (B, T, D), and what the cells hold after `lengths` tokens of each row, or after all."""
        given = None if held is None else held if len(held) > 1 else held[0]
        # cuDNN keeps what learning needs in training mode alone; and autocast would make it compute in half precision,
        # whose small numbers end where gradients begin
        learning_still = x.is_cuda and torch.is_grad_enabled() and not self.training
        with (
            torch.backends.cudnn.flags(enabled=False) if learning_still else nullcontext(),
            torch.autocast(x.device.type, enabled=False),
        ):
            if lengths is None:
                x, after = self.cells(x.float(), given)
            else:
                packed = pack_padded_sequence(x.float(), lengths, batch_first=True, enforce_sorted=False)
                packed, after = self.cells(packed, given)
                x, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.size(1))
        if self.project is not None:
            x = self.project(x)  # (B, T, H) -> (B, T, D)
        return self.dropout(x), after if isinstance(after, tuple) else (after,)


class RecurrentStack(nn.Module):
    """Layers one above the other, all reading the same way."""

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.layers = nn.ModuleList(RecurrentLayer(config) for _ in range(config.depth))
        self.initialise()

    def initialise(self) -> None:
        """As torch makes them, but cells that at first remember and a way back to the width that adds nothing."""
        for layer in self.layers:
            assert isinstance(layer, RecurrentLayer)
            for name, parameter in layer.cells.named_parameters():
                if name.startswith("bias"):
                    nn.init.zeros_(parameter)
            if isinstance(layer.cells, nn.LSTM):
                forget = dict(layer.cells.named_parameters())["bias_ih_l0"].data.chunk(4)[1]
                forget.fill_(1.0)  # the gate that forgets is open
            if layer.project is not None:
                nn.init.zeros_(layer.project.bias)

    def forward(
        self, x: Tensor, held: list[CellState] | None = None, lengths: Tensor | None = None
    ) -> tuple[list[Tensor], list[CellState]]:
        """What every layer makes of the rows, from the bottom up, and what its cells hold in the end."""
        made, after = [], []
        for i, layer in enumerate(self.layers):
            x, kept = layer(x, None if held is None else held[i], lengths)
            made.append(x)
            after.append(kept)
        return made, after


@BACKBONES.add("recurrent")
class Recurrent(Backbone):
    """An embedding and layers of cells, read from left to right."""

    Config = RecurrentConfig
    supports_compile = False  # packed rows are cut into stretches, otherwise in every batch
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

    def counted(self, d: Dimensions, place: ExecutionContext) -> ModuleCost:
        stack = ModuleCost("stack", parts=(recurrent_layers("layers", self.config, d, place),))
        return ModuleCost("backbone", parts=(table("tokens", d.vocabulary, d.width), stack))

    def new_state(self, rows: int, capacity: int) -> RecurrentState:
        """An empty memory; what cells hold does not grow, so that the capacity has no meaning."""
        empty = self.tokens.weight.new_zeros(1, rows, self.config.hidden)
        held = (empty, empty) if self.config.cell == "lstm" else (empty,)
        return RecurrentState(torch.zeros(rows, dtype=torch.long, device=empty.device), [held] * self.depth)

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        assert state is None or isinstance(state, RecurrentState)
        x = self.dropout(self.tokens(batch.tokens))  # (B, T) -> (B, T, D)
        if state is not None:
            assert batch.document_ids is None and batch.prefix is None, "a state goes on with one text a row"
            layers, state = self.read_on(x, batch, state)
        elif batch.document_ids is None:  # padding stands at the right, where nothing that is read comes after it
            layers, _ = self.stack(x, self.carried(batch))
        else:
            layers = run_by_document(self.stack, x, batch, held=self.carried(batch), top=not keep_layers)
        return Output(layers[-1], [x, *layers] if keep_layers else [], state)

    def read_on(self, x: Tensor, batch: Batch, state: RecurrentState) -> tuple[list[Tensor], RecurrentState]:
        """Go on from a state; the padding of shorter rows never reaches what is kept."""
        if batch.padding is None:
            layers, after = self.stack(x, state.cells)
            return layers, RecurrentState(state.lengths + x.size(1), after)
        real = (~batch.padding).sum(1)
        lengths = real.cpu()
        if not bool(lengths.any()):
            return [x.new_zeros(x.shape)] * self.depth, state
        layers, after = self.stack(x, state.cells, lengths.clamp(min=1))
        nothing = (real == 0)[None, :, None]  # torch packs no empty rows, so these have read one token too many
        kept = [
            tuple(torch.where(nothing, old, new) for old, new in zip(olds, news, strict=True))
            for olds, news in zip(state.cells, after, strict=True)
        ]
        return layers, RecurrentState(state.lengths + real, kept)

    def carried(self, batch: Batch) -> list[CellState] | None:
        """What the cells hold when the rows begin: no gradient goes back through what stands before them."""
        if batch.prefix is None:
            return None
        with torch.no_grad():
            read = self.forward(batch.prefix, self.new_state(len(batch.tokens), 0)).state
        assert isinstance(read, RecurrentState)
        return read.cells


def make_embedding(config: RecurrentConfig) -> nn.Embedding:
    tokens = nn.Embedding(config.vocabulary, config.width)
    nn.init.uniform_(tokens.weight, -0.1, 0.1)  # cells read it as it is, so it must not be as small as before a norm
    return tokens


# Rows that are cut into the texts they are made of


@dataclass
class Stretches:
    """Documents of like length, as rows of their own. A place is a number in the batch's rows end to end."""

    places: Tensor  # (N, L) of each token; behind a shorter one's end, its last one's again
    rows: Tensor  # (N,) whose part it is
    first: Tensor  # (N,) True where it begins its row


def cut(batch: Batch, *, backward: bool = False) -> tuple[list[Stretches], Tensor]:
    """The documents of all rows; and (B T) where each token then is, in all stretches end to end and one more place.

    That last place is for the padding. `backward` they are read from their ends.
    """
    numbers = (
        torch.zeros(batch.tokens.shape, dtype=torch.long) if batch.document_ids is None else batch.document_ids.cpu()
    )
    if batch.padding is not None:
        numbers = numbers.masked_fill(batch.padding.cpu(), -1)
    length = numbers.size(1)
    before = F.pad(numbers[:, :-1], (1, 0), value=-1)
    real = (numbers >= 0).flatten()
    begins = ((numbers != before) & (numbers >= 0)).flatten()
    starts = begins.nonzero().squeeze(1)  # (N,)
    sizes = (begins.cumsum(0) - 1)[real].bincount(minlength=len(starts))
    order = sizes.argsort(descending=True, stable=True)
    home = torch.zeros(len(real), dtype=torch.long)
    found, used = [], 0
    for chosen in alike(sizes[order].tolist()):
        of, long = starts[order[chosen]], sizes[order[chosen]]  # (N,), (N,)
        step = torch.arange(int(long[0])).expand(len(of), -1)  # (N, L)
        inside = step < long[:, None]
        step = torch.minimum(step, long[:, None] - 1)
        places = of[:, None] + (long[:, None] - 1 - step if backward else step)
        home[places[inside]] = used + inside.flatten().nonzero().squeeze(1)
        used += places.numel()
        found.append(Stretches(places, of // length, of % length == 0))
    home[~real] = used
    return found, home


def alike(sizes: list[int]) -> list[slice]:
    """Sizes from the largest down in groups, each filled by half at the least when padded to its largest."""
    groups, begin, total = [], 0, 0
    for i, size in enumerate(sizes):
        if total + size < FILLED * sizes[begin] * (i + 1 - begin):
            groups.append(slice(begin, i))
            begin, total = i, 0
        total += size
    return [*groups, slice(begin, len(sizes))] if sizes else []


def run_by_document(
    stack: Callable[..., tuple[list[Tensor], list[CellState]]],
    x: Tensor,
    batch: Batch,
    *,
    held: list[CellState] | None = None,
    top: bool = False,
    backward: bool = False,
) -> list[Tensor]:
    """What every layer, or the `top` one alone, makes of rows whose documents are read apart, each where it was.

    A row's first document goes on from what the cells held before the row; every other one begins anew. Padding is
    not read: there stands zero.
    """
    stretches, home = cut(batch, backward=backward)
    flat = x.flatten(0, 1)  # (B, T, D) -> (B T, D)
    made: list[list[Tensor]] = []
    for part in stretches:
        rows = flat.index_select(0, part.places.flatten().to(x.device)).view(*part.places.shape, -1)  # (N, L, D)
        layers, _ = stack(rows, None if held is None else begin_with(held, part, x.device))
        made.append([layer.flatten(0, 1) for layer in (layers[-1:] if top else layers)])
    nowhere = x.new_zeros(1, x.size(2))
    back = home.to(x.device)
    by_layer = zip(*made, strict=True)
    return [torch.cat([*parts, nowhere.to(parts[0])]).index_select(0, back).view_as(x) for parts in by_layer]


def begin_with(held: list[CellState], part: Stretches, device: torch.device) -> list[CellState]:
    rows, first = part.rows.to(device), part.first.to(device)[None, :, None]
    return [tuple(state[:, rows] * first for state in layer) for layer in held]
