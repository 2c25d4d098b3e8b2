"""Trainers that learn from given answers: SFT, reward models, process reward models, DPO and KTO.

`kinds.py` registers them. A trainer is two files: `NAME_recipe.py` has what it reads and measures, without torch, and
`NAME_trainer.py` builds and steps it. What several of them do alike is in the other files.
"""
