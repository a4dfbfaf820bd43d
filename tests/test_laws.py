"""The laws, over every kind of every slot: attention, causality, padding, caches, saving, gradients.

`pytest tests/test_laws.py --parts yours.py` runs them on parts of your own.
"""

from __future__ import annotations

import copy

import kinds
import pytest
import safetensors.torch
import torch
from kinds import HEADS, LENGTH, WIDTH, choices, made, named, padded, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel

from manyheads import Inputs, outline, read_model, record
from manyheads.parts.attend import Core, check_rows
from manyheads.parts.mask import Mask
from manyheads.parts.position import Places
from manyheads.spec import SLOTS, to_tree

CORES, POSITIONS = choices("core"), choices("position")
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def equal(a, b, dtype=torch.float64):
    torch.testing.assert_close(a, b, rtol=CLOSE[dtype], atol=CLOSE[dtype])


# ------------------------------------------------------------------------------------ weights @ v == forward


def masks(batch, queries, keys):
    """Every mask and some combinations, with a row that sees nothing where a mask can make one."""
    device = torch.device("cpu")

    def mask(**options):
        return Mask(queries, keys, device, **options)

    right = torch.zeros(batch, keys, dtype=torch.bool)
    right[1, keys - 3 :] = True
    left = right.flip(-1)
    nobody = right.clone()
    nobody[0] = True
    segments = torch.arange(keys).div(4, rounding_mode="floor").expand(batch, -1)
    of_queries = segments[:, keys - queries :]
    alone = of_queries.clone()
    alone[0, 0] = 99
    last = keys - queries
    return {
        "open": mask(),
        "padding right": mask(padding_BM=right),
        "padding left": mask(padding_BM=left),
        "all padding": mask(padding_BM=nobody),
        "segments": mask(segments=(of_queries, segments)),
        "alone": mask(segments=(alone, segments)),
        "causal": mask(causal=True, offset=last),
        "causal, padding left": mask(causal=True, offset=last, padding_BM=left),
        "causal, segments, padding": mask(causal=True, offset=last, segments=(of_queries, segments), padding_BM=right),
        "window": mask(window=2, offset=last),
        "window, causal": mask(window=3, causal=True, offset=last),
        "window, causal, padding": mask(window=2, causal=True, offset=last, padding_BM=left),
        "prefix": mask(causal=True, offset=last, prefix_B=torch.tensor([3, 0])),
        "prefix, window, padding": mask(causal=True, window=2, offset=last, prefix_B=torch.tensor([4, 1]), padding_BM=right),
    }


MASKS = list(masks(2, 5, 9))


def attention_inputs(core, queries, keys, dtype, groups=HEADS):
    spec = SLOTS["core"].choose(core)
    sizes = {"head": 6, "memory": 8, "none": 0}
    query_size, key_size = sizes[spec.query], {"head": 6, "raw": 8, "none": 0}[spec.key]
    module = spec.build(HEADS, query_size, key_size).to(dtype).requires_grad_(False)
    q = torch.randn(2, HEADS, queries, query_size, dtype=dtype)
    k = torch.randn(2, groups if spec.key == "head" else 1, keys, key_size, dtype=dtype)
    v = torch.randn(2, groups, keys, 6, dtype=dtype)
    places = Places(torch.arange(keys - queries, keys)[None], torch.arange(keys)[None])
    return module, [x.requires_grad_() for x in (q, module.key(k), v)], places


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("core", CORES, ids=named)
def test_weights_at_values_are_the_fast_forward(core, name, dtype, training):
    for queries, keys, groups, biased in ((9, 9, HEADS, False), (9, 9, 1, True), (5, 9, HEADS, True), (1, 9, HEADS, False)):
        module, (q, k, v), places = attention_inputs(core, queries, keys, dtype, groups)
        module.train(training)
        mask = masks(2, queries, keys)[name]
        bias = torch.randn(1, HEADS, queries, keys, dtype=dtype) if biased else None
        # with dropout torch has only its plain path on a CPU; without, the fused kernel must be the one that ran
        fused = SDPBackend.MATH if training and module.drop else SDPBackend.FLASH_ATTENTION
        for kernel in (fused, SDPBackend.MATH):
            torch.manual_seed(5)
            with sdpa_kernel(kernel):
                out = module(q, k, v, mask=mask, places=places, bias=bias)
            torch.manual_seed(5)
            weights = module.weights(q, k, mask=mask, places=places, bias=bias, dropped=True)
            equal(weights @ v.repeat_interleave(HEADS // groups, dim=1), out, dtype)
            obeys_the_mask(weights, mask, dropped=training and module.drop > 0, dtype=dtype)
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v), allow_unused=True)
            assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


