"""Groups rows into batches of similar length, or packs them, as a function of the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.order import batch_by_length, pack_documents, sample_indices
from manyheads.data.tokenized import TokenizedDataset
from manyheads.parts.inputs import Inputs
from manyheads.tasks.auxiliary import add_attention_targets
from manyheads.tasks.batch import IGNORE_INDEX, Batch
from manyheads.tasks.task import PackableTask
from manyheads.training.preparation import PreparedRun
from manyheads.training.store import TrainState


def row_lengths(run: PreparedRun, dataset: TokenizedDataset) -> np.ndarray:
    """Returns the number of tokens of each row, special tokens included, as rows × texts."""
    task = run.spec.task
    lengths = task.lengths([dataset.lengths(name) for name in dataset.fields if name != "label"])
    return lengths if task.packable else lengths + task.max_special_tokens(run.special_tokens) - task.num_special_tokens


class BatchLoader:
    """All batches of one epoch, as of a DataLoader. With `max_rows`, those of an evaluation, the same for all seeds."""

    def __init__(
        self, run: PreparedRun, dataset: TokenizedDataset, *, epoch: int = 0, max_rows: int | None = None
    ) -> None:
        self.run, self.dataset, self.epoch, self.pack = run, dataset, epoch, run.spec.train.pack
        self.seed, self.lengths = run.spec.seed if max_rows is None else 0, row_lengths(run, dataset)
        batch_tokens = run.spec.train.batch_tokens
        self.batches: Sequence[Any]  # arrays of row indices; with packing, lists of arrays of (row, start, stop)
        if self.pack is None:
            index = np.arange(len(dataset)) if max_rows is None else sample_indices(len(dataset), max_rows)
            # a training row must fit into a batch, an evaluated row need not
            max_tokens = max(batch_tokens, 0 if max_rows is None else int(self.lengths[index].sum(1).max()))
            batches = batch_by_length(self.lengths[index], self.seed, epoch, max_tokens=max_tokens)
            self.batches = [index[batch] for batch in batches]
        else:
            packed = pack_documents(self.lengths[:, 0], self.pack, self.seed, epoch)[:max_rows]
            size = batch_tokens // self.pack
            self.batches = [packed[i : i + size] for i in range(0, len(packed), size)]

    def __len__(self) -> int:
        return len(self.batches)

    def row_indices(self, index: int) -> tuple[int, ...]:
        rows = self.batches[index] if self.pack is None else np.concatenate(self.batches[index])[:, 0]
        return tuple(int(i) for i in rows)

    def shape(self, index: int) -> tuple[int, int]:
        """Returns the number of rows of a batch and the length of the longest, summed over the texts of a row."""
        batch = self.batches[index]
        return len(batch), int(self.lengths[batch].sum(1).max()) if self.pack is None else self.pack

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Batch:
        task, special_tokens = self.run.spec.task, self.run.special_tokens
        rng = np.random.default_rng([self.seed, self.epoch, index])
        if self.pack is None:
            return task.batch([self.dataset[i] for i in self.row_indices(index)], special_tokens, rng)
        assert isinstance(task, PackableTask)
        rows = self.batches[index]
        chunks = [task.chunk(self.dataset[i][0], start, stop) for row in rows for i, start, stop in row.tolist()]
        return pack_batch(
            task.batch_chunks(chunks, special_tokens, rng), [len(row) for row in rows], self.pack, special_tokens.pad
        )


def pack_batch(batch: Batch, counts: Sequence[int], length: int, pad: int) -> Batch:
    """Packs the texts of a batch into shared rows, `counts[i]` texts into row i; positions start at 0 in each text."""
    inputs, padding_mask = batch.inputs, batch.inputs.padding_mask
    sizes = [inputs.length] * inputs.batch_size if padding_mask is None else (~padding_mask).sum(1).tolist()
    texts = zip(inputs.tokens, batch.targets, sizes, strict=True)
    rows = [[next(texts) for _ in range(count)] for count in counts]

    def join(rows: Iterable[Iterable[Tensor]], value: int) -> Tensor:
        joined = [torch.cat([*pieces]) for pieces in rows]
        return torch.stack([F.pad(row, (0, length - len(row)), value=value) for row in joined])

    targets = join(((targets[:size] for _, targets, size in row) for row in rows), IGNORE_INDEX)
    document_ids = join(((torch.full((row[i][2],), i) for i in range(len(row))) for row in rows), -1)
    packed = Inputs(
        join(((ids[:size] for ids, _, size in row) for row in rows), pad),
        padding_mask=document_ids < 0 if (document_ids < 0).any() else None,
        positions=join(((torch.arange(size) for _, _, size in row) for row in rows), 0) if max(counts) > 1 else None,
        document_ids=document_ids.clamp(min=0) if max(counts) > 1 else None,
    )
    return Batch(packed, targets)


class BatchStream:
    """Gives batches without end, epoch after epoch; the training state stores its position."""

    def __init__(self, run: PreparedRun, state: TrainState | None = None) -> None:
        self.run, self.state = run, state or TrainState()
        self.row_indices: tuple[int, ...] = ()  # training rows of the last batch
        self._loader: BatchLoader | None = None

    def loader(self) -> BatchLoader:
        """Returns the loader of the current epoch."""
        if self._loader is None or self._loader.epoch != self.state.epoch:
            self._loader = BatchLoader(self.run, self.run.train_dataset, epoch=self.state.epoch)
        return self._loader

    def next(self) -> Batch:
        state = self.state
        if state.batch_index >= len(self.loader()):
            state.epoch, state.batch_index = state.epoch + 1, 0
        loader, index = self.loader(), state.batch_index
        state.batch_index += 1
        self.row_indices = loader.row_indices(index)
        targets = {name: [rows[i] for i in self.row_indices] for name, rows in self.run.attention_targets.items()}
        batch = loader[index]
        return add_attention_targets(batch, self.run.spec.task, self.run.special_tokens, targets) if targets else batch
