"""Every error a user can meet, as a class with a stable code, which programs may rely on, and an exit status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self


def one_line(text: str) -> str:
    """Returns the text as one printable line, so that a message cannot send control codes to a terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)


class ManyheadsError(ValueError):
    """The base of all errors below. `str(error)` is one sentence; `hint`, where there is one, says what to do next."""

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 2

    def __init_subclass__(cls, *, code: str, exit_status: int | None = None) -> None:
        cls.code, cls.exit_status = code, cls.exit_status if exit_status is None else exit_status

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = one_line(message), one_line(hint)
        super().__init__(f"{self.message}; {self.hint}" if self.hint else self.message)


# ----------------------------------------------------------------------------------- arguments and command line: exit 2


class UsageError(ManyheadsError, code="usage.argument"):
    """An option or argument has a wrong value, or does not go with another."""


class ExpiredError(UsageError, code="usage.expired"):
    """The page requested a cached result that has expired."""


class PathNotFoundError(UsageError, code="usage.path-not-found"):
    """An argument names a file, a folder or a model on the Hub that does not exist."""


class OutputExistsError(UsageError, code="usage.output-exists"):
    """The output path exists already."""


class OutputError(UsageError, code="usage.output"):
    """The output path cannot be written."""


class MissingExtraError(UsageError, code="usage.missing-extra"):
    """An optional dependency is not installed."""


@contextmanager
def needs_extra(message: str, extra: str) -> Iterator[None]:
    """Raises this message if an import inside the block fails, with the extra of manyheads that has the package."""
    try:
        yield
    except ImportError:
        raise MissingExtraError(message, hint=f"pip install 'manyheads[{extra}]'") from None


class PartsFileError(UsageError, code="usage.parts-file"):
    """A --parts file is missing, fails when executed, or defines an incomplete part."""


class DeviceError(UsageError, code="usage.device"):
    """The device does not exist here."""


class FileAccessError(UsageError, code="file.access"):
    """A file cannot be read or written."""


class InternalError(ManyheadsError, code="internal", exit_status=1):
    """An unexpected exception: a bug in manyheads or in a --parts file."""


# ------------------------------------------------------------------------------------------------------- config: exit 2


class ConfigError(ManyheadsError, code="config.invalid"):
    """A model description or run file has a value that is not allowed; `path` is the dotted path of the field."""

    def __init__(self, message: str, path: Iterable[str | int] = (), key: str = "", *, hint: str = "") -> None:
        self.reason, self.path, self.key = message, tuple(path), key  # key: an unknown field at `path`
        super().__init__(f"{'.'.join(map(str, self.path))}: {message}" if self.path else message, hint=hint)

    def with_prefix(self, *path: str | int) -> Self:
        """Returns the same error for a field that is inside `path`."""
        return type(self)(self.reason, (*path, *self.path), self.key, hint=self.hint)


class UnknownKeyError(ConfigError, code="config.unknown-key"):
    """A field does not exist."""


class MissingKeyError(ConfigError, code="config.missing-key"):
    """A required field is missing."""


class WrongTypeError(ConfigError, code="config.wrong-type"):
    """A field has a value of the wrong type."""


class OutOfRangeError(ConfigError, code="config.out-of-range"):
    """A number is outside its bounds."""


class UnknownKindError(ConfigError, code="config.unknown-kind"):
    """A slot has no such kind."""


class UnknownPresetError(ConfigError, code="config.unknown-preset"):
    """No preset has this name."""


class IncompatibleError(ConfigError, code="config.incompatible"):
    """Two fields are valid alone and incompatible together."""


class ConfigSyntaxError(ConfigError, code="config.syntax"):
    """A file is not valid TOML, or an override is not path=value."""


class ConfigFileError(ConfigError, code="config.file"):
    """A TOML file is missing or cannot be read."""


# --------------------------------------------------------------------------------------------------------- data: exit 3


class DataError(ManyheadsError, code="data.invalid", exit_status=3):
    """The data cannot be used."""


class DataFileError(DataError, code="data.file"):
    """A data file is missing or cannot be read."""


class EncodingError(DataError, code="data.encoding"):
    """A line is not UTF-8 text."""


class EmptyDataError(DataError, code="data.empty"):
    """A file or a split has no rows."""


class ColumnError(DataError, code="data.columns"):
    """A column is missing, ambiguous or empty."""


class RowError(DataError, code="data.row"):
    """A row does not have the expected form."""


