"""Griffe extension: docstrings reach the reference as Markdown, with links to what they name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from roles import function_of, markdown_of


class SphinxRoles(griffe.Extension):
    """Convert the docstrings of a package once it is loaded, when every name in it is known."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit every object that has a docstring."""
        found = list(_objects(pkg))
        by_name: dict[str, list[str]] = {}
        for obj in found:
            by_name.setdefault(obj.name, []).append(obj.path)
        paths = {obj.path for obj in found}
        for obj in found:
            if obj.docstring is not None:
                scope = obj

                def resolve(name: str, scope: griffe.Object = scope) -> str | None:
                    path = _resolved(name, scope, paths, by_name, pkg)
                    return path if path is None else function_of(path, paths)

                obj.docstring.value = markdown_of(obj.docstring.value, resolve)


def _objects(obj: Any) -> Iterator[griffe.Object]:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _resolved(
    name: str, scope: griffe.Object, paths: set[str], by_name: dict[str, list[str]], pkg: griffe.Module
) -> str | None:
    """The path of a name as a reader of ``scope`` means it: nearest first, then anywhere if there is only one."""
    around: griffe.Object | None = scope
    while around is not None:
        try:
            return around.resolve(name) if "." not in name else around[name].canonical_path
        except (griffe.NameResolutionError, griffe.AliasResolutionError, KeyError):
            around = around.parent
    if name in paths:
        return name
    try:
        return pkg[name.removeprefix(f"{pkg.path}.")].canonical_path
    except KeyError:
        same = by_name.get(name.rpartition(".")[2], [])
        ends = [path for path in same if path.endswith(f".{name}")]
        return ends[0] if len(ends) == 1 else None
