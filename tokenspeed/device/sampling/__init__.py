"""Sampling on the execution plane: parameters of each pool row, penalties, backends, and the step that draws tokens."""
