"""What attention costs: multiply–adds, memory and time against the lengths of source and target."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Annotated, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.labs.figures import Bars, Lines, Table
from manyheads.labs.finding import Finding, at_most, equals, near, reported
from manyheads.labs.fitting import fastest
from manyheads.labs.lab import OnProgress, lab, no_progress
from manyheads.labs.plain import attend, attention_weights
from manyheads.model.builder import build_meta
from manyheads.model.cost import count_multiply_adds, dummy_inputs
from manyheads.model.spec import read_model
from manyheads.parts.core import DotSpec
from manyheads.spec import Tree

ATTENTIONS = {
    "encoder self-attention": "encoder.layers.0.attention",
    "cross-attention": "decoder.layers.0.cross",
    "decoder self-attention": "decoder.layers.0.attention",
}


def multiply_adds(width: int, source: int, target: int) -> Counter[str]:
    """The multiply–adds of each module of an encoder–decoder with one layer each, which runs on the meta device."""
    feedforward = {"kind": "mlp", "hidden": 4 * width}
    stack: Tree = {"layers": 1, "width": width, "attention": {"heads": 4}, "feedforward": feedforward}
    decoder = stack | {"cross": True, "mask": {"causal": True}}
    spec = read_model({"vocab": 5, "encoder": stack, "decoder": decoder})
    return count_multiply_adds(build_meta(spec), *dummy_inputs(spec, 1, target, source))[0]


def counted(width: int, source: int, target: int, *, projections: bool) -> dict[str, int]:
    """Multiply–adds of the three attentions: scores and means, and with `projections` W_Q, W_K, W_V and W_O."""
    by_module = multiply_adds(width, source, target)
    parts = ("core", "query", "key", "value", "output") if projections else ("core",)
    return {name: sum(by_module[f"{path}.{part}"] for part in parts) for name, path in ATTENTIONS.items()}


def exponent(lengths: list[int], values: list[float]) -> float:
    """The p of the power law value = c · lengthᵖ that fits best."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


@lab("cost", rows=("M1",), counterexample={"projections": True},
     try_next=("--source 1000 --target 10", "--projections"))  # fmt: skip
def complexity_table(
    *,
    source: Annotated[int, "M, tokens of the source"] = 96,
    target: Annotated[int, "N, tokens of the target"] = 40,
    width: Annotated[int, "k, width of the model"] = 64,
    projections: Annotated[bool, "whether the products with W_Q, W_K, W_V and W_O count too"] = False,
) -> Finding:
    """Attention costs 2M²k multiply–adds in the encoder, 2MNk between the two, and 2N²k in the decoder.

    A score is a product of two vectors of size k, and there is one for each pair of query and key; the mean of the
    values takes as many multiply–adds again. The encoder has M queries and M keys, cross-attention N and M, the decoder
    N and N. So if the source is twice as long, the three cost 4, 2 and 1 times as much. The counts are those of a model
    that runs.
    """
    m, n, k = source, target, width
    multiples = {i: counted(k, i * m, n, projections=projections) for i in (1, 2, 4, 8)}
    counts, twice = multiples[1], multiples[2]
    expected = dict(zip(ATTENTIONS, (2 * m * m * k, 2 * m * n * k, 2 * n * n * k), strict=True))
    factors = dict(zip(ATTENTIONS, (4, 2, 1), strict=True))
    rows = [
        (name, formula, counts[name], expected[name], twice[name] / counts[name])
        for name, formula in zip(ATTENTIONS, ("O(M²k)", "O(MNk)", "O(N²k)"), strict=True)
    ]
    columns = ("attention", "complexity", "counted", "2M²k, 2MNk, 2N²k", "factor if M doubles")
    curves = {name: [(float(i * m), float(counts[name])) for i, counts in multiples.items()] for name in ATTENTIONS}
    return Finding(
        (
            *(equals(name, counts[name], expected[name]) for name in ATTENTIONS),
            *(equals(f"{name}, M doubled", twice[name] / counts[name], float(factors[name])) for name in ATTENTIONS),
        ),
        (
            Table(f"Multiply–adds for M = {m}, N = {n}, k = {k}", columns, rows),
            Lines("Longer sources", "tokens of the source, M", "multiply–adds", curves, log_x=True, log_y=True),
        ),
    )


