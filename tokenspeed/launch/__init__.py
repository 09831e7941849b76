"""Composes both planes into processes: the only room that may see them together."""
