"""The keys in words, from the bindings and nowhere else: the help and docs/dashboard.md are made of them."""

from collections.abc import Sequence

from textual.binding import Binding, BindingType

from tokenspeed_tui.controls import KeyWords


def key_words(bindings: Sequence[BindingType]) -> tuple[KeyWords, ...]:
    """The bindings as the help lists them."""
    return tuple(
        KeyWords(binding.key_display or binding.key, binding.description, binding.tooltip)
        for binding in bindings
        if isinstance(binding, Binding)
    )


def key_table(keys: Sequence[KeyWords]) -> list[str]:
    """The keys as a Markdown table."""
    rows = [f"| {' '.join(f'`{part}`' for part in key.key.split())} | {key.name} | {key.does} |" for key in keys]
    return ["| key | name | does |", "|---|---|---|", *rows]
