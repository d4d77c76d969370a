"""Export of models as ONNX graphs that run without torch and without this library."""

from mpgelu.export.export import export_onnx

__all__ = ["export_onnx"]
