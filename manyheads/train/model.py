"""The model of a run: before its first step, and as its checkpoints hold it for those who load them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from manyheads.convert.folder import Origin, described
from manyheads.model.build import Model, build
from manyheads.model.transformer import Transformer
from manyheads.spec import Tree
from manyheads.train.average import averaged
from manyheads.train.checkpoint import save
from manyheads.train.events import Event, Shortened, Started
from manyheads.train.lora import adapt, naming, write_adapter
from manyheads.train.run import Ready, longest_read
from manyheads.train.start import freeze, take
from manyheads.train.state import State


def first_model(ready: Ready, device: torch.device | str = "cpu") -> tuple[Model, list[Event]]:
    """The model before the first step, and what there is to know of it."""
    run, events = ready.run, list[Event]()
    model = build(ready.spec, seed=run.seed)
    found = take(model, ready.start, str(run.start), ready.labels) if ready.start else None
    notes: tuple[str, ...] = ()
    if found and run.lora:
        adapt(model, run.lora, seed=run.seed, new=found.new)
        notes = tuple(filter(None, [naming(model, family_of(ready))[1]]))
    freeze(model, run.freeze or ())
    if run.train.compile:
        compiled(model)
    if found:
        events.append(Started(0, len(found.taken), found.new, found.left, notes))
    if any(ready.cut):
        events.append(Shortened(0, *ready.cut))
    return model.to(device), events


def compiled(model: Model) -> None:
    """Compiles what is the same many times: the layers, for batches of any size. A recurrent network has none."""
    for tower in (model.encoder, model.decoder) if isinstance(model, Transformer) else ():
        for layer in tower.layers if tower else ():
            layer.compile(dynamic=True)


def family_of(ready: Ready) -> str | None:
    """The family of the checkpoint that a run began from, or that this one began from, and so on."""
    if ready.start is None:
        return None
    origin = ready.start.origin
    return origin.config.get("family") if origin.family.model_type == "manyheads" else origin.family.model_type


def with_tokens(origin: Origin, ready: Ready) -> Origin:
    """What those who load the model must know of its tokens and classes; what the checkpoint says that it began from stands."""
    tokens, named = ready.tokens, {str(i): name for i, name in enumerate(ready.labels)}
    roles = {"pad": tokens.pad, "bos": tokens.begin, "eos": tokens.end, "decoder_start": tokens.opening[0]}
    ids = {f"{role}_token_id": token for role, token in roles.items()}
    came = {key: value for key, value in origin.config.items() if key != "problem_type" or not named}
    config = came | ({} if ready.tokenizer is None else ids)
    config |= {key: value for key, value in came.items() if value is not None} if ready.start else {}
    config |= {"id2label": named, "label2id": {name: i for i, name in enumerate(ready.labels)}} if named else {}
    config |= {"objective": ready.run.objective.kind}
    config |= {"family": known} if (known := family_of(ready)) else {}
    beside, most = dict(origin.beside), longest_read(ready.run, ready.spec.encoder or ready.spec.decoder)
    if tokens.around is None:  # the tokenizer is one of ours: no family's, and in texts special tokens are none
        said = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
        beside["tokenizer_config.json"] = json.dumps(said | ({} if most is None else {"model_max_length": most})).encode() + b"\n"
        beside.pop("tokenizer.json", None)
    elif "tokenizer.json" in beside and (cut := json.loads(framed(ready).to_str())["truncation"]):  # as it came, but for where it cuts
        beside["tokenizer.json"] = json.dumps(json.loads(beside["tokenizer.json"]) | {"truncation": cut}, ensure_ascii=False).encode()
    return replace(origin, config=config, beside=beside)


def framed(ready: Ready) -> Any:
    """The tokenizer for those who load the model: it puts around a text what the objective put there, and cuts where the run did."""
    if ready.tokenizer is None:
        return None
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(ready.tokenizer.to_str())
    if ready.tokens.around is None:
        ends = [("<s>", ready.tokens.begin), ("</s>", ready.tokens.end)]
        tokenizer.post_processor = processors.TemplateProcessing(single=ready.run.objective.frame, special_tokens=ends)
    most = longest_read(ready.run, ready.spec.encoder or ready.spec.decoder)
    if most is not None and ready.run.objective.fields != ("text",):  # a text alone is read in windows
        tokenizer.enable_truncation(most)
    return tokenizer


def writer(ready: Ready, model: Model, changer: torch.optim.Optimizer, places: Path) -> Callable[..., Path]:
    """What writes a checkpoint of a run, with the tokenizer and, of low ranks, what PEFT reads."""
    run = ready.run
    origin = with_tokens(described(model, ready.start.origin if ready.start else None), ready)
    names = naming(model, family_of(ready))[0] if run.lora else {}

    def also(draft: Path) -> None:
        if run.lora:
            write_adapter(draft, model, run.lora, str(run.start), names)

    held: Tree = {"model": model, "optimiser": changer, "origin": origin, "tokenizer": framed(ready), "keep": run.train.keep}

    def write(state: State, *, best: bool) -> Path:
        with averaged(changer):
            return save(places, state, best=best, also=also, **held)

    return write
