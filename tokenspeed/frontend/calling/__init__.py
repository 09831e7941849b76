"""Grammars of tool calls: what a model may write where its calls must be valid, in each family's own way of writing.

The parsers beside (frontend/parsing) read what these let through. Nothing is compiled here: a grammar is a text for the
engine (docs/design/structured-output.md).
"""
