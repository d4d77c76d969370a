"""Audit of propagated moments against Monte-Carlo samples of the same random network, layer by layer."""

from mpgelu.inspect.audit.auditing import verify
from mpgelu.inspect.audit.findings import Audit, LayerAudit
from mpgelu.inspect.audit.inputs import InputAudit

__all__ = ["Audit", "InputAudit", "LayerAudit", "verify"]
