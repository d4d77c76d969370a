"""A page about a model that a person wants to read."""

from mpgelu.tables.report.page import page

__all__ = ["page"]
