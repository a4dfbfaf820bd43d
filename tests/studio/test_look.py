"""The tab Look: its numbers are those of the model, and its server is bounded and answers one page only."""

from __future__ import annotations

import gc
import json
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from shown_checkpoints import HOSTILE, WORDS, checkpoint, image_checkpoint, long_checkpoint
from small_runs import described, train_all
from studio_client import HOST, Page, literal

from manyheads import load
from manyheads.inspect.edit import ablate, edit
from manyheads.inspect.measure import PATTERNS, rollout
from manyheads.studio import app, forward, look, session, views
from manyheads.studio.sample_inputs import find_examples
from manyheads.studio.session import ShownCheckpoint
from manyheads.training.run import read_run_file


def assert_over_layers(page, run, info, tape):
    """The mean and the maximum over the heads of all layers of one kind, and the rollout of self-attention."""
    kind = info["stack"], info["kind"]
    names = [other["name"] for other in run["attentions"] if (other["stack"], other["kind"]) == kind]
    weights = torch.cat([tape.weights(name)[0] for name in names])
    torch.testing.assert_close(page.tile(run, name=info["name"], head="all-mean"), weights.mean(dim=0))
    torch.testing.assert_close(page.tile(run, name=info["name"], head="all-max"), weights.amax(dim=0))
    if info["kind"] == "self":
        expected = rollout(tape, info["stack"])[0]
        torch.testing.assert_close(page.tile(run, name=info["name"], head="rollout"), expected)
    else:
        answer = page.get("tile", run, check=422, name=info["name"], head="rollout", row=0, column=0)
        assert answer.json()["code"] == "model.unsupported"


def assert_thumbnails(page, run, info, weights):
    """A pixel is 255·√ of the largest weight in it."""
    steps = [math.ceil(size / views.THUMBNAIL) for size in weights.shape[1:]]
    expected = F.max_pool2d(weights[None], steps, ceil_mode=True)[0]
    assert list(expected.shape[1:]) == info["thumbnail"]
    picture = torch.frombuffer(bytearray(page.get("thumbnails", run, name=info["name"]).content), dtype=torch.uint8)
    torch.testing.assert_close(picture.reshape(expected.shape).float(), 255 * expected.sqrt(), atol=0.51, rtol=0)


