"""Operations on moments, one function per operation, dispatching on how the covariance is held."""

from mpgelu.rules.dropout import dropout, multiply
from mpgelu.rules.gaussian_linear import gaussian_linear
from mpgelu.rules.linear import linear
from mpgelu.rules.mpgelu import keep_probability, mpgelu
from mpgelu.rules.relu import relu

__all__ = ["dropout", "gaussian_linear", "keep_probability", "linear", "mpgelu", "multiply", "relu"]
