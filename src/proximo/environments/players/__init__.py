"""Processes and threads that run environments: deadlines, retries of `reset`, faults. `pool.py` is the way in."""
