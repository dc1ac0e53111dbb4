"""Blocks and stacks match torch's Transformer layers with the same weights."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from headstock.kernels.pointwise import gelu_tanh
from headstock.model.attention_mask import AttentionMask, make_attention_mask, padding_mask
from headstock.model.batch import Batch
from headstock.model.layers import Block, BlockConfig
from tests.model.small import small_backbone, some_tokens, stir

WIDTH, HEADS, HIDDEN, ROWS, LENGTH, SOURCE = 8, 2, 12, 3, 6, 5
SIZES = {"width": WIDTH, "heads": HEADS, "hidden": HIDDEN}
MASKS = ["none", "causal", "padding", "causal padding", "document", "causal document"]
SHAPES = list(product(["pre", "post"], ["relu", "gelu"], [True, False]))
PADDING = torch.arange(LENGTH)[None] >= torch.tensor([6, 3, 1])[:, None]
MEMORY_PADDING = torch.arange(SOURCE)[None] >= torch.tensor([2, 5, 4])[:, None]
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def copy_weights(theirs: nn.Module, ours: Block) -> None:
    """Copy the weights of torch's layer into our block."""
    cross = ours.cross is not None
    pairs = [
        (theirs.self_attn.out_proj, ours.attention.output),
        (theirs.linear1, ours.feed.up),
        (theirs.linear2, ours.feed.down),
        (theirs.norm1, ours.around_attention.norm),
        (theirs.norm3 if cross else theirs.norm2, ours.around_feed.norm),
    ]
    attentions = [(theirs.self_attn, ours.attention)]
    if cross:
        pairs += [(theirs.multihead_attn.out_proj, ours.cross.output), (theirs.norm2, ours.around_cross.norm)]
        attentions.append((theirs.multihead_attn, ours.cross))
    with torch.no_grad():
        for source, target in pairs:
            target.load_state_dict(source.state_dict())
        for source, target in attentions:
            target.inputs.weight.copy_(source.in_proj_weight)
            if source.in_proj_bias is not None:
                target.inputs.bias.copy_(source.in_proj_bias)


def torch_layer(kind: type, norm: str, activation: str, bias: bool) -> nn.Module:
    layer = kind(WIDTH, HEADS, HIDDEN, 0.0, activation, batch_first=True, norm_first=norm == "pre", bias=bias)
    stir(layer)
    return layer


def matching_layers(kind: type, norm: str, activation: str, bias: bool) -> tuple[nn.Module, Block]:
    theirs = torch_layer(kind, norm, activation, bias)
    config = BlockConfig(**SIZES, norm=norm, activation=activation, bias=bias)
    ours = Block(config, cross=kind is nn.TransformerDecoderLayer)
    copy_weights(theirs, ours)
    return theirs, ours


def matching_masks(kind: str) -> tuple[AttentionMask, dict[str, Tensor | None]]:
    """Our mask and torch's, where True means masked."""
    batch = Batch(torch.zeros(ROWS, LENGTH, dtype=torch.long))
    forbidden = torch.zeros(ROWS, LENGTH, LENGTH, dtype=torch.bool)
    if "causal" in kind:
        forbidden = forbidden | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if "document" in kind:
        batch.document_ids = DOCUMENTS
        forbidden = forbidden | (DOCUMENTS[:, :, None] != DOCUMENTS[:, None, :])
    if "padding" in kind:
        batch.padding = PADDING
    theirs = {"mask": forbidden.repeat_interleave(HEADS, 0), "padding": batch.padding}
    return make_attention_mask(batch, causal="causal" in kind), theirs


def assert_same(ours: Tensor, theirs: Tensor, padding: Tensor | None) -> None:
    real = slice(None) if padding is None else ~padding
    torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("norm", "activation", "bias"), SHAPES)
def test_a_block_matches_torchs_encoder_layer(norm, activation, bias, kind):
    theirs, ours = matching_layers(nn.TransformerEncoderLayer, norm, activation, bias)
    mask, torch_masks = matching_masks(kind)
    x = random_tensor(ROWS, LENGTH, WIDTH)
    expected = theirs(x, src_mask=torch_masks["mask"], src_key_padding_mask=torch_masks["padding"])
    assert_same(ours(x, mask), expected, torch_masks["padding"])


