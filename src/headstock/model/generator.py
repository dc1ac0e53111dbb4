"""The generator of ELECTRA: a small masked language model that shares the token embedding of a backbone.

B rows, T tokens, D width of the backbone, G width of the generator, V vocabulary.
"""

from dataclasses import replace

from torch import Tensor, nn

from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch, Output
from headstock.model.heads import LMHead, LMHeadTransform


class Generator(nn.Module):
    """A narrower Transformer of the same kind as the backbone; its head is `GeneratorHead`."""

    def __init__(self, backbone: Transformer, *, width_share: float, depth: int | None = None):
        super().__init__()
        config = backbone.config
        heads = max(1, round(config.heads * width_share))
        self.network = Transformer(
            replace(
                config,
                heads=heads,
                width=heads * (config.width // config.heads),
                hidden=max(1, round(config.hidden * width_share)),
                depth=depth or config.depth,
            )
        )
        self.network.tokens = ProjectedEmbedding(backbone.tokens, self.network.width)

    def forward(self, batch: Batch) -> Output:
        return self.network(batch)  # hidden: (B, T, G)


class ProjectedEmbedding(nn.Embedding):
    """The embedding of another model in fewer dimensions: (V, D) and a projection to G."""

    def __init__(self, tokens: nn.Embedding, width: int):
        super().__init__(tokens.num_embeddings, tokens.embedding_dim, _weight=tokens.weight)
        self.weight = tokens.weight  # the same parameter
        self.projection = nn.Linear(tokens.embedding_dim, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.projection(super().forward(tokens))  # (B, T) -> (B, T, D) -> (B, T, G)


class GeneratorHead(LMHead):
    """Logits over the vocabulary from the generator's vectors, tied to the backbone's token embedding."""

    def __init__(self, backbone: Transformer, generator: Generator):
        nn.Module.__init__(self)
        self.transform = LMHeadTransform(backbone, inputs=generator.network.width)
        self.tied, self.int8 = True, None
        self.weight = backbone.tokens.weight
        self.bias = nn.Parameter(self.weight.new_zeros(len(self.weight)))
