"""Models as ONNX graphs, from raw features to the predictive distribution: they run without torch and without us."""

from mpgelu.export.export import export_onnx

__all__ = ["export_onnx"]
