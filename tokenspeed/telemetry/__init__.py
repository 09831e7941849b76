"""Metrics, the state snapshot, and what the dashboard reads."""
