"""Logits processors. Importing this package registers them."""

from manyheads.spec import import_all

import_all(__name__)
