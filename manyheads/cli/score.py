"""`manyheads score`: log-probability, perplexity and surprisal per token of given texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.cli import console
from manyheads.cli.inputs import EncodingErrors, TextArgument, TextFile, Whole, open_texts, process_lines
from manyheads.errors import InputError, one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from manyheads.checkpoint.checkpoint import Checkpoint
    from manyheads.generate.score import ScoredText
    from manyheads.spec import Tree

# the style of a token by its surprisal, from so many bits on; both colors are set, so they suit any background
STYLES = {
    0.0: "",
    1.0: "#000000 on #fff0b8",
    2.0: "#000000 on #ffd274",
    4.0: "#000000 on #ff9f5a",
    8.0: "#ffffff on #c83a24",
    12.0: "#ffffff on #7a0c1c",
}
UNSCORED = "dim"  # a token without a probability


@console.app.command()
def score(
    path: console.CheckpointPath,
    text: TextArgument = None,
    file: TextFile = None,
    whole: Whole = False,
    context: Annotated[
        str | None,
        console.option("TEXT", "Text before it, which is not scored. Put the space between the two into one of them."),
    ] = None,
    source: Annotated[
        str | None, console.option("TEXT", "The input of an encoder-decoder, whose target is the text.")
    ] = None,
    stride: Annotated[
        int | None,
        console.integer_option(
            "Tokens between the windows of a text that is too long for the model [default: half a window]."
        ),
    ] = None,
    encoding_errors: EncodingErrors = "strict",
    device: console.Device = "auto",
    weights: console.Weights = None,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """Show how probable a model finds given texts.

    One text is shown with its tokens colored by surprisal, −log₂ p, or as a table if there is no terminal. Many texts,
    one per line, give one line each, in the same order: log-probability, perplexity, number of tokens and the text,
    separated by tabs. A blank line stays blank. With --json each line is one object with all tokens.

    Examples: manyheads score ./gpt2 " Paris" --context "The capital of France is" · manyheads score ./gpt2 --file
    poem.txt --whole · manyheads score runs/de-en "Good morning" --source "Guten Morgen"
    """
    inputs = open_texts(text, file, whole=whole, encoding_errors=encoding_errors)

    def load() -> Scorer:
        return Scorer(console.load_checkpoint(path, device, weights), context, source, stride)

    if not isinstance(inputs, str):
        process_lines(inputs, path, load, as_json=as_json)
        return
    with console.Progress(f"loading {path}"):
        scorer = load()
        (scored_text,) = scorer.score([inputs])
    if as_json:
        console.print_json({"schema": 1} | scorer.result(inputs, scored_text))
    else:
        print_scores(scored_text, console.stdout())


@dataclass(frozen=True)
class Scorer:
    """A checkpoint with the options of the command line."""

    checkpoint: Checkpoint
    context: str | None
    source: str | None
    stride: int | None

    def score(self, texts: Sequence[str]) -> list[ScoredText]:
        from manyheads.tasks.prediction import parse_row

        def read(text: str | None, index: int = 0) -> Any:
            return text if text is None or self.checkpoint.tokenizer is not None else parse_row(text, index)

        scored_texts: list[ScoredText] = self.checkpoint.score(
            [read(text, index) for index, text in enumerate(texts)],
            context=read(self.context),
            source=read(self.source),
            stride=self.stride,
        )
        return scored_texts

    def results(self, texts: Sequence[str], errors: dict[int, InputError]) -> Iterator[tuple[int, Tree]]:
        from manyheads.tasks.prediction import apply_to_each

        for i, scored_text in apply_to_each(self.score, texts, errors).items():
            yield i, self.result(texts[i], scored_text)

    def result(self, text: str, scored_text: ScoredText) -> Tree:
        """A scored text as plain data."""
        options = {"context": self.context, "source": self.source}
        tokens = [
            {"token": token.token, "id": token.id, "logprob": token.logprob, "surprisal": token.surprisal}
            for token in scored_text.tokens
        ]
        return {
            "text": text,
            **{name: value for name, value in options.items() if value is not None},
            "tokens": tokens,
            "count": scored_text.count,
            "logprob": scored_text.logprob,
            "perplexity": scored_text.perplexity,
            "bits_per_token": scored_text.bits_per_token,
        }

    def format_line(self, result: Tree) -> str:
        numbers = f"{result['logprob']:.4f}", f"{result['perplexity']:.4f}", str(result["count"])
        return "\t".join((*numbers, one_line(result["text"])))


# ------------------------------------------------------------------------------------------------------------- printing


def print_scores(scored_text: ScoredText, out: Console) -> None:
    """Prints a text with colored tokens and a legend, or without colors a table; then its scores in one line."""
    if out.color_system is None or out.no_color:
        out.print(token_table(scored_text))
    else:
        out.print(colored_text(scored_text), overflow="fold")
        out.print()
        out.print(legend())
    total = f"{scored_text.count:,}" + (
        f" of {len(scored_text.tokens):,}" if scored_text.count < len(scored_text.tokens) else ""
    )
    out.print(
        f"{total} tokens · log-probability {scored_text.logprob:,.4f} · perplexity {scored_text.perplexity:,.4f} · "
        f"{scored_text.bits_per_token:.4f} bits per token"
    )


def token_table(scored_text: ScoredText) -> RenderableType:
    table = console.new_table(["token"], ["id", "log p", "surprisal"])
    for token in scored_text.tokens:
        numbers = ("–", "–") if token.logprob is None else (f"{token.logprob:.4f}", f"{token.surprisal:.2f}")
        table.add_row(json.dumps(token.token, ensure_ascii=False), str(token.id), *numbers)
    return table


def colored_text(scored_text: ScoredText) -> Text:
    from rich.text import Text

    text = Text()
    for characters, surprisal in visible_tokens(scored_text):
        text.append(characters, style=style_of(surprisal))
    return text


def visible_tokens(scored_text: ScoredText) -> Iterator[tuple[str, float | None]]:
    """Yields what is shown of each token, and its surprisal; the tokens of one character are shown together."""
    from manyheads.generate.text import REPLACEMENT

    characters, surprisal = "", None
    for token in scored_text.tokens:
        if characters and not token.text and REPLACEMENT in token.token:
            surprisal = None if surprisal is None or token.surprisal is None else surprisal + token.surprisal
            continue
        if characters:
            yield characters, surprisal
        characters, surprisal = escape_controls(token.text or f"{token.token} "), token.surprisal
    yield characters, surprisal


def escape_controls(text: str) -> str:
    """A text whose line breaks can be seen, and that sends no control codes to a terminal."""
    return "\n".join(one_line(line) for line in text.replace("\r\n", "\n").replace("\n", "↵\n").split("\n"))


def style_of(surprisal: float | None) -> str:
    if surprisal is None:
        return UNSCORED
    return STYLES[max((bound for bound in STYLES if bound <= surprisal), default=0.0)]


def legend() -> Text:
    """The scale of surprisal, each range in its colors."""
    from rich.text import Text

    text = Text("surprisal in bits: ")
    for low, high in pairwise((*STYLES, math.inf)):
        text.append(f" {low:g}–{high:g} " if high < math.inf else f" {low:g} or more ", style=STYLES[low])
    return text
