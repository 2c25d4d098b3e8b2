"""KTO: `recipe.py` without torch, and `trainer.py`."""
