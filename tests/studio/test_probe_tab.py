"""The tab Probe: its numbers are those of the library, its windows are bounded, and a model it cannot probe is named."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from shown_checkpoints import checkpoint, image_checkpoint
from studio_client import Client

from manyheads.inspect.probe import LabelledTokens, next_token, only_frequent, position, previous_token, probe
from manyheads.studio import probe as tab

TEXT = "the cat sat on a mat . a dog ran un ##known " * 8  # 96 tokens: 24 windows of 4


class Page(Client):
    def start(self, code=None, **fields):
        return self.post("probe/start", code=code, **{"text": TEXT, "length": 4} | fields)

    def layer(self, started, index, code=None):
        return self.get("probe/layer", code=code, probe=started["probe"], index=index).json()


def windows_of(shown, text, length):
    ids = shown.tokenizer.encode(text, add_special_tokens=False).ids
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]


@pytest.mark.parametrize(("name", "label"), [("decoder", "position"), ("encoder", "next"), ("rope", "previous")])
def test_every_layer_has_the_numbers_of_the_library(name, label):
    shown = checkpoint(name)
    page, rows = Page(shown), windows_of(shown, TEXT, 4)
    labels = {"position": position, "next": next_token, "previous": previous_token}
    report = probe(shown.model, rows, labels[label])
    started = page.start(label=label)
    layers = [page.layer(started, index) for index in range(len(started["layers"]))]
    for shown_layer, layer in zip(layers, report.layers, strict=True):
        expected = asdict(layer)
        assert {key: shown_layer[key] for key in expected} == expected | {"interval": list(layer.interval)}
    assert started["layers"] == [layer.name for layer in report.layers]
    assert (started["chance"], started["classes"], started["tested"]) == (report.chance, report.classes, report.tokens)
    assert [item["hash_after"] for item in layers] == [None] * (len(layers) - 1) + [report.weights_hash]
    assert started["hash_before"] == report.weights_hash
    assert page.layer(started, 0) == layers[0], "a layer may be asked for again"
    page.layer(started, len(layers), code="usage.argument")


def test_windows_have_no_begin_token_and_random_ids_replace_a_text_that_is_too_short():
    shown = checkpoint("decoder")
    request = tab.ProbeRequest(session="", text=TEXT, length=4)
    rows, source = tab.windows(shown, request)
    assert rows == windows_of(shown, TEXT, 4)
    assert shown.tokenizer.token_to_id("<s>") not in {token for row in rows for token in row}
    assert "24 windows" in source
    page = Page(shown)
    assert "random" in page.start(text="the cat")["source"]
    page.start(text="the cat", windows="text", code="data.empty")
    random = tab.windows(shown, request.model_copy(update={"windows": "random"}))[0]
    assert len(random) * 4 <= tab.MAX_TOKENS
    assert {len(row) for row in random} == {4}
    assert random == tab.windows(shown, request.model_copy(update={"windows": "random"}))[0], "by the seed"


def test_ids_are_windows_too_and_are_checked():
    shown = checkpoint("decoder", text=False)
    page, numbers = Page(shown), torch.arange(100) % 20
    text = " ".join(str(int(number)) for number in numbers)
    assert "20 windows of 5 tokens of the text" in page.start(text=text, length=5)["source"]
    page.start(text="99 " * 100, windows="text", code="input.invalid")
    page.start(text="words " * 100, code="input.invalid")
    page.start(text=text, label="length", code="model.unsupported")
    assert "random" in page.start(text="")["source"]


def test_rare_labels_are_left_out_by_their_number():
    rows = [[1, 2, 3], [1, 2, 4], [5, 2, 3]]
    label = only_frequent(next_token, rows, 2)
    assert [[label(row, i) for i in range(3)] for row in rows] == [[2, 3, None], [2, None, None], [2, 3, None]]


def test_windows_that_fit_and_test_a_probe_are_counted():
    shown = checkpoint("decoder")
    assert Page(shown).start()["repeated"] == 4, "a text that repeats itself every three windows"
    once = LabelledTokens.from_rows([[i, i + 1] for i in range(20)], position)
    assert once.repeated == 0


def test_the_longest_token_is_a_label():
    shown = checkpoint("decoder")
    rows = windows_of(shown, TEXT, 4)
    label = tab.label_of(shown, "length", rows)
    names = [[shown.text_generator.token_name(token) for token in row] for row in rows]
    assert [[label(row, i) for i in range(4)] for row in rows] == [[len(name) for name in row] for row in names]


def test_a_page_bounds_what_it_computes(monkeypatch):
    shown = checkpoint("decoder")
    monkeypatch.setattr(tab, "MAX_WORK", 16 * 4 * 4 * 22)  # width, labels, tokens of 22 windows
    assert Page(shown).start()["windows"] == 22
    monkeypatch.setattr(tab, "MAX_STATES", 16 * 3 * 4 * 21)  # width, layers with the embeddings
    assert Page(shown).start()["windows"] == 21
    monkeypatch.setattr(tab, "MAX_TOKENS", 4 * 19)
    Page(shown).start(code="usage.argument")
    Page(shown).start(length=65, code="usage.argument")


def test_other_models_and_other_probes_are_refused():
    Page(checkpoint("pair")).start(code="model.unsupported")
    Page(checkpoint("recurrent")).start(code="model.unsupported")
    Page(image_checkpoint()).start(code="model.unsupported")
    page = Page(checkpoint("decoder"))
    first = page.start()
    page.start(seed=1)
    page.layer(first, 0, code="usage.argument")
    page.start(checkpoint=1, code="usage.argument")


def test_closing_the_page_frees_the_probes():
    page = Page(checkpoint("decoder"))
    page.start()
    assert page.sessions[page.key].probe is not None
    page.client.post(f"session/{page.key}/close")
    page.start(code="usage.expired")