def obeys_the_mask(weights, mask, *, dropped, dtype):
    seen = torch.ones(1, dtype=torch.bool) if mask.dense is None else mask.dense
    seen = seen.expand_as(weights)
    assert (weights[~seen] == 0).all(), "a masked weight is not exactly 0"
    assert (weights >= 0).all()
    if not dropped:
        expected = seen.any(dim=-1).to(weights.dtype)
        torch.testing.assert_close(weights.sum(dim=-1), expected, rtol=0, atol=1e-6 if dtype != torch.bfloat16 else 2e-2)
        check_rows(weights, 1e-4 if dtype != torch.bfloat16 else 2e-2)


@pytest.mark.parametrize("core", CORES, ids=named)
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients(core):
    module, (q, k, v), places = attention_inputs(core, 5, 9, torch.float32)
    mask = masks(2, 5, 9)["all padding"]
    out = module(q, k, v, mask=mask, places=places)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()
    out.square().sum().backward()
    assert all(tensor.grad is None or tensor.grad.isfinite().all() for tensor in (q, k, v))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("core", CORES, ids=named)
def test_blocks_of_rows_say_the_same(core, training, monkeypatch):
    """Long texts are computed in blocks: by the window's width, or by the number of scores that fit."""
    module, (q, k, v), places = attention_inputs(
        core | ({"length": 300} if core["kind"] in ("dense", "random") else {}), 200, 200, torch.float64
    )
    module.train(training)
    device, padding = torch.device("cpu"), torch.arange(200).expand(2, -1) < 5
    segments = torch.arange(200).div(60, rounding_mode="floor").expand(2, -1)
    ranks = ((~padding).cumsum(1) - 1,) * 2
    several = [
        (None, {"window": 7, "causal": True}),
        (None, {"window": 7}),
        (None, {"window": 40, "causal": True, "segments": (segments, segments)}),
        (1 << 14, {"causal": True, "padding_BM": padding}),
        (1 << 14, {"causal": True, "window": 9, "padding_BM": padding, "ranks": ranks}),
        (1 << 14, {"causal": True, "prefix_B": torch.tensor([30, 3])}),
        (1 << 14, {"causal": True, "window": 9, "prefix_B": torch.tensor([30, 3])}),
        (1 << 14, {"segments": (segments, segments)}),
    ]
    bias = torch.randn(1, HEADS, 200, 200, dtype=torch.float64)
    for limit, options in several:
        mask = Mask(200, 200, device, **options)
        monkeypatch.setattr("manyheads.parts.mask.DENSE_LIMIT", limit or 1 << 24)
        monkeypatch.setattr("manyheads.parts.attend.LITERAL_LIMIT", limit or 1 << 22)
        assert mask.form == "blocks", options
        assert len(module.blocks(q, k, mask)) > 1
        torch.manual_seed(6)
        out = module(q, k, v, mask=mask, places=places, bias=bias)
        torch.manual_seed(6)
        weights = module.weights(q, k, mask=mask, places=places, bias=bias, dropped=True)
        equal(weights @ v, out)
        obeys_the_mask(weights, mask, dropped=training and module.drop > 0, dtype=torch.float64)
        if not training:
            equal(weights, module._weights(q, k, mask, places, bias, dropped=False))


# --------------------------------------------------------------------------------- every model in which parts meet


def recorded_cores(model):
    """What each core was given and gave in a run, by forward hooks."""
    seen = []

    def hook(core, args, kwargs, output):
        seen.append((core, args, kwargs, output))

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in model.modules() if isinstance(module, Core)]
    return seen, handles


def check_seen_as_computed(model, run):
    """In the composed model too, with the positions' bias and the real masks: weights @ v is what came out."""
    seen, handles = recorded_cores(model)
    run()
    for handle in handles:
        handle.remove()
    assert seen
    for core, (q, k, v), kwargs, output in seen:
        weights = core.weights(q, k, **kwargs)
        equal(weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), output)
        obeys_the_mask(weights, kwargs["mask"], dropped=False, dtype=torch.float64)


