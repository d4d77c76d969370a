"""Instruments that take a network or a model apart: an audit against sampling, and the sources of its variance."""

from mpgelu.inspect.attribution import attribute
from mpgelu.inspect.attribution_figure import plot_attribution
from mpgelu.inspect.audit import Audit, LayerAudit, verify

__all__ = ["Audit", "LayerAudit", "attribute", "plot_attribution", "verify"]
