"""Inspection of networks and models: audit against sampling, and decomposition of the predictive variance."""

from mpgelu.inspect.attribution import attribute
from mpgelu.inspect.attribution_figure import plot_attribution
from mpgelu.inspect.audit import Audit, LayerAudit, verify

__all__ = ["Audit", "LayerAudit", "attribute", "plot_attribution", "verify"]
