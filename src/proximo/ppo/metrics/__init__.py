"""Metrics, curves and alarms of PPO. `declared.py` has all of them."""
