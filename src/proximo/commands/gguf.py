"""Converts an exported folder to GGUF with llama.cpp's converter, a script beside Proximo. Not the format itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from proximo.errors import ProximoError, UserError

VARIABLE = "PROXIMO_GGUF_CONVERTER"
SCRIPT = "convert_hf_to_gguf.py"
MOST_SECONDS = 6 * 3600.0
"""Large models take long, but a converter that hangs must not wait for ever."""
GGUFType = Literal["f32", "f16", "bf16", "q8_0", "auto"]


def find_converter() -> Path:
    """The converter that the environment variable names, or the one on the PATH.

    Raises UserError if there is none.
    """
    named = os.environ.get(VARIABLE)
    found = named or shutil.which(SCRIPT)
    if found is None:
        raise UserError(
            f"--gguf needs llama.cpp's converter {SCRIPT}, and there is none on the PATH: get it with `git clone "
            f"https://github.com/ggml-org/llama.cpp`, and set {VARIABLE} to its path"
        )
    path = Path(found).expanduser()
    if not path.is_file():
        raise UserError(f"{VARIABLE} is {named}, and there is no such file: it should be the path of {SCRIPT}")
    return path


def write_gguf(folder: Path, kind: GGUFType, converter: Path) -> Path:
    """Write the folder's model as one GGUF file into it; returns the file.

    Raises ProximoError with the converter's last line if it fails.
    """
    out = folder / f"{folder.resolve().name}-{kind}.gguf"
    partial = out.with_suffix(".partial")
    command = [sys.executable, str(converter), str(folder), "--outfile", str(partial), "--outtype", kind]
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
        reason = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
        failed = ran.returncode != 0 or not partial.is_file()
    except (OSError, subprocess.TimeoutExpired) as error:
        failed, reason = True, str(error)
    if failed:
        partial.unlink(missing_ok=True)
        raise ProximoError(f"{folder} is written, but {converter} could not convert it to GGUF: {reason[:500]}")
    partial.rename(out)
    return out
