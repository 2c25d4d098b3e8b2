"""File names of `shard_files.py`, for code that loads no torch."""

INDEX = "shards.json"
"""Lists the tensors in the files of the ranks. A folder with this file holds shards."""


def file_of_rank(rank: int) -> str:
    """The name of the file of one rank."""
    return f"rank-{rank:05d}.safetensors"
