"""Conversion between text and token ids at the boundary of prompt and response: `encoding.py` and `decoding.py`."""
