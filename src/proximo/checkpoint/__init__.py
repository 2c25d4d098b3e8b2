"""Run folders and checkpoints: saved whole or not at all, verified when read, resumed bit for bit.

Start with `store.py` (save and prune), then `reading.py` (what makes a checkpoint complete) and `run_folder.py`.
"""
