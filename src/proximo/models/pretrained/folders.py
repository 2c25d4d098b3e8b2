"""Checks the files of a model's folder: its JSON before a library reads it, and which file is damaged.

Damage is looked for after a library could not read the folder; in files that libraries skip silently, before they read
it. Reads no tensor, and imports no torch.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from proximo.errors import ModelError
from proximo.hub import TOKENIZER_FILES, is_local, not_there

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files of adapter weights. peft would search the Hub if a folder had neither."""
ADAPTER_KIND = "LORA"
"""peft's name of the only kind of adapter that can be merged into its base."""
UNMERGED_OPTIONS = ("alora_invocation_tokens", "arrow_config", "layer_replication")
"""Options of LoRA that cannot be merged: the sum depends on the tokens, or the layers themselves change."""
OTHER_INPUTS = ("vision_config", "audio_config", "audio_encoder_config", "vq_config", "text_config")
"""Sections in the configuration of a model that reads more than text. Only there text has its own section."""
WHOLE_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def is_adapter_folder(folder: Path) -> bool:
    """True for a folder with an adapter but without the weights of its base.

    Raises ModelError if the folder has whole weights too: libraries disagree on which of them to use.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    whole = [file.name for pattern in WHOLE_WEIGHTS for file in sorted(folder.glob(pattern))]
    if whole:
        raise ModelError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}) and whole weights ({whole[0]}), so it is unclear "
            "which to use: move one of them to another folder"
        )
    return True


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The adapter configuration of peft. Raises ModelError if it is unreadable or of a kind that is not merged."""
    file = folder / ADAPTER_CONFIG
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the adapter's configuration {file} cannot be read: {error}") from error
    if not isinstance(saved, dict):
        raise ModelError(f"the adapter's configuration {file} cannot be read: it is not a JSON object")
    kind = saved.get("peft_type")
    if kind != ADAPTER_KIND:
        raise ModelError(
            f"{folder} holds an adapter of the kind {kind}; only LoRA is read ({ADAPTER_KIND}). Merge it with peft, if "
            "peft can (merge_and_unload), save the whole model, and start from that"
        )
    used = [option for option in UNMERGED_OPTIONS if saved.get(option)]
    if used:
        raise ModelError(
            f"{folder} holds a LoRA adapter with {used[0]}, which cannot be added into the weights of its base: train "
            f"one without {used[0]}"
        )
    return saved


def base_of_adapter(folder: Path) -> tuple[str, str | None]:
    """Path or Hub name of an adapter's base model, and its revision. Raises ModelError if the adapter names none."""
    saved = read_adapter_config(folder)
    base = saved.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ModelError(f"{folder} holds an adapter but does not name its base model; export the merged model instead")
    return base, saved.get("revision")


