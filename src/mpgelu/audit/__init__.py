"""Are the propagated moments right? An audit of a network against sampling of itself, layer by layer."""

from mpgelu.audit.findings import Audit, LayerAudit
from mpgelu.audit.run import verify

__all__ = ["Audit", "LayerAudit", "verify"]
