"""The compiled kernels; everything else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

_FOLDER = Path("src/mpgelu/native")
_COMPILED = ("choice.c", "baseline.c", "avx2.c", "avx512.c")  # these include the others
_FLAGS = (
    *("-std=c11", "-O3", "-g0", "-fopenmp-simd", "-ffp-contract=fast", "-fvisibility=hidden"),
    # Not -ffast-math: it takes NaN for impossible, and linking with it makes gcc flush denormals in the whole process.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
    # Nor -march: the variants for different processors are told apart when the library is loaded.
)

if __name__ == "__main__":
    setup(
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