def check_saved(model, spec, run):
    held = safetensors.torch.save(model.state_dict())
    other = made(spec, seed=8)
    assert not torch.equal(run(other), run(model))
    other.load_state_dict(safetensors.torch.load(held), strict=True)
    assert torch.equal(run(other), run(model))
    assert read_model(to_tree(spec)) == spec


def check_gradients(model, run):
    run().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} takes no part in the result"
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), f"{name} changes nothing"
    model.zero_grad()


def check_causal(model, run, embed):
    """A changed token changes no output before it, and no gradient flows back from an output to a later input."""
    ids = tokens()
    for place in (1, LENGTH // 2, LENGTH - 1):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % kinds.VOCAB
        before, after = run(ids), run(other)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.equal(before[:, place:], after[:, place:])
    held = []
    handle = embed.register_forward_hook(lambda module, args, output: held.append(output))
    out = run(ids)
    handle.remove()
    (gradient,) = torch.autograd.grad(out[:, LENGTH // 2].sum(), held[-1], allow_unused=True)
    assert (gradient[:, LENGTH // 2 + 1 :] == 0).all()


def check_padding(run, counts=(4, LENGTH)):
    """Left and right padding equal the unpadded run, whatever stands in the padded places."""
    ids = tokens()
    for side in ("left", "right"):
        given = padded(ids, counts, side, filler=7)
        out = run(given)
        for row, count in enumerate(counts):
            equal(out[row][~given.padding[row]], run(Inputs(ids[row : row + 1, :count]))[0])


def asks_span(model):
    """Whether the positions depend on how long the text will be, so that decoding must say it at the start."""
    tower = model.spec.decoder
    return tower is not None and tower.position.asks_span


@torch.no_grad()
def check_cached(model, source=None):
    """After every step, in ones or in chunks, with growing and fixed caches: what a full forward over the text so far says."""
    ids, room = tokens(), LENGTH + 3
    sources = () if source is None else (source,)
    full = {size: model(Inputs(ids[:, :size], span=room), *sources) for size in range(1, LENGTH + 1)}
    for capacity in (room,) if asks_span(model) else (None, room):
        for cuts in ([1] * LENGTH, [4, 1, LENGTH - 5]):
            state, start = model.start(source, capacity=capacity), 0
            for size in cuts:
                logits, state = model.step(ids[:, start : start + size], state)
                equal(logits, full[start + size][:, start:])
                start += size
        _, state = model.step(ids[:, :5], model.start(source, capacity=capacity))
        for rows in (torch.tensor([1, 0, 1]), torch.tensor([1]), torch.tensor([0, 0])):  # reorder, keep one, repeat
            logits, _ = model.step(ids[rows, 5:], state.select(rows))
            equal(logits, full[LENGTH][rows, 5:])
        other = torch.cat((ids[:, :5], (ids[:, 5:] + 1) % kinds.VOCAB), dim=1)
        _, branch = model.step(other[:, 5:7], state)  # two ways on from one state
        logits, _ = model.step(ids[:, 5:], state)
        equal(logits, full[LENGTH][:, 5:])
        logits, _ = model.step(other[:, 7:], branch)
        equal(logits, model(Inputs(other, span=room), *sources)[:, 7:])
    alone = None if source is None else Inputs(source.tokens[:1], padding=None if source.padding is None else source.padding[:1])
    _, state = model.step(ids[:1, :5], model.start(alone, capacity=room))
    logits, _ = model.step(ids[:1, 5:].expand(3, -1), state.select(torch.tensor([0, 0, 0])))  # one text becomes three beams
    equal(logits, full[LENGTH][:1, 5:].expand(3, -1, -1))


@torch.no_grad()
def check_cached_padding(model):
    """Prompts of other lengths, padded on either side, continue as each would alone."""
    ids, more = tokens(length=6), tokens(length=3, seed=9)
    room = 12 if asks_span(model) else None
    for side in ("left", "right"):
        given = padded(ids, (3, 6), side, filler=7)
        _, state = model.step(given, model.start(capacity=room))
        for i in range(3):
            logits, state = model.step(more[:, i : i + 1], state)
            for row, count in enumerate((3, 6)):
                alone = model(Inputs(torch.cat((ids[row : row + 1, :count], more[row : row + 1, : i + 1]), dim=1), span=room))
                equal(logits[row, 0], alone[0, -1])


DECODERS = (
    [{"core": core, "position": position} for core in CORES for position in POSITIONS if kinds.fits(position, core)]
    + [{"attention": attention, "core": core} for attention in choices("attention") for core in CORES if core.get("dropout", 0) == 0]
    + [{"attention": attention, "position": position} for attention in choices("attention") for position in POSITIONS]
    + [{slot: choice} for slot in ("norm", "residual", "feedforward") for choice in choices(slot)]
    + [
        {"embed": embed}
        for embed in choices("embed")
        if (chosen := SLOTS["embed"].kinds[embed["kind"]]).reads == "tokens" and not chosen.borrows
    ]
    + [{"position": {"kind": "rope", "scaling": scaling}} for scaling in choices("scaling")]
    + [
        {"layers": 0},
        {"layers": 3, "pattern": [{"mask": {"window": 3}}, {"position": "rope"}]},
        {"mask": {"causal": True, "window": 2}},
        {"layers": 4, "distinct": 2, "position": {"kind": "clipped", "clip": 3}},
        {"layers": 2, "distinct": 1},
        {"embed": {"scale": True, "norm": "layer"}},
        {"final_norm": "none"},
        {"norm": "none", "residual": "post"},
    ]
)


@pytest.mark.parametrize(
    "changes",
    DECODERS,
    ids=lambda changes: " ".join(named(v) if isinstance(v, dict) and "kind" in v else f"{k}={v}" for k, v in changes.items()),
)
def test_decoder(changes):
    spec = kinds.decoder(**copy.deepcopy(changes))
    model = made(spec)
    check_causal(model, model, model.decoder.embed)
    check_padding(model)
    check_cached(model)
    check_cached_padding(model)
    check_gradients(model, lambda: model(tokens()))
    if spec.decoder.layers:
        check_seen_as_computed(model, lambda: model(padded(tokens(), (4, LENGTH), "left")))
    check_saved(model, spec, lambda m: m(tokens()))


def source_of(side=None):
    ids = tokens(length=LENGTH + 2, seed=11)
    return Inputs(ids) if side is None else padded(ids, (5, LENGTH + 2), side, filler=7)


PAIRS = (
    [{"position": position} for position in POSITIONS]
    + [{"core": core} for core in CORES]
    + [{"attention": attention} for attention in choices("attention")]
    + [{"residual": residual} for residual in choices("residual")]
)


@pytest.mark.parametrize("changes", PAIRS, ids=lambda changes: named(next(iter(changes.values()))))
def test_encoder_decoder(changes):
    spec = kinds.pair(**copy.deepcopy(changes))
    model = made(spec)
    source = source_of("left")
    check_causal(model, lambda ids: model(ids, source), model.decoder.embed)
    for side in ("left", "right"):
        given = padded(tokens(), (4, LENGTH), side, filler=7)
        alone = Inputs(source.tokens[:1], padding=source.padding[:1])
        equal(model(given, source)[0, ~given.padding[0]], model(tokens()[:1, :4], alone)[0])
    for side in ("left", "right"):
        given = source_of(side)
        out = model(tokens(), given)
        for row in range(2):
            real = Inputs(given.tokens[row : row + 1, ~given.padding[row]])
            equal(out[row], model(tokens()[row : row + 1], real)[0])
    check_cached(model, source)
    if changes.get("core", {}).get("kind") != "random":  # across, it reads no query, so the norm before it takes no part
        check_gradients(model, lambda: model(tokens(), source))
    check_seen_as_computed(model, lambda: model(tokens(), source))
    check_saved(model, spec, lambda m: m(tokens(), source))


ENCODERS = (
    [{"position": position} for position in POSITIONS]
    + [{"core": core} for core in CORES]
    + [{slot: choice} for slot in ("attention", "norm", "residual", "feedforward") for choice in choices(slot)]
    + [{"mask": {"window": 3}}, {"embed": {"types": 3, "size": 6, "norm": "layer"}}]
)


@pytest.mark.parametrize(
    "changes", ENCODERS, ids=lambda changes: " ".join(f"{k}={named(v) if 'kind' in v else v}" for k, v in changes.items())
)
def test_encoder(changes):
    spec = kinds.encoder(**copy.deepcopy(changes))
    model = made(spec)
    check_padding(model)
    check_gradients(model, lambda: model(tokens()))
    check_seen_as_computed(model, lambda: model(padded(tokens(), (4, LENGTH), "right")))
    check_saved(model, spec, lambda m: m(tokens()))


@pytest.mark.parametrize("head", [*choices("head"), *({"kind": "vector", "pool": pool} for pool in choices("pool"))], ids=named)
def test_head(head):
    spec = read_model({"vocab": kinds.VOCAB, "encoder": kinds.tower(embed={"types": 2}), "head": head, "init": {"std": 0.3}})
    model = made(spec)
    out = model(tokens())
    assert out.shape[0] == 2
    check_gradients(model, lambda: model(tokens()))
    check_saved(model, spec, lambda m: m(tokens()))
    for side in ("left", "right"):
        given = padded(tokens(), (4, LENGTH), side, filler=7)
        alone = model(tokens()[:1, :4])
        found = model(given)[:1]
        equal(found if found.dim() == 2 else found[:, ~given.padding[0]], alone)


RECURRENT = (
    [{"cell": cell, "two_way": ways, "layers": layers} for cell in choices("cell") for ways in (True, False) for layers in (1, 2)]
    + [
        {"core": core, "two_way": False}
        for core in CORES
        if (chosen := SLOTS["core"].kinds[core["kind"]]) and (chosen.query, chosen.key) == ("head", "head") and "heads" not in core
    ]
    + [{"core": core} for core in ({"kind": "additive", "size": 5}, {"kind": "bilinear"}, {"kind": "projected", "size": 4})]
    + [{"position": position} for position in POSITIONS if SLOTS["position"].kinds[position["kind"]].door in ("none", "embed")]
    + [{"readout": readout} for readout in choices("readout")]
    + [{"readout": readout, "attention": False} for readout in choices("readout")]
    + [{"attention": False}, {"attention": False, "cell": "lstm"}, {"embed": {"size": 6}}]
)


@pytest.mark.parametrize(
    "changes",
    RECURRENT,
    ids=lambda changes: " ".join(f"{k}={named(v) if isinstance(v, dict) and 'kind' in v else v}" for k, v in changes.items()),
)
def test_recurrent(changes):
    tied = "readout" not in changes and "embed" not in changes and changes.get("position", {}).get("join") != "concat"
    head = {"kind": "tied" if tied else "free"}
    spec = kinds.recurrent(**copy.deepcopy(changes)).changed(head=head)
    model = made(spec)
    source = source_of("right")
    check_causal(model, lambda ids: model(ids, source), model.embed)
    for side in ("left", "right"):
        given = source_of(side)
        out = model(tokens(), given)
        for row in range(2):
            equal(out[row], model(tokens()[row : row + 1], given.tokens[row : row + 1, ~given.padding[row]])[0])
    check_cached(model, source)
    check_gradients(model, lambda: model(tokens(), source))
    check_saved(model, spec, lambda m: m(tokens(), source))
    if spec.recurrent.attention:
        check_seen_as_computed(model, lambda: model(tokens(), source))


@pytest.mark.parametrize(
    "spec",
    [
        kinds.recurrent(source=False),
        kinds.recurrent(source=False, cell="lstm", layers=2),
        kinds.ngram(),
        kinds.ngram(order=2),
        kinds.ngram(order=5),
    ],
    ids=["gru", "lstm", "trigram", "bigram", "five-gram"],
)
def test_language_models_of_other_shapes(spec):
    model = made(spec)
    check_causal(model, model, model.embed if spec.recurrent else model.embedding)
    check_padding(model)
    check_cached(model)
    check_cached_padding(model)
    check_gradients(model, lambda: model(tokens()))
    check_saved(model, spec, lambda m: m(tokens()))


@pytest.mark.parametrize("init", choices("init"), ids=named)
@pytest.mark.parametrize("shape", ["decoder", "pair", "recurrent", "ngram"])
def test_every_weight_is_set_after_a_build_without_memory(shape, init):
    """Memory that was never written holds anything; after initialising, nothing of it may be left. Same seed, same bits."""
    from manyheads.model.build import build
    from manyheads.model.init import initialise

    spec = getattr(kinds, shape)().changed(init=init)
    model = outline(spec).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)
        initialise(model, spec.init)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all(), name
    first, second, third = build(spec, seed=4), build(spec, seed=4), build(spec, seed=5)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))


SHAPES = {"encoder": kinds.encoder, "decoder": kinds.decoder, "pair": kinds.pair, "recurrent": kinds.recurrent, "ngram": kinds.ngram}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_runs_in_the_precisions_people_use(shape, dtype):
    """Near the float64 result, gradients finite and of the same precision; step by step as at once."""
    spec = SHAPES[shape]() if shape in ("recurrent", "ngram") else SHAPES[shape](position="rope")
    exact, model = made(spec), made(spec).to(dtype)
    given = [padded(tokens(), (4, LENGTH), "left"), *([source_of("right")] if shape in ("pair", "recurrent") else [])]
    out, real = model(*given), ~given[0].padding
    assert out.dtype == dtype
    near = {torch.float32: 1e-4, torch.bfloat16: 0.15}[dtype]
    torch.testing.assert_close(out.double()[real], exact(*given)[real], rtol=near, atol=near)
    out[real].float().square().mean().backward()
    assert all(parameter.grad.dtype == dtype and parameter.grad.isfinite().all() for parameter in model.parameters())
    if shape != "encoder":
        with torch.no_grad():
            state = model.start(given[1] if len(given) > 1 else None)
            _, state = model.step(Inputs(given[0].tokens[:, :5], padding=given[0].padding[:, :5]), state)
            again, _ = model.step(given[0].tokens[:, 5:], state)
        torch.testing.assert_close(again, out[:, 5:], rtol=near, atol=near)


@pytest.mark.parametrize("position", POSITIONS, ids=named)
def test_a_packed_row_is_its_documents(position):
    """Segments keep packed documents apart, in both towers; positions start anew with each."""
    model = made(kinds.pair(position=position))
    if model.spec.encoder.position.asks_span:
        with pytest.raises(ValueError, match="a row holds several: give span"):
            model(*[Inputs(tokens(1), segments=torch.zeros(1, LENGTH, dtype=torch.long))] * 2)
        return
    first, second = tokens(1, 4), tokens(1, 5, seed=5)
    segments = torch.tensor([[0] * 4 + [1] * 5])
    positions = torch.cat((torch.arange(4), torch.arange(5)))[None]
    packed = Inputs(torch.cat((first, second), dim=1), segments=segments, positions=positions)
    for given in (packed, Inputs(packed.tokens, segments=segments)):  # positions start anew by themselves
        out = model(given, given)
        equal(out[:, :4], model(first, first))
        equal(out[:, 4:], model(second, second))


def test_a_prefix_is_seen_by_all_and_the_rest_is_causal():
    model = made(kinds.decoder(mask={"prefix": True}))
    ids, prefix = tokens(), torch.tensor([4, 0])
    for place in range(LENGTH):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % kinds.VOCAB
        changed = (model(Inputs(ids, prefix=prefix)) != model(Inputs(other, prefix=prefix))).any(dim=-1)
        expected = torch.stack([torch.arange(LENGTH) >= (0 if place < count else place) for count in prefix.tolist()])
        assert torch.equal(changed, expected)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 2])
