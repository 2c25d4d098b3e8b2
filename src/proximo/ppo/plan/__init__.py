"""What a step of PPO costs: its models and calls in `step.py`, the profiled passes in `costs.py`."""
