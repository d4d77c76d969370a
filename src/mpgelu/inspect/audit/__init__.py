"""Are the propagated moments right? An audit of a network against sampling of itself, layer by layer."""

from mpgelu.inspect.audit.auditing import verify
from mpgelu.inspect.audit.findings import Audit, LayerAudit
from mpgelu.inspect.audit.inputs import InputAudit

__all__ = ["Audit", "InputAudit", "LayerAudit", "verify"]
