"""PPO. `step.py` is the step: read it first. `trainer.py` is its library, `from_recipe.py` its command."""
