"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any

NOTHING = "–"


def count(value: Any) -> str:
    """1,234 below ten thousand, then 12.3k, 4.56M, 7.89B."""
    if value is None:
        return NOTHING
    if abs(value) < 10_000:
        return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    value = float(f"{value:.3g}")
    factor, letter = next((f, c) for f, c in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(value) >= f)
    return f"{value / factor:.3g}{letter}"


def size(value: Any) -> str:
    """Bytes in the largest binary unit that keeps the number above one."""
    if value is None:
        return NOTHING
    unit = min(4, int(math.log2(value) // 10)) if value >= 1 else 0
    return f"{value / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def duration(seconds: Any) -> str:
    """12.3 s, 4 min 5 s, 6 h 7 min, 8 d 9 h."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.3g} s"
    larger, smaller, a, b = next(
        units for units in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")) if seconds >= units[0]
    )
    return f"{seconds // larger:.0f} {a} {seconds % larger // smaller:.0f} {b}"


def share(value: Any) -> str:
    """A fraction as a percentage; one decimal near 0 and 100, where it matters."""
    if value is None:
        return NOTHING
    percent = 100 * value
    if 99.95 <= percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f} %" if 0 < percent < 10 or 90 < percent < 100 else f"{percent:.0f} %"


def loss(value: Any) -> str:
    """Four significant digits."""
    return NOTHING if value is None else f"{value:.4g}"
