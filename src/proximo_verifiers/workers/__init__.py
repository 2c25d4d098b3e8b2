"""Worker processes that verify answers, with deadlines, retries and limits of memory. `pool.py` is the way in."""
