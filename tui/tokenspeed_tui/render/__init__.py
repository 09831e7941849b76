"""Pure render functions: picture, controls, time and size in, lines of text out. No widget, no clock, no network."""

from tokenspeed_tui.render.screen import render_screen

__all__ = ["render_screen"]
