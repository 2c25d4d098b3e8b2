"""Every checkpoint, and each way to export one, read by transformers and peft alone, is the model that runs here."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from builders import CHAT_TEMPLATE, tiny_language_model, tiny_tokenizer
from proximo.commands.export import run_export
from proximo.models.loading import load_language_model, load_scalar_model
from proximo.models.lora import load_adapter
from proximo.models.packing import pack
from proximo.models.pretrained.folders import is_adapter_folder
from proximo.models.pretrained.sources import ModelSource, adapter_base
from proximo.models.scalar import HeadStart, ScalarModel
from proximo.run import journal
from proximo.run.checkpoint_lookup import find_model
from proximo.run.options import RunOptions
from tiny_runs import LLAMA, LORA, Kind, changed, make_inputs, recipe_of, run

IDS = [1, 7, 8, 9, 10, 7]
NEW = ["<n1>", "<n2>"]
NUM_TOKENS = 63
"""Of the tokenizer without the new ones. Saved models have a spare row more, which the first new one takes."""
READER = """
import json, sys
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

found = {}
for path, asked in json.load(open("asked.json")).items():
    scalar, adapter = asked["scalar"], asked["adapter"]
    loader = {
        (False, False): AutoModelForCausalLM, (True, False): AutoModelForSequenceClassification,
        (False, True): AutoPeftModelForCausalLM, (True, True): AutoPeftModelForSequenceClassification,
    }[scalar, adapter]
    labels = {"num_labels": 1} if scalar and adapter else {}
    model = loader.from_pretrained(path, dtype="float32", **labels).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("ab" + asked["text"])["input_ids"]
    with torch.no_grad():
        output = model(torch.tensor([asked["ids"]])).logits[0]
    base = model.get_base_model() if adapter else model
    tied = None if scalar else base.lm_head.weight is base.model.embed_tokens.weight
    ends = {"max_new_tokens": 4, "prefix_allowed_tokens_fn": lambda *_: [asked["end"]], "pad_token_id": 0}
    prompt = torch.tensor([asked["ids"]])
    drawn = None if scalar else model.generate(input_ids=prompt, **ends).shape[1] - len(asked["ids"])
    found[path] = {
        "drawn": drawn,
        "output": output.tolist(), "ids": ids, "template": tokenizer.chat_template, "tied": tied,
        "says_tied": base.config.tie_word_embeddings,
        "architecture": type(base).__name__,
        "eos": None if scalar else base.generation_config.eos_token_id,
    }
    whole = model.merge_and_unload() if adapter else model
    save_file({name: each.clone() for name, each in whole.state_dict().items()}, asked["weights"])
