"""Conversion of trained torch modules to networks of moments that share their parameters."""

from mpgelu.convert.accuracy import ConversionReport, ConvertedOperation
from mpgelu.convert.conversion import from_torch
from mpgelu.convert.measured import MeasuredError
from mpgelu.convert.network import ConvertedNetwork
from mpgelu.convert.tracing import conversion

__all__ = ["ConversionReport", "ConvertedNetwork", "ConvertedOperation", "MeasuredError", "conversion", "from_torch"]
