"""Loads this folder in transformers: one of its backbones under Headstock's classification head.

Written by `headstock export --custom-code`. It needs torch and transformers, but not Headstock.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu}


class HeadstockConfig(PreTrainedConfig):
    """The backbone's configuration and the settings of the head."""

    model_type = "headstock"

    def __init__(
        self,
        backbone: Any = None,
        pool: str = "mean",
        dense: str = "none",
        head_bias: bool = True,
        **options: Any,
    ):
        if isinstance(backbone, dict):
            backbone = AutoConfig.for_model(**backbone)
        self.backbone, self.pool, self.dense, self.head_bias = backbone, pool, dense, head_bias
        super().__init__(**options)

    def get_text_config(self, *_: Any, **__: Any) -> Any:
        return self if self.backbone is None else self.backbone


class HeadstockForSequenceClassification(PreTrainedModel):
    """Pools the backbone's last hidden states to one vector per text, (B, T, D) -> (B, D), and classifies it."""

    config_class = HeadstockConfig
    base_model_prefix = "backbone"

    def __init__(self, config: HeadstockConfig):
        super().__init__(config)
        unused = {"add_pooling_layer": False} if config.backbone.model_type == "bert" else {}
        self.backbone = AutoModel.from_config(config.backbone, **unused)
        width = config.backbone.hidden_size * (3 if config.pool == "concat" else 1)
        self.dense = None if config.dense == "none" else nn.Linear(width, width)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.linear = nn.Linear(width, config.num_labels, bias=config.head_bias)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool = True,
        **options: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        output = self.backbone(input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **options)
        hidden = output.last_hidden_state
        if attention_mask is None:
            attention_mask = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        vectors = pool(hidden, attention_mask, self.config.pool)
        if self.dense is not None:
            vectors = ACTIVATIONS[self.config.dense](self.dense(vectors))
        logits = self.linear(self.dropout(vectors))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        result = SequenceClassifierOutput(loss, logits, output.hidden_states, output.attentions)
        return result if return_dict else result.to_tuple()

    def loss_function(self, labels: Tensor, logits: Tensor, config: HeadstockConfig) -> Tensor:
        if config.problem_type == "regression":
            return F.mse_loss(logits.squeeze(-1), labels.to(logits.dtype).view(-1))
        if config.problem_type == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return F.cross_entropy(logits, labels.view(-1))


def pool(hidden: Tensor, attention_mask: Tensor, kind: str) -> Tensor:
    """One vector per text, without padding on either side: (B, T, D) -> (B, D), or (B, 3 D) for concat."""
    if kind == "concat":
        return torch.cat([pool(hidden, attention_mask, part) for part in ("last", "mean", "max")], -1)
    rows, mask = torch.arange(len(hidden), device=hidden.device), attention_mask != 0
    if kind == "cls":
        return hidden[rows, mask.int().argmax(1)]
    if kind == "last":
        return hidden[rows, hidden.size(1) - 1 - mask.int().flip(1).argmax(1)]
    if kind == "max":
        return hidden.masked_fill(~mask[..., None], -torch.inf).amax(1)
    return hidden.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True)