def tokenizer_place(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Folder or Hub name, and revision, of the tokenizer that belongs to a model: an adapter may have that of its base.

    Raises ModelError for a folder that is not there, and for one without a tokenizer.
    """
    if not is_local(name):
        return name, revision
    folder = Path(name)
    if not folder.is_dir():
        raise ModelError(f"{not_there(name)}; give a tokenizer's folder, or a Hub name such as owner/name")
    if any((folder / file).is_file() for file in TOKENIZER_FILES):
        return name, revision
    if is_adapter_folder(folder):
        return tokenizer_place(*base_of_adapter(folder))
    raise ModelError(
        f"{name} holds no tokenizer: neither tokenizer.json nor tokenizer_config.json is in it; set tokenizer.path (of "
        "a reward model, `tokenizer`)"
    )


def lacks_chat_template(folder: Path) -> bool:
    """Whether a tokenizer's folder has no chat template, as far as its files can be read."""
    if any((folder / name).exists() for name in ("chat_template.jinja", "additional_chat_templates")):
        return False
    try:
        return not json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except FileNotFoundError:
        return folder.is_dir()
    except (OSError, ValueError, AttributeError):
        return False


def refuse_bare_adapter(folder: Path | None, name: str = "") -> None:
    """Raises ModelError if a model with a score or value head is to start from an adapter without the weights below.

    `name`: its name in messages, if the folder is in a cache.
    """
    _refuse_adapter(
        folder,
        name,
        "holds an adapter only: export it with --merge and start from that, or give a reward model of PPO whose base "
        "is the policy's share_base: true",
    )


def refuse_second_adapter(folder: Path | None, name: str = "") -> None:
    """As `refuse_bare_adapter`, for a new adapter on an adapter: their merged base would be only in memory."""
    _refuse_adapter(
        folder,
        name,
        "is an adapter itself, and a new one (lora) cannot be trained on it: the base of both is saved in no folder, "
        "so the checkpoint would load as another model. Write it first with `proximo export RUN OUT --merge` (an "
        "adapter of another tool: with peft's merge_and_unload and save_pretrained), and start from OUT",
    )


def _refuse_adapter(folder: Path | None, name: str, why: str) -> None:
    if folder is not None and is_adapter_folder(folder):
        raise ModelError(f"{name or folder} {why}")


def refuse_other_inputs(config: Mapping[str, Any], name: str) -> None:
    """Raises ModelError for the configuration of a model that reads pictures or sound besides text."""
    sections = [section for section in OTHER_INPUTS if config.get(section)]
    if sections:
        raise ModelError(
            f"{name} reads more than text ({config.get('model_type')}, with {sections[0]}); Proximo trains models of "
            "text only. Save its text part as a separate model first: see docs/faq.md"
        )


def check_folder(folder: Path) -> None:
    """Raises ModelError for problems that the JSON files of a folder show: a missing base, inputs other than text.

    The reader of the model reports files that cannot be read.
    """
    if is_adapter_folder(folder):
        base, _ = base_of_adapter(folder)
        if is_local(base):
            if not Path(base).is_dir():
                raise ModelError(f"the adapter in {folder} was trained on {base}: {not_there(base)}")
            check_folder(Path(base))
        return
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(config, dict):
        refuse_other_inputs(config, str(folder))


GENERATION = "generation_config.json"
JSON_OBJECTS = (
    "config.json",
    GENERATION,
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "model.safetensors.index.json",
)
TEXTS = ("chat_template.jinja", "merges.txt")
WEIGHTS = "*.safetensors"
SHORTEST_KEY = 6
"""Least number of letters: shorter keys (top_k, top_p) may differ in one letter and both be valid."""


def damage_in(folder: Path, *, weights: bool = True) -> str | None:
    """The first file with contents that do not fit its name, with the problem; None if none was found.

    `weights` looks at the headers of weight files too.
    """
    texts = [file for name in (*JSON_OBJECTS, *TEXTS) if (file := folder / name).exists()]
    files = [*texts, *(sorted(folder.glob(WEIGHTS)) if weights else ())]
    return next((f"{file} {problem}" for file in files if (problem := _problem(file))), None)


def refuse_overlooked(folder: Path) -> None:
    """Raises ModelError for the first damaged file that libraries would treat as missing.

    Without its generation config a model has other tokens that end an answer, without its tokenizer's config other
    special tokens, without its template another form of a conversation.
    """
    for file in (folder / name for name in (*JSON_OBJECTS, *TEXTS)):
        looked_at = file.is_dir() or (file.name == GENERATION and file.exists())
        if looked_at and (problem := _problem(file)):
            raise ModelError(f"{file} {problem}")


def misspelt_key(file: Path, known: Iterable[str]) -> str | None:
    """The problem if a key of the JSON object in `file` is a known key with one letter changed; else None.

    Libraries ignore such a key, and use the default of the intended one. None also for a file without a JSON object.
    """
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(saved, dict):
        return None
    missing = set(known) - saved.keys()
    for key in saved.keys() - set(known):
        for meant in missing if len(key) >= SHORTEST_KEY else ():
            if len(meant) == len(key) and sum(a != b for a, b in zip(meant, key, strict=True)) == 1:
                return f"{file} has the key {key!r} where {meant!r} is meant: it is damaged; copy or fetch it again"
    return None


def _problem(file: Path) -> str | None:
    """What is wrong with a file, by its name; None if nothing was found."""
    try:
        if file.is_dir() or file.stat().st_size == 0:
            return "is a folder, but must be a file" if file.is_dir() else "is empty: copy or fetch it again"
        return _content_problem(file)
    except OSError as error:
        return f"cannot be opened: {error.strerror or error}"
    except SafetensorError as error:
        return f"is not a complete safetensors file of {file.stat().st_size} bytes ({error}): copy or fetch it again"
    except UnicodeDecodeError as error:
        return f"is not text in UTF-8 (byte {error.start}): it is damaged or of another kind; copy or fetch it again"
    except (ValueError, RecursionError) as error:
        return f"is not complete JSON ({error}): it was cut or damaged; copy or fetch it again"


def _content_problem(file: Path) -> str | None:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="np"):
            return None
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".json":
        return None
    content = json.loads(text)
    if not isinstance(content, dict):
        return f"holds a JSON {type(content).__name__}, but must hold an object: it is a file of another kind"
    if file.name == "tokenizer.json" and not isinstance(content.get("model"), dict):
        return "is JSON without a `model`, so it is not a tokenizer's: copy or fetch it again"
    return None