@lab("cost", errata=("E7",), counterexample={"length": 2048, "width": 16}, try_next=("--length 8192", "--width 1024"))
def what_the_table_leaves_out(
    *,
    length: Annotated[int, "M, tokens of the text"] = 512,
    width: Annotated[int, "k, width of the model"] = 512,
) -> Finding:
    """Of the cost of a layer, O(M²k) is only a part, and for short texts the smaller one.

    The table of complexities counts scores and means. A layer also multiplies every token by W_Q, W_K, W_V and W_O,
    which is 4Mk², and by the two matrices of its feed-forward network, which is 8Mk² if that is 4k wide. So a layer
    costs 2M²k + 12Mk². The part with M² is the larger one only if M > 6k: in a model of width 512, for more than 3072
    tokens.
    """

    def parts(m: int) -> dict[str, int]:
        by_module, path = multiply_adds(width, m, 1), "encoder.layers.0"
        projections = sum(by_module[f"{path}.attention.{name}"] for name in ("query", "key", "value", "output"))
        feedforward = sum(by_module[f"{path}.feedforward.{name}"] for name in ("up", "down"))
        return {"scores and means, 2M²k": by_module[f"{path}.attention.core"], "W_Q, W_K, W_V, W_O, 4Mk²": projections,
                "feed-forward, 8Mk²": feedforward}  # fmt: skip

    scores, projections, feedforward = parts(length).values()
    at_6k = parts(6 * width)
    lengths = [width * 2**i // 4 for i in range(8)]
    shares = [(float(m), (p := list(parts(m).values()))[0] / sum(p)) for m in lengths]
    return Finding(
        (
            equals("products with W_Q, W_K, W_V and W_O", projections, 4 * length * width**2),
            equals("products of the feed-forward network", feedforward, 8 * length * width**2),
            at_most("share of the products that the table counts", scores / (scores + projections + feedforward), 0.5),
            near("the same share for M = 6k", next(iter(at_6k.values())) / sum(at_6k.values()), 0.5, 1e-9),
        ),
        (
            Bars(f"Multiply–adds of a layer, M = {length}, k = {width}", "multiply–adds", parts(length)),
            Lines("Share that the table counts", "tokens, M", "share", {"2M²k / (2M²k + 12Mk²)": shares},
                  {"half": 0.5}, log_x=True),
        ),
        correction="O(M²k) is the cost of the attention alone. The projections and the feed-forward network cost "
        "O(Mk²) more, which is most of the cost of a layer unless the text is longer than six times the width.",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- measured


class LiveBytes(TorchDispatchMode):
    """The bytes of all tensors that are alive and were made inside the block, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        input_storages = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in input_storages:
                self.add(tensor)
        return out

    def add(self, tensor: torch.Tensor) -> None:
        count = tensor.untyped_storage().nbytes()
        self.live += count
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self.free, count)

    def free(self, count: int) -> None:
        self.live -= count


def run_attention(length: int, k: int, *, fused: bool, repeats: int) -> tuple[int, float]:
    """The peak of the live bytes of attention over `length` tokens, and the seconds of its products, without softmax.

    The products are written to memory that exists already: to get new memory from the system would take longer.
    """
    q, key, value = torch.randn(3, length, k)
    core, scores, out = DotSpec().build(1, k, k).eval(), torch.empty(length, length), torch.empty(length, k)

    def fused_attention() -> None:
        attend(q, key, value, core)

    def two_products() -> None:
        torch.mm(q, key.T, out=scores)
        torch.mm(scores, value, out=out)

    with torch.no_grad():
        with LiveBytes() as memory:
            fused_attention() if fused else attention_weights(q, key, core) @ value
        return memory.peak, fastest(fused_attention if fused else two_products, repeats)


@lab("cost", rows=("M2",), seconds=(1, 3), smallest={"repeats": 1}, full={"repeats": 30},
     counterexample={"fused": True}, try_next=("--fused", "--width 16"))  # fmt: skip
def measured_beside_counted(
    *,
    width: Annotated[int, "k, size of a head"] = 64,
    fused: Annotated[bool, "whether a fused kernel computes it, without the matrix of weights"] = False,
    repeats: Annotated[int, "runs, of which the fastest counts"] = 7,
    progress: OnProgress = no_progress,
) -> Finding:
    """Measured memory grows with the square of the length, as the count of products does.

    If a quantity grows as Mᵖ, it is a straight line of slope p when both axes are logarithmic. The products of
    attention have p = 2, and so has the memory, because the matrix of weights has M² entries. The time of the products
    tends to it for long texts, but a time depends on the machine: it is reported, and no verdict rests on it. A fused
    kernel never holds the whole matrix: it computes as many products, and its memory has p = 1.
    """
    lengths, measured = [64, 128, 256, 512, 1024], list[tuple[int, float]]()
    for i, length in enumerate(lengths):
        measured.append(run_attention(length, width, fused=fused, repeats=repeats))
        progress("length", i + 1, len(lengths))
    products = [float(counted(width, m, 1, projections=False)["encoder self-attention"]) for m in lengths]
    memory, seconds = [float(peak) for peak, _ in measured], [second for _, second in measured]
    values = {"products": products, "bytes": memory, "nanoseconds": [1e9 * second for second in seconds]}
    curves = {name: list(zip(map(float, lengths), numbers, strict=True)) for name, numbers in values.items()}
    columns = ("tokens, M", "products", "peak bytes", "milliseconds")
    rows = [
        (m, product, peak, round(1000 * second, 3))
        for m, product, peak, second in zip(lengths, products, memory, seconds, strict=True)
    ]
    return Finding(
        (
            near("exponent of the products", exponent(lengths, products), 2.0, 0.2),
            near("exponent of the peak memory", exponent(lengths, memory), 2.0, 0.2),
            reported("exponent of the time of the products", exponent(lengths, seconds)),
        ),
        (
            Table("One head", columns, rows),
            Lines("Growth with the length", "tokens, M", "", curves, log_x=True, log_y=True),
        ),
        note="The memory is the largest sum of the tensors that exist at one time; a kernel may use more inside.",
    )  # fmt: skip
