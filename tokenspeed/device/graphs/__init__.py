"""Captured forwards: recorded once, made again with one call. See docs/design/unified_path.md, "Graphs"."""
