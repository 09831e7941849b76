"""Recipes: what an operator writes, and the configuration it amounts to. Nothing here imports torch.

From text to a start: ``document`` (YAML with places), ``schema`` and ``validation``, ``catalogue`` (the recipes),
``machine`` and ``selection`` (which profile), ``resolve`` with ``overrides`` (every value and its source), ``plan``
(what it needs), ``prepare`` with ``weights`` (fetched), ``resolved`` (what crosses to the engine).
"""
