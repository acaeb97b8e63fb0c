"""Exponentials with the same bits on every machine.

Made of additions, multiplications and divisions, each of which IEEE 754 fixes to the last bit. The
functions of libm and numpy choose their instructions by processor, so that two hosts of one job
could disagree about the better of two schedules.
"""

from __future__ import annotations

LARGEST = 700.0
"""Exponents up to this have a finite result."""
_TERMS = 9
_SMALL = 1 / 16


def expm1(exponent: float) -> float:
    """``e**exponent - 1`` for ``|exponent| <= LARGEST``, to a relative error below 1e-12."""
    halvings = 0
    while abs(exponent) > _SMALL:
        exponent /= 2
        halvings += 1
    result = 0.0
    for term in range(_TERMS, 0, -1):  # x (1 + x/2 (1 + x/3 (...)))
        result = exponent / term * (1 + result)
    for _ in range(halvings):
        result *= 2 + result  # e**2x - 1 = (e**x - 1)(e**x + 1)
    return result


def power_sum(exponent: float, count: int) -> float:
    """Sum of ``e**(exponent * k)`` over k from 1 to ``count``."""
    ratio = expm1(exponent)
    if not ratio:
        return float(count)
    return (1 + ratio) * expm1(exponent * count) / ratio
