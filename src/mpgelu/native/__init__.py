"""Fused C loops for float32 on the CPU, compiled on first use; without a compiler everything runs in torch.

The environment variable ``MPGELU_NATIVE=0`` turns them off.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pooch
import torch
from torch import Tensor

# Not -ffast-math: it takes NaN for impossible, and linking with it makes gcc flush denormals in the whole process.
_FLAGS = (
    *("-std=c11", "-O3", "-march=native", "-fopenmp-simd", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fPIC", "-shared"),
)
_SOURCES = ("kernels.c", "perceptron.c", "full.c", "factored.c")  # compiled as one
_log = logging.getLogger("mpgelu")

Size = int | ctypes.Array[ctypes.c_int64]

_switched_off = False


def available() -> bool:
    """Whether the kernels can be used: compiled, or found in the cache, on the first call."""
    return not _switched_off and _library() is not None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run the plain torch formulas inside, for comparison; for the whole process, not for one thread."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


@cache
def can_compile() -> bool:
    """Whether ``torch.compile`` has the C++ compiler that it needs on the CPU; if not, the log says so once."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]
    if any(shutil.which(name) for name in chosen or ("c++", "g++", "clang++")):
        return True
    _log.info("No C++ compiler: torch.compile is skipped, which changes the speed and not the numbers")
    return False


def keep_freed_memory() -> None:
    """Ask the C library to keep freed memory for the next tensor instead of returning it to the system.

    Propagation allocates and frees tensors of about a megabyte, which by default costs a page fault for every four
    kilobytes, up to half of the running time. The setting is the process's own: the command line and the experiments
    make it, importing the library does not. Does nothing where the C library is not glibc.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(trim_threshold, 2**31 - 1)
        glibc.mallopt(mmap_threshold, 2**25)


def run(name: str, sizes: Sequence[Size], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Call one function of ``kernels.c``, whose arguments are sizes, inputs and outputs in this order.

    Args:
        name: the function.
        sizes: its leading integers, or arrays of them.
        inputs: float32 tensors on the CPU.
        outputs: contiguous float32 tensors on the CPU, which are overwritten.
    """
    library = _library()
    if library is None:
        raise RuntimeError(f"run: the kernel {name} was called although there are no native kernels here")
    inputs = [tensor.contiguous() for tensor in inputs]
    tensors = [*inputs, *outputs]
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise TypeError(f"run: the kernel {name} takes contiguous float32 on the CPU, got {tensor.type()}")
    function = getattr(library, name)
    function.restype = None
    numbers = (ctypes.c_int64(size) if isinstance(size, int) else size for size in sizes)
    function(*numbers, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors))


@cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("MPGELU_NATIVE") == "0":
        return None
    try:
        return ctypes.CDLL(str(_build()))
    except subprocess.CalledProcessError as error:
        reason = f"{shlex.join(error.cmd[:1])} failed: {error.stderr.strip()[:500]}"
    except OSError as error:
        reason = str(error)
    _log.info("No native kernels, which makes small networks slower: %s", reason)
    return None


def _build() -> Path:
    """Path of the compiled kernels in the user's cache, made there if missing."""
    compiler = _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    source = "".join(files(__name__).joinpath(name).read_text(encoding="utf-8") for name in _SOURCES)
    key = sha256("\0".join([source, *_FLAGS, *compiler, version, platform.machine(), _processor()]).encode())
    library = Path(pooch.os_cache("mpgelu")) / f"kernels-{key.hexdigest()[:20]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # several processes may build at once
            target = Path(folder) / library.name
            command = [*compiler, *_FLAGS, "-x", "c", "-", "-o", str(target), "-lm"]
            subprocess.run(command, input=source, capture_output=True, text=True, check=True)
            target.replace(library)
    return library


def _compiler() -> list[str]:
    """The C compiler: ``$CC`` or the first one found."""
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise FileNotFoundError("there is no C compiler (cc, gcc, clang or $CC)")


def _processor() -> str:
    """What the compiler's ``-march=native`` depends on: a shared home folder may serve different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
