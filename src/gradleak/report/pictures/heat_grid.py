"""From little (pale) to much (dark red), with ink that can be read on it; the same on a terminal and in a picture."""

STOPS = ((255, 247, 214), (254, 204, 122), (247, 138, 78), (214, 61, 47), (128, 12, 38))  # at 0, ¼, ½, ¾ and 1
DARK, LIGHT = "#000000", "#ffffff"  # the darkest and the lightest: one of them always has a contrast of 4.5 or more


def paper(leak: float) -> str:
    """The colour of a leak between 0 and 1, as #rrggbb."""
    place = min(max(leak, 0.0), 1.0) * (len(STOPS) - 1)
    first = min(int(place), len(STOPS) - 2)
    mixed = [round(low + (high - low) * (place - first)) for low, high in zip(STOPS[first], STOPS[first + 1], strict=True)]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def ink(leak: float) -> str:
    """Black or white, whichever stands out from the paper (relative luminance as in WCAG 2)."""
    return DARK if contrast(paper(leak), DARK) >= contrast(paper(leak), LIGHT) else LIGHT


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
