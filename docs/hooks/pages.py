"""MkDocs hooks: pages that programs write, formulas without a foreign host, and a check of what was built."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

HOOKS = Path(__file__).parent
DOCS = HOOKS.parent
ROOT = DOCS.parent
CACHE = ROOT / ".cache" / "tutorials"

REFERENCE = {  # page: title, what it holds, packages; of packages in WHOLE every name, of others the public ones
    "estimator": (
        "Estimator and tables",
        "The scikit-learn estimator, and models of tables.",
        ("estimators", "tables"),
    ),
    "networks": ("Networks and training", "Networks, stacks of them, and the training loop.", ("networks", "training")),
    "layers": ("Layers", "Modules that own parameters and call one rule.", ("layers",)),
    "moments": ("Moments", "Values that carry a mean and a covariance.", ("moments",)),
    "rules": ("Rules", "One function per operation; the type of the moments chooses the formula.", ("rules",)),
    "likelihoods": (
        "Likelihoods and distributions",
        "What the outputs of a network mean.",
        ("likelihoods", "predictive"),
    ),
    "instruments": ("Instruments", "Audit, attribution, conversion, export.", ("inspect", "convert", "export")),
    "errors": ("Errors", "Every error names the function and argument, what was wanted and the fix.", ("errors",)),
}
WHOLE = {"layers", "moments", "rules", "likelihoods", "errors"}
FIRST = ["MPGELURegressor", "TableModel", "load", "network", "fit", "propagate", "Linear", "MPGELU", "Dropout"]
FIRST += ["DiagonalMoments", "FullMoments", "FactoredMoments", "HeteroscedasticGaussian", "Predictive"]
INHERITING = {"MPGELURegressor"}  # most of its methods are those of its bases

sys.path[:0] = [str(HOOKS), str(DOCS / "figures")]

import check  # noqa: E402
import style  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from typer.main import get_command  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from mpgelu.cli import app  # noqa: E402


def on_files(files: Files, config: Any) -> Files:
    """Add the tutorials, the gallery, the commands, and MathJax from its package."""
    for script in sorted((DOCS / "tutorials").glob("*.py")):
        folder = _executed(script)
        for path in sorted(folder.iterdir()):
            files.append(File.generated(config, f"tutorials/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "gallery.md", content=_gallery()))
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    for page, content in _reference().items():
        files.append(File.generated(config, f"reference/{page}.md", content=content))
    for name, path in _mathjax():
        files.append(File.generated(config, f"assets/mathjax/{name}", abs_src_path=str(path)))
    return files


def on_post_build(config: Any) -> None:
    """Refuse a site with raw roles, LaTeX outside maths, broken links, missing images or foreign assets."""
    found = list(check.problems(Path(config["site_dir"])))
    if found:
        raise PluginError("the built site has problems:\n  " + "\n  ".join(found))


def _executed(script: Path) -> Path:
    """Folder with the page and figures of a tutorial, run now unless nothing that it depends on has changed."""
    folder = CACHE / f"{script.stem}-{_fingerprint(script)}"
    if not folder.exists():
        work = folder.with_suffix(".part")
        shutil.rmtree(work, ignore_errors=True)
        command = [sys.executable, str(HOOKS / "tutorials.py"), str(script), str(work)]
        done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PluginError(f"tutorial {script.name} failed:\n{done.stderr[-3000:]}")
        for old in CACHE.glob(f"{script.stem}-*"):
            if old != work:
                shutil.rmtree(old)
        work.rename(folder)
    return folder


def _fingerprint(script: Path) -> str:
    """Of the tutorial, of what runs it, and of the whole package."""
    package = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in {".py", ".c"})
    content = hashlib.sha256()
    for path in [script, HOOKS / "tutorials.py", DOCS / "figures" / "style.py", *package]:
        content.update(path.read_bytes())
    return content.hexdigest()[:16]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "96"}


def _gallery() -> str:
    """Every figure of the documentation with the program that draws it."""
    page = [
        "# Gallery",
        "Every figure of these pages and of the README, with the program that draws it. `make figures` draws them all.",
    ]
    for script in sorted((DOCS / "figures").glob("*.py")):
        source = script.read_text(encoding="utf-8")
        if script.stem in {"style", "make"}:
            continue
        title, _, text = (ast.get_docstring(ast.parse(source)) or script.stem).partition("\n\n")
        code = "\n".join(f"    {line}".rstrip() for line in source.splitlines())
        page += [
            f"## {title.rstrip('.')}",
            style.image(f"images/{script.stem}", title),
            text,
            f'??? example "docs/figures/{script.name}"\n\n    ```python\n{code}\n    ```',
        ]
    return "\n\n".join(page) + "\n"


def _commands() -> str:
    """The help of every command, in the order in which ``mpgelu --help`` lists them."""
    page = ["# Commands", "What `mpgelu` prints with `--help`.", f"```text\n{_help()}\n```"]
    for command in _named(get_command(app)):
        page += [f"## mpgelu {command}", f"```text\n{_help(*command.split())}\n```"]
    return "\n\n".join(page) + "\n"


def _named(group: Any) -> Iterator[str]:
    """The names of all commands, with those of the groups that they are in."""
    for name, command in group.commands.items():
        inside = list(_named(command)) if hasattr(command, "commands") else []
        yield from (f"{name} {part}" for part in inside) if inside else (name,)


def _help(*command: str) -> str:
    shown = CliRunner().invoke(app, [*command, "--help"], prog_name="mpgelu", env=_environment())
    if shown.exit_code != 0:
        raise PluginError(f"mpgelu {' '.join(command)} --help failed:\n{shown.output}")
    return "\n".join(row.rstrip() for row in shown.output.strip("\n").splitlines())


def _reference() -> dict[str, str]:
    """The pages of the reference and their index, from what packages say is public."""
    public = _exported("")
    pages, index, missing = (
        {},
        ["# Reference", "Every public name, with signatures and links to its parts."],
        set(public),
    )
    for page, (title, intro, packages) in REFERENCE.items():
        homes = [(name, part) for part in packages for name in _exported(part)]
        homes.sort(key=lambda home: FIRST.index(home[0]) if home[0] in FIRST else len(FIRST))
        named = {name: _home(name, part) for name, part in homes if name in public or part in WHOLE}
        entries = [
            f"::: {path}" + "\n    options: {inherited_members: true}" * (name in INHERITING)
            for name, path in named.items()
        ]
        pages[page] = "\n\n".join([f"# {title}", intro, *entries]) + "\n"
        links = ", ".join(f"[`{name}`][{path}]" for name, path in named.items())
        index += [f"## [{title}]({page}.md)", f"{intro} {links}"]
        missing -= set(named)
    if missing:
        raise PluginError(f"public names without a place in the reference: {sorted(missing)}")
    index += ["## [Commands](commands.md)", "What `mpgelu` does from a shell."]
    pages["index"] = "\n\n".join(index) + "\n"
    return pages


def _exported(part: str) -> list[str]:
    """``__all__`` of a package, read without importing it; of a single module the classes that it defines."""
    body = _source(part)
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [node.name for node in body if isinstance(node, ast.ClassDef)]


def _home(name: str, part: str) -> str:
    """Where a package has a name from: a function may be called like its module, which is not what is meant."""
    for node in _source(part):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return f"{node.module}.{name}"
    return f"mpgelu.{part}.{name}"


def _source(part: str) -> list[ast.stmt]:
    path = ROOT / "src" / "mpgelu" / part
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")).body


def _mathjax() -> list[tuple[str, Path]]:
    """MathJax's program and fonts, as the package ``sphinx-mathjax-offline`` ships them."""
    found = []
    for file in metadata.files("sphinx-mathjax-offline") or []:
        _, inside, name = str(file).partition("/static/mathjax/")
        if inside and (name == "tex-chtml.js" or name.startswith("output/chtml/fonts/woff-v2/")):
            found.append((name, Path(str(file.locate()))))
    if not any(name == "tex-chtml.js" for name, _ in found):
        raise PluginError("sphinx-mathjax-offline is not installed: pip install '.[docs]'")
    return found
