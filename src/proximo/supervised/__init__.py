"""Trainers that learn from given answers: SFT, reward models, process reward models, DPO and KTO.

`kinds.py` registers them. A trainer is two files of its folder: `recipe.py` has what it reads and measures, without
torch, and `trainer.py` builds, steps and plans it. What all of them do alike is in the files beside these folders.
"""
