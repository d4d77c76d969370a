"""A small model of a table that the tests of commands share; it is not changed by any of them."""

from __future__ import annotations

import pytest

from houses import QUICK, houses
from mpgelu.tables.model import TableModel


@pytest.fixture(scope="session")
def fitted() -> TableModel:
    return TableModel.fit(houses(), "price", **QUICK)
