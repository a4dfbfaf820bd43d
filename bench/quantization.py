"""The price of quantized weights: perplexity and agreement with float32, token by token, as in decoding.

python bench/quantization.py CHECKPOINT TEXT.txt [--tokens 20000] [--weights int8 int4]
"""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import manyheads

WINDOW, PIECE = 512, 8  # tokens of a text, and of a step, of which the kernels read at most 8


def read_text(path: Path) -> str:
    return (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8").read()


@torch.no_grad()
def log_probabilities(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each token after those before it, and the most probable tokens; read in short steps, as in decoding."""
    logprobs, best = [], []
    for window in ids.split(WINDOW):
        state, logits = model.start(capacity=len(window)), []
        for piece in window.split(PIECE):
            out, state = model.step(piece[None], state)
            logits.append(out[0])
        logp = torch.cat(logits)[:-1].log_softmax(dim=-1)
        logprobs.append(logp.gather(1, window[1:, None])[:, 0])
        best.append(logp.argmax(dim=-1))
    return torch.cat(logprobs), torch.cat(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--weights", nargs="+", default=["int8", "int4"])
    options = parser.parse_args()
    plain = manyheads.load(options.checkpoint)
    ids = torch.tensor(plain.tokenizer.encode(read_text(options.text)).ids[: options.tokens])
    expected, best = log_probabilities(plain.model, ids)
    print(f"{len(expected):,} tokens, perplexity {math.exp(-float(expected.mean())):.3f} in float32")
    for weights in options.weights:
        logprobs, predicted = log_probabilities(manyheads.load(options.checkpoint, weights=weights).model, ids)
        difference = expected - logprobs
        error = float(difference.std()) / math.sqrt(len(difference))
        print(
            f"{weights}: perplexity {math.expm1(float(difference.mean())):+.2%} ± {error:.2%}, "
            f"the same first token for {float((predicted == best).float().mean()):.1%}"
        )


if __name__ == "__main__":
    main()
