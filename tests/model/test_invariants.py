"""Laws that every kind of every slot obeys: attention, causality, padding, caches, saving, gradients.

`pytest tests/model/test_invariants.py --parts yours.py` also runs them on the kinds of your own file.
"""

from __future__ import annotations

import copy

import kinds
import pytest
import safetensors.torch
import torch
from kinds import HEADS, LENGTH, WIDTH, choices, kind_id, padded, random_model, tokens
from raising import raises
from torch.nn.attention import SDPBackend, sdpa_kernel

from manyheads import Inputs, build, build_meta, read_model
from manyheads.model.builder import manual_seed
from manyheads.parts.core import Core, InnerProduct, check_rows
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions
from manyheads.spec import SLOTS, to_tree

CORES, POSITIONS = choices("core"), choices("position")
# every kind, "heads" with grouped and normalized keys: without them it is in every other decoder
GROUPED = {"kind": "heads", "heads": 4, "kv_heads": 2, "qk_norm": "rms"}
ATTENTIONS = [GROUPED, *(choice for choice in kinds.first_choices("attention") if choice["kind"] != "heads")]
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def equal(a, b, dtype=torch.float64):
    torch.testing.assert_close(a, b, rtol=CLOSE[dtype], atol=CLOSE[dtype])


# ------------------------------------------------------------------------------------ weights @ v == forward


def masks(batch, queries, keys):
    """Every mask and some combinations, with a fully masked row where a mask can have one."""
    device = torch.device("cpu")

    def mask(**options):
        return Mask(queries, keys, device, **options)

    right = torch.zeros(batch, keys, dtype=torch.bool)
    right[1, keys - 3 :] = True
    left = right.flip(-1)
    all_padding = right.clone()
    all_padding[0] = True
    document_ids = torch.arange(keys).div(4, rounding_mode="floor").expand(batch, -1)
    of_queries = document_ids[:, keys - queries :]
    alone = of_queries.clone()
    alone[0, 0] = 99
    last = keys - queries
    return {
        "none": mask(),
        "padding right": mask(padding_BM=right),
        "padding left": mask(padding_BM=left),
        "all padding": mask(padding_BM=all_padding),
        "document_ids": mask(document_ids=(of_queries, document_ids)),
        "alone": mask(document_ids=(alone, document_ids)),
        "causal": mask(causal=True, query_offset=last),
        "causal, padding left": mask(causal=True, query_offset=last, padding_BM=left),
        "causal, document_ids, padding": mask(
            causal=True, query_offset=last, document_ids=(of_queries, document_ids), padding_BM=right
        ),
        "window": mask(window=2, query_offset=last),
        "window, causal": mask(window=3, causal=True, query_offset=last),
        "window, causal, padding": mask(window=2, causal=True, query_offset=last, padding_BM=left),
        "prefix": mask(causal=True, query_offset=last, prefix_B=torch.tensor([3, 0])),
        "prefix, window, padding": mask(
            causal=True, window=2, query_offset=last, prefix_B=torch.tensor([4, 1]), padding_BM=right
        ),
    }


MASKS = list(masks(2, 5, 9))


def attention_inputs(core, queries, keys, dtype, groups=HEADS):
    spec = SLOTS["core"].from_config(core)
    sizes = {"head": 6, "memory": 8, "none": 0}
    query_size, key_size = sizes[spec.query_source], {"head": 6, "raw": 8, "none": 0}[spec.key_source]
    module = spec.build(HEADS, query_size, key_size).to(dtype).requires_grad_(False)
    q = torch.randn(2, HEADS, queries, query_size, dtype=dtype)
    k = torch.randn(2, groups if spec.key_source == "head" else 1, keys, key_size, dtype=dtype)
    v = torch.randn(2, groups, keys, 6, dtype=dtype)
    positions = Positions(torch.arange(keys - queries, keys)[None], torch.arange(keys)[None])
    return module, [x.requires_grad_() for x in (q, module.key_transform(k), v)], positions


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("core", CORES, ids=kind_id)
def test_weights_at_values_are_the_fast_forward(core, name):
    for dtype in CLOSE:
        for training in (False, True) if core.get("dropout") or dtype is torch.float64 else (False,):
            check_forward(core, name, dtype, training=training)


