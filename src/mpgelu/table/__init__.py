"""Tables as people have them: read in parts, turned into numbers, written whole."""

from mpgelu.table.cells import CellError
from mpgelu.table.encoder import Encoded, TableEncoder
from mpgelu.table.sink import Sink, check_writable
from mpgelu.table.source import Source

__all__ = ["CellError", "Encoded", "Sink", "Source", "TableEncoder", "check_writable"]
