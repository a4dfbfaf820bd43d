"""The parts a model is made of: one file a slot, each kind a class beside its spec. Importing fills every slot.

Shapes are written in names: B batch, L query length, M memory length, D width, H query heads, G key/value heads,
K head size, F hidden, V vocabulary.
"""

from manyheads.parts import attend, attention, batch, embed, feedforward, head, mask, norm, position, recurrent, residual, rope

__all__ = ["attend", "attention", "batch", "embed", "feedforward", "head", "mask", "norm", "position", "recurrent", "residual", "rope"]
