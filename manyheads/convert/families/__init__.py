"""Model families by the model_type of their configs. A family is data: shared fields, config keys and weight names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module

from manyheads.convert.config import Config, ConfigRow, read_config, write_config
from manyheads.convert.keys import PAD_TOKEN_FOR_LAST_POOLING, Labels, tying
from manyheads.convert.weights import (
    KeyMapping,
    Parameters,
    Rows,
    Table,
    Tensors,
    WeightTable,
    expand,
    renames,
    token_scores,
)
from manyheads.errors import CheckpointConfigError, UnknownArchitectureError
from manyheads.model.spec import ModelSpec, read_model
from manyheads.spec import Tree, copy_tree, did_you_mean, quote

# written as None, because transformers would replace missing keys by the special tokens of published models
UNSET_TOKEN_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model class of transformers: its head, the head's keys and weights, and the prefix of the other weights."""

    head: Tree = field(default_factory=dict)  # fields of the head that no key sets
    weights: Rows = ()  # the weights of the head
    keys: tuple[ConfigRow, ...] = ()
    prefix: str = ""  # precedes the names of the other weights


HEADLESS = Architecture(head={"kind": "none"})  # a class without a head


def decoder_architectures(
    name: str,
    prefix: str = "model.",
    *,
    language: str = "ForCausalLM",
    output: str = "lm_head",
    head: Tree | None = None,
    keys: tuple[ConfigRow, ...] = (tying(False),),
) -> dict[str, Architecture]:
    """The classes of a decoder: with scores of tokens, with scores of classes from the last token, and without a head.

    The head of tokens is `head`, or the one that `keys` select.
    """
    tokens = token_scores(output, "decoder.embed.table")
    classes = Architecture(
        head={"kind": "classes", "pool": "last", "bias": False},
        weights=renames({"head.output": "score"}),
        keys=(Labels(), PAD_TOKEN_FOR_LAST_POOLING),
        prefix=prefix,
    )
    return {
        f"{name}{language}": Architecture(head=head or {}, weights=tokens, keys=keys, prefix=prefix),
        f"{name}ForSequenceClassification": classes,
        f"{name}Model": HEADLESS,
    }


@dataclass(frozen=True)
class Family:
    """The fields that all models of a family share, the keys of their configs, and the names of their weights.

    Parts of a stack that neither the fields nor the keys name are those of `StackSpec` and `DecoderSpec` by default.
    """

    model_type: str
    base_fields: Tree
    _: KW_ONLY
    keys: tuple[ConfigRow, ...]
    weights: Table  # the weights except those of the head, without prefix
    architectures: Mapping[str, Architecture]  # the first is the default of a config without architectures
    ignored_keys: tuple[str, ...] = ()  # keys that do not change the output
    # completes a config from the names of the stored tensors
    resolve: Callable[[Config, Collection[str]], Config] = lambda config, names: config
    key_mappings: tuple[KeyMapping, ...] = ()  # to other names of the weights in published checkpoints
    # tensors that an export computes, from the names of those that are not read
    computed_tensors: Callable[[ModelSpec, Config, Collection[str]], Tensors] = lambda spec, config, unused: {}

    def architecture(self, config: Config) -> str:
        names = config.get("architectures") or [next(iter(self.architectures))]
        name = names[0] if isinstance(names, list) and names else names
        if not isinstance(name, str) or name not in self.architectures:
            raise UnknownArchitectureError(
                f"{self.model_type} has no architecture {quote(name)}{did_you_mean(str(name), self.architectures)}"
            )
        return name

    def spec_of(self, config: Config) -> ModelSpec:
        head_architecture = self.architectures[self.architecture(config)]
        tree = copy_tree(self.base_fields) | {"head": copy_tree(head_architecture.head)}
        return read_model(
            read_config((*self.keys, *head_architecture.keys), config, tree, ignored_keys=self.ignored_keys)
        )

    def stored_spec(self, config: Config, names: Collection[str]) -> ModelSpec:
        """The spec of a config, completed from the names of the stored tensors."""
        return self.spec_of(self.resolve(config, names))

    def config_of(self, spec: ModelSpec, architecture: str) -> Tree:
        """A config for the spec. If `spec_of` reads another spec from it, the family cannot express the spec."""
        config = write_config((*self.keys, *self.architectures[architecture].keys), spec)
        return {"architectures": [architecture], "model_type": self.model_type} | UNSET_TOKEN_IDS | config

    def table(self, spec: ModelSpec, architecture: str, parameters: Parameters) -> WeightTable:
        """The weight table of a model, whose parameters may be on the meta device."""
        head_architecture = self.architectures[architecture]
        rows = self.weights(spec) if callable(self.weights) else self.weights
        prefixed_rows = (row.rename(lambda name: head_architecture.prefix + name) for row in rows)
        stacks = {"encoder": spec.encoder, "decoder": spec.decoder}
        layers = {name: stack.layer_groups or stack.layers for name, stack in stacks.items() if stack}
        return WeightTable(tuple(expand((*prefixed_rows, *head_architecture.weights), parameters, layers)))

    def tables(self, spec: ModelSpec, architecture: str, parameters: Parameters) -> list[WeightTable]:
        """The table with the usual names, and the tables with the names of other published checkpoints."""
        table = self.table(spec, architecture, parameters)
        if not table.covers(parameters):
            raise CheckpointConfigError(f"this config does not describe a supported {self.model_type} model")
        return [table, *(table.map_keys(key_mapping) for key_mapping in self.key_mappings)]


# model_type → module, in the order in which an export tries them
NAMES = {
    "gpt2": "gpt2", "bert": "bert", "llama": "llama", "t5": "t5", "bart": "marian", "marian": "marian",
    "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "gemma": "llama", "phi3": "llama", "phi": "phi",
    "gptj": "gpt2", "gpt_neox": "gpt_neox", "roberta": "bert", "distilbert": "bert", "albert": "bert",
    "ernie": "bert", "eurobert": "llama", "pegasus": "marian", "vit": "vit", "vit_mae": "vit",
}  # fmt: skip
# families of other formats
GGUF = tuple(f"gguf-{name}" for name in ("llama", "qwen2", "qwen3", "phi3", "gemma", "gpt2", "gptneox", "phi2"))
OTHERS = {"fairseq": "fairseq"} | dict.fromkeys(GGUF, "gguf")


def get_family(model_type: object) -> Family:
    modules = NAMES | OTHERS
    if not isinstance(model_type, str) or model_type not in modules:
        raise UnknownArchitectureError(f"unknown model_type {quote(model_type)}{did_you_mean(str(model_type), NAMES)}")
    families: tuple[Family, ...] = import_module(f"{__name__}.{modules[model_type]}").FAMILIES
    return next(family for family in families if family.model_type == model_type)
