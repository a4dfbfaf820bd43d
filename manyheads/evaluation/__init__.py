"""How good a model is: the metrics of its task on rows it has not seen, beside baselines on the same rows."""

from manyheads.evaluation.report import evaluate
from manyheads.evaluation.subject import How, Tell

__all__ = ["How", "Tell", "evaluate"]