ARCHITECTURES = ["decoder", "encoder", "pair", "recurrent", "rope", "additive"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_page_shows_the_weights_of_the_model(name):
    shown = checkpoint(name)
    page = Page(shown)
    run = page.run()
    tape, _ = literal(shown, run)
    assert [attention["name"] for attention in run["attentions"]] == tape.names()
    for info in run["attentions"]:
        weights = tape.weights(info["name"])[0]
        assert weights.shape == (info["heads"], info["rows"], info["columns"])
        for head in range(info["heads"]):
            torch.testing.assert_close(page.tile(run, name=info["name"], head=head), weights[head])
        torch.testing.assert_close(page.tile(run, name=info["name"], head="mean"), weights.mean(dim=0))
        torch.testing.assert_close(page.tile(run, name=info["name"], head="max"), weights.amax(dim=0))
        assert_over_layers(page, run, info, tape)
        assert_thumbnails(page, run, info, weights)
        trust = page.get("measures", run, name=info["name"]).json()["trust"]
        assert trust["difference"] < 1e-5
        assert trust["row_sum"] < 1e-5
        assert trust["masked"] == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_cell_is_explained_by_numbers_that_give_its_weight(name):
    page = Page(checkpoint(name))
    run = page.run()
    for info in run["attentions"]:
        weights = page.tile(run, name=info["name"], head=0)
        for row, column in ((0, 0), (3, 1), (info["rows"] - 1, info["columns"] - 1), (1, info["columns"] - 1)):
            cell = page.get("cell", run, name=info["name"], head=0, row=row, column=column).json()
            assert cell["weight"] == pytest.approx(float(weights[row, column]), abs=1e-6)
            assert cell["masked"] == (info["causal"] and column > row)
            assert cell["rank"] == 1 + sum(other > weights[row, column] for other in weights[row])
            if not cell["masked"]:
                probability = math.exp(cell["score"] - cell["highest"]) / cell["denominator"]
                assert probability == pytest.approx(cell["weight"], abs=1e-5)
            if "query" in cell:
                dot = sum(q * k for q, k in zip(cell["query"], cell["key"], strict=True))
                assert dot == pytest.approx(cell["dot"], abs=1e-3)
                assert cell["dot"] * cell["scale"] + cell["bias"] == pytest.approx(cell["score"], abs=1e-4)
            if cell["terms"]:
                assert sum(cell["terms"].values()) == pytest.approx(cell["score"], abs=1e-4)
    first = run["attentions"][0]
    terms = page.get("cell", run, name=first["name"], head=0, row=2, column=1).json()["terms"]
    assert (terms is not None) == (name in ("decoder", "encoder", "pair", "rope"))


def test_masked_cells_share_the_rank_after_all_visible_ones():
    page = Page(checkpoint("decoder"))
    run = page.run()
    info = run["attentions"][0]
    row = 2
    cells = [
        page.get("cell", run, name=info["name"], head=0, row=row, column=column).json()
        for column in range(info["columns"])
    ]
    assert sorted(cell["rank"] for cell in cells[: row + 1]) == [1, 2, 3]
    assert len(cells) > row + 2
    assert {cell["rank"] for cell in cells[row + 1 :]} == {row + 2}


def test_the_effect_of_a_head_is_the_divergence_of_the_output_without_it():
    shown = checkpoint("decoder")
    page = Page(shown)
    run = page.run()
    name = run["attentions"][1]["name"]
    effect = page.get("effect", run, name=name, head=1).json()
    _, logits = literal(shown, run)
    with edit(shown.model, ablate(name, head=1)):
        _, without = literal(shown, run)
    p, q = logits.log_softmax(-1), without.log_softmax(-1)
    divergence = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert effect["measure"] == "kl"
    assert effect["mean"] == pytest.approx(float(divergence.mean()), rel=1e-3, abs=1e-6)
    assert effect["max"] == pytest.approx(float(divergence.max()), rel=1e-3, abs=1e-6)
    off = page.run(off=[[name, 1]])
    assert off["off"] == [[name, 1]]
    position = len(run["texts"]["text"]["ids"]) - 1
    listed = page.get("next", off, position=position).json()
    assert {token: logit for token, _, logit in listed["tokens"]}[4] == pytest.approx(float(without[-1, 4]), abs=1e-4)


def test_next_tokens_have_exact_probabilities_at_every_temperature():
    shown = checkpoint("pair")
    page = Page(shown)
    run = page.run()
    _, logits = literal(shown, run)
    listed = page.get("next", run, position=2).json()
    for temperature, log_sum in zip(listed["temperatures"], listed["log_sums"], strict=True):
        expected = (logits[2] / temperature).softmax(-1)
        for token, _, logit in listed["tokens"]:
            assert math.exp(logit / temperature - log_sum) == pytest.approx(float(expected[token]), abs=1e-5)


def test_an_id_without_a_token_is_named_by_its_number():
    names = {token: name for token, name, _ in Page(checkpoint("decoder")).next_tokens()}
    assert {names[i] for i in range(len(WORDS), 23)} == {f"#{i}" for i in range(len(WORDS), 23)}
    assert names[4] == "the"


def test_a_target_is_generated_unless_it_is_given():
    shown = checkpoint("pair")
    page = Page(shown)
    run = page.run()
    generated = shown.generate(run["texts"]["source"]["ids"], max_new_tokens=forward.GENERATED)
    assert run["texts"]["target"]["ids"] == [1, *generated]
    assert run["add"] == generated
    assert page.run(target="the dog")["texts"]["target"]["tokens"] == ["<s>", "the", "dog"]
    assert page.run(add=[4, 5])["texts"]["target"]["ids"] == [1, 4, 5]


def test_a_text_is_continued_by_tokens():
    page = Page(checkpoint("decoder"))
    run = page.run("the cat", add=[6], generate=3)
    assert run["texts"]["text"]["ids"][:4] == [1, 4, 5, 6]
    assert len(run["texts"]["text"]["ids"]) <= 7
    assert run["add"] == run["texts"]["text"]["ids"][3:]


def test_tokens_know_their_words_and_whether_they_are_special():
    text = Page(checkpoint("encoder")).run(f"the unknown {HOSTILE} cat")["texts"]["text"]
    assert text["tokens"] == ["<s>", "the", "un", "##known", HOSTILE, "cat"]
    assert text["special"] == [True, *[False] * 5]
    assert text["words"][2] == text["words"][3]
    assert len(set(text["words"])) == 5


def test_a_model_without_a_tokenizer_reads_ids():
    page = Page(checkpoint("decoder", text=False))
    assert page.run("3 1 4")["texts"]["text"]["tokens"] == ["3", "1", "4"]
    assert page.run("the cat", check=422)["code"] == "input.invalid"
    assert page.run("3 1 400", check=422)["code"] == "input.invalid"


def test_a_run_on_built_in_data_has_examples_of_its_own(tmp_path):
    train_all(described("causal", save_every=1, keep_last=2), tmp_path / "run")
    data = read_run_file(tmp_path / "run" / "run.toml").data
    shown = ShownCheckpoint(load(tmp_path / "run"), str(tmp_path / "run"))
    rows = [row[0] for row in data.load().validation]
    assert find_examples(shown)
    assert set(find_examples(shown)) <= set(rows)
    (tmp_path / "run" / "run.toml").write_text("data = 3")
    assert set(find_examples(shown)).isdisjoint(rows)  # a page is shown without them


def test_an_image_model_shows_its_patches():
    shown = image_checkpoint()
    page = Page(shown)
    info = page.client.get("look/info", params={"session": page.key}).json()["checkpoints"][0]
    assert info["reads"] == "image"
    run = page.run(info["examples"][0])
    assert run["texts"]["text"]["tokens"][5] == "r2c2"
    assert run["texts"]["text"]["image"] == {"channels": 1, "side": 8, "patch": 2}
    assert run["attentions"][0]["rows"] == 17  # with the class token
    assert page.tile(run, name=run["attentions"][0]["name"], head=0).sum(dim=-1).tolist() == pytest.approx([1.0] * 17)
    assert page.run("0.5 0.5 0.5", check=422)["code"] == "input.invalid"
    assert page.run("nan nan nan nan", check=422)["code"] == "input.invalid"


@pytest.mark.parametrize(("level", "row", "column"), [(0, 1, 0), (1, 0, 0), (2, 0, 0), (0, 2, 2)])
def test_tiles_are_the_matrix_in_parts_pooled(level, row, column):
    shown = long_checkpoint()
    page = Page(shown)
    run = page.run(" ".join(str(i * i % 23) for i in range(600)))
    weights = literal(shown, run)[0].weights("decoder.layers.0.attention", 1)[0]
    step = 2**level
    padded = F.pad(weights, (0, -600 % step, 0, -600 % step))
    expected = padded.unflatten(1, (-1, step)).unflatten(0, (-1, step)).amax(dim=(1, 3))
    part = expected[row * 256 : (row + 1) * 256, column * 256 : (column + 1) * 256]
    name = run["attentions"][0]["name"]
    torch.testing.assert_close(page.tile(run, name=name, head=1, level=level, row=row, column=column), part)
    mean = page.tile(run, name=name, head=1, level=level, row=row, column=column, pool="mean")
    means = F.avg_pool2d(weights[None], step, ceil_mode=True, count_include_pad=False)[0]
    torch.testing.assert_close(mean, means[row * 256 : (row + 1) * 256, column * 256 : (column + 1) * 256])


def test_thumbnails_of_a_text_that_fills_several_blocks_are_pooled():
    shown = long_checkpoint()
    page = Page(shown)
    run = page.run(" ".join(str(i * i % 23) for i in range(600)))
    info = run["attentions"][0]
    assert_thumbnails(page, run, info, literal(shown, run)[0].weights(info["name"])[0])


def test_badges_are_the_patterns_whose_mass_reaches_the_threshold():
    info = views.AttentionInfo("decoder.layers.0.attention", "decoder", 0, "self", 2, "text", "text", 4, 4, True)
    measures = dict.fromkeys(PATTERNS, 0.0)
    assert views.badges(measures, info) == []
    for name, pattern in PATTERNS.items():
        assert views.badges(measures | {name: pattern.threshold}, info) == [name]
        assert views.badges(measures | {name: pattern.threshold - 0.01}, info) == []


# -------------------------------------------------------------------------------------------------------------- bounds


HOSTILE_RUNS = [
    {"text": "x" * (forward.MAX_TEXT + 1)},
    {"text": 3},
    {"text": "the\ud800cat"},
    {"text": "the cat", "checkpoint": 7},
    {"text": "the cat", "checkpoint": -1},
    {"text": "the cat", "add": [-1]},
    {"text": "the cat", "add": [10**9]},
    {"text": "the cat", "add": ["x"]},
    {"text": "the cat", "generate": 10**6},
    {"text": "the cat", "temperature": 1e9},
    {"text": "the cat", "off": [["nothing", 0]]},
    {"text": "the cat", "off": [["decoder.layers.0.attention", 99]]},
    {"text": "the cat", "off": [["decoder.layers.0.attention", "0"]]},
    {"text": "the cat", "off": [["decoder.layers.0.attention", -1]]},
    {"text": "the cat", "off": [["decoder.layers.0.attention", 10**30]]},
    {"text": "the cat", "off": [["decoder.layers.0.attention", 0.0]]},
    {"text": "the cat", "off": [["decoder.layers.0.attention", True]]},
    {"text": "the cat", "off": [["decoder.layers.0.feedforward", 0]]},
    {"text": "the cat", "off": [[]]},
    {"text": "the cat", "off": ["ab"]},
    {"text": "the cat", "path": "/etc/passwd"},
    {"text": "the " * 100},
]


@pytest.mark.parametrize("fields", HOSTILE_RUNS, ids=range(len(HOSTILE_RUNS)))
def test_a_wrong_run_is_an_error_with_a_code(fields):
    page = Page(checkpoint("decoder"))
    body = json.dumps({"session": page.key, **fields})
    answer = page.client.post("look/run", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"]
    assert not page.sessions[page.key].forward_passes


@pytest.mark.parametrize(
    "body", [b"\xff\xfe{", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}", b"{", b"", b"\x00"], ids=range(6)
)
def test_a_body_that_is_not_json_is_an_error_with_a_code(body):
    page = Page(checkpoint("decoder"))
    answer = page.client.post("look/run", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["code"] == "usage.argument"
    assert answer.json()["message"]


def test_a_head_that_does_not_exist_is_answered_with_those_that_do():
    page = Page(checkpoint("decoder"))
    info = page.run()["attentions"][0]
    answer = page.run(off=[[info["name"], 99]], check=422)
    assert all(part in answer["message"] for part in (info["name"], "99", str(info["heads"] - 1)))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("tile", {"name": "nothing", "head": 0, "row": 0, "column": 0}),
        ("tile", {"head": "9", "row": 0, "column": 0}),
        ("tile", {"head": "../x", "row": 0, "column": 0}),
        ("tile", {"head": 0, "row": 5, "column": 0}),
        ("tile", {"head": 0, "row": -1, "column": 0}),
        ("tile", {"head": 0, "row": 0, "column": 0, "level": 99}),
        ("tile", {"head": 0}),
        ("cell", {"head": 0, "row": 99, "column": 0}),
        ("cell", {"head": 99, "row": 0, "column": 0}),
        ("next", {"position": 99}),
        ("effect", {"head": 99}),
        ("thumbnails", {"name": "x" * 1000}),
    ],
)
def test_a_wrong_question_is_an_error_with_a_code(path, fields):
    page = Page(checkpoint("decoder"))
    run = page.run()
    answer = page.get(path, run, check=422, **{"name": "decoder.layers.0.attention", **fields})
    assert answer.json()["code"]
    assert page.get(path, {"run": "other"}, check=422, **{"name": "decoder.layers.0.attention", **fields}).json()[
        "code"
    ]


def test_only_the_address_with_its_token_and_host_is_answered():
    page = Page(checkpoint("decoder"))
    client, session = page.client, {"session": page.key}
    assert client.get("look/info", params=session).status_code == 200
    assert client.get(f"http://{HOST}/api/look/info", params=session).status_code == 404
    assert client.get(f"http://{HOST}/wrong/api/look/info", params=session).status_code == 404
    assert client.get("look/info", params=session, headers={"Host": "evil.example"}).status_code == 421
    assert client.get("look/info", params=session, headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post("look/run", content=b"x" * (app.MAX_BODY + 1)).status_code == 413
    assert client.get("look/info", params={"session": "other"}).json()["code"] == "usage.expired"
    page_headers = client.get(f"http://{HOST}/secret/").headers
    assert "default-src 'none'" in page_headers["content-security-policy"]
    assert "unsafe" not in page_headers["content-security-policy"]
    for name in ("../look.py", "..%2flook.py", "%2e%2e/look.py", "/etc/passwd"):
        assert client.get(f"http://{HOST}/secret/{name}").status_code == 404


def test_a_session_holds_a_bounded_number_of_runs(monkeypatch):
    page = Page(checkpoint("decoder"))
    runs = [page.run(f"the cat {'sat ' * i}") for i in range(session.MAX_FORWARD_PASSES + 2)]
    assert len(page.sessions[page.key].forward_passes) == session.MAX_FORWARD_PASSES
    page.get("next", runs[-1], position=0)
    assert page.get("next", runs[0], check=422, position=0).json()["code"] == "usage.expired"
    monkeypatch.setattr(session, "MAX_BYTES", 1)
    page.run()
    assert len(page.sessions[page.key].forward_passes) == 1


def test_a_run_keeps_a_bounded_number_of_tensors_and_a_row_of_each_cell():
    page = Page(checkpoint("decoder"))
    run = page.run()
    info = run["attentions"][0]
    held = page.sessions[page.key][run["run"]]
    before = held.num_bytes
    for head in range(info["heads"]):
        for row in range(info["rows"]):
            terms = page.get("cell", run, name=info["name"], head=head, row=row, column=0).json()["terms"]
            assert terms == page.get("cell", run, name=info["name"], head=head, row=row, column=0).json()["terms"]
    assert info["heads"] * info["rows"] > views.MAX_BANDS
    assert held.num_bytes - before <= views.MAX_BANDS * 5 * info["columns"] * 4  # five terms in float32
    for head in ("rollout", *range(info["heads"]), "mean", "max"):
        for pool in ("max", "mean"):
            page.tile(run, name=info["name"], head=head, pool=pool)
    page.tile(run, name=info["name"], head="rollout", level=1)
    assert held.num_bytes - before <= views.MAX_BANDS * info["rows"] * info["columns"] * 4


def test_a_text_that_takes_more_memory_than_a_page_may_hold_is_refused(monkeypatch):
    page = Page(checkpoint("decoder"))
    monkeypatch.setattr(look, "MAX_BYTES", 1000)
    assert page.run(check=422)["code"] == "resource.memory"
    monkeypatch.setattr(forward, "MAX_TOKENS", 3)
    assert page.run(check=422)["code"] == "input.length"


def test_closing_the_page_frees_what_it_held():
    page = Page(checkpoint("decoder"))
    held = weakref.ref(page.sessions[page.key][page.run()["run"]])
    assert held() is not None
    page.client.post(f"session/{page.key}/close")
    gc.collect()
    assert held() is None
    assert len(page.sessions) == 0
    keys = [page.sessions.start() for _ in range(session.MAX_SESSIONS + 3)]
    assert len(page.sessions) == session.MAX_SESSIONS
    assert page.sessions[keys[-1]]


def test_a_page_that_is_not_used_is_closed():
    page = Page(checkpoint("decoder"))
    page.sessions[page.key].used -= session.IDLE_SECONDS - 60
    assert page.client.get("look/info", params={"session": page.key}).status_code == 200
    page.sessions[page.key].used -= session.IDLE_SECONDS - 60  # since the last use, not since the first
    assert page.client.get("look/info", params={"session": page.key}).status_code == 200
    page.sessions[page.key].used -= session.IDLE_SECONDS + 1
    assert page.client.get("look/info", params={"session": page.key}).json()["code"] == "usage.expired"
    assert len(page.sessions) == 0
