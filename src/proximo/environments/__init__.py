"""Policies that act over several turns: environments, the loop that plays them, trajectories, rewards."""
