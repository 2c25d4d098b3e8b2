"""The process reward model: `recipe.py` without torch, and `trainer.py`."""
