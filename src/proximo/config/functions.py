"""Checks an import path `package.module:function` without importing the module, whose imports may be slow."""

import ast
import hashlib
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from proximo import session_functions

IMPORT_PATH_HINT = "a function is named as package.module:function"


def function_problem(import_path: str, *, may_be_async: bool = False) -> str | None:
    """What is wrong with an import path; None if no problem can be found without running code."""
    module_name, colon, function = import_path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), function)):
        return f"{IMPORT_PATH_HINT}, got {import_path!r}"
    return (
        session_functions.problem(function)
        if module_name == session_functions.MODULE
        else _problem_in_module(module_name, function, may_be_async=may_be_async)
    )


def code_problem(path: str) -> str | None:
    """As `function_problem`, for a path that may also be `file.py:name`."""
    place, _, _ = path.rpartition(":")
    if not place.endswith(".py"):
        return function_problem(path)
    return None if Path(place).is_file() else f"there is no file {place} in {Path.cwd()}"


def _problem_in_module(module_name: str, function: str, *, may_be_async: bool) -> str | None:
    exists, source = _module_file(module_name)
    if not exists:
        return f"there is no module {module_name} among the installed packages or in the working directory {Path.cwd()}"
    if source is None:
        return None
    names = _top_level_names(source)
    if names is None:
        return None
    if function not in names:
        public = sorted(name for name in names if not name.startswith("_"))
        return f"{source} defines no {function}" + (f"; it defines {', '.join(public[:8])}" if public else "")
    return (
        f"{module_name}:{function} is async, and nobody would wait for it: write it with def"
        if names[function] and not may_be_async
        else None
    )


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
    name = top
    for piece in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return False, None
        name = f"{name}.{piece}"
        # Unlike find_spec, this does not import the parent packages.
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    is_source = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return spec is not None, Path(spec.origin) if spec and spec.origin and is_source else None


def _top_level_names(source: Path) -> dict[str, bool] | None:
    """Top-level names of a module -> whether it is an async function.

    None if the names depend on running the module.
    """
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):  # importing it will report the error with its line
        return None
    names: dict[str, bool] = {}
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] = False
            case ast.AsyncFunctionDef(name=name, decorator_list=decorators):
                names[name] = not decorators  # a decorator may wrap it in a synchronous function
            case ast.Assign(targets=targets):
                names |= {target.id: False for target in targets if isinstance(target, ast.Name)}
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name: False for alias in aliases}
            case ast.Expr() | ast.AnnAssign():
                pass
            case _:  # names may be bound in a condition or loop
                return None
    return None if "*" in names or "__getattr__" in names else names
