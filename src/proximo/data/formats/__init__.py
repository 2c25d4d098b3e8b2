"""Reads rows as prompts and responses, in the column layouts of many data sets. Start with `row_formats.py`."""
