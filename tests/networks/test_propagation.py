import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import mpgelu
from mpgelu import DiagonalMoments, FullMoments, InputError, propagate


@pytest.mark.parametrize("kind", [DiagonalMoments, mpgelu.FactoredMoments, FullMoments])
@pytest.mark.parametrize("rows_at_once", [None, 1, 7, 1000])
def test_chunks_are_the_whole(kind: Any, rows_at_once: int | None) -> None:
    torch.manual_seed(0)
    network = mpgelu.network(5, hidden=(8, 8)).double()
    x = torch.randn(23, 5, dtype=torch.float64)
    whole = network(kind.certain(x))
    parts = propagate(network, x, moments=kind if rows_at_once else kind.certain, rows_at_once=rows_at_once)
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.covariance, whole.covariance)
    assert isinstance(parts, DiagonalMoments if kind is DiagonalMoments else FullMoments)
    assert not parts.mean.requires_grad


def test_bad_arguments() -> None:
    network = mpgelu.network(2, hidden=(4,))
    with pytest.raises(InputError, match=r"propagate: x must have shape \(rows, features\), got \(2,\)"):
        propagate(network, torch.ones(2))
    with pytest.raises(InputError, match="rows_at_once must be at least 1, got -3"):
        propagate(network, torch.ones(4, 2), rows_at_once=-3)
    with pytest.raises(InputError, match="mean must be finite, got nan at index"):
        propagate(network, torch.tensor([[1.0, float("nan")]]))


_PEAK = """
import sys, torch, mpgelu
from mpgelu.research.bench.sections import _high_water_mark
torch.set_num_threads(1)
network = mpgelu.network(9, hidden=(50, 50))
x = torch.zeros(400_000, 9)
mpgelu.propagate(network, x[:20_000])
before = _high_water_mark()
mpgelu.propagate(network, x, rows_at_once=int(sys.argv[1]) or None)
print(_high_water_mark() - before)
"""


def _megabytes(rows_at_once: int) -> float:
    """With the rules, which need room for a chunk; the kernels need none worth measuring."""
    command, environment = [sys.executable, "-c", _PEAK, str(rows_at_once)], os.environ | {"MPGELU_NATIVE": "0"}
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_memory_is_that_of_the_output_and_a_chunk() -> None:
    output = 400_000 * (2 + 4) * 4 / 2**20  # mean and covariance of two outputs
    assert _megabytes(0) < output + 15
    assert _megabytes(100_000) > 100_000 * 9 * 50 * 4 / 2**20  # one block of a larger chunk: the measure measures
