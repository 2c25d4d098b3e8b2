"""PPO. `step.py` is the step: read it first. `trainer.py` is the Python API; `from_recipe.py` is for `proximo ppo`."""
