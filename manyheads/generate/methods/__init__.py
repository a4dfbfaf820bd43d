"""Decoding methods, one file each. Importing this package fills the slot."""

from manyheads.spec import import_all

import_all(__name__)
