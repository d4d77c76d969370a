"""The report on a model: one HTML page with figures, written for readers who did not train it."""

from mpgelu.tables.report.page import page

__all__ = ["page"]
