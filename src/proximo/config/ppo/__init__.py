"""The section `ppo`. `options.py` has it whole; `objectives.py`, `losses.py` and `advantage.py` have its parts."""
