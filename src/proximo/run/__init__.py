"""Takes a task through its run: folder, checks before the start, loop, saves, signals, logs, pushes to the Hub."""
