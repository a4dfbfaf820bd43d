"""The slots are right: with copied weights, the logits are those of Hugging Face transformers, on tiny random models."""

from __future__ import annotations

import pytest
import torch
import transformers

from manyheads import Inputs, build, read
from manyheads.convert.activation import THEIRS
from manyheads.convert.families import family
from manyheads.convert.weights import read_weights, write_weights
from manyheads.parts.feedforward import ACTIVATIONS
from manyheads.spec import SLOTS, to_tree

COMMON = {"vocab_size": 61}


def gpt2(**options):
    config = transformers.GPT2Config(**COMMON, n_embd=32, n_layer=3, n_head=4, n_positions=40, **options)
    return transformers.GPT2LMHeadModel(config)


def bert(**options):
    config = transformers.BertConfig(
        **COMMON, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, max_position_embeddings=40, **options
    )
    return transformers.BertForMaskedLM(config)


def llama(**options):
    options = {"num_key_value_heads": 2, "max_position_embeddings": 40} | options
    config = transformers.LlamaConfig(**COMMON, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, **options)
    return transformers.LlamaForCausalLM(config)


def t5(**options):
    config = transformers.T5Config(
        **COMMON, d_model=32, d_kv=12, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, **options,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def marian(**options):
    config = transformers.MarianConfig(
        **COMMON, d_model=32, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=40, pad_token_id=60, eos_token_id=0,
        decoder_start_token_id=60, forced_eos_token_id=0, **options,
    )  # fmt: skip
    return transformers.MarianMTModel(config)


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


CASES = {
    "gpt2": lambda: gpt2(),
    "gpt2-relu": lambda: gpt2(activation_function="relu", n_inner=40),
    "bert": lambda: bert(),
    "bert-eps": lambda: bert(layer_norm_eps=1e-3, hidden_act="relu", type_vocab_size=3),
    "llama-grouped": lambda: llama(),
    "llama-multi-query-tied": lambda: llama(num_key_value_heads=1, tie_word_embeddings=True),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=6),
    "llama-theta": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama-linear": lambda: llama(**rope("linear", factor=3.0)),
    "llama-dynamic-below": lambda: llama(**rope("dynamic", factor=3.0)),
    "llama-dynamic-beyond": lambda: llama(max_position_embeddings=7, **rope("dynamic", factor=3.0)),
    "llama-yarn": lambda: llama(**rope("yarn", factor=4.0, original_max_position_embeddings=10)),
    "llama-yarn-options": lambda: llama(
        **rope("yarn", factor=4.0, original_max_position_embeddings=10, beta_fast=2.0, beta_slow=0.5, attention_factor=1.3, truncate=False)
    ),
    "gpt2-eps-unscaled": lambda: gpt2(layer_norm_epsilon=1e-2, scale_attn_weights=False),
    "llama-llama3": lambda: llama(
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    ),
    "llama-longrope-short": lambda: llama(
        **rope(
            "longrope", factor=2.0, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 2.5, 3.0, 4.0], original_max_position_embeddings=20
        )
    ),
    "llama-longrope-long": lambda: llama(
        **rope(
            "longrope", factor=4.0, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 2.5, 3.0, 4.0], original_max_position_embeddings=10
        )
    ),
    "t5": lambda: t5(),
    "t5-gated-untied": lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "marian": lambda: marian(),
    "marian-scaled-swish": lambda: marian(scale_embedding=True, activation_function="swish"),
}


@pytest.fixture(params=CASES)
def pair(request):
    torch.manual_seed(1)
    theirs = CASES[request.param]().eval()
    for name, tensor in theirs.state_dict().items():
        # published biases and norms are not at their first values: neither may ours be when compared
        if "embed_positions" not in name:
            tensor.copy_(tensor + 0.1 * torch.randn_like(tensor)) if tensor.is_floating_point() else None
    if theirs.config.tie_word_embeddings:
        theirs.tie_weights()
    config = theirs.config.to_dict()
    table = family(config["model_type"])
    spec = table.spec_of(config)
    ours = build(spec, seed=2).eval()
    read_weights(table.table(spec), theirs.state_dict(), ours)
    return theirs, ours, list(table.table(spec))


def compare(ours, theirs, real=None):
    difference = (ours - theirs).abs()
    assert (difference if real is None else difference[real]).max() <= 1e-4


@torch.no_grad()
def test_logits_equal_the_reference(pair):
    theirs, ours, _ = pair
    torch.manual_seed(3)
    ids = torch.randint(1, 60, (2, 13))
    if ours.spec.shape == "encoder–decoder":
        source = torch.randint(1, 60, (2, 17))
        compare(ours(ids, source), theirs(input_ids=source, decoder_input_ids=ids).logits)
    else:
        compare(ours(ids), theirs(input_ids=ids).logits)


# references in which a padded row depends on its neighbours or its padding: ours is compared with theirs on the row alone
UNSTEADY = {("marian", "left"), ("marian-scaled-swish", "left"), ("llama-dynamic-beyond", "left"), ("llama-dynamic-beyond", "right")}


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_logits_equal_the_reference_under_padding(pair, side, request):
    theirs, ours, _ = pair
    torch.manual_seed(4)
    ids, padding = torch.randint(1, 60, (2, 17)), torch.zeros(2, 17, dtype=torch.bool)
    padding[1, slice(0, 5) if side == "left" else slice(12, 17)] = True
    paired, target = ours.spec.shape == "encoder–decoder", torch.randint(1, 60, (2, 9))
    given = Inputs(ids, padding=padding)
    found = ours(target, given) if paired else ours(given)
    if (request.node.callspec.params["pair"], side) in UNSTEADY:
        real = ids[1:, ~padding[1]]
        alone = theirs(input_ids=real, decoder_input_ids=target[1:]) if paired else theirs(input_ids=real)
        compare(found[1:] if paired else found[1:, ~padding[1]], alone.logits)
        return
    attention = (~padding).long()
    if paired:
        compare(found, theirs(input_ids=ids, attention_mask=attention, decoder_input_ids=target).logits)
    else:
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        compare(found, theirs(input_ids=ids, attention_mask=attention, position_ids=positions).logits, real=~padding)