def check_forward(core, name, dtype, *, training):
    sizes = [(9, 9, 1, False), (5, 9, HEADS, True)]
    if dtype is torch.float64:
        sizes += [(9, 9, HEADS, False), (1, 9, HEADS, False), (9, 9, 1, True)]
    for queries, keys, groups, biased in sizes:
        module, (q, k, v), positions = attention_inputs(core, queries, keys, dtype, groups)
        module.train(training)
        mask = masks(2, queries, keys)[name]
        bias = torch.randn(1, HEADS, queries, keys, dtype=dtype) if biased else None
        # on a CPU torch has no fused kernel with dropout; without dropout the fused kernel must be the one that ran
        fused = SDPBackend.MATH if training and module.dropout else SDPBackend.FLASH_ATTENTION
        manual_seed(5)
        weights = module.weights(q, k, mask=mask, positions=positions, bias=bias, dropout=True)
        check_mask(weights, mask, dropout=training and module.dropout > 0, dtype=dtype)
        expected = weights @ v.repeat_interleave(HEADS // groups, dim=1)
        for kernel in dict.fromkeys((fused, SDPBackend.MATH)) if isinstance(module, InnerProduct) else (fused,):
            manual_seed(5)
            with sdpa_kernel(kernel):
                out = module(q, k, v, mask=mask, positions=positions, bias=bias)
            equal(out, expected, dtype)
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v), allow_unused=True)
            assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


def check_mask(weights, mask, *, dropout, dtype):
    """Claims B1 and B4: masked weights are exactly 0, and every row sums to 1 unless it is fully masked."""
    visible = torch.ones(1, dtype=torch.bool) if mask.dense is None else mask.dense
    visible = visible.expand_as(weights)
    assert (weights[~visible] == 0).all(), "a masked weight is not exactly 0"
    assert (weights >= 0).all()
    if not dropout:
        expected = visible.any(dim=-1).to(weights.dtype)
        torch.testing.assert_close(
            weights.sum(dim=-1), expected, rtol=0, atol=1e-6 if dtype != torch.bfloat16 else 2e-2
        )
        check_rows(weights, 1e-4 if dtype != torch.bfloat16 else 2e-2)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("window", [None, 9], ids=["dense", "blocks"])
@pytest.mark.parametrize("core", CORES, ids=kind_id)
def test_a_fully_masked_query_gets_zeros_and_no_gradient(core, window, dtype):
    """Claim B5, in every backend: the fused kernel, literal scores, and blocks of rows."""
    length = 60 if core["kind"] in ("synthesizer-dense", "synthesizer-random") else 120
    module, inputs, positions = attention_inputs(core, length, length, dtype)
    padding_mask = torch.tensor([[True] * length, [False] * length])
    mask = Mask(length, length, padding_mask.device, padding_BM=padding_mask, causal=True, window=window)
    assert mask.form == ("blocks" if window else "dense")
    out = module(*inputs, mask=mask, positions=positions)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()
    gradients = torch.autograd.grad(out.float().square().sum(), inputs, allow_unused=True)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    assert all(gradient is None or (gradient[0] == 0).all() for gradient in gradients)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("core", CORES, ids=kind_id)
def test_blocks_of_rows_give_the_same(core, training):
    """Long sequences are computed in blocks: by the width of the window, or by the number of scores that fit."""
    module, (q, k, v), positions = attention_inputs(
        core | ({"length": 300} if core["kind"] in ("synthesizer-dense", "synthesizer-random") else {}),
        200,
        200,
        torch.float64,
    )
    module.train(training)
    device, padding_mask = torch.device("cpu"), torch.arange(200).expand(2, -1) < 5
    document_ids = torch.arange(200).div(60, rounding_mode="floor").expand(2, -1)
    non_padding_indices = ((~padding_mask).cumsum(1) - 1,) * 2
    several = [
        (None, {"window": 7, "causal": True}),
        (None, {"window": 7}),
        (None, {"window": 40, "causal": True, "document_ids": (document_ids, document_ids)}),
        (1 << 14, {"causal": True, "padding_BM": padding_mask}),
        (
            1 << 14,
            {"causal": True, "window": 9, "padding_BM": padding_mask, "non_padding_indices": non_padding_indices},
        ),
        (1 << 14, {"causal": True, "prefix_B": torch.tensor([30, 3])}),
        (1 << 14, {"causal": True, "window": 9, "prefix_B": torch.tensor([30, 3])}),
        (1 << 14, {"document_ids": (document_ids, document_ids)}),
    ]
    bias = torch.randn(1, HEADS, 200, 200, dtype=torch.float64)
    for limit, options in several:
        mask = Mask(200, 200, device, **options, **({"dense_limit": limit} if limit else {}))
        module.max_scores = limit or type(module).max_scores
        assert mask.form == "blocks", options
        assert len(module.blocks(q, k, mask)) > 1
        manual_seed(6)
        out = module(q, k, v, mask=mask, positions=positions, bias=bias)
        manual_seed(6)
        weights = module.weights(q, k, mask=mask, positions=positions, bias=bias, dropout=True)
        equal(weights @ v, out)
        check_mask(weights, mask, dropout=training and module.dropout > 0, dtype=torch.float64)
        if not training:
            equal(weights, literal_weights(module, q, k, mask, positions, bias))


