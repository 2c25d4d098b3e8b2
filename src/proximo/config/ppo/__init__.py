"""The section `ppo`. `options.py` has it whole, the other files its parts (`objectives.py`, `kl.py` ...)."""
