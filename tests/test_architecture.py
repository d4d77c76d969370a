"""The order in which modules may import each other, and the public names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpgelu

# Each layer may import those before it. Inside a layer the order is that of the list, and what stands in one tuple is
# parallel: members do not import each other.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "foundations": (("errors", "visibility"), ("registry", "storage", "native")),
    "mathematics": (("moments",), ("rules",), ("layers", "predictive"), ("likelihoods",)),
    "networks": (("networks",), ("training",)),
    "models": (("estimators",), ("tables",)),
    "instruments": (("inspect", "convert"), ("export",)),
    "surface": (("research",), ("cli",)),
}
RANK = {part: rank for rank, group in enumerate(sum(LAYERS.values(), ())) for part in group}
ROOT = Path(mpgelu.__file__).parent


def imported(path: Path) -> set[str]:
    """Top-level parts of the package that a file imports from, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("mpgelu.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: imports in this package are absolute"
            if node.module == "mpgelu":
                found |= {alias.name for alias in node.names}
            elif node.module is not None and node.module.startswith("mpgelu."):
                found.add(node.module.split(".")[1])
    return found


def files() -> list[tuple[str, Path]]:
    """Every file below the package with the part that it belongs to."""
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    return [(path.parts[0].removesuffix(".py"), ROOT / path) for path in paths if path.parts[0] != "__init__.py"]


def test_every_part_has_its_place() -> None:
    assert {part for part, _ in files()} - {"__main__"} <= set(RANK)


def test_every_part_is_on_the_map_for_contributors() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for layer, groups in LAYERS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {layer} |")]
        assert {part for group in groups for part in group} == set(row.split("|")[2].replace("`", "").split())


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_the_guides_name_are_there(page: str) -> None:
    text = (ROOT.parents[1] / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/|[a-z]+/)[a-z_/]*(?:\.py|/))`", text)
    assert len(named) > 3
    missing = [name for name in named if not ((ROOT / name).exists() or (ROOT.parents[1] / name).exists())]
    assert not missing


def test_every_package_inside_a_part_is_walked_through_or_listed() -> None:
    """Packages within packages are few, and a reader finds each in the guides."""
    text = "".join((ROOT.parents[1] / page).read_text() for page in ("CONTRIBUTING.md", "docs/architecture.md"))
    inner = {path.parent.relative_to(ROOT) for path in ROOT.glob("*/*/__init__.py")} - {Path("research")}
    assert not [str(path) for path in inner if path.parts[0] != "research" and f"{path.as_posix()}/" not in text]


def test_files_are_short_and_their_names_tell_them_apart() -> None:
    long = {path.name for path in ROOT.rglob("*.py") if len(path.read_text(encoding="utf-8").splitlines()) > 400}
    assert not long
    names = [path.name for path in ROOT.rglob("*.py") if "research" not in path.parts]
    assert not {name for name in ("report.py", "run.py", "utils.py") if name in names}


def test_imports_follow_the_layers() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for part, path in files()
        if part in RANK
        for name in imported(path)
        if name in RANK and name != part and RANK[name] >= RANK[part]
    ]
    assert not wrong


def test_inside_the_package_nothing_imports_the_package_itself() -> None:
    wrong = {path.name: imported(path) - set(RANK) for part, path in files() if part in RANK and part != "cli"}
    assert not {name: names for name, names in wrong.items() if names}


def test_public_names_are_sorted_and_there() -> None:
    def place(name: str) -> tuple[bool, bool, str]:  # constants, classes, functions
        return not name.isupper(), not name[0].isupper(), name

    assert mpgelu.__all__ == sorted(mpgelu.__all__, key=place)
    assert len(set(mpgelu.__all__)) == len(mpgelu.__all__)
    assert all(hasattr(mpgelu, name) for name in mpgelu.__all__)
    assert all(getattr(mpgelu, name).__doc__ for name in mpgelu.__all__)
    assert len(mpgelu.__all__) <= 35, "what few users need belongs to a package, such as mpgelu.errors"


def test_submodules_need_no_import_of_their_own() -> None:
    code = "import mpgelu; print(mpgelu.estimators.FAST, mpgelu.inspect.verify is mpgelu.verify)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "{'folds': 5, 'effort': 0.4} True\n"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, mpgelu.cli; print({'torch', 'pandas', 'sklearn', 'scipy'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "set()\n"


def test_every_public_name_can_be_imported_when_asked_for() -> None:
    assert sorted(mpgelu._HOME) == sorted(mpgelu.__all__)
    assert all(getattr(mpgelu, name).__module__.startswith("mpgelu.") for name in mpgelu.__all__)
    assert set(mpgelu.__all__) < set(dir(mpgelu))
    with pytest.raises(AttributeError, match="module 'mpgelu' has no attribute 'nothing'"):
        _ = mpgelu.nothing


def test_the_estimator_is_imported_without_what_only_other_parts_need() -> None:
    """What scikit-learn and torch load by themselves, pandas among them, is not counted."""
    heavy = ("matplotlib", "pandas", "pyarrow", "typer", "rich", "onnx", "pooch", "sklearn.model_selection")
    code = f"""
import sys, torch, sklearn, sklearn.base, sklearn.utils.validation
before = set(sys.modules)
import mpgelu
mpgelu.MPGELURegressor
print([name for name in {heavy} if name in set(sys.modules) - before])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
