"""Calls reward functions of users. `binding.py` matches their parameters with data; `event_loop.py` runs async ones."""
