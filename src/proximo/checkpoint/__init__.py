"""Run folders and checkpoints: saved whole or not at all, verified when they are read, resumed bit for bit."""
