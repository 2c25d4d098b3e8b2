"""Several ranks as one program: joining, collectives, heartbeats, sharding. Read `world.py` first, then `join.py`."""
