"""The cost of a model: its backbone and heads, by closed form where there is one."""

from collections.abc import Mapping
from dataclasses import fields, replace

from torch import nn

from headstock.cost.formulas import CPU, Dimensions, ExecutionContext, ModuleCost, SavedActivations, Size, linear, norm
from headstock.cost.measured import measured_backbone, measured_generator, measured_head
from headstock.cost.recurrent import elmo_cost, recurrent_cost
from headstock.cost.transformer import encoder_decoder_cost, transformer_cost
from headstock.model.backbone import Backbone, CachedBackbone
from headstock.model.backbones.elmo import Elmo
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.backbones.recurrent import Recurrent
from headstock.model.backbones.transformer import Transformer
from headstock.model.generator import Generator
from headstock.model.heads import ClassificationHead, LMHead, LMHeadTransform, NextSentenceHead, SpanHead
from headstock.model.model import Model
from headstock.tasks.base import Task


def model_dimensions(model: Model, *, length: int = 0, source_length: int | None = None) -> Dimensions:
    """The sizes of a model as numbers, for rows of `length` tokens and sources as long unless specified."""
    backbone, config = model.backbone, model.backbone.config
    names = {part.name for part in fields(Dimensions)}
    sizes = {"width": backbone.width, "depth": backbone.depth}
    sizes |= {name: value for name, value in vars(config).items() if name in names}
    if backbone.is_encoder_decoder:
        sizes["source_vocabulary"] = sizes.get("source_vocabulary") or sizes["vocabulary"]
        sizes["encoder_depth"] = sizes.get("encoder_depth") or sizes["depth"]
    classes = [head.linear.out_features for head in model.heads.values() if isinstance(head, ClassificationHead)]
    length = length or backbone.context or 256
    sizes |= {"classes": classes[0] if classes else 0, "context": backbone.context or 0}
    return Dimensions(**sizes, length=length, source_length=source_length or length)


def model_cost(model: Model, task: Task, d: Dimensions, context: ExecutionContext = CPU) -> ModuleCost:
    """The cost of a model as a task trains it."""
    return module_costs(model, d, context, uses={head: task.head_passes(head, d.length) for head in model.heads})


def module_costs(
    model: Model, d: Dimensions, context: ExecutionContext = CPU, *, uses: Mapping[str, Size] | None = None
) -> ModuleCost:
    """The cost of backbone and heads; `uses` is how often a token passes through each head."""
    heads = []
    for name, head in model.heads.items():
        cost = head_cost(head, model.backbone, d, context)
        heads.append(replace(cost, name=name, passes=(uses or {}).get(name, 1)))
    backbone = backbone_cost(model.backbone, d, context)
    return ModuleCost("", parts=(backbone, ModuleCost("heads", parts=tuple(heads))))


def backbone_cost(backbone: Backbone, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    if isinstance(backbone, CachedBackbone):
        return ModuleCost("backbone")
    if isinstance(backbone, Transformer):
        return transformer_cost(backbone.config, d, context)
    if isinstance(backbone, EncoderDecoder):
        return encoder_decoder_cost(backbone, d, context)
    if isinstance(backbone, Recurrent):
        return recurrent_cost(backbone.config, d, context)
    if isinstance(backbone, Elmo):
        return elmo_cost(backbone.config, d, context)
    length = d.length if isinstance(d.length, int) else backbone.context or 256
    return measured_backbone(backbone, length, d.source_length if isinstance(d.source_length, int) else length)


def head_cost(head: nn.Module, backbone: Backbone, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    if isinstance(head, LMHead):
        return lm_head_cost(head, d, context)
    if isinstance(head, NextSentenceHead):
        return next_sentence_cost(d)
    if isinstance(head, ClassificationHead):
        return classification_cost(head, d, getattr(backbone.config, "width", backbone.width))
    if isinstance(head, Generator):
        return measured_generator(head, backbone, d.length if isinstance(d.length, int) else backbone.context or 256)
    return measured_head(head, backbone)


def lm_head_cost(head: LMHead, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    """The loss saves the logits in float32."""
    full = linear("", d.width, d.vocabulary, bias=head.bias is not None)
    shapes = {name: shape for name, shape in full.shapes.items() if not (head.tied and name == "weight")}
    parts = () if head.transform is None else (transform_cost(head.transform, d, context),)
    saved = full.saved + SavedActivations(single=d.vocabulary)
    return ModuleCost("", shapes, flops=full.flops, saved=saved, parts=parts)


def transform_cost(transform: LMHeadTransform, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    bias = transform.dense.bias is not None
    inputs, outputs = transform.dense.in_features, transform.dense.out_features
    dense = linear("dense", d.width if inputs == outputs else inputs, d.width, bias=bias)
    kind = "layer" if isinstance(transform.norm, nn.LayerNorm) else "rms"
    normed = norm("norm", d.width, kind, context, bias=bias)
    return ModuleCost("transform", saved=SavedActivations(d.width), parts=(dense, normed))


def next_sentence_cost(d: Dimensions) -> ModuleCost:
    parts = (linear("pooler", d.width, d.width), linear("linear", d.width, 2))
    return ModuleCost("", parts=parts, saved=SavedActivations(single=2))


def classification_cost(head: ClassificationHead, d: Dimensions, width: int) -> ModuleCost:
    """The head's input may be several vectors of the model's `width` side by side."""
    inputs = head.linear.in_features // width * d.width
    outputs: Size = 2 if isinstance(head, SpanHead) else d.classes
    mix: tuple[ModuleCost, ...] = ()
    if head.mix is not None:
        saved = SavedActivations(single=(d.depth + 1) * inputs)
        mix = (ModuleCost("mix", {"weights": (d.depth + 1,), "gamma": ()}, saved=saved),)
    dropped = SavedActivations(dropped=inputs if head.dropout.p else 0)
    dense = () if head.dense is None else (linear("dense", inputs, inputs),)
    last = linear("linear", inputs, outputs, bias=head.linear.bias is not None)
    activated = SavedActivations(inputs) if dense else SavedActivations()
    return ModuleCost("", parts=(*mix, *dense, last), saved=SavedActivations(single=outputs) + dropped + activated)
