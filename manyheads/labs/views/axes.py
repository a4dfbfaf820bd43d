"""Axes of figures: nice ticks on linear and logarithmic scales, and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MAX_LABELLED = 9  # values that are all labelled, such as a few lengths


@dataclass(frozen=True)
class Axis:
    """The range of an axis, its ticks and their labels."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between the ends of the axis, from 0 to 1."""
        low, high, value = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)


def make_axis(values: Sequence[float], *, log: bool, zero: bool = False, max_ticks: int = 6) -> Axis:
    """An axis for these values; with `zero` a linear one begins at 0 if that is not far away."""
    shown = [value for value in values if is_shown(value, log)]
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0) if log else (0.0, 1.0)
    return log_axis(low, high, shown, max_ticks) if log else linear_axis(low, high, shown, zero, max_ticks)


def is_shown(value: float, log: bool) -> bool:
    """Whether an axis has a place for a value: a logarithmic one has none for 0."""
    return math.isfinite(value) and (value > 0 or not log)


# -------------------------------------------------------------------------------------------------------------- linear


def linear_axis(low: float, high: float, values: Sequence[float], zero: bool, max_ticks: int) -> Axis:
    if zero and 0 < low <= 0.6 * high:
        low = 0.0
    if zero and 0.6 * low >= high and high < 0:
        high = 0.0
    if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-300):
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    whole = all(float(value).is_integer() for value in values)
    step = nice_step((high - low) / max(1, max_ticks - 1), whole)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, tuple(label(tick, step) for tick in ticks))


def nice_step(rough: float, whole: bool) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten; for whole numbers, such as layers, an integer."""
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole and power <= 1 else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def label(value: float, step: float) -> str:
    """A tick with the digits of its step."""
    if step >= 1e4 or step < 1e-4:
        return format_number(round(value / step) * step)
    decimals = next(digits for digits in range(7) if math.isclose(step * 10**digits, round(step * 10**digits)))
    return f"{value:,.{decimals}f}".replace("-", "−") if abs(value) > step / 2 else "0"


def power_of(exponent: int) -> str:
    return str(exponent).translate(SUPERSCRIPTS)


# --------------------------------------------------------------------------------------------------------- logarithmic


def log_axis(low: float, high: float, values: Sequence[float], max_ticks: int) -> Axis:
    distinct = sorted(set(values))
    few = 1 < len(distinct) <= min(MAX_LABELLED, max_ticks + 1) and high <= 1e5
    if few and all(float(value).is_integer() for value in distinct):  # lengths such as 32, 64, …, 1024
        return Axis(low, high, tuple(distinct), tuple(f"{value:,.0f}" for value in distinct), log=True)
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    step = math.ceil((last - first) / max(1, max_ticks))
    exponents = range(first, last + 1, step)
    ticks = [10.0**exponent for exponent in exponents]
    labels = [short_power(exponent) for exponent in exponents]
    if last - first == 1:
        ticks, labels = within_decade(first)
    return Axis(10.0**first, max(10.0**last, ticks[-1]), tuple(ticks), tuple(labels), log=True)


def within_decade(exponent: int) -> tuple[list[float], list[str]]:
    ticks = [factor * 10.0**exponent for factor in (1, 2, 5, 10)]
    return ticks, [f"{tick:,.6g}" if abs(exponent) <= 4 else f"{tick:.0e}" for tick in ticks]


def short_power(exponent: int) -> str:
    return f"{10.0**exponent:,.6g}" if -3 <= exponent <= 3 else f"10{power_of(exponent)}"


# ------------------------------------------------------------------------------------------------------------- numbers


def format_number(value: float) -> str:
    """A number with few digits: 12,345 · 0.0123 · 1.5e-12."""
    size = abs(value)
    if not math.isfinite(value):
        text = str(value)
    elif float(value).is_integer() and size < 1e15:
        text = f"{value:,.0f}"
    elif 1e-3 <= size < 1e5:
        text = f"{value:,.{max(0, 2 - math.floor(math.log10(size)))}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:.3g}"
    return text.replace("-", "−", 1) if value < 0 else text


def format_value(value: float, low: float, high: float) -> str:
    """A number of a matrix, with the decimals that all numbers from `low` to `high` have."""
    largest = max(abs(low), abs(high))
    if not math.isfinite(value) or largest < 0.01 or largest >= 1000 or float(value).is_integer():
        return format_number(value)
    return f"{value:.{2 if largest < 10 else 1}f}".replace("-", "−")


def extent(values: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    """The ends of the scale of shades: 0 is one of them if no value is on its other side."""
    shown = [value for row in values for value in row if value is not None and math.isfinite(value)]
    return (min(0.0, *shown), max(0.0, *shown)) if shown else (0.0, 1.0)
