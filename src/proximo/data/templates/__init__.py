"""Conversations to text segments by a tokenizer's chat template. Start with `chat.py`."""
