"""Are the propagated moments right? An audit of a network against sampling of itself, layer by layer."""

from mpgelu.verify.audit import Audit, LayerAudit
from mpgelu.verify.run import verify

__all__ = ["Audit", "LayerAudit", "verify"]
