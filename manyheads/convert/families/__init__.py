"""The families, by the name their config gives them. A family is data: what its models share, its config keys, its table of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module

from manyheads.convert.config import Config, ConfigRow, read_config, write_config
from manyheads.convert.tables import Table, nothing
from manyheads.convert.weights import Row
from manyheads.model.spec import ModelSpec, read_model
from manyheads.spec import Tree, copied, merged, nearest, quoted

Spelling = tuple[
    tuple[str, str], ...
]  # how usual names begin or end, as a pattern, and what stands there instead; the first that fits counts


# a description says nothing of special tokens; left out, they would be those of the published models
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a checkpoint is for: the head it has, the keys that head reads, and its weights."""

    head: Tree = field(default_factory=dict)  # where no key says it
    table: Table = nothing  # of the head's weights
    keys: tuple[ConfigRow, ...] = ()
    prefix: str = ""  # what stands before the names of the tower's weights
    tower: Tree = field(default_factory=dict)  # what this task changes in the tower


BARE = Task(head={"kind": "none"})  # a tower without a head


@dataclass(frozen=True)
class Family:
    """What all models of a family have, what their config says, and how their weights are called."""

    model_type: str
    shape: Tree
    _: KW_ONLY
    keys: tuple[ConfigRow, ...]
    table: Table  # of the tower's weights, behind a prefix
    tasks: Mapping[str, Task]  # by the name of the architecture; the first is taken where a config names none
    silent: tuple[str, ...] = ()  # keys of this family that say nothing about the numbers a forward gives
    settle: Callable[[Config, Collection[str]], Config] = lambda config, names: config  # where only the stored names tell
    spellings: tuple[Spelling, ...] = ()  # other ways in which published checkpoints write the names of the table

    def architecture(self, config: Config) -> str:
        given = config.get("architectures") or [next(iter(self.tasks))]
        name = given[0] if isinstance(given, list) and given else given
        if not isinstance(name, str) or name not in self.tasks:
            raise ValueError(f"no architecture {quoted(name)} of {self.model_type}{nearest(str(name), self.tasks)}")
        return name

    def spec_of(self, config: Config) -> ModelSpec:
        task = self.tasks[self.architecture(config)]
        tree = merged(copied(self.shape), copied(task.tower)) | {"head": copied(task.head)}
        return read_model(read_config((*self.keys, *task.keys), config, tree, silent=self.silent))

    def config_of(self, spec: ModelSpec, architecture: str) -> Tree:
        """A config that says the same as the spec, if the family can say it: `spec_of` of it tells."""
        config = write_config((*self.keys, *self.tasks[architecture].keys), spec)
        return {"architectures": [architecture], "model_type": self.model_type} | NO_TOKENS | config

    def rows(self, spec: ModelSpec, architecture: str) -> list[Row]:
        task = self.tasks[architecture]
        return [*self.table(spec, task.prefix), *task.table(spec, task.prefix)]


# by the name in their configs: the module that holds them, the more general ones first
NAMES = {
    "gpt2": "gpt2", "bert": "bert", "llama": "llama", "t5": "t5", "bart": "bart", "marian": "marian", "mistral": "mistral", "qwen2": "qwen",
    "qwen3": "qwen", "gemma": "gemma", "phi3": "phi3", "phi": "phi", "gptj": "gptj", "gpt_neox": "gpt_neox", "roberta": "roberta",
    "distilbert": "distilbert", "albert": "albert", "ernie": "ernie", "vit": "vit", "vit_mae": "vit_mae",
}  # fmt: skip
# of other files than folders of transformers
GGUF = tuple(f"gguf-{name}" for name in ("llama", "qwen2", "qwen3", "phi3", "gemma", "gpt2", "gptneox", "phi2"))
ELSEWHERE = {"manyheads": "own", "fairseq": "fairseq"} | dict.fromkeys(GGUF, "gguf")


def family(model_type: object) -> Family:
    places = NAMES | ELSEWHERE
    if not isinstance(model_type, str) or model_type not in places:
        raise ValueError(f"no family {quoted(model_type)}{nearest(str(model_type), NAMES)}")
    module = import_module(f"{__name__}.{places[model_type]}")
    families: dict[str, Family] = module.FAMILIES
    return families[model_type]