def literal_weights(core, q, k, mask, positions, bias):
    """The weights of all rows at once, by the scores of the core."""
    scores = core.scores(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), positions) + bias
    visible = torch.ones_like(scores, dtype=torch.bool) if mask.dense is None else mask.dense.expand_as(scores)
    empty = ~visible.any(dim=-1, keepdim=True)
    return core.normalize(scores.masked_fill(~visible & ~empty, -torch.inf)).masked_fill(empty, 0.0)


# ------------------------------------------------------------------------------------------------- composed models


def check_weights(model, run):
    """weights @ v is the output in the composed model too, with the bias of its positions and its masks."""
    calls = []

    def hook(core, args, kwargs, output):
        calls.append((core, args, kwargs, output))

    cores = [module for module in model.modules() if isinstance(module, Core)]
    handles = [core.register_forward_hook(hook, with_kwargs=True) for core in cores]
    run()
    for handle in handles:
        handle.remove()
    assert calls
    for core, (q, k, v), kwargs, output in calls:
        weights = core.weights(q, k, **kwargs)
        equal(weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), output)
        check_mask(weights, kwargs["mask"], dropout=False, dtype=torch.float64)


def check_saved(model, spec, run):
    content = safetensors.torch.save(model.state_dict())
    other, out = random_model(spec, seed=8), run(model)
    assert not torch.equal(run(other), out)
    other.load_state_dict(safetensors.torch.load(content), strict=True)
    assert torch.equal(run(other), out)
    assert read_model(to_tree(spec)) == spec


def check_gradients(model, run):
    run().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} is not used"
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), f"{name} changes nothing"
    model.zero_grad()


