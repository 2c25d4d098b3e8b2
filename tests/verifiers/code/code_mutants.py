"""Programs with one token changed. Most of them are wrong; which are, plain Python says."""

import ast
import copy
from collections.abc import Iterator

from proximo_verifiers.code.parsed_asserts import parsed

FLIPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr},
    **{ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.USub: ast.UAdd},
}


def mutants(source: str) -> Iterator[str]:
    """All of them, in the order of the program's nodes."""
    tree = parsed(source)
    for number, _ in enumerate(ast.walk(tree)):
        changed = copy.deepcopy(tree)
        node = list(ast.walk(changed))[number]
        if _change(node):
            yield ast.unparse(changed)


def _change(node: ast.AST) -> bool:
    """Changes one token of a node; False where there is none to change."""
    if isinstance(node, ast.Compare):
        node.ops[0] = FLIPS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in FLIPS:
        node.op = FLIPS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value += 1
    elif isinstance(node, ast.Break | ast.Continue):
        node.__class__ = ast.Continue if isinstance(node, ast.Break) else ast.Break
    else:
        return False
    return True
