"""Sizes and spans of time in few characters, for tables and prompts."""

_UNITS = ("", "K", "M", "G", "T")


def short(size: object) -> str:
    """
    >>> short(210 << 20), short(1 << 30), short(1536), short(None)
    ('210M', '1G', '1.5K', '?')
    """
    if not isinstance(size, (int, float)):
        return "?"
    value, unit = float(size), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 1 if value < 9.95 and value != int(value) else 0
    return f"{value:.{digits}f}{_UNITS[unit]}"


def ago(seconds: float) -> str:
    """
    >>> ago(4), ago(90), ago(3 * 3600), ago(5 * 86400)
    ('4s', '1m', '3h', '5d')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds / length)}{unit}"
    return f"{max(0, int(seconds))}s"