def check_causal(model, run, embed):
    """Claim B3: a changed token changes no output before it, and an output has no gradient to later inputs."""
    ids, embeddings = tokens(), []
    handle = embed.register_forward_hook(lambda module, args, output: embeddings.append(output))
    before = run(ids)
    handle.remove()
    for index in (1, LENGTH // 2, LENGTH - 1):
        changed = ids.clone()
        changed[:, index] = (changed[:, index] + 1) % kinds.VOCAB
        after = run(changed)
        assert torch.equal(before[:, :index], after[:, :index])
        assert not torch.equal(before[:, index:], after[:, index:])
    (gradient,) = torch.autograd.grad(before[:, LENGTH // 2].sum(), embeddings[-1], allow_unused=True)
    assert (gradient[:, LENGTH // 2 + 1 :] == 0).all()


def check_padding(run, counts=(4, LENGTH)):
    """Claim B4: a run padded on the left or right equals the unpadded run, whatever the padding tokens are."""
    ids = tokens()
    alone = [run(Inputs(ids[row : row + 1, :count]))[0] for row, count in enumerate(counts)]
    for side in ("left", "right"):
        inputs = padded(ids, counts, side, filler=7)
        out = run(inputs)
        for row in range(len(counts)):
            equal(out[row][~inputs.padding_mask[row]], alone[row])


def needs_final_length(model):
    """Whether positions depend on the final length, which decoding must then give at the start."""
    stack = model.spec.decoder
    return stack is not None and stack.position.needs_final_length


@torch.no_grad()
def check_cached(model, source=None):
    """Every step of one or more tokens, with growing and fixed caches, equals the full forward over the same tokens."""
    ids, max_length = tokens(), LENGTH + 3
    sources = () if source is None else (source,)
    full = model(Inputs(ids, final_length=max_length), *sources)
    for size in (1, 4):  # what comes later changes nothing, so one forward is what every step is compared with
        equal(model(Inputs(ids[:, :size], final_length=max_length), *sources), full[:, :size])
    for capacity in (max_length,) if needs_final_length(model) else (None, max_length):
        begin = model.start(source, capacity=capacity)  # a state does not change: every sequence can start from it
        for cuts in ([1, 1, 1, LENGTH - 3], [4, 1, LENGTH - 5]):
            state, start = begin, 0
            for size in cuts:
                logits, state = model.step(ids[:, start : start + size], state)
                equal(logits, full[:, start : start + size])
                start += size
        _, state = model.step(ids[:, :5], begin)
        for rows in (torch.tensor([1, 0, 1]), torch.tensor([1])):  # reorder and repeat, keep one
            logits, _ = model.step(ids[rows, 5:], state.select(rows))
            equal(logits, full[rows, 5:])
        other = torch.cat((ids[:, :5], (ids[:, 5:] + 1) % kinds.VOCAB), dim=1)
        _, branch = model.step(other[:, 5:7], state)  # a branch of the same state
        logits, _ = model.step(ids[:, 5:], state)
        equal(logits, full[:, 5:])
        logits, _ = model.step(other[:, 7:], branch)
        equal(logits, model(Inputs(other, final_length=max_length), *sources)[:, 7:])
    alone = (
        None
        if source is None
        else Inputs(source.tokens[:1], padding_mask=None if source.padding_mask is None else source.padding_mask[:1])
    )
    _, state = model.step(ids[:1, :5], model.start(alone, capacity=max_length))
    logits, _ = model.step(
        ids[:1, 5:].expand(3, -1), state.select(torch.tensor([0, 0, 0]))
    )  # one row becomes three beams
    equal(logits, full[:1, 5:].expand(3, -1, -1))


@torch.no_grad()
def check_cached_padding(model):
    """Prompts of different lengths, padded on either side, continue as each does alone."""
    ids, more = tokens(length=6), tokens(length=3, seed=9)
    max_length = 12 if needs_final_length(model) else None
    texts = [torch.cat((ids[row : row + 1, :count], more[row : row + 1]), dim=1) for row, count in enumerate((3, 6))]
    alone = torch.cat([model(Inputs(text, final_length=max_length))[:, -3:] for text in texts])
    for side in ("left", "right"):
        _, state = model.step(padded(ids, (3, 6), side, filler=7), model.start(capacity=max_length))
        for i in range(3):
            logits, state = model.step(more[:, i : i + 1], state)
            equal(logits[:, 0], alone[:, i])


DECODERS = (
    [{slot: choice} for slot in ("core", "position", "attention") for choice in choices(slot)]
    + [  # every choice of a core, because its scale enters the bias of a position; pairs meet in one layer
        {"layers": 1, "core": core, "position": position}
        for core in CORES
        for position in kinds.first_choices("position")
        if kinds.fits(position, core) and position["kind"] != "none" and "dropout" not in core  # which is off here
    ]
    + [
        {"layers": 1, "attention": attention, slot: choice}
        for attention in ATTENTIONS
        for slot in ("core", "position")
        for choice in kinds.first_choices(slot)
    ]
    + [{slot: choice} for slot in ("norm", "residual", "feedforward") for choice in choices(slot)]
    + [
        {"embed": embed}
        for embed in choices("embed")
        if (spec := SLOTS["embed"].kinds[embed["kind"]]).reads == "tokens" and not spec.shares_table
    ]
    + [{"position": {"kind": "rope", "scaling": scaling}} for scaling in choices("scaling")]
    + [
        {"layers": 0},
        {"layers": 3, "pattern": [{"mask": {"window": 3}}, {"position": "rope"}]},
        {"mask": {"causal": True, "window": 2}},
        {"layers": 4, "layer_groups": 2, "position": {"kind": "clipped", "clip": 3}},
        {"layers": 2, "layer_groups": 1},
        {"embed": {"scale": True, "norm": "layer"}},
        {"final_norm": "none"},
        {"norm": "none", "residual": "post"},
    ]
)


@pytest.mark.parametrize(
    "changes",
    DECODERS,
    ids=lambda changes: " ".join(
        kind_id(v) if isinstance(v, dict) and "kind" in v else f"{k}={v}" for k, v in changes.items()
    ),
)
def test_any_decoder_is_causal_ignores_padding_and_decodes_alike_with_a_cache(changes):
    spec = kinds.decoder(**copy.deepcopy(changes))
    model = random_model(spec)
    check_causal(model, model, model.decoder.embed)
    check_padding(model)
    check_cached(model)
    check_cached_padding(model)
    check_gradients(model, lambda: model(tokens()))
    if spec.decoder.layers:
        check_weights(model, lambda: model(padded(tokens(), (4, LENGTH), "left")))
    check_saved(model, spec, lambda m: m(tokens()))


SOURCE_LENGTHS = (5, LENGTH + 2)


def source_of(side=None):
    ids = tokens(length=LENGTH + 2, seed=11)
    return Inputs(ids) if side is None else padded(ids, SOURCE_LENGTHS, side, filler=7)


def check_padded_source(model):
    """Claim B4 for the source: padding on the left or right changes nothing."""
    ids = source_of().tokens
    alone = [model(tokens()[row : row + 1], ids[row : row + 1, :count]) for row, count in enumerate(SOURCE_LENGTHS)]
    for side in ("left", "right"):
        equal(model(tokens(), source_of(side)), torch.cat(alone))


PAIRS = (
    [{"position": position} for position in POSITIONS]
    + [{"core": core} for core in CORES]
    + [{"attention": attention} for attention in choices("attention")]
    + [{"residual": residual} for residual in choices("residual")]
)


@pytest.mark.parametrize("changes", PAIRS, ids=lambda changes: kind_id(next(iter(changes.values()))))
def test_any_encoder_decoder_is_causal_ignores_padding_and_decodes_alike_with_a_cache(changes):
    spec = kinds.pair(**copy.deepcopy(changes))
    model = random_model(spec)
    source = source_of("left")
    check_causal(model, lambda ids: model(ids, source), model.decoder.embed)
    alone = model(tokens()[:1, :4], Inputs(source.tokens[:1], padding_mask=source.padding_mask[:1]))[0]
    for side in ("left", "right"):
        target = padded(tokens(), (4, LENGTH), side, filler=7)
        equal(model(target, source)[0, ~target.padding_mask[0]], alone)
    check_padded_source(model)
    check_cached(model, source)
    # without queries, the norm before cross-attention is not used
    if spec.decoder.core.query_source != "none":
        check_gradients(model, lambda: model(tokens(), source))
    check_weights(model, lambda: model(tokens(), source))
    check_saved(model, spec, lambda m: m(tokens(), source))


ENCODERS = (
    [{"position": position} for position in POSITIONS]
    + [{"core": core} for core in CORES]
    + [{slot: choice} for slot in ("attention", "norm", "residual", "feedforward") for choice in choices(slot)]
    + [{"mask": {"window": 3}}, {"embed": {"type_vocab_size": 3, "size": 6, "norm": "layer"}}]
)


@pytest.mark.parametrize(
    "changes",
    ENCODERS,
    ids=lambda changes: " ".join(f"{k}={kind_id(v) if 'kind' in v else v}" for k, v in changes.items()),
)
def test_any_encoder_ignores_padding_and_its_recorded_weights_are_those_of_its_forward(changes):
    spec = kinds.encoder(**copy.deepcopy(changes))
    model = random_model(spec)
    check_padding(model)
    check_gradients(model, lambda: model(tokens()))
    check_weights(model, lambda: model(padded(tokens(), (4, LENGTH), "right")))
    check_saved(model, spec, lambda m: m(tokens()))


@pytest.mark.parametrize(
    "head", [*choices("head"), *({"kind": "vector", "pool": pool} for pool in choices("pool"))], ids=kind_id
)
def test_every_head_ignores_padding_has_gradients_and_can_be_saved(head):
    spec = read_model(
        {"vocab": kinds.VOCAB, "encoder": kinds.stack(embed={"type_vocab_size": 2}), "head": head, "init": {"std": 0.3}}
    )
    model = random_model(spec)
    out = model(tokens())
    assert out.shape[0] == 2
    check_gradients(model, lambda: model(tokens()))
    check_saved(model, spec, lambda m: m(tokens()))
    for side in ("left", "right"):
        inputs = padded(tokens(), (4, LENGTH), side, filler=7)
        first = model(inputs)[:1]
        equal(first if first.dim() == 2 else first[:, ~inputs.padding_mask[0]], model(tokens()[:1, :4]))


RECURRENT = (
    [
        {"cell": cell, "bidirectional": ways, "layers": layers}
        for cell in choices("cell")
        for ways in (True, False)
        for layers in (1, 2)
    ]
    + [
        {"core": core, "bidirectional": False}
        for core in CORES
        if (spec := SLOTS["core"].kinds[core["kind"]])
        and (spec.query_source, spec.key_source) == ("head", "head")
        and "heads" not in core
    ]
    + [
        {"core": core}
        for core in ({"kind": "additive", "size": 5}, {"kind": "bilinear"}, {"kind": "projected", "size": 4})
    ]
    + [
        {"position": position}
        for position in POSITIONS
        if SLOTS["position"].kinds[position["kind"]].mechanism in ("none", "embed")
    ]
    + [{"readout": readout} for readout in choices("readout")]
    + [{"readout": readout, "attention": False} for readout in choices("readout")]
    + [{"attention": False}, {"attention": False, "cell": "lstm"}, {"embed": {"size": 6}}]
)


@pytest.mark.parametrize(
    "changes",
    RECURRENT,
    ids=lambda changes: " ".join(
        f"{k}={kind_id(v) if isinstance(v, dict) and 'kind' in v else v}" for k, v in changes.items()
    ),
)
def test_any_recurrent_network_is_causal_ignores_padding_and_decodes_alike_step_by_step(changes):
    tied = "readout" not in changes and "embed" not in changes and changes.get("position", {}).get("join") != "concat"
    head = {"kind": "tied" if tied else "untied"}
    spec = kinds.recurrent(**copy.deepcopy(changes)).replace(head=head)
    model = random_model(spec)
    source = source_of("right")
    check_causal(model, lambda ids: model(ids, source), model.embed)
    check_padded_source(model)
    check_cached(model, source)
    check_gradients(model, lambda: model(tokens(), source))
    check_saved(model, spec, lambda m: m(tokens(), source))
    if spec.recurrent.attention:
        check_weights(model, lambda: model(tokens(), source))


@pytest.mark.parametrize(
    "spec",
    [
        kinds.recurrent(source=False),
        kinds.recurrent(source=False, cell="lstm", layers=2),
        kinds.recurrent(source=False, cell="lstmn", layers=2),
        kinds.ngram(),
        kinds.ngram(order=2),
        kinds.ngram(order=5),
    ],
    ids=["gru", "lstm", "lstmn", "trigram", "bigram", "five-gram"],
)
def test_recurrent_and_ngram_language_models_are_causal_ignore_padding_and_decode_alike_step_by_step(spec):
    model = random_model(spec)
    check_causal(model, model, model.embed if spec.recurrent else model.embedding)
    check_padding(model)
    check_cached(model)
    check_cached_padding(model)
    check_gradients(model, lambda: model(tokens()))
    check_saved(model, spec, lambda m: m(tokens()))


@pytest.mark.parametrize("init", choices("init"), ids=kind_id)
@pytest.mark.parametrize("shape", ["decoder", "pair", "recurrent", "ngram"])
def test_every_weight_is_initialized_after_a_build_on_the_meta_device(shape, init):
    """Uninitialized memory holds anything, so no NaN written there may be left. The same seed gives the same bits."""
    from manyheads.model.builder import build
    from manyheads.model.init import init_weights

    spec = getattr(kinds, shape)().replace(init=init)
    model = build_meta(spec).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)
        init_weights(model, spec.init)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all(), name
    first, second, third = build(spec, seed=4), build(spec, seed=4), build(spec, seed=5)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))


SHAPES = {
    "encoder": kinds.encoder,
    "decoder": kinds.decoder,
    "pair": kinds.pair,
    "recurrent": kinds.recurrent,
    "ngram": kinds.ngram,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_runs_in_float32_and_bfloat16(shape, dtype):
    """Close to the float64 result, with finite gradients of the same dtype; step by step as at once."""
    spec = SHAPES[shape]() if shape in ("recurrent", "ngram") else SHAPES[shape](position="rope")
    exact, model = random_model(spec), random_model(spec).to(dtype)
    inputs, source = (
        padded(tokens(), (4, LENGTH), "left"),
        source_of("right") if shape in ("pair", "recurrent") else None,
    )
    out, real = model(inputs, source), ~inputs.padding_mask
    assert out.dtype == dtype
    near = {torch.float32: 1e-4, torch.bfloat16: 0.15}[dtype]
    torch.testing.assert_close(out.double()[real], exact(inputs, source)[real], rtol=near, atol=near)
    out[real].float().square().mean().backward()
    assert all(parameter.grad.dtype == dtype and parameter.grad.isfinite().all() for parameter in model.parameters())
    if shape != "encoder":
        with torch.no_grad():
            first = Inputs(inputs.tokens[:, :5], padding_mask=inputs.padding_mask[:, :5])
            _, state = model.step(first, model.start(source))
            again, _ = model.step(inputs.tokens[:, 5:], state)
        torch.testing.assert_close(again, out[:, 5:], rtol=near, atol=near)


@pytest.mark.parametrize("position", POSITIONS, ids=kind_id)
def test_a_packed_row_equals_its_documents(position):
    """Segments keep packed documents apart in both stacks, and positions start at 0 in each."""
    model = random_model(kinds.pair(position=position))
    if model.spec.encoder.position.needs_final_length:
        with raises("input.invalid", "final_length"):
            model(*[Inputs(tokens(1), document_ids=torch.zeros(1, LENGTH, dtype=torch.long))] * 2)
        return
    first, second = tokens(1, 4), tokens(1, 5, seed=5)
    document_ids = torch.tensor([[0] * 4 + [1] * 5])
    positions = torch.cat((torch.arange(4), torch.arange(5)))[None]
    packed = Inputs(torch.cat((first, second), dim=1), document_ids=document_ids, positions=positions)
    for inputs in (packed, Inputs(packed.tokens, document_ids=document_ids)):  # with and without given positions
        out = model(inputs, inputs)
        equal(out[:, :4], model(first, first))
        equal(out[:, 4:], model(second, second))


def test_every_token_attends_to_the_prefix_and_the_rest_is_causal():
    model = random_model(kinds.decoder(mask={"prefix": True}))
    ids, prefix = tokens(), torch.tensor([4, 0])
    for index in range(LENGTH):
        other = ids.clone()
        other[:, index] = (other[:, index] + 1) % kinds.VOCAB
        changed = (model(Inputs(ids, prefix_lengths=prefix)) != model(Inputs(other, prefix_lengths=prefix))).any(dim=-1)
        expected = torch.stack([torch.arange(LENGTH) >= (0 if index < count else index) for count in prefix.tolist()])
        assert torch.equal(changed, expected)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 2])
def test_a_prefix_is_part_of_the_state_and_does_not_count_padding(window):
    model = random_model(kinds.decoder(mask={"prefix": True} | ({"window": window} if window else {})))
    ids, prefix = tokens(), torch.tensor([3, 2])
    full = model(Inputs(ids, prefix_lengths=prefix))
    _, state = model.step(Inputs(ids[:, :5], prefix_lengths=prefix), model.start())
    equal(model.step(ids[:, 5:], state)[0], full[:, 5:])
    for side in ("left", "right"):
        inputs = padded(ids, (5, LENGTH), side, filler=7)
        out = model(Inputs(inputs.tokens, padding_mask=inputs.padding_mask, prefix_lengths=prefix))
        equal(out[0, ~inputs.padding_mask[0]], model(Inputs(ids[:1, :5], prefix_lengths=prefix[:1]))[0])
    with raises("input.length", "2 tokens", "prefix of 3") as caught:
        model.step(Inputs(ids[:, :2], prefix_lengths=prefix), model.start())
    assert caught.value.index == 0


def test_computing_weights_draws_no_random_numbers():
    """Weights computed during training do not change the run."""
    model = random_model(kinds.decoder(core={"dropout": 0.5})).train()
    manual_seed(3)
    expected = model(tokens())

    def hook(core, args, kwargs, output):
        check_rows(core.weights(*args[:2], **kwargs))

    for layer in model.decoder.layers:
        layer.attention.core.register_forward_hook(hook, with_kwargs=True)
    manual_seed(3)
    assert torch.equal(model(tokens()), expected)


def test_mask_tokens_put_every_encoder_state_at_its_position():
    """The decoder of a masked autoencoder: the order of the visible patches does not matter, their positions do."""
    from manyheads import preset

    model = random_model(read_model(preset("mae-tiny")))
    image = torch.randn(2, 16, 4, dtype=torch.float64)
    positions = torch.tensor([[3, 7, 8, 15], [0, 1, 2, 9]])
    visible = image.gather(1, positions[..., None].expand(-1, -1, 4))
    out = model(Inputs(image), Inputs(visible, positions=positions))
    assert out.shape == image.shape
    order = torch.tensor([2, 0, 3, 1])
    equal(model(Inputs(image), Inputs(visible[:, order], positions=positions[:, order])), out)
    moved = positions.clone()
    moved[0, 0] = 4
    assert not torch.allclose(model(Inputs(image), Inputs(visible, positions=moved))[0], out[0])


def test_a_class_token_stands_before_the_patches_and_padded_patches_are_ignored():
    spec = read_model(
        {
            "encoder": {
                "width": WIDTH,
                "embed": {"kind": "patches", "pixels": 4, "class_token": True},
                "position": {"kind": "learned", "length": 17},
            },
            "head": "none",
        }
    )
    model = random_model(spec)
    image = torch.randn(2, 16, 4, dtype=torch.float64)
    out = model(image)
    assert out.shape == (2, 17, WIDTH)
    padding_mask = torch.zeros(2, 16, dtype=torch.bool)
    padding_mask[:, 10:] = True
    equal(model(Inputs(image, padding_mask=padding_mask))[:, :11], model(image[:, :10]))
    check_gradients(model, lambda: model(image))


@torch.no_grad()
@pytest.mark.parametrize("shape", ["decoder", "encoder", "pair", "recurrent", "ngram", "masked", "pixels", "classes"])
def test_logits_to_keep_gives_the_logits_where_it_is_true(shape):
    heads = ("masked", "pixels", "classes")
    spec = read_model({"vocab": kinds.VOCAB, "encoder": kinds.stack(), "head": shape}) if shape in heads else None
    model = random_model(spec or getattr(kinds, shape)())
    inputs = (tokens(), tokens()) if shape in ("pair", "recurrent") else (tokens(),)
    out = model(*inputs)
    mask = torch.arange(out.shape[:-1].numel()).view(out.shape[:-1]) % 2 == 1
    equal(model(*inputs, logits_to_keep=mask), out[mask])


def test_a_part_that_does_not_initialize_its_tensors_is_an_error():
    class NoReset(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(width))

        def forward(self, x):
            return x * self.gain

    class WithBuffer(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.register_buffer("steps", torch.arange(width), persistent=False)

    class WithBufferSpec(SLOTS["norm"], kind="with-buffer"):
        def build(self, width):
            return WithBuffer(width)

    class NoResetSpec(SLOTS["norm"], kind="no-reset"):
        def build(self, width):
            return NoReset(width)

    class Replaced(NoReset):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("scale", torch.ones(width))

        def reset_parameters(self):
            torch.nn.init.ones_(self.gain)
            self.scale = torch.full_like(self.scale, 2.0)  # another tensor, not the same one filled

    class ReplacedSpec(SLOTS["norm"], kind="replaced"):
        def build(self, width):
            return Replaced(width)

    names = {"no-reset": "decoder.layers.0.residual.norms.0.gain", "with-buffer": "decoder.layers.0.residual.norms.0"}
    try:
        buffers = dict(build(kinds.decoder(norm="replaced")).named_buffers())
        assert buffers
        assert all((buffer == 2).all() for buffer in buffers.values())
        for kind, name in names.items():
            with raises("usage.parts-file", f"{name} ", "reset_parameters"):
                random_model(kinds.decoder(norm=kind))
    finally:
        for kind in (*names, "replaced"):
            del SLOTS["norm"].kinds[kind]
