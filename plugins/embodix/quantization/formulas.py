# SPDX-License-Identifier: Apache-2.0
"""Arithmetic formulas as text, evaluated with named numbers: what a threshold says is what is computed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "exp": math.exp,
    "log10": math.log10,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def evaluate(formula: str | float, numbers: Mapping[str, float]) -> float:
    """The value of a formula of numbers, names, ``+ - * / **``, parentheses and ``FUNCTIONS``.

    Raises:
        ValueError: anything else in it, an unknown name (with those that are known), or no finite value.
    """
    try:
        value = float(_value(ast.parse(str(formula).strip(), mode="eval").body, numbers))
    except (SyntaxError, ArithmeticError, TypeError) as error:
        raise ValueError(f"The formula {formula!r} can't be evaluated: {error}.") from error
    if not math.isfinite(value):
        raise ValueError(f"The formula {formula!r} has no finite value with {dict(numbers)}.")
    return value


def _value(node: ast.expr, numbers: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        return _named(node.id, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        result: float = _BINARY[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, numbers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in FUNCTIONS:
            return _called(node.func.id, [_value(argument, numbers) for argument in node.args])
        raise ValueError(f"Formulas know the functions {', '.join(FUNCTIONS)}; got {node.func.id}.")
    raise ValueError(
        f"A formula has numbers, names, + - * / **, parentheses and {', '.join(FUNCTIONS)}; got {ast.unparse(node)!r}."
    )


def _called(name: str, arguments: list[float]) -> float:
    try:
        return FUNCTIONS[name](*arguments)
    except ValueError as error:  # math's, outside of a function's domain
        raise ArithmeticError(f"{name}({', '.join(map(str, arguments))}): {error}") from error


def _named(name: str, numbers: Mapping[str, float]) -> float:
    if name not in numbers:
        raise ValueError(f"The formula names {name}, which is not known here. Known: {', '.join(sorted(numbers))}.")
    return numbers[name]
