"""The kernels as part of the package: built into the wheel, found without a compiler, missed in words."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpgelu as mp
from mpgelu import native
from mpgelu.networks.prepared import Prepared

ROOT = Path(__file__).parents[2]
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

_USE = """
import warnings, numpy, torch, mpgelu
from mpgelu import native
from mpgelu.networks.prepared import Prepared
warnings.simplefilter("error", native.SlowWarning)
print(native.status(), native.available())
x = torch.linspace(-1, 1, 64)[:, None]
net = mpgelu.network(1, hidden=(8,))
try:
    mpgelu.fit(net, mpgelu.HeteroscedasticGaussian(), (x, x[:, 0]), epochs=2)
    mpgelu.fit(net, mpgelu.HeteroscedasticGaussian(), (x, x[:, 0]), epochs=2)
except native.SlowWarning as warning:
    print(warning)
model = mpgelu.MPGELURegressor((8,), steps=5, random_state=0).fit(x.numpy(), x[:, 0].numpy())
print(numpy.isfinite(model.predict(x.numpy())).all(), mpgelu.__file__)
"""


def _environment(folder: Path) -> Path:
    """The Python of a new environment without a compiler, that finds the packages of this one but not mpgelu."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    (target,) = folder.glob("lib/python*/site-packages")
    (target / "others.pth").write_text(f"{here}\n")
    return folder / "bin" / "python"


def _used(python: Path) -> list[str]:
    environment = {"PATH": str(python.parent), "OMP_NUM_THREADS": "1", "HOME": str(python.parent)}
    command = [str(python), "-I", "-c", _USE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def _install(wheel: Path, python: Path) -> Path:
    """Unpack a wheel where the environment finds it first."""
    (target,) = python.parents[1].glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@NEEDS_COMPILER
def test_a_wheel_brings_its_kernels_where_there_is_no_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-abi3-" in wheel.name
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".c", ".h"))]
    python = _environment(tmp_path / "environment")
    target = _install(wheel, python)
    status, predicted = _used(python)
    assert status.startswith("compiled, ")
    assert status.endswith("True")
    assert predicted == f"True {target}/mpgelu/__init__.py"
    next(target.glob("mpgelu/native/_kernels*")).unlink()  # as where the package was built without a compiler
    status, warning, predicted = _used(python)
    assert status.endswith("installed without a C compiler; install one, then mpgelu again False")
    assert warning.startswith("fit: no compiled kernels (the package was installed without a C compiler")
    assert predicted.startswith("True ")


def test_a_damaged_library_is_missed_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, checksum = (tmp_path / name for name in (native._FILE, native._CHECKSUM))
    if native.available():
        whole, written = ((native._FOLDER / path.name).read_bytes() for path in (library, checksum))
        checksum.write_bytes(written)
        half = len(whole) // 2
        for damaged in (whole[:half], whole[:half] + bytes(len(whole) - half)):  # loading them is SIGBUS and SIGSEGV
            library.write_bytes(damaged)
            with monkeypatch.context() as patch:
                patch.setattr(native, "_FOLDER", tmp_path)
                assert native._missing.__wrapped__() == "the file is damaged; install mpgelu again"
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    library.write_bytes(b"not a library")
    checksum.write_text(hashlib.sha256(b"not a library").hexdigest())
    assert native._missing.__wrapped__().startswith("they cannot be loaded: ")
    checksum.unlink()
    assert native._missing.__wrapped__().startswith("they cannot be loaded: ")
    source = tmp_path / "kernels.h"
    source.touch()
    os.utime(tmp_path / native._FILE, (0, 0))
    assert native._missing.__wrapped__() == "they are older than their source; run make kernels"


def test_the_first_slow_fit_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.linspace(-1, 1, 60)[:, None].numpy()
    model = mp.MPGELURegressor((4,), steps=3, folds=2, random_state=0)
    monkeypatch.setattr(native, "_missing", lambda: "no compiler")
    monkeypatch.setattr(native, "_warned", False)
    with pytest.warns(native.SlowWarning, match=r"fit: no compiled kernels \(no compiler\)"):
        model.fit(X, X[:, 0])
    model.fit(X, X[:, 0])  # once is enough: warnings are errors here


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with native.disabled():
        assert not native.available()
        assert native.status() == "switched off"
        native.warn_if_missing()  # says nothing: it was wanted
    code = "from mpgelu import native; print(native.available(), native.status())"
    environment = os.environ | {"MPGELU_NATIVE": "0"}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "False switched off\n"


@NEEDS_COMPILER
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "src/mpgelu/native").glob("*.c")))
def test_every_file_compiles_on_its_own_without_a_warning(name: str) -> None:
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fopenmp-simd", "-fsyntax-only"]
    subprocess.run(["cc", *flags, ROOT / "src/mpgelu/native" / name], check=True)


VARIANTS = ["baseline", "avx2", "avx512"]


def check_variants(found: Callable[[], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every variant of this processor gives the same value to rounding, and that it was called."""
    here, made = native.variant(), []
    for variant in VARIANTS[: VARIANTS.index(here) + 1]:
        monkeypatch.setattr(native, "variant", lambda name=variant: name)
        monkeypatch.setattr(native, "_typed", {})
        made.append(found())
        assert {used for _, used in native._typed} == {variant}
    for other in made[1:]:
        for ours, theirs in zip(made[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu", mp.ReLU])
@pytest.mark.parametrize("kind", [mp.DiagonalMoments, mp.FactoredMoments])
def test_variants_agree(nonlinearity: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if nonlinearity is mp.ReLU:  # exact covariance of pairs
        stack = mp.Stack([mp.network(4, (20, 20), nonlinearity=nonlinearity, rate=0.1) for _ in range(2)])
    else:
        stack = mp.Stack([mp.paper_network(4, nonlinearity=nonlinearity, rate=0.1) for _ in range(2)])
    x = torch.randn(2, 21, 4)

    def found() -> list[torch.Tensor]:
        stack.zero_grad()
        after = stack(kind.certain(x))
        (after.mean.sum() + after.variance.sum()).backward()
        return [after.mean, after.variance, *(p.grad for p in stack.parameters() if p.grad is not None)]

    check_variants(found, monkeypatch)


@pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")
def test_variants_agree_on_an_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps by each, and predictions of the model of one: networks, process, noise, mixture and quantiles."""
    X = np.random.default_rng(0).normal(size=(60, 3))
    settings: dict[str, Any] = {"folds": 2, "random_state": 0}
    few = mp.MPGELURegressor((8, 8), steps=3, **settings)
    check_variants(lambda: [torch.as_tensor(few.fit(X, X[:, 0]).predict(X))], monkeypatch)
    model = mp.MPGELURegressor((8, 8), steps=50, **settings).fit(X, np.sin(3 * X[:, 0]))

    def predicted() -> list[torch.Tensor]:
        model.ensemble_._fast = Prepared()
        return [torch.as_tensor(part) for part in (*model.predict_parts(X), *model.predict_interval(X))]

    check_variants(predicted, monkeypatch)


def test_wrong_kind_of_tensor() -> None:
    with pytest.raises(TypeError, match=r"takes contiguous float32 on the CPU, got torch\.DoubleTensor"):
        native.run("diagonal_forward", (), (torch.ones(2).double(),))