assert not any(name.partition(".")[0] == "proximo" for name in sys.modules)
json.dump(found, open("found.json", "w"))
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and the role whose model is read."""

    kind: Kind
    changes: Mapping[str, Any]
    role: str | None = None
    new_tokens: int = 0
    tied: bool = False
    template: str = CHAT_TEMPLATE
    ends: tuple[int, ...] = (2,)
    """Tokens that end a response, the last of which the template teaches."""


TIED = {**LLAMA, "tie_word_embeddings": True}
ADDED = {"tokenizer.added_tokens": NEW}
MARKED = CHAT_TEMPLATE.replace("<eos>", "<n1>")
TURNS = {"tokenizer.added_tokens": NEW[:1], "tokenizer.chat_template": MARKED}
"""A chat template that ends a turn with another token than the EOS."""
CASES = {
    "sft turns": Case(kind="sft", changes=TURNS, new_tokens=1, template=MARKED, ends=(2, NUM_TOKENS)),
    "ppo turns": Case(kind="ppo", changes=TURNS, new_tokens=1, template=MARKED, ends=(2, NUM_TOKENS)),
    "sft": Case(kind="sft", changes={}),
    "sft tied": Case(kind="sft", changes={"model.config": TIED}, tied=True),
    "sft added": Case(kind="sft", changes={"model.config": TIED} | ADDED, tied=True, new_tokens=2),
    "sft adapter added": Case(kind="sft", changes={"model.lora": LORA} | ADDED, new_tokens=2),
    "sft adapter tied added": Case(
        kind="sft", changes={"model": {"path": "tied", "lora": LORA}} | ADDED, tied=True, new_tokens=2
    ),
    "sft two matrices": Case(kind="sft", changes={"model": {"path": "two_matrices"}} | ADDED, new_tokens=2),
    "sft two matrices adapter": Case(kind="sft", changes={"model": {"path": "two_matrices", "lora": LORA}}),
    "reward": Case(kind="reward", changes={}),
    "reward adapter added": Case(kind="reward", changes={"model.lora": LORA} | ADDED, new_tokens=2),
    "ppo": Case(kind="ppo", changes={}),
    "ppo value": Case(kind="ppo", changes={}, role="value"),
    "ppo adapters": Case(kind="ppo", changes={"model.lora": LORA, "value": {"init_from": "policy", "lora": LORA}}),
    "ppo adapters value": Case(
        kind="ppo", changes={"model.lora": LORA, "value": {"init_from": "policy", "lora": LORA}}, role="value"
    ),
    "ppo trunk value": Case(
        kind="ppo",
        changes={"model.lora": LORA, "value": {"init_from": "trunk"}, "ppo.critic_warmup_steps": 1} | ADDED,
        role="value",
        new_tokens=2,
    ),
}
EXPORTS: dict[str, dict[str, Any]] = {
    "export": {},
    "bfloat16": {"merge": True, "dtype": "bfloat16"},
    "merged": {"merge": True},
    "bfloat16 alone": {"dtype": "bfloat16"},
}


def make_run(place: Path, name: str, case: Case) -> Path:
    """The folder of the run, which takes a step or two."""
    folder = place / "runs" / name.removesuffix(" value")
    if folder.exists():
        return folder
    few = {"ppo.num_steps": 2} if case.kind == "ppo" else {f"{case.kind}.num_epochs": 1}
    once = {"run.folder": str(folder), "run.save_every_steps": None, "run.evaluate_every_steps": None}
    made = changed(recipe_of(case.kind, place), {**once, **few, **case.changes})
    assert run(case.kind, made, RunOptions(quiet=True)) == 0
    return folder


def make_bases(place: Path) -> None:
    """A tied model, and one whose configuration says that its two matrices are one."""
    tiny_language_model(seed=6, num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(place / "tied")
    model = tiny_language_model(seed=7, num_hidden_layers=1)
    model.config.tie_word_embeddings = True
    model.save_pretrained(place / "two_matrices")
    for name in ("tied", "two_matrices"):
        tiny_tokenizer().save_pretrained(place / name)


@dataclass(frozen=True, kw_only=True)
class Read:
    """What the fresh process found in a folder, and what Proximo runs."""

    case: Case
    path: Path
    found: dict[str, Any]
    weights: dict[str, torch.Tensor]
    ours: torch.Tensor
    """Logits or scores of the checkpoint's model at each of the ids."""
    saved: dict[str, torch.Tensor]
    """Weights of the checkpoint's model, an adapter merged."""


def asked_ids(case: Case) -> list[int]:
    return [*IDS, *range(NUM_TOKENS, NUM_TOKENS + case.new_tokens)]