def test_weights_return_as_they_came(pair):
    theirs, ours, table = pair
    back, given = write_weights(table, ours), theirs.state_dict()
    for name, tensor in back.items():
        assert torch.equal(tensor, given[name]), name
    held = {row.theirs for row in table if hasattr(row, "ours")}
    assert held == set(back)


def test_a_weight_too_many_or_too_few_is_named(pair):
    theirs, ours, table = pair
    given = dict(theirs.state_dict())
    first = next(row.theirs for row in table if hasattr(row, "ours"))
    with pytest.raises(ValueError, match="extra.weight"):
        read_weights(table, given | {"extra.weight": torch.zeros(1)}, ours)
    del given[first]
    with pytest.raises(ValueError, match=first):
        read_weights(table, given, ours)


@pytest.mark.parametrize(
    ("preset", "config", "tower"),
    [
        ("gpt2", transformers.GPT2Config, "decoder"),
        ("bert-base", transformers.BertConfig, "encoder"),
        ("llama-7b", transformers.LlamaConfig, "decoder"),
        ("t5-small", transformers.T5Config, "decoder"),
        ("t5-small", transformers.T5Config, "encoder"),
    ],
)
def test_a_preset_is_what_the_reference_has_by_default(preset, config, tower):
    given = config().to_dict()
    ours, theirs = (getattr(spec, tower) for spec in (read(preset), family(given["model_type"]).spec_of(given)))
    assert ours == theirs.changed(attention=to_tree(theirs.attention) | {"groups": None, "size": None}) or ours == theirs


def test_dropout_is_read_where_it_belongs():
    spec = family("gpt2").spec_of(transformers.GPT2Config(embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3).to_dict()).decoder
    assert (spec.embed.dropout, spec.core.dropout, spec.residual.dropout) == (0.1, 0.2, 0.3)
    spec = family("bert").spec_of(transformers.BertConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2).to_dict()).encoder
    assert (spec.embed.dropout, spec.core.dropout, spec.residual.dropout) == (0.1, 0.2, 0.1)
    assert family("llama").spec_of(transformers.LlamaConfig(attention_dropout=0.2).to_dict()).decoder.core.dropout == 0.2
    config = transformers.MarianConfig(dropout=0.1, attention_dropout=0.2, activation_dropout=0.3, pad_token_id=1, decoder_start_token_id=1)
    spec = family("marian").spec_of(config.to_dict()).decoder
    assert (spec.embed.dropout, spec.core.dropout, spec.feedforward.dropout, spec.residual.dropout) == (0.1, 0.2, 0.3, 0.1)


def test_a_config_of_the_first_version_reads_by_its_defaults():
    old = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6, "hidden_act": "silu",
           "rms_norm_eps": 1e-6, "max_position_embeddings": 40, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}}  # fmt: skip
    position = family("llama").spec_of(old).decoder.position
    assert (position.theta, position.scaling.kind, position.scaling.factor) == (500.0, "linear", 3.0)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("llama", {"hidden_act": "selu"}, "no activation 'selu'"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope scaling 'spiral'"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(name, options, said):
    config = {"gpt2": transformers.GPT2Config, "bert": transformers.BertConfig, "llama": transformers.LlamaConfig}[
        name
    ]().to_dict() | options
    with pytest.raises(ValueError, match=said):
        family(name).spec_of(config)


def test_activations_are_theirs():
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 81)
    for theirs, ours in THEIRS.items():
        torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), rtol=1e-5, atol=1e-5)


def test_a_tied_weight_that_is_not_and_a_wrong_shape_are_named():
    torch.manual_seed(1)
    theirs, table = gpt2(), family("gpt2")
    spec = table.spec_of(theirs.config.to_dict())
    given, ours = dict(theirs.state_dict()), build(spec)
    with pytest.raises(ValueError, match="lm_head.weight should be tied"):
        read_weights(table.table(spec), given | {"lm_head.weight": given["lm_head.weight"] + 1}, ours)
    with pytest.raises(ValueError, match=r"decoder.norm.weight has shape \(3,\), the config implies \(32,\)"):
        read_weights(table.table(spec), given | {"transformer.ln_f.weight": torch.ones(3)}, ours)


def test_a_rope_scaling_is_read_field_by_field():
    """The small models above have too few pairs for every field to show in their logits."""
    options = {"factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.3}
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "truncate": False, **options}
    position = family("llama").spec_of(transformers.LlamaConfig(rope_parameters=rope).to_dict()).decoder.position
    scaling = {"kind": "yarn", "factor": 4.0, "length": 10, "fast": 2.0, "slow": 0.5, "attention": 1.3, "truncate": False}
    assert position == SLOTS["position"].choose({"kind": "rope", "theta": 500.0, "scaling": scaling})


def test_a_preset_is_what_its_config_says():
    """As published with the weights."""
    config = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
              "intermediate_size": 14336, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}  # fmt: skip
    assert read("llama-3-8b").decoder == family("llama").spec_of(config).decoder
