"""Checks an import path `package.module:function` without importing the module, whose imports may be slow."""

import hashlib
import re
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from proximo import session_functions

MADE_WHEN_RUN = "__getattr__|globals|locals|setattr|vars|exec|__dict__"
"""Words of a module that may make names only when it runs."""


def function_problem(import_path: str) -> str | None:
    """What is wrong with an import path; None if no problem can be found without running code."""
    module_name, colon, function = import_path.partition(":")
    is_file, stem = module_name.endswith(".py"), Path(module_name).stem
    if is_file or not colon or not all(part.isidentifier() for part in (*module_name.split("."), function)):
        is_module = is_file and stem.isidentifier() and function.isidentifier()
        hint = f": write {stem}:{function}, and start in its folder" if is_module else ""
        return f"a function is named as package.module:function, got {import_path!r}{hint}"
    if module_name == session_functions.MODULE:
        return session_functions.problem(function)
    exists, source = _module_file(module_name)
    if not exists:
        return f"there is no module {module_name} among the installed packages or in the working directory {Path.cwd()}"
    text = f"import {function}" if source is None else source.read_text(encoding="utf-8", errors="replace")
    may_be_there = re.search(rf"\b({function}|{MADE_WHEN_RUN})\b|import\s*\*", text)
    return None if may_be_there else f"{source} defines no {function}"


def code_problem(path: str) -> str | None:
    """As `function_problem`, for a path that may also be `file.py:name`."""
    place, _, _ = path.rpartition(":")
    if not place.endswith(".py"):
        return function_problem(path)
    return None if Path(place).is_file() else f"there is no file {place} in {Path.cwd()}"


def source_digest(import_path: str) -> str | None:
    """Text with the first 16 hex digits of the SHA-256 of the function's source file; None if there is no file."""
    module_name, _, name = import_path.partition(":")
    if module_name == session_functions.MODULE:
        return session_functions.digest(name)
    _, source = _module_file(module_name)
    return None if source is None else f"source with sha256 {hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"


def _module_file(module_name: str) -> tuple[bool, Path | None]:
    """Whether the module exists, and its source file if it has one."""
    top, *submodules = module_name.split(".")
    spec = find_spec(top)
    for piece in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return False, None
        # Unlike find_spec, this does not import the parent packages. A folder without __init__.py would look for its
        # parent among the imported modules, had it a name with dots.
        spec = PathFinder.find_spec(piece, list(spec.submodule_search_locations))
    is_source = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return spec is not None, Path(spec.origin) if spec and spec.origin and is_source else None
