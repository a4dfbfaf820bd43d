"""The parts of a model: one file per slot, each kind a class with its spec. Importing this registers every kind.

Tensor names end in their shape: B batch, L query length, M memory length, D width, H query heads, G key/value heads,
K head size, F feed-forward size, V vocabulary.
"""

from manyheads.spec import import_all

import_all(__name__)
