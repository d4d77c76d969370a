"""Models of tables: reading and writing files, encoding of columns, training, evaluation and a report."""

from mpgelu.tables.cells import CellError
from mpgelu.tables.columns import Encoded
from mpgelu.tables.encoder import TableEncoder
from mpgelu.tables.model import TableModel, load
from mpgelu.tables.sink import Sink
from mpgelu.tables.source import Source

__all__ = ["CellError", "Encoded", "Sink", "Source", "TableEncoder", "TableModel", "load"]
