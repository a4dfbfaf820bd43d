"""Tasks, one file each. Importing this package registers every task."""

from manyheads.spec import import_all

import_all(__name__)
