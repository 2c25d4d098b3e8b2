"""Names of the files of `shard_files.py`, for those who load no torch."""

INDEX = "shards.json"
"""Beside the files of the ranks: which tensors there are. A folder that has it holds shards."""


def file_of_rank(rank: int) -> str:
    """The name of the file with the parts of one rank."""
    return f"rank-{rank:05d}.safetensors"