def test_a_prefix_is_remembered_and_padding_takes_nothing_from_it(window):
    model = made(kinds.decoder(mask={"prefix": True} | ({"window": window} if window else {})))
    ids, prefix = tokens(), torch.tensor([3, 2])
    full = model(Inputs(ids, prefix=prefix))
    _, state = model.step(Inputs(ids[:, :5], prefix=prefix), model.start())
    equal(model.step(ids[:, 5:], state)[0], full[:, 5:])
    for side in ("left", "right"):
        given = padded(ids, (5, LENGTH), side, filler=7)
        found = model(Inputs(given.tokens, padding=given.padding, prefix=prefix))
        equal(found[0, ~given.padding[0]], model(Inputs(ids[:1, :5], prefix=prefix[:1]))[0])
    with pytest.raises(ValueError, match="text 0 has 2 tokens, and its prefix is said to have 3"):
        model.step(Inputs(ids[:, :2], prefix=prefix), model.start())


def test_looking_draws_no_random_number():
    """Weights asked for in training leave the run as it was."""
    model = made(kinds.decoder(core={"dropout": 0.5})).train()
    torch.manual_seed(3)
    expected = model(tokens())
    for layer in model.decoder.layers:
        layer.attention.core.register_forward_hook(look, with_kwargs=True)
    torch.manual_seed(3)
    assert torch.equal(model(tokens()), expected)


