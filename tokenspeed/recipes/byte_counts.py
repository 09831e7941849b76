"""How many bytes, for a person to read."""


def human_bytes(count: int) -> str:
    """Bytes for a person: two digits after the point and a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
