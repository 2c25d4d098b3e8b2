"""The engine that samples with vLLM servers. Read `engine.py` first; `inside/` runs in vLLM's worker processes."""
