"""Compiled kernels that evaluate whole perceptrons in one call, and their interface by ctypes.

The kernels are C functions, compiled when the package is built, once for each instruction set (AVX-512, AVX2 and the
baseline of the platform); the best one for the processor is chosen when the library is loaded. Without them, if the
package was installed without a C compiler, everything runs in torch, with the same results up to rounding. Setting the
environment variable ``MPGELU_NATIVE=0`` before the first use has the same effect.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent
_FILE = "_kernels.abi3.so"
_CHECKSUM = "_kernels.sha256"
_log = logging.getLogger("mpgelu")

Integers = ctypes.Array[ctypes.c_int64]
Size = int | Integers

_switched_off = False
_warned = False
_typed: dict[tuple[str, str], Any] = {}  # kernels that were called, by name and variant


class SlowWarning(UserWarning):
    """Training runs in torch, in about twice the time, because there are no compiled kernels."""


def available() -> bool:
    """Return whether the kernels can be used."""
    return not _switched_off and _library() is not None


def status() -> str:
    """Return the instruction set of the kernels, or the reason why they cannot be used, as text."""
    if _switched_off or os.environ.get("MPGELU_NATIVE") == "0":
        return "switched off"
    return _missing() or f"compiled, {variant()}"


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Return a context in which torch is used instead of the kernels, for comparisons; it applies to all threads."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def warn_if_missing() -> None:
    """Issue a :class:`SlowWarning` once per process if the kernels are missing, but not if they were switched off."""
    global _warned
    if not _warned and not _switched_off and os.environ.get("MPGELU_NATIVE") != "0" and (reason := _missing()):
        _warned = True
        message = f"fit: no compiled kernels ({reason}); small networks train at about half the speed"
        warnings.warn(message, SlowWarning, stacklevel=3)


@cache
def variant() -> str:
    """Return the compiled variant for this processor: ``"avx512"``, ``"avx2"`` or ``"baseline"``."""
    function = _loaded().kernels_variant
    function.restype = ctypes.c_char_p
    name: bytes = function()
    return name.decode()


@cache
def number_of(name: str) -> int:
    """Return the number of a nonlinearity, or of an objective of training, in the kernels.

    Args:
        name: Its name in ``kernels.h``.

    Raises:
        RuntimeError: The kernels have nothing of this name.
    """
    function = _loaded().kernels_number
    function.restype = ctypes.c_int64
    number: int = function(name.encode())
    if number < 0:
        raise RuntimeError(f"number_of: the kernels have no nonlinearity and no objective {name!r}")
    return number


def size_of(name: str, rows: int, widths: Integers, *counts: int) -> int:
    """Return the number of floats of an array that a kernel of networks needs.

    Args:
        name: ``"<kernel>_workspace"`` or ``"<kernel>_kept"``.
        rows: Number of rows of a batch.
        widths: Number of features before the first layer and after each layer.
        *counts: Further arguments of this function in ``kernels.h``.
    """
    size: int = _function(f"{name}_{variant()}", ctypes.c_int64)(
        ctypes.c_int64(rows), ctypes.c_int64(len(widths) - 1), widths, *map(ctypes.c_int64, counts)
    )
    return size


@cache
def size_of_array(name: str, *counts: int) -> int:
    """Return the number of floats of the workspace of a kernel that does not evaluate networks.

    Args:
        name: ``"<kernel>_workspace"``.
        *counts: Arguments of this function in ``kernels.h``.
    """
    size: int = _function(f"{name}_{variant()}", ctypes.c_int64)(*map(ctypes.c_int64, counts))
    return size


def integers(values: Sequence[int]) -> Integers:
    """Return integers as an array for the kernels."""
    return (ctypes.c_int64 * len(values))(*values)


def run(name: str, sizes: Sequence[Size], tensors: Sequence[Tensor], doubles: int = 0, longs: int = 0) -> None:
    """Call a kernel, whose arguments are sizes and arrays in this order; see :func:`bound`."""
    bound(name, sizes, tensors, doubles, longs)()


def bound(
    name: str, sizes: Sequence[Size], tensors: Sequence[Tensor], doubles: int = 0, longs: int = 0
) -> Callable[[], None]:
    """Return a kernel with its arguments as a function that can be called any number of times.

    Args:
        name: Name of a function of ``kernels.h``, without its variant.
        sizes: Its leading integers, or arrays of them.
        tensors: Contiguous tensors on the CPU that the kernel reads or overwrites: ``longs`` tensors of int64,
            ``doubles`` of float64, and the others of float32. The function holds references to them.
        doubles: Number of tensors of float64.
        longs: Number of tensors of int64.

    Raises:
        TypeError: A tensor has another dtype, is not contiguous, or not on the CPU.
    """
    floats = len(tensors) - doubles - longs
    wanted = [torch.int64] * longs + [torch.float64] * doubles + [torch.float32] * floats
    for tensor, dtype in zip(tensors, wanted, strict=True):
        if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
            came = str(dtype).removeprefix("torch.")
            raise TypeError(f"run: the kernel {name} takes contiguous {came} on the CPU, got {tensor.type()}")
    function = _typed.get((name, variant())) or _with_types(name, sizes, len(tensors))
    arguments = (*sizes, *[tensor.data_ptr() for tensor in tensors])

    def call(held: object = tensors) -> None:  # the reference keeps the memory at these addresses alive
        function(*arguments)

    return call


@cache
def can_compile() -> bool:
    """Return whether there is a C++ compiler, which ``torch.compile`` needs on the CPU; if not, it is logged once."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]
    if any(shutil.which(name) for name in chosen or ("c++", "g++", "clang++")):
        return True
    _log.info("No C++ compiler: torch.compile is skipped, which changes the speed and not the numbers")
    return False


