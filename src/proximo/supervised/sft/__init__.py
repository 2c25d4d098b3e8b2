"""Supervised fine-tuning: `recipe.py` without torch, and `trainer.py`."""
