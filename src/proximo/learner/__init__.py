"""Optimizer steps for any loss. Read `update.py` first: one update from micro-batches to new weights."""
