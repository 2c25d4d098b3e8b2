"""Reads and writes model folders and tokenizers. Read `sources.py` first, then `saving.py` and `vocabulary.py`."""
