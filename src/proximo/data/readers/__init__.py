"""Reads files, folders, Hub data sets and functions as rows. Start with `reading.py`."""
