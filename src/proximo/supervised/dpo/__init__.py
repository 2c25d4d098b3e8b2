"""DPO and IPO: `recipe.py` without torch, and `trainer.py`."""
