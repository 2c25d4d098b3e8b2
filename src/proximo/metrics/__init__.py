"""Metrics: declarations, values, alarms and the places they go. Read `values.py` and `definitions.py` first."""
