"""Operations on moments: one function for each operation, which dispatches on the structure of the covariance.

Every function also accepts plain tensors, for which it computes the deterministic operation. A new type of moments
registers its rules with ``@rule.register``; no existing line changes.
"""

from mpgelu.moments.base import OPERATORS
from mpgelu.rules.add import add, subtract_from
from mpgelu.rules.concatenate import concatenate
from mpgelu.rules.dropout import dropout, multiply
from mpgelu.rules.elementwise import elementwise
from mpgelu.rules.flatten import flatten
from mpgelu.rules.fork import fork
from mpgelu.rules.gaussian_linear import gaussian_linear
from mpgelu.rules.leaky_relu import leaky_relu
from mpgelu.rules.linear import linear
from mpgelu.rules.mpgelu import keep_probability, mpgelu
from mpgelu.rules.normalise import batch_norm, layer_norm
from mpgelu.rules.periodic import periodic
from mpgelu.rules.relu import relu
from mpgelu.rules.scale import rescale, scale

OPERATORS.update(add=add, scale=scale, subtract_from=subtract_from)

__all__ = [
    "add",
    "batch_norm",
    "concatenate",
    "dropout",
    "elementwise",
    "flatten",
    "fork",
    "gaussian_linear",
    "keep_probability",
    "layer_norm",
    "leaky_relu",
    "linear",
    "mpgelu",
    "multiply",
    "periodic",
    "relu",
    "rescale",
    "scale",
    "subtract_from",
]
