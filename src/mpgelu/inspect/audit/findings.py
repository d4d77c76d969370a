"""The findings of an audit, as a table and in words."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from mpgelu.inspect.audit.inputs import ALLOWED, Finding, InputAudit

_WEAK = 0.5  # skewness from which on a distribution is visibly lopsided; a gamma distribution of shape 16 has it
# Layers whose outputs the next nonlinearity, or at the end the likelihood, assumes to be Gaussian.
_MIXING = ("Linear", "GaussianLinear", "BatchNorm1d", "LayerNorm", "Operation")
_EXACT = ("Dropout", "MPGELU")  # layers whose moments are exact without a Gaussian assumption


@dataclass(frozen=True)
class LayerAudit(Finding):
    """Comparison of the propagated moments of one layer with samples; the worst entry over all rows and units.

    Attributes:
        layer: Name of the layer in the network.
        kind: Class of the layer.
        mean_error: Largest error of a mean, in standard deviations of its unit.
        mean_se: Standard error of that estimate, in the same unit.
        covariance_error: Largest error of a covariance, relative to the product of the two standard deviations; or
            that of the sum of all variances, if it exceeds its allowance by more.
        covariance_se: Standard error of that estimate, in the same unit.
        smallest_eigenvalue: Smallest eigenvalue of a propagated covariance, relative to its largest variance.
        skewness: Largest absolute sample skewness of units with at least a tenth of the largest standard deviation of
            their row; it is 0 for a Gaussian, which the nonlinearities assume.
        judged: Share of the units whose sample variance rests on enough deviations to be compared.
        decided: Whether the number of draws suffices to distinguish right from wrong moments for most units.
        passed: Whether both errors are within their allowance, including sampling error.
    """

    layer: str
    kind: str
    mean_error: float
    mean_se: float
    covariance_error: float
    covariance_se: float
    smallest_eigenvalue: float
    skewness: float
    judged: float
    decided: bool
    passed: bool


@dataclass(frozen=True)
class Audit:
    """The result of :func:`verify`: one entry per layer, and one for errors of the features. It prints as a table.

    Attributes:
        layers: Findings of the layers, in the order of their execution.
        draws: Number of samples of each row.
        rows: Number of rows.
        tolerance: Error allowed in addition to sampling error, in standard deviations.
        inputs: Findings for features with errors; ``None`` without ``input_std``.
    """

    layers: tuple[LayerAudit, ...]
    draws: int
    rows: int
    tolerance: float
    inputs: InputAudit | None = None

    @property
    def passed(self) -> bool:
        """Whether no error was found."""
        return all(part.passed for part in self._parts())

    @property
    def decided(self) -> bool:
        """Whether the number of draws suffices to distinguish right from wrong moments in every layer."""
        return all(part.decided for part in self._parts())

    def _parts(self) -> tuple[Finding, ...]:
        """Return all findings."""
        return self.layers if self.inputs is None else (*self.layers, self.inputs)

    def words(self) -> str:
        """Return the findings in words: whether the moments are right, and where the Gaussian assumption is weak."""
        lines = [*self._agreement(), *self._assumption()]
        return "\n".join(lines if self.inputs is None else [*lines, self.inputs.words()])

    def _agreement(self) -> list[str]:
        """Return the sentences about errors of moments, and about what the draws cannot decide."""
        wrong = [row for row in self.layers if not row.passed]
        undecided = [row.layer for row in self.layers if row.verdict == "undecided"]
        lines = ["Means and covariances agree with sampling at every layer."]
        if not self.layers:
            lines = ["No network has random layers: their outputs are known, and there are no moments to audit."]
        if wrong:
            worst = max(wrong, key=lambda row: max(row.mean_error, row.covariance_error))
            lines = [
                f"Means or covariances disagree with sampling at {_listed([row.layer for row in wrong])}, most at "
                f"layer {worst.layer} ({worst.kind}): by {worst.mean_error:.2f} standard deviations in a mean, by "
                f"{worst.covariance_error:.2f} of the product of the two standard deviations in a covariance."
            ]
        elif undecided:
            agreeing = len(self.layers) - len(undecided)
            lines = [f"Means and covariances agree with sampling at {agreeing} of {len(self.layers)} layers."]
        if undecided:
            lines.append(
                f"Undecided at {_listed(undecided)}, neither right nor wrong: too rarely random for {self.draws} "
                "draws. More draws tell more."
            )
        partly = [row for row in self.layers if row.judged < 1]
        if partly:
            least = min(partly, key=lambda row: row.judged)
            lines.append(
                f"{1 - least.judged:.1%} of the units of layer {least.layer}"
                + f", and of {len(partly) - 1} other layer{'s' * (len(partly) > 2)}," * (len(partly) > 1)
                + f" are too rarely random for {self.draws} draws and were left out."
            )
        return lines

    def _assumption(self) -> list[str]:
        """Return the sentences about the assumption that units before a nonlinearity are Gaussian."""
        lines = []
        misled = [row.layer for row in self.layers if not row.passed and row.kind not in (*_MIXING, *_EXACT)]
        if misled:
            lines.append(f"The Gaussian assumption is wrong for some inputs of the nonlinearity at {_listed(misled)}.")
        skewed = [row for row in self.layers if row.skewness > _WEAK and row.kind in _MIXING]
        if skewed:
            worst = max(skewed, key=lambda row: row.skewness)
            lines.append(
                f"The Gaussian assumption is weak at {_listed([row.layer for row in skewed])}: units are skewed, most "
                f"at layer {worst.layer} ({worst.kind}) with {worst.skewness:.1f} (0 is Gaussian). Means and variances "
                "after MP-GELU do not depend on it; those after other nonlinearities, and quantiles, do. How good "
                "intervals are, rows whose target is known tell better (mpgelu evaluate)."
            )
        else:
            lines.append(f"No unit that is taken for Gaussian has a skewness above {_WEAK}.")
        return lines

    def frame(self) -> pd.DataFrame:
        """Return the findings of the layers as a DataFrame, one row per layer."""
        return pd.DataFrame([vars(layer) for layer in self.layers])

    def __str__(self) -> str:
        """Return the table, followed by an explanation of its columns."""
        head = f"{'layer':12} {'kind':14} {'mean error':>18} {'covariance error':>18} {'min eigen':>10} {'skew':>6}"
        lines = [head + "  verdict", "-" * (len(head) + 9)]
        for row in self.layers:
            mean = f"{row.mean_error:.4f} ± {row.mean_se:.4f}"
            covariance = f"{row.covariance_error:.4f} ± {row.covariance_se:.4f}"
            lines.append(
                f"{row.layer:12} {row.kind:14} {mean:>18} {covariance:>18} {row.smallest_eigenvalue:>10.1e} "
                f"{row.skewness:>6.2f}  {row.verdict}"
            )
        lines.append(
            f"{self.draws} draws, {self.rows} rows; errors in standard deviations, largest entry; "
            f"passes within sampling error + {self.tolerance:g}"
        )
        if self.inputs is not None:
            lines.append(f"{self.inputs}; {self.draws} random inputs, passes within sampling error + {ALLOWED:g}")
        return "\n".join(lines)


def _listed(layers: list[str]) -> str:
    """Return the names of at most four layers, and the number of the others."""
    names = ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
    return f"layer{'s' * (len(layers) > 1)} {names}"
