"""LoRA: a frozen matrix and a learned one of low rank beside it, put around the linear maps of any model, and written as PEFT writes it."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from manyheads.convert.families import NAMES
from manyheads.convert.folder import give
from manyheads.convert.match import fitting
from manyheads.convert.weights import Same
from manyheads.model.build import Model, outline
from manyheads.model.spec import ModelSpec
from manyheads.spec import Spec, SpecError, Tree, field, nearest, quoted

TRAINED = "trained.safetensors"  # what a run with low ranks goes on from, by our names


class LoraSpec(Spec):
    """y = Wx + (α/r)·BAx, where only A (r × in) and B (out × r) are learned: Hu et al. 2021, arXiv 2106.09685."""

    rank: int = field(8, "r", ge=1, le=65536)
    scale: float = field(16.0, "α: what is learned counts α/r", gt=0)
    dropout: float = field(0.0, "share of x dropped before A in training", ge=0, lt=1)
    where: tuple[str, ...] = field(
        ("query", "value"),
        "which linear maps, by the end of their path: query, key, value, output, up, down",
        strict=False,
        min_length=1,
    )


class Lora(nn.Module):
    """A linear map with A and B beside it. B begins at 0, so at first nothing changes."""

    def __init__(self, inner: nn.Linear, spec: LoraSpec, chance: torch.Generator) -> None:
        super().__init__()
        self.inner, self.share = inner, spec.scale / spec.rank
        self.dropout = nn.Dropout(spec.dropout)
        self.down = nn.Linear(inner.in_features, spec.rank, bias=False)
        self.up = copy.deepcopy(inner)  # whatever it makes of Wx, cut into heads for one, it makes of BAx too
        self.up.weight, self.up.bias = nn.Parameter(torch.zeros(inner.out_features, spec.rank)), None  # type: ignore[assignment]
        self.up.in_features = spec.rank
        with torch.no_grad():
            self.down.weight.normal_(std=inner.in_features**-0.5, generator=chance)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.share * self.up(self.down(self.dropout(x)))

    @property
    def weight(self) -> Tensor:
        """W + (α/r)·BA"""
        return self.inner.weight + self.share * self.up.weight @ self.down.weight


def adapt(model: Model, spec: LoraSpec, *, seed: int, new: Collection[str]) -> None:
    """Puts A and B beside every linear map that is named; all else stays as it is, but for what is new."""
    maps = {path: part for path, part in model.named_modules() if isinstance(part, nn.Linear) and not path.startswith("head.")}
    for name in spec.where:
        if not any(f".{path}".endswith(f".{name}") for path in maps):
            known = {path.rpartition(".")[2] for path in maps}
            raise SpecError(f"no linear map of this model is called {quoted(name)}{nearest(name, known)}", ("lora", "where"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    chance = torch.Generator().manual_seed(seed)
    for path, inner in maps.items():
        if any(f".{path}".endswith(f".{name}") for name in spec.where):
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, Lora(inner, spec, chance))


def adapters(model: nn.Module) -> dict[str, Lora]:
    return {path: part for path, part in model.named_modules() if isinstance(part, Lora)}


def merged(model: Model) -> Model:
    """The model with every BA added to its W, as if it had been trained whole; itself where there is none."""
    found = adapters(model)
    if not found:
        return model
    plain, held = outline(model.spec), dict(model.named_parameters())
    with torch.no_grad():
        for name, _ in list(plain.named_parameters()):
            path, _, last = name.rpartition(".")
            tensor = held[name] if path not in found else found[path].weight if last == "weight" else held[f"{path}.inner.{last}"]
            give(plain, tensor.dtype, name, tensor.detach())
    return plain.eval()


# --------------------------------------------------------------------------------------------------------------- files


def called(spec: ModelSpec, family: str | None) -> dict[str, str]:
    """What transformers calls our linear maps, where it has them as they are here; or a sentence on why it does not."""
    first = [family] if family in NAMES else []
    known, architecture, _ = fitting(spec, (*first, *NAMES))
    rows = [row for row in known.rows(spec, architecture) if isinstance(row, Same) and not row.transposed and row.shape is None]
    return {row.ours.rpartition(".")[0]: row.theirs.rpartition(".")[0] for row in rows if row.ours.endswith(".weight")}


def naming(model: Model, family: str | None) -> tuple[dict[str, str], str]:
    """The names that an adapter is written under, and, where they are our own, why."""
    trained, found = [name for name, parameter in model.named_parameters() if parameter.requires_grad], adapters(model)
    whole = {name.rpartition(".")[0] for name in trained if not name.startswith(tuple(f"{path}." for path in found))}
    own = {path: path for path in sorted({*found, *whole})}
    try:
        theirs = called(model.spec, family)
    except ValueError as error:
        return own, f"adapter/ has our names, so peft cannot open it: {error}"
    if missing := [path for path in own if path not in theirs]:
        return own, f"adapter/ has our names, so peft cannot open it: transformers holds {missing[0]} turned round or in one with others"
    return {path: theirs[path] for path in own}, ""


def write_adapter(folder: Path, model: Model, spec: LoraSpec, start: str, names: dict[str, str]) -> None:
    """`adapter/` as PEFT reads it, under these names, and what is learned under our own, to go on from."""
    held = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    save_file(held, folder / TRAINED)
    found = adapters(model)
    tensors: dict[str, Tensor] = {}
    for path, part in found.items():
        tensors[f"base_model.model.{names[path]}.lora_A.weight"] = part.down.weight.detach()
        tensors[f"base_model.model.{names[path]}.lora_B.weight"] = part.up.weight.detach()
    whole = [path for path in names if path not in found]
    for path in whole:
        tensors |= {
            f"base_model.model.{names[path]}.{name.rpartition('.')[2]}": held[name] for name in held if name.rpartition(".")[0] == path
        }
    config: Tree = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": start, "r": spec.rank,
        "lora_alpha": int(spec.scale) if spec.scale.is_integer() else spec.scale,  # a whole number, where some readers want one
        "lora_dropout": spec.dropout, "target_modules": sorted(names[path] for path in found), "bias": "none", "fan_in_fan_out": False,
        "modules_to_save": sorted(names[path] for path in whole) or None, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
