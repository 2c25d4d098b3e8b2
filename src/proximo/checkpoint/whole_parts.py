"""Puts whole files into a finished checkpoint in place of those of ranks. Not how they are made.

The new files get their names first, which no manifest lists yet; then the manifest that lists them replaces the old
one; then the files of the ranks go. A crash leaves a checkpoint that is complete by its manifest, before or after.
"""

from dataclasses import replace
from pathlib import Path

from proximo.checkpoint import atomic
from proximo.checkpoint.manifest import MANIFEST, describe_files, read_manifest
from proximo.checkpoint.writers import Writer


def replace_shards(checkpoint: Path, part: str, shards: str, write: Writer) -> None:
    """Add the weight files of the folder that `write` makes to the folder `part`, and remove `shards` from there.

    `checkpoint` is the folder of one step. Other files that `write` makes, such as configurations, are left out: they
    are there.
    """
    atomic.clear_temporaries(checkpoint)
    atomic.clear_temporaries(checkpoint / part)
    temporary = atomic.temporary_beside(checkpoint / part)
    write(temporary)
    # The index, by which a reader finds several files, is the last of them.
    files = [*sorted(temporary.glob("*.safetensors")), *sorted(temporary.glob("*.safetensors.index.json"))]
    atomic.fsync_tree(temporary)
    entries = dict(zip([f"{part}/{path.name}" for path in files], describe_files(files), strict=True))
    for path in files:
        atomic.rename(path, checkpoint / part / path.name)
    manifest = read_manifest(checkpoint)
    kept = {name: entry for name, entry in manifest.files.items() if not name.startswith(f"{part}/{shards}/")}
    manifest = replace(manifest, files=dict(sorted((kept | entries).items())))
    atomic.write_bytes_atomically(checkpoint / MANIFEST, manifest.encode())
    atomic.remove(checkpoint / part / shards)
    atomic.clear_temporaries(checkpoint)
