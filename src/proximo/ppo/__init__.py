"""PPO. `step.py` is the step: read it first. `trainer.py` is its Python API; `from_recipe.py` builds one for `proximo ppo`."""