def look(core, args, kwargs, output):
    check_rows(core.weights(*args[:2], **kwargs))


def test_restored_pictures_put_every_state_back_in_its_place():
    """The masked autoencoder's decoder: the order in which the visible patches come does not matter, where they stand does."""
    from manyheads import preset

    model = made(read_model(preset("mae-tiny")))
    picture = torch.randn(2, 16, 4, dtype=torch.float64)
    shown = torch.tensor([[3, 7, 8, 15], [0, 1, 2, 9]])
    visible = picture.gather(1, shown[..., None].expand(-1, -1, 4))
    out = model(Inputs(picture), Inputs(visible, positions=shown))
    assert out.shape == picture.shape
    order = torch.tensor([2, 0, 3, 1])
    equal(model(Inputs(picture), Inputs(visible[:, order], positions=shown[:, order])), out)
    moved = shown.clone()
    moved[0, 0] = 4
    assert not torch.allclose(model(Inputs(picture), Inputs(visible, positions=moved))[0], out[0])


def test_patches_behind_a_first_vector():
    spec = read_model(
        {
            "encoder": {
                "width": WIDTH,
                "embed": {"kind": "patches", "pixels": 4, "first": True},
                "position": {"kind": "learned", "length": 17},
            },
            "head": "none",
        }
    )
    model = made(spec)
    picture = torch.randn(2, 16, 4, dtype=torch.float64)
    out = model(picture)
    assert out.shape == (2, 17, WIDTH)
    padding = torch.zeros(2, 16, dtype=torch.bool)
    padding[:, 10:] = True
    equal(model(Inputs(picture, padding=padding))[:, :11], model(picture[:, :10]))
    check_gradients(model, lambda: model(picture))


