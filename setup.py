"""The compiled kernels; everything else about the package is in pyproject.toml."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_FOLDER = Path("src/mpgelu/native")
_COMPILED = ("choice.c", "baseline.c", "avx2.c", "avx512.c")  # these include the others
_FLAGS = (
    *("-std=c11", "-O3", "-g0", "-fopenmp-simd", "-ffp-contract=fast", "-fvisibility=hidden"),
    # Not -ffast-math: it takes NaN for impossible, and linking with it makes gcc flush denormals in the whole process.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
    # Nor -march: the variants for different processors are told apart when the library is loaded.
)


class BuildWithChecksum(build_ext):
    """Writes the checksum of the library next to it: loading a damaged one would end the process with a signal."""

    def run(self) -> None:
        """Compile, then write the file."""
        super().run()
        for extension in self.extensions:
            library = Path(self.get_ext_fullpath(extension.name))
            if library.exists():  # without a compiler there is none
                checksum = hashlib.sha256(library.read_bytes()).hexdigest()
                library.with_name("_kernels.sha256").write_text(f"{checksum}\n", encoding="ascii")


if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": BuildWithChecksum},
        ext_modules=[
            # A plain library, opened by ctypes: it knows nothing of Python, so that one wheel serves all versions.
            Extension(
                "mpgelu.native._kernels",
                sources=[str(_FOLDER / name) for name in _COMPILED],
                depends=sorted(map(str, _FOLDER.glob("*.[ch]"))),
                extra_compile_args=list(_FLAGS),
                libraries=["m"],
                py_limited_api=True,
                optional=True,  # without a compiler the package is installed all the same, and runs in torch
            )
        ],
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
