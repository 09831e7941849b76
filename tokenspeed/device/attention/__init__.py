"""Attention on the execution plane: one contract, one decode path, one owner of the slot rule."""