@torch.no_grad()
def ours(folder: Path, case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The outputs and the merged weights of a checkpoint's model as Proximo loads it."""
    packed, place = pack([asked_ids(case)]), torch.device("cpu")
    if folder.name == "policy":
        model = load_language_model(ModelSource(path=str(folder)), device=place)
        output = model.head.logits(model.hidden_states(packed))
    else:
        base = adapter_base(ModelSource(path=str(folder)))
        model = load_scalar_model(base or ModelSource(path=str(folder)), fresh_head=HeadStart.ZERO, device=place)
        if base is not None:
            model = ScalarModel(load_adapter(model.base, folder).eval())
        output = model.sequence_scores(packed)
    inner: Any = model.model
    return output, (inner.merge_and_unload() if model.has_adapter else inner).state_dict()


def ways_of(model: Path, seen: Counter[str]) -> list[str]:
    """One way to export a whole model and two for an adapter, so that the cases take turns in all of them."""
    ways = list(EXPORTS) if is_adapter_folder(model) else list(EXPORTS)[:2]
    chosen = sorted(ways, key=seen.__getitem__)[: len(ways) // 2]
    seen.update(chosen)
    return chosen


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    place = make_inputs(tmp_path_factory.mktemp("exports"))
    make_bases(place)
    folders: dict[str, tuple[Case, Path, Path]] = {}
    asked: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(journal, "write_report", lambda folder: folder / "report.html")
        for name, case in CASES.items():
            model = find_model(make_run(place, name, case), role=case.role).folder
            if name != "ppo trunk value":  # a head alone, which only Proximo reads
                folders[f"{name}: checkpoint"] = case, model, model
            for way in ways_of(model, seen):
                path = place / "out" / name / way
                run_folder = place / "runs" / name.removesuffix(" value")
                assert run_export(run_folder, path, role=case.role, **EXPORTS[way]) == 0
                folders[f"{name}: {way}"] = case, path, model
        for index, (case, path, model) in enumerate(folders.values()):
            asked[str(path)] = {
                "scalar": model.name != "policy",
                "adapter": (path / "adapter_config.json").exists(),
                "ids": asked_ids(case),
                "end": case.ends[-1],
                "text": "".join(NEW[: case.new_tokens]),
                "weights": f"weights-{index}.safetensors",
            }
        (place / "asked.json").write_text(json.dumps(asked))
        (place / "reader.py").write_text(READER)
        subprocess.run([sys.executable, "-I", "reader.py"], check=True, timeout=600)
        found = json.loads((place / "found.json").read_text())
        made = {str(model): ours(model, case) for case, _, model in folders.values()}
    return {
        name: Read(
            case=case,
            path=path,
            found=found[str(path)],
            weights=load_file(place / asked[str(path)]["weights"]),
            ours=made[str(model)][0],
            saved=made[str(model)][1],
        )
        for name, (case, path, model) in folders.items()
    }


def test_the_weights_are_those_that_were_trained(read: dict[str, Read]) -> None:
    for name, each in read.items():
        bound = 0.02 if "bfloat16" in name else 1e-6
        missing = each.saved.keys() ^ each.weights.keys()
        assert not missing, (name, missing)
        for tensor, value in each.weights.items():
            torch.testing.assert_close(value, each.saved[tensor], atol=bound, rtol=bound, msg=f"{name}: {tensor}")


def test_one_pass_gives_the_numbers_that_it_gives_here(read: dict[str, Read]) -> None:
    for name, each in read.items():
        bound = (0.05 if "bfloat16" in name else 2e-5) * max(1.0, each.ours.abs().max().item())
        found = torch.tensor(each.found["output"])
        torch.testing.assert_close(found, each.ours, atol=bound, rtol=0, msg=f"{name}: {found} {each.ours}")


def test_tokens_and_template_are_those_of_the_run(read: dict[str, Read]) -> None:
    for name, each in read.items():
        new = list(range(NUM_TOKENS, NUM_TOKENS + each.case.new_tokens))
        assert each.found["ids"] == [*tiny_tokenizer()("ab")["input_ids"], *new], name
        assert each.found["template"] == each.case.template, name


def test_what_ends_a_response_in_the_run_ends_one_in_transformers(read: dict[str, Read]) -> None:
    """An adapter alone has no generation config: it runs with that of its base."""
    for name, each in read.items():
        if each.found["drawn"] is None:
            continue
        ends = (2,) if (each.path / "adapter_config.json").exists() else each.case.ends
        assert each.found["eos"] == (list(ends) if len(ends) > 1 else ends[0]), name
        assert each.found["drawn"] == (1 if each.case.ends[-1] in ends else 4), name


def test_the_configuration_says_what_the_weights_are(read: dict[str, Read]) -> None:
    for name, each in read.items():
        scalar = each.path.name in ("value", "reward") or each.case.kind == "reward" or each.case.role == "value"
        kind = "SequenceClassification" if scalar else "CausalLM"
        assert each.found["architecture"] == f"LlamaFor{kind}", name
        if not scalar:
            assert each.found["tied"] is each.case.tied, name
        whole = not (each.path / "adapter_config.json").exists()
        if whole:
            config = json.loads((each.path / "config.json").read_text())
            assert config["dtype"] == ("bfloat16" if "bfloat16" in name else "float32"), name
            assert config["vocab_size"] == len(each.saved["model.embed_tokens.weight"]), name
            assert scalar or each.found["says_tied"] is each.case.tied, name


def test_an_adapter_holds_embeddings_only_where_its_base_lacks_rows(read: dict[str, Read]) -> None:
    for name, each in read.items():
        if (each.path / "adapter_config.json").exists():
            kept = any("embed_tokens" in tensor for tensor in load_file(each.path / "adapter_model.safetensors"))
            assert kept is (each.case.new_tokens > 1), name
