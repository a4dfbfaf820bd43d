"""A language model of given probabilities, and how often each of its tokens is sampled."""

from __future__ import annotations

import torch

from manyheads import Inputs
from manyheads.generate.decoding import GenerationBatch, run_to_end
from manyheads.generate.vocabulary import Vocabulary


class Scripted:
    """A language model of given probabilities: the next token depends on the length of the text alone."""

    def __init__(self, steps):
        self.steps = torch.tensor(steps).log()

    def start(self, source=None, *, capacity=None):
        return Counted(0)

    def step(self, inputs, state):
        logits = self.steps[min(state.length, len(self.steps) - 1)]
        return logits.expand(inputs.batch_size, inputs.length, -1), Counted(state.length + 1)


class Counted:
    def __init__(self, length):
        self.length = length

    def select(self, rows):
        return self


def prepared(config, tokenizer=None):
    """The processors of one batch."""
    return [item.prepare(Vocabulary(tokenizer)) for item in config.processors]


def processed(config, logits, tokens, tokenizer=None):
    """The logits after the processors at the first step."""
    return GenerationBatch(None, None, None, config, prepared(config, tokenizer)).process_logits(logits, tokens, 0)


def frequencies(model, config, count, vocab, tokenizer=None):
    """How often each token is the first generated one after the prompt 0, over rows with a generator each."""
    rng = [torch.Generator().manual_seed(i) for i in range(count)]
    prompt = Inputs(torch.zeros(count, 1, dtype=torch.long))
    batch = GenerationBatch(model, prompt, None, config, prepared(config, tokenizer), rng)
    output = [hypotheses[0].token_ids for hypotheses in run_to_end(config.decoding.generate(batch))]
    return torch.bincount(torch.tensor(output).flatten(), minlength=vocab) / count


def chi2_tail(value, freedom):
    """P(χ² > value), by torch's incomplete gamma function."""
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(value / 2.0)))
