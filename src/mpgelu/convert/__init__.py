"""From a trained torch module to a network for moments that shares its weights."""

from mpgelu.convert.accuracy import ConversionReport, ConvertedOperation
from mpgelu.convert.conversion import from_torch
from mpgelu.convert.measured import MeasuredError
from mpgelu.convert.network import ConvertedNetwork
from mpgelu.convert.tracing import conversion

__all__ = ["ConversionReport", "ConvertedNetwork", "ConvertedOperation", "MeasuredError", "conversion", "from_torch"]