class DataSizeError(DataError, code="data.too-large"):
    """A line, a file or a row is larger than allowed."""


class LabelError(DataError, code="data.label"):
    """A label is not one of the classes, or the classes cannot be learned."""


class TokenizedDataError(DataError, code="data.tokenized"):
    """A folder of tokenized data is broken, or does not fit the run."""


class TokenizerError(DataError, code="data.tokenizer"):
    """A tokenizer cannot be trained or read, or does not fit the task."""


# ----------------------------------------------------------------------------- inputs of a model: exit 2, from a file 3


class InputError(ManyheadsError, code="input.invalid"):
    """The model cannot read an input; `index` is its number among those given."""

    def __init__(self, message: str, index: int = 0, *, hint: str = "") -> None:
        self.index = index
        super().__init__(message, hint=hint)


class InputLengthError(InputError, code="input.length"):
    """An input is empty, or longer than the model has positions for."""


class InputShapeError(InputError, code="input.shape"):
    """A tensor has the wrong shape or dtype."""


class UnsupportedError(ManyheadsError, code="model.unsupported"):
    """The model cannot do what was requested."""


class GenerationConfigError(ManyheadsError, code="generate.config"):
    """A generation setting has a wrong value, or does not go with another."""


class QueueFullError(ManyheadsError, code="generate.queue-full"):
    """Too many requests wait for the engine."""


# -------------------------------------------------------------------------------------------------- checkpoints: exit 4


class CheckpointError(ManyheadsError, code="checkpoint.invalid", exit_status=4):
    """A model file is broken or must not be trusted."""


class CheckpointNotFoundError(CheckpointError, code="checkpoint.not-found"):
    """There is no checkpoint at this path."""


class UnsafeFileError(CheckpointError, code="checkpoint.unsafe"):
    """A file could run code, or a name or link leads out of its folder."""


class HashMismatchError(CheckpointError, code="checkpoint.hash-mismatch"):
    """The hash of a file is not the one in the manifest."""


class CorruptFileError(CheckpointError, code="checkpoint.corrupt"):
    """A file is truncated, or its header does not fit its contents."""


class UnknownArchitectureError(CheckpointError, code="checkpoint.architecture"):
    """The model type or architecture is not supported."""


class CheckpointConfigError(CheckpointError, code="checkpoint.config"):
    """A config key is unknown or has a value that is not supported."""


class WeightsError(CheckpointError, code="checkpoint.weights"):
    """Weights are missing, unexpected, or have another shape or dtype."""


class NonFiniteError(CheckpointError, code="checkpoint.non-finite"):
    """A weight is NaN or infinite."""


class NonFiniteOutputError(CheckpointError, code="model.non-finite"):
    """The model computes NaN or infinity for an input."""


class CheckpointTokenizerError(CheckpointError, code="checkpoint.tokenizer"):
    """The tokenizer of a checkpoint is missing or cannot be read."""


class ChatTemplateError(CheckpointError, code="checkpoint.chat-template"):
    """The chat template fails, refuses the conversation, or needs too much time or memory."""


class DatabaseError(ManyheadsError, code="database.invalid", exit_status=4):
    """A database of answers is no SQLite file, has no table of answers, or needs too much time."""


class ExportError(ManyheadsError, code="export.unsupported"):
    """The target format cannot express this model."""


# --------------------------------------------------------------------------------------------------------------- runs


class RunError(ManyheadsError, code="run.invalid"):
    """A run cannot start or resume."""


class RunChangedError(RunError, code="run.changed"):
    """The folder holds a run with other settings or other data."""

    def __init__(self, message: str, changes: Iterable[Any] = (), *, hint: str = "") -> None:
        self.changes = tuple(changes)  # (field, old value, new value) of each
        super().__init__(message, hint=hint)


class RunLockedError(RunError, code="run.locked"):
    """Another process uses the folder."""


class DivergedError(RunError, code="run.diverged", exit_status=1):
    """The loss, the gradients or the weights are NaN or infinite."""


# ---------------------------------------------------------------------------------------------------- resources: exit 5


class ResourceError(ManyheadsError, code="resource.limit", exit_status=5):
    """The machine lacks memory or disk space."""


class OutOfDiskError(ResourceError, code="resource.disk"):
    """The disk is full, or a checkpoint would not fit."""


class OutOfMemoryError(ResourceError, code="resource.memory"):
    """The model or a batch does not fit into memory."""
