"""Environments at play, in processes or threads: deadlines, retries of `reset`, faults. `pool.py` is the way in."""
