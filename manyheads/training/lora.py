"""LoRA: trains a low-rank update next to frozen linear layers of any model, and saves it in the format of PEFT."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from manyheads.convert.families import NAMES
from manyheads.convert.match import find_architecture
from manyheads.errors import IncompatibleError
from manyheads.model.builder import Model, build_meta
from manyheads.model.spec import ModelSpec
from manyheads.spec import Spec, Tree, did_you_mean, field, quote

TRAINED = "trained.safetensors"  # the trained parameters under our own names, to resume from


class LoraSpec(Spec):
    """y = Wx + (α/r)·BAx, where only A (r × in) and B (out × r) are trained: Hu et al. 2021, arXiv 2106.09685."""

    rank: int = field(8, "r", ge=1, le=65536)
    alpha: float = field(16.0, "α; the update is scaled by α/r", gt=0)
    dropout: float = field(0.0, "dropout of x before A", ge=0, lt=1)
    target_modules: tuple[str, ...] = field(
        ("query", "value"),
        "linear layers, by the end of their path: query, key, value, output, up, down",
        strict=False,
        min_length=1,
    )


class Lora(nn.Module):
    """A frozen linear layer with its A and B. B starts at 0, so that the first output is that of the layer alone."""

    def __init__(self, base_layer: nn.Linear, spec: LoraSpec, rng: torch.Generator) -> None:
        super().__init__()
        self.base_layer, self.scale = base_layer, spec.alpha / spec.rank  # named as in PEFT
        self.dropout = nn.Dropout(spec.dropout)
        self.lora_A = nn.Linear(base_layer.in_features, spec.rank, bias=False)
        # a subclass of nn.Linear may reshape Wx, into heads for example, and must reshape BAx alike
        self.lora_B = copy.deepcopy(base_layer)
        self.lora_B.weight = nn.Parameter(torch.zeros(base_layer.out_features, spec.rank))
        self.lora_B.bias, self.lora_B.in_features = None, spec.rank  # type: ignore[assignment]
        with torch.no_grad():
            self.lora_A.weight.normal_(std=base_layer.in_features**-0.5, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(self.dropout(x)))

    @property
    def weight(self) -> Tensor:
        """W + (α/r)·BA"""
        return self.base_layer.weight + self.scale * self.lora_B.weight @ self.lora_A.weight


def add_lora(model: Model, spec: LoraSpec, *, seed: int, new: Collection[str]) -> None:
    """Wraps every target module; freezes all other weights except the `new` ones, which no checkpoint has trained."""
    modules = ((path, module) for path, module in model.named_modules() if not path.startswith("head."))
    layers = {path: module for path, module in modules if isinstance(module, nn.Linear)}
    targets = set[str]()
    for name in spec.target_modules:
        matching = {path for path in layers if f".{path}".endswith(f".{name}")}
        if not matching:
            layer_names = {path.rpartition(".")[2] for path in layers}
            raise IncompatibleError(
                f"the model has no linear layer {quote(name)}{did_you_mean(name, layer_names)}",
                ("lora", "target_modules"),
            )
        targets |= matching
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    rng = torch.Generator().manual_seed(seed)
    for path, layer in layers.items():  # in the order of the model, on which the random values depend
        if path in targets:
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, Lora(layer, spec, rng))


def lora_layers(model: nn.Module) -> dict[str, Lora]:
    return {path: module for path, module in model.named_modules() if isinstance(module, Lora)}


def merge_lora(model: Model) -> Model:
    """Returns a model without LoRA layers, with (α/r)·BA added to every W."""
    merged, state = build_meta(model.spec), model.state_dict()
    for path, layer in lora_layers(model).items():
        state |= layer.base_layer.state_dict(prefix=f"{path}.") | {f"{path}.weight": layer.weight.detach()}
    merged.load_state_dict({name: state[name] for name in merged.state_dict()}, assign=True)
    return merged.eval()


# --------------------------------------------------------------------------------------------------------------- files


def transformers_names(spec: ModelSpec, family: str | None) -> dict[str, str]:
    """Maps our path of each linear layer that transformers stores alike to its path there; raises if no family fits."""
    families = (*([family] if family in NAMES else []), *NAMES)
    architecture_family, architecture, *_ = find_architecture(spec, families)
    parameters = dict(build_meta(spec).named_parameters())
    names = architecture_family.table(spec, architecture, parameters).unchanged_names
    return {name.removesuffix(".weight"): tensor.removesuffix(".weight") for name, tensor in names.items()}


def adapter_names(model: Model, family: str | None) -> tuple[dict[str, str], str]:
    """Returns the names under which the adapter is saved, and a note if they cannot be those of transformers."""
    layers = lora_layers(model)
    trained_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    modules_to_save = {
        name.rpartition(".")[0] for name in trained_names if not name.startswith(tuple(f"{path}." for path in layers))
    }
    own_names = {path: path for path in sorted({*layers, *modules_to_save})}
    try:
        peft_names = transformers_names(model.spec, family)
        missing = [path for path in own_names if path not in peft_names]
        reason = f"transformers stores {missing[0]} transposed or joined with others" if missing else ""
    except ValueError as error:
        reason = str(error)
    if reason:
        return own_names, f"adapter/ has our own names, so PEFT cannot open it: {reason}"
    return {path: peft_names[path] for path in own_names}, ""


def trained_tensors(model: Model) -> dict[str, Tensor]:
    """Returns the tensors that training changes: the parameters that are not frozen, and buffers."""
    state = model.state_dict(keep_vars=True)
    trained_state = {name: t for name, t in state.items() if t.requires_grad or not isinstance(t, nn.Parameter)}
    return {name: tensor.detach().contiguous() for name, tensor in trained_state.items()}


def write_adapter(folder: Path, model: Model, spec: LoraSpec, *, base: str, names: dict[str, str]) -> None:
    """Writes adapter/ in the format of PEFT under these names, and the trained parameters under our own, to resume."""
    trained_state = trained_tensors(model)
    save_file(trained_state, folder / TRAINED)
    layers = lora_layers(model)
    tensors: dict[str, Tensor] = {}
    for path, layer in layers.items():
        tensors[f"base_model.model.{names[path]}.lora_A.weight"] = layer.lora_A.weight.detach()
        tensors[f"base_model.model.{names[path]}.lora_B.weight"] = layer.lora_B.weight.detach()
    modules_to_save = [path for path in names if path not in layers]
    for name, tensor in trained_state.items():
        path, _, last = name.rpartition(".")
        if path in modules_to_save:
            tensors[f"base_model.model.{names[path]}.{last}"] = tensor
    config: Tree = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": base, "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,  # some readers expect an int
        "lora_dropout": spec.dropout, "target_modules": sorted(names[path] for path in layers), "bias": "none",
        "fan_in_fan_out": False, "modules_to_save": sorted(names[path] for path in modules_to_save) or None,
        "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