@torch.no_grad()
@pytest.mark.parametrize("shape", ["decoder", "encoder", "pair", "recurrent", "ngram", "masked", "pixels", "classes"])
def test_what_is_asked_at_some_places_is_what_is_said_there(shape):
    heads = ("masked", "pixels", "classes")
    model = made(read_model({"vocab": kinds.VOCAB, "encoder": kinds.tower(), "head": shape}) if shape in heads else getattr(kinds, shape)())
    given = (tokens(), tokens()) if shape in ("pair", "recurrent") else (tokens(),)
    out = model(*given)
    at = torch.arange(out.shape[0] * (out.shape[1] if out.dim() == 3 else 1)).view(out.shape[: out.dim() - 1]) % 2 == 1
    equal(model(*given, at=at), out[at])


@torch.no_grad()
@pytest.mark.parametrize("shape", ["decoder", "encoder", "pair", "recurrent"])
def test_a_run_that_is_looked_at_gives_the_same_bits(shape):
    model, ids = made(getattr(kinds, shape)()), tokens()
    given = (ids, ids) if shape in ("pair", "recurrent") else (ids,)
    plain = model(*given)
    with record(model) as seen:
        assert torch.equal(model(*given), plain)
    assert torch.equal(model(*given), plain)
    names = [attended.name for attended in seen]
    expected = {
        "decoder": ["decoder.layers.0.attention", "decoder.layers.1.attention"],
        "encoder": ["encoder.layers.0.attention", "encoder.layers.1.attention"],
        "pair": [
            *(f"encoder.layers.{i}.attention" for i in (0, 1)),
            *(f"decoder.layers.{i}.{part}" for i in (0, 1) for part in ("attention", "cross")),
        ],
        "recurrent": ["core"] * LENGTH,
    }
    assert names == expected[shape]
    for attended in seen:
        weights = attended.weights()
        check_rows(weights)
        hidden = attended.seen()
        assert hidden is None or (weights[~hidden.expand_as(weights)] == 0).all()
    assert len(seen) == len(names), "nothing is recorded once the look is over"


def test_a_part_that_does_not_set_its_weights_is_refused(tmp_path):
    class Unset(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(width))

        def forward(self, x):
            return x * self.gain

    class Kept(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.register_buffer("steps", torch.arange(width), persistent=False)

    class KeptSpec(SLOTS["norm"], kind="kept"):
        def build(self, width):
            return Kept(width)

    class UnsetSpec(SLOTS["norm"], kind="unset"):
        def build(self, width):
            return Unset(width)

    try:
        with pytest.raises(ValueError, match=r"nobody sets decoder.layers.0.residual.norms.0.gain: .* in reset_parameters"):
            made(kinds.decoder(norm="unset"))
        with pytest.raises(ValueError, match=r"decoder.layers.0.residual.norms.0 has a buffer and no reset_parameters"):
            made(kinds.decoder(norm="kept"))
    finally:
        del SLOTS["norm"].kinds["unset"], SLOTS["norm"].kinds["kept"]
