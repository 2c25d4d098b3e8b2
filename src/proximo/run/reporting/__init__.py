"""Writes what a run reports: its logs, progress and outcome. Start with `journal.py`."""