def keep_freed_memory() -> None:
    """Set glibc to keep freed memory for later allocations instead of returning it to the system.

    Propagation allocates and frees tensors of about a megabyte, which by default costs a page fault for every four
    kilobytes, up to half of the running time. The setting applies to the whole process, so that importing the library
    does not make it; the command line and the experiments do. It has no effect with other C libraries.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(trim_threshold, 2**31 - 1)
        glibc.mallopt(mmap_threshold, 2**25)


def _with_types(name: str, sizes: Sequence[Size], pointers: int) -> Any:
    """Return a kernel with declared argument types: integers or arrays of integers, followed by addresses."""
    function = _function(f"{name}_{variant()}", None)
    numbers = [ctypes.c_int64 if isinstance(size, int) else ctypes.c_void_p for size in sizes]
    function.argtypes = [*numbers, *[ctypes.c_void_p] * pointers]
    _typed[name, variant()] = function
    return function


@cache
def _function(name: str, result: type[ctypes.c_int64] | None) -> Any:
    """Return a function of the library by its full name, with the type of its result."""
    function = getattr(_loaded(), name)
    function.restype = result
    return function


def _loaded() -> ctypes.CDLL:
    """Return the library.

    Raises:
        RuntimeError: The kernels cannot be used.
    """
    library = _library()
    if library is None:
        raise RuntimeError(f"run: a kernel was called although there are none here: {status()}")
    return library


@cache
def _library() -> ctypes.CDLL | None:
    """Return the library, or ``None`` if it is switched off or cannot be used."""
    if os.environ.get("MPGELU_NATIVE") == "0" or _missing():
        return None
    return ctypes.CDLL(str(_FOLDER / _FILE))


@cache
def _missing() -> str:
    """Return the reason why the kernels cannot be used; empty if they can."""
    library = _FOLDER / _FILE
    if not library.exists():
        return "the package was installed without a C compiler; install one, then mpgelu again"
    sources = [*_FOLDER.glob("*.[ch]")]  # in a working copy only; a wheel does not contain the sources
    if any(source.stat().st_mtime > library.stat().st_mtime for source in sources):
        return "they are older than their source; run make kernels"
    try:
        written, found = (_FOLDER / _CHECKSUM).read_text(encoding="ascii"), hashlib.sha256(library.read_bytes())
        if written.strip() != found.hexdigest():  # a truncated library ends the process when it is loaded
            return "the file is damaged; install mpgelu again"
        ctypes.CDLL(str(library))
    except (OSError, UnicodeDecodeError) as error:
        return f"they cannot be loaded: {error}"
    return ""
