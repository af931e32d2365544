# SPDX-License-Identifier: Apache-2.0
"""Formulas as text: Python's arithmetic, and nothing else of Python."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodix.quantization.gate_rules import FUNCTIONS, evaluate

NUMBERS = {"a": 2.0, "b": -0.5, "c": 10.0}
LEAVES = st.one_of(st.integers(-5, 5).map(str), st.sampled_from(list(NUMBERS)))
FORMULAS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.tuples(parts, st.sampled_from(["+", "-", "*", "/"]), parts).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(parts, st.integers(0, 3)).map(lambda p: f"({p[0]}) ** {p[1]}"),
        st.tuples(parts, parts).map(lambda p: f"max({p[0]}, -{p[1]})"),
        parts.map(lambda part: f"sqrt(abs({part}))"),
    ),
    max_leaves=8,
)


@given(FORMULAS)
def test_a_formula_has_the_value_that_python_gives_it(formula):
    try:
        wanted = float(eval(formula, {"__builtins__": {}}, {**FUNCTIONS, **NUMBERS}))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="can't be evaluated"):
            evaluate(formula, NUMBERS)
        return
    if not math.isfinite(wanted):
        return
    assert evaluate(formula, NUMBERS) == wanted


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("mantisa_bits + 1", r"names mantisa_bits, which is not known here. Known: a, b, c"),
        ("__import__('os')", r"know the functions abs, exp, log10, max, min, sqrt; got __import__"),
        ("a.real", r"a formula has numbers, names"),
        ("[1][0]", r"a formula has numbers, names"),
        ("max(a, key=b)", r"a formula has numbers, names"),
        ("1 if a else 2", r"a formula has numbers, names"),
        ("'text'", r"a formula has numbers, names"),
        ("True", r"a formula has numbers, names"),
        ("a +", r"can't be evaluated"),
        ("sqrt(b)", r"can't be evaluated"),
        ("b ** 0.5", r"can't be evaluated"),
        ("a / 0", r"can't be evaluated"),
        ("1e308 * c", r"has no finite value"),
        ("10 ** 1e9", r"can't be evaluated"),
    ],
)
def test_anything_else_is_refused_with_the_reason(formula, words):
    with pytest.raises(ValueError, match=f"(?i){words}"):
        evaluate(formula, NUMBERS)


def test_a_number_is_a_formula():
    assert evaluate(0.999, {}) == 0.999
    assert evaluate(" 3 ", {}) == 3.0
