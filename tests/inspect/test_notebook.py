"""What a notebook shows: pictures of recorded weights, bounded in size and work, with nothing of the text executed."""

from __future__ import annotations

import base64
import re
import struct
import zlib

import pytest
import torch
from raising import raises

from manyheads import attention_table, build, read, read_model, record
from manyheads.inspect.notebook import LEVELS, MAX_CELLS, MAX_THUMBNAILS, sampled_rows, thumbnails
from manyheads.inspect.thumbnail import THUMBNAIL

SMALL = ("decoder.layers=2", "decoder.width=64", "decoder.attention.heads=4", "vocab=100")


def recorded(*changes, length=10, batch=1, scale=8.0):
    """A tape of one forward pass of a random model, whose scores are scaled up so that its weights are not uniform."""
    model = build(read("gpt2", *SMALL, f"decoder.position.length={max(length, 2)}", *changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(scale)
    ids = torch.randint(0, 100, (batch, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), record(model, activations=False) as tape:
        model(ids)
    return tape


def pictures(html):
    """The shades of every PNG of a page, read as the format says."""
    return [decode(base64.b64decode(match)) for match in re.findall(r"data:image/png;base64,([\w+/=]+)", html)]


def decode(data):
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, start = {}, 8
    while start < len(data):
        size, name = struct.unpack(">I4s", data[start : start + 8])
        body = data[start + 8 : start + 8 + size]
        assert struct.unpack(">I", data[start + 8 + size : start + 12 + size])[0] == zlib.crc32(name + body)
        chunks[name] = body
        start += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_each_pixel_of_a_short_text_is_a_weight():
    tape = recorded()
    html = tape._repr_html_()
    shown = torch.stack(pictures(html))
    weights = torch.cat([attention.weights()[0] for attention in tape])
    assert shown.shape == weights.shape
    assert torch.equal(shown, (weights.sqrt() * (LEVELS - 1)).round().to(torch.uint8))
    assert "decoder.layers.1.attention" in html
    assert "4 heads, 10 queries × 10 keys" in html
    assert torch.equal(torch.stack(pictures(tape[1]._repr_html_())), shown[4:])


def test_a_pixel_of_a_long_text_is_the_largest_weight_of_its_keys_and_only_its_queries_are_computed(monkeypatch):
    (attention, *_) = recorded(length=200)
    step = -(-200 // THUMBNAIL)
    columns = -(-200 // step)
    rows = attention.weights()[0, :, ::step]
    padded = torch.nn.functional.pad(rows, (0, -200 % step))
    expected = padded.view(*rows.shape[:2], columns, step).amax(dim=3)
    core, computed = type(attention.core), []
    original = core.weights

    def counted(self, query, *args, **kwargs):
        computed.append(query.shape[2])
        return original(self, query, *args, **kwargs)

    monkeypatch.setattr(core, "weights", counted)
    shades = thumbnails([attention])
    assert sum(computed) == len(range(0, 200, step)) <= THUMBNAIL
    assert torch.equal(shades, (expected.sqrt() * (LEVELS - 1)).round().to(torch.uint8))


@pytest.mark.parametrize(("prompt", "length"), [(7, 12), (71, 100)])
def test_calls_of_several_steps_follow_one_another(prompt, length):
    model = build(read("gpt2", *SMALL)).eval()
    ids = torch.randint(0, 100, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), record(model, activations=False) as whole:
        model(ids)
    with torch.no_grad(), record(model, activations=False) as tape:
        _, state = model.step(ids[:, :prompt], model.start())
        for i in range(prompt, length):
            _, state = model.step(ids[:, i : i + 1], state)
    name = tape.names()[0]
    assert len(tape.calls(name)) > 1
    in_steps, at_once = thumbnails(tape.calls(name)), thumbnails(whole.calls(name))
    assert in_steps.shape == at_once.shape
    assert (in_steps.int() - at_once.int()).abs().max() <= 1  # of 32 shades, for rounding


def test_a_tape_stays_below_a_megabyte():
    changes = ("decoder.layers=12", "decoder.width=96", "decoder.attention.heads=12")
    html = recorded(*changes, length=1024, scale=30.0)._repr_html_()
    assert len(pictures(html)) == 144
    assert len(html) < 1e6
    many = recorded(*changes, "decoder.layers=40", length=200, scale=30.0)._repr_html_()
    assert 0 < len(pictures(many)) <= MAX_THUMBNAILS
    assert len(many) < 1e6
    assert f"{40 - len(pictures(many)) // 12} more attentions" in many


def test_only_the_first_sequence_of_a_batch_is_shown_and_an_empty_tape_says_so():
    tape = recorded(batch=3)
    assert "the first of 3" in tape._repr_html_()
    first = (tape[0].weights()[0].sqrt() * (LEVELS - 1)).round().to(torch.uint8)
    assert torch.equal(thumbnails(tape[:1]), first)
    with record(build(read("gpt2", *SMALL))) as empty:
        pass
    assert pictures(empty._repr_html_()) == []


@pytest.mark.parametrize("head", [0, None])
def test_a_table_has_the_weights_and_the_mask_of_a_recorded_attention(head):
    attention = recorded(length=5)[0]
    words = ["<script>", "a", '"b', "c", "d"]
    html = attention_table(attention, words, words, head=head)
    weights = attention.weights()[0]
    weights = weights[head] if head is not None else weights.mean(dim=0)
    shown = [float(match) for match in re.findall(r">(\d\.\d\d)</td>", html)]
    lower = torch.ones(5, 5).tril().bool()
    assert torch.allclose(torch.tensor(shown), weights[lower], atol=0.0051)
    assert html.count('class="mh-cell hidden"') == 10
    assert html._repr_html_() == html
    assert html.page("<b>").startswith("<!doctype html>")
    for text in (html, html.page("<b>")):
        assert "<script" not in text
        assert "http" not in text
        assert "<b>" not in text


def test_a_table_is_bounded():
    side = int(MAX_CELLS**0.5) + 1
    names = range(side)
    with raises("input.shape"):
        attention_table(torch.full((side, side), 1 / side), names, names)


@pytest.mark.parametrize(
    "spec",
    [read("gpt2"), read_model({"vocab": 9, "ngram": {"order": 3, "width": 8}})],
    ids=["stack", "ngram"],
)
def test_a_spec_is_shown_as_its_drawing(spec):
    html = spec._repr_html_()
    assert html.count("<svg") == 1
    assert "<script" not in html
    assert "_repr_html_" not in spec.model_dump()


def test_a_thumbnail_has_every_nth_query():
    tape = recorded(length=2 * THUMBNAIL + 5)
    call = tape[0]
    rows = torch.cat(list(sampled_rows([call])), dim=1)
    torch.testing.assert_close(rows, call.weights()[0][:, ::3].float())
