"""Checks dtypes and shapes that functions state in their annotations, in the tests, by an import hook.

jaxtyping and beartype do the checking. Their own hook would wrap every function of a module, at some 30 us a call; this
one wraps the functions whose arguments state a shape, and the dataclasses whose fields do.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, jaxtyped

CHECKED = ("proximo.algorithms", "proximo.models", "proximo.rollout.sampling", "proximo_cpu")
SHAPED = {"Bool", "Float", "Float32", "Int", "Int64", "Shaped"}
"""The names of jaxtyping that the package uses."""

_types = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float, as for every type checker


def install() -> None:
    """To be called before any of the modules is imported."""
    sys.meta_path.insert(0, _Finder())


def checked(made: Any) -> Any:
    """The function, or the dataclass, with its shapes checked. Other annotations are for the type checker."""
    if not isinstance(made, type):
        return _checked_function(made)
    made.__init__ = _checked_function(made.__init__)
    return made


def _shape(hint: Any) -> Any:
    return hint if _states_a_shape(hint) else Any


def _states_a_shape(hint: Any) -> bool:
    """True for an annotation of jaxtyping, and for a union or a tuple that holds one."""
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(_states_a_shape(part) for part in getattr(hint, "__args__", ()))


def _checked_function(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Checked once for each combination of dtypes and shapes of its arguments: a decoding loop repeats them endlessly.

    Within torch.compile, which cannot trace through the checks, it is the function itself.
    """
    whole = inspect.signature(plain)
    parameters = [each.replace(annotation=_shape(each.annotation)) for each in whole.parameters.values()]
    plain.__signature__ = whole.replace(parameters=parameters, return_annotation=_shape(whole.return_annotation))
    strict = jaxtyped(plain, typechecker=_types)
    del plain.__signature__

    passed: set[Any] = set()

    @wraps(plain)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*arguments, **options)
        kinds = (*map(_kind, arguments), *((name, _kind(value)) for name, value in options.items()))
        if kinds in passed:
            return plain(*arguments, **options)
        result = strict(*arguments, **options)
        passed.add(kinds)
        return result

    return call


def _kind(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in CHECKED):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if b"from jaxtyping import" not in spec.loader.get_data(spec.loader.path):
            return None  # there is nothing to check, and its byte code is cached
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        """Compiled anew, past the cache of byte code: what is cached there is the module without checks."""
        path = self.get_filename(fullname)
        tree = _Wrapping().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Wrapping(ast.NodeTransformer):
    """Puts the check below all other decorators of a function, and above those of a class (its dataclass comes first).

    Functions within functions stay as they are: they would be wrapped again at every call.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        if _name_a_shape(*(each.annotation for each in every if each is not None)):
            node.decorator_list.append(_check())
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        if _name_a_shape(*(each.annotation for each in node.body if isinstance(each, ast.AnnAssign))):
            node.decorator_list.insert(0, _check())
        return node


def _name_a_shape(*annotations: ast.expr | None) -> bool:
    parts = [part for each in annotations if each is not None for part in ast.walk(each)]
    return any(isinstance(part, ast.Name) and part.id in SHAPED for part in parts)


def _check() -> ast.expr:
    return ast.parse("__import__('shape_checks').checked", mode="eval").body
