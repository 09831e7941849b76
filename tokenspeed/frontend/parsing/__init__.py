"""A model's text, told apart: reasoning, answer and tool calls, whatever pieces the text comes in."""
