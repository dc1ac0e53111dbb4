"""Closed forms of the heads."""

from torch import nn

from headstock.cost.formulas import Dimensions, ExecutionContext, ModuleCost, SavedActivations, Size, linear, norm
from headstock.model.heads import ClassificationHead, LMHead, LMHeadTransform, SpanHead


def lm_head_cost(head: LMHead, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    """The loss saves the logits in float32."""
    whole = linear("", d.width, d.vocabulary, bias=head.bias is not None)
    shapes = {name: shape for name, shape in whole.shapes.items() if not (head.tied and name == "weight")}
    parts = () if head.transform is None else (transform_cost(head.transform, d, context),)
    return ModuleCost(
        "", shapes, flops=whole.flops, kept=whole.kept + SavedActivations(single=d.vocabulary), parts=parts
    )


def transform_cost(transform: LMHeadTransform, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    bias = transform.dense.bias is not None
    dense = linear("dense", d.width, d.width, bias=bias)
    kind = "layer" if isinstance(transform.norm, nn.LayerNorm) else "rms"
    normed = norm("norm", d.width, kind, context, bias=bias)
    return ModuleCost("transform", kept=SavedActivations(d.width), parts=(dense, normed))


def next_sentence_cost(d: Dimensions) -> ModuleCost:
    parts = (linear("pooler", d.width, d.width), linear("linear", d.width, 2))
    return ModuleCost("", parts=parts, kept=SavedActivations(single=2))


def classification_cost(head: ClassificationHead, d: Dimensions, width: int) -> ModuleCost:
    """The head's input may be several vectors of the model's `width` side by side."""
    inputs = head.linear.in_features // width * d.width
    outputs: Size = 2 if isinstance(head, SpanHead) else d.classes
    mix: tuple[ModuleCost, ...] = ()
    if head.mix is not None:
        kept = SavedActivations(single=(d.depth + 1) * inputs)
        mix = (ModuleCost("mix", {"weights": (d.depth + 1,), "gamma": ()}, kept=kept),)
    dropped = SavedActivations(dropped=inputs) if head.dropout.p else SavedActivations()
    dense = () if head.dense is None else (linear("dense", inputs, inputs),)
    last = linear("linear", inputs, outputs, bias=head.linear.bias is not None)
    activated = SavedActivations(inputs) if dense else SavedActivations()
    return ModuleCost("", parts=(*mix, *dense, last), kept=SavedActivations(single=outputs) + dropped + activated)