@pytest.mark.parametrize("memory_padding", [None, MEMORY_PADDING], ids=["memory", "padded-memory"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("norm", "activation", "bias"), SHAPES)
def test_a_block_with_memory_matches_torchs_decoder_layer(norm, activation, bias, kind, memory_padding):
    theirs, ours = matching_layers(nn.TransformerDecoderLayer, norm, activation, bias)
    mask, torch_masks = matching_masks(kind)
    x, memory = random_tensor(ROWS, LENGTH, WIDTH), random_tensor(ROWS, SOURCE, WIDTH, seed=1)
    expected = theirs(
        x,
        memory,
        tgt_mask=torch_masks["mask"],
        tgt_key_padding_mask=torch_masks["padding"],
        memory_key_padding_mask=memory_padding,
    )
    key_value = ours.cross.project_key_value(memory)
    assert_same(
        ours(x, mask, memory=key_value, memory_mask=AttentionMask(padding_mask(memory_padding))),
        expected,
        torch_masks["padding"],
    )


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_weight_affects_the_output(norm):
    """Control: changing any one weight changes the output."""
    theirs, ours = matching_layers(nn.TransformerDecoderLayer, norm, "gelu", True)
    mask, torch_masks = matching_masks("causal")
    x, memory = random_tensor(ROWS, LENGTH, WIDTH), random_tensor(ROWS, SOURCE, WIDTH, seed=1)
    expected = theirs(x, memory, tgt_mask=torch_masks["mask"])
    for name, parameter in ours.named_parameters():
        with torch.no_grad():
            before = parameter.flatten()[0].clone()
            parameter.view(-1)[0] += 0.05
            changed = ours(x, mask, memory=ours.cross.project_key_value(memory), memory_mask=AttentionMask())
            parameter.view(-1)[0] = before
        assert (changed - expected).abs().max() > 1e-4, name


def test_the_masks_matter():
    _, ours = matching_layers(nn.TransformerEncoderLayer, "pre", "relu", True)
    x = random_tensor(ROWS, LENGTH, WIDTH)
    results = [
        ours(x, matching_masks(kind)[0]) for kind in ("none", "causal", "padding", "document", "causal document")
    ]
    for i, output in enumerate(results):
        for reference in results[:i]:
            assert (output - reference).abs().max() > 1e-3


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_stack_matches_torchs_encoder(norm):
    """Pre-norm stacks have a final norm, post-norm stacks have none."""
    backbone = small_backbone(norm=norm, activation="relu", causal=True)
    last = nn.LayerNorm(WIDTH) if norm == "pre" else None
    theirs = nn.TransformerEncoder(
        torch_layer(nn.TransformerEncoderLayer, norm, "relu", True), 2, last, enable_nested_tensor=False
    )
    for seed, (layer, block) in enumerate(zip(theirs.layers, backbone.blocks, strict=True)):
        stir(layer, seed=seed)
        copy_weights(layer, block)
    if last is not None:
        theirs.norm.load_state_dict(backbone.final_norm.state_dict())
    else:
        assert backbone.final_norm is None
    batch = Batch(some_tokens(ROWS, LENGTH))
    x = backbone.embed(batch, torch.arange(LENGTH), LENGTH)
    expected = theirs(x, mask=nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True)
    output = backbone(batch, keep_layers=True)
    torch.testing.assert_close(output.hidden, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.layers[0], x)
    torch.testing.assert_close(output.layers[1], theirs.layers[0](x, src_mask=matching_masks("causal")[1]["mask"]))
    assert len(output.layers) == 3


def test_a_stack_with_memory_matches_torchs_decoder():
    backbone = small_backbone(norm="pre", activation="gelu", cross=True)
    layer = torch_layer(nn.TransformerDecoderLayer, "pre", "gelu", True)
    theirs = nn.TransformerDecoder(layer, 2, nn.LayerNorm(WIDTH))
    for seed, (layer, block) in enumerate(zip(theirs.layers, backbone.blocks, strict=True)):
        stir(layer, seed=seed)
        copy_weights(layer, block)
    theirs.norm.load_state_dict(backbone.final_norm.state_dict())
    batch, memory = Batch(some_tokens(ROWS, LENGTH)), random_tensor(ROWS, SOURCE, WIDTH)
    x = backbone.embed(batch, torch.arange(LENGTH), LENGTH)
    square = matching_masks("causal")[1]["mask"]
    expected = theirs(x, memory, tgt_mask=square, memory_key_padding_mask=MEMORY_PADDING)
    hidden = backbone(batch, memory=memory, memory_padding=MEMORY_PADDING).hidden
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=0)


def test_dropout_is_applied_in_training_where_torch_applies_it():
    _, ours = matching_layers(nn.TransformerEncoderLayer, "pre", "relu", True)
    for part in ours.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    x = random_tensor(ROWS, LENGTH, WIDTH)
    ours.eval()
    assert torch.equal(ours(x, AttentionMask()), ours(x, AttentionMask()))
    ours.train()
    assert not torch.equal(ours(x, AttentionMask()), ours(x, AttentionMask()))
    assert sum(isinstance(part, nn.Dropout) for part in ours.modules()) == 3  # after attention, inside and after feed
    assert Block(BlockConfig(**SIZES, dropout=0.25)).attention.dropout == 0.25  # and on attention weights


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("inner", [True, False])
def test_inner_dropout_is_optional(activation, inner):
    block = Block(BlockConfig(**SIZES, activation=activation, dropout=0.5, inner_dropout=inner)).train()
    stir(block)
    x = random_tensor(ROWS, LENGTH, WIDTH)
    assert torch.equal(block.feed(x), block.feed(x)) == (not inner)
    assert torch.equal(block.feed(x), block.eval().feed(x)) == (not inner)
    assert not torch.equal(block.train()(x, AttentionMask()), block(x, AttentionMask()))  # the other dropouts stay


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_residual_stream_has_the_autocast_dtype(norm, kind):
    backbone = small_backbone(norm=norm, norm_kind=kind).eval()
    batch = Batch(some_tokens(2, 8))
    exact = backbone(batch, keep_layers=True)
    with torch.autocast("cpu", torch.bfloat16):
        bfloat16 = backbone(batch, keep_layers=True)
    assert all(layer.dtype == torch.float32 for layer in exact.layers)
    assert all(layer.dtype == torch.bfloat16 for layer in [*bfloat16.layers, bfloat16.hidden])
    torch.testing.assert_close(bfloat16.hidden.float(), exact.hidden, rtol=0.05, atol=0.05)


def test_compiled_gelu_tanh_matches_torch():
    x = random_tensor(1000).mul(4).requires_grad_()
    plain, reference = gelu_tanh(x), torch.compile(gelu_tanh, backend="aot_eager")(x)
    torch.testing.assert_close(reference, plain, rtol=1e-5, atol=2e-6)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (plain, reference)]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)
