"""Bases in few bits: what is refused everywhere, and, where bitsandbytes is installed, that only the adapter learns."""

import importlib.util
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from architectures import build_architecture, random_sequences
from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import LARGE, ppo_trainer
from proximo.config.run import ModelConfig, ScalarModelConfig
from proximo.errors import ConfigError, MissingExtraError, ModelError
from proximo.models import loading
from proximo.models.language import LanguageModel
from proximo.models.loading import load_language_model, load_scalar_model
from proximo.models.lora import LoRAOptions, load_adapter, merged_copy
from proximo.models.packing import pack
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.saving import load_weights, save_pretrained
from proximo.models.pretrained.sources import ModelSource
from proximo.models.quantised import Quantisation, loading_options, quantisation_of, quantised_layers, settle_products
from proximo.models.scalar import HeadStart
from proximo.models.sharing import base_alone, is_shared, scalar_from_adapter, value_on_base
from proximo.ppo.recipe import PPORecipe
from proximo.rewards.model import ModelReward
from proximo.run.make.models import DeviceSpec, build_language_model, build_scalar_model
from proximo.supervised.sft_recipe import SFTRecipe
from proximo.trainer_kinds import recipe_kind
from tiny_runs import changed, make_inputs, recipe_of

CPU = torch.device("cpu")
OPTIONS = LoRAOptions(rank=2)
LORA = {"rank": 2}
installed = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes (the extra `low-memory`) is not installed",
)
third_party = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_language_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Quantisation]:
    """How bases were asked to be stored; none of them is loaded."""
    kinds: list[Quantisation] = []

    def options(kind: Quantisation, device: torch.device) -> dict[str, Any]:
        kinds.append(kind)
        raise MissingExtraError("asked")

    monkeypatch.setattr(loading, "loading_options", options)
    return kinds


def load(folder: Path, kind: Quantisation, precision: Precision) -> LanguageModel:
    source = ModelSource(path=str(folder), quantisation=kind)
    return load_language_model(source, device=CPU, precision=precision)


def ppo(precision: str = "float32", **sections: Any) -> PPORecipe:
    return PPORecipe.model_validate(
        {
            "run": {"folder": "r", "precision": precision},
            "model": {"path": "p", "lora": LORA},
            "data": {"sources": [{"path": "d.jsonl"}]},
            "reward": [{"kind": "function", "function": "f:g"}],
        }
        | sections
    )


def test_without_the_package_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else find(name, *a)
    )
    with pytest.raises(MissingExtraError, match=r"4bit needs bitsandbytes.*pip install 'proximo\[low-memory\]'"):
        load(folder, Quantisation.NF4, Precision.FLOAT32)


@pytest.mark.parametrize("role", ["policy", "reward"])
def test_a_recipe_says_how_the_base_is_stored(folder: Path, role: str, asked: list[Quantisation]) -> None:
    """What the section names reaches the loading of its base."""
    device_spec = DeviceSpec(device=CPU, precision=Precision.FLOAT32, seed=0)
    for stored in ("4bit", "8bit", "none"):
        lora = {"path": str(folder), "lora": LORA, "quantisation": stored}
        with pytest.raises(MissingExtraError) if stored != "none" else nullcontext():
            if role == "policy":
                build_language_model(ModelConfig(**lora), tiny_tokenizer(), device_spec=device_spec)
            else:
                build = partial(build_scalar_model, fresh_head=HeadStart.NORMAL, device_spec=device_spec)
                build(ScalarModelConfig(**lora), tiny_tokenizer())
    assert asked == [Quantisation.NF4, Quantisation.INT8]


@pytest.mark.parametrize(("precision", "dtype"), [(Precision.BF16, torch.bfloat16), (Precision.FLOAT32, torch.float32)])
def test_matrices_of_4_bits_compute_in_the_precision_of_the_run(precision: Precision, dtype: torch.dtype) -> None:
    stored, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    stored.weight = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    vars(stored).update(compute_dtype=torch.float16, support_avx512bf16_for_cpu=True)
    before = set(vars(plain))
    settle_products(torch.nn.ModuleList([stored, plain]), precision)  # ty: ignore[invalid-argument-type]
    assert (stored.compute_dtype, stored.support_avx512bf16_for_cpu) == (dtype, False)
    assert set(vars(plain)) == before


def test_a_machine_that_cannot_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object())
    with pytest.raises(ModelError, match="bitsandbytes has no kernels for mps"):
        loading_options(Quantisation.INT8, torch.device("mps"))


def test_a_quantised_base_that_trains_needs_an_adapter() -> None:
    with pytest.raises(ConfigError, match="quantisation is for a base that an adapter trains above"):
        ScalarModelConfig(path="p", quantisation="4bit")
    assert ScalarModelConfig(path="p", quantisation="4bit", lora=LORA).quantisation == "4bit"
    with pytest.raises(ValidationError, match=r"model\.quantisation is for a base that an adapter trains above"):
        ppo(model={"path": "p", "quantisation": "4bit"})
    assert ppo(reference={"path": "q", "quantisation": "4bit"}).reference is not None


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_reference_may_be_quantised(kind: str, folder: Path, asked: list[Quantisation], tmp_path: Path) -> None:
    """Its section reaches the loading; where the model trains the same section is refused."""
    tree = recipe_of(kind, make_inputs(tmp_path / "inputs"))
    section = {"path": str(folder), "quantisation": "4bit"}
    with pytest.raises(MissingExtraError):
        recipe_kind(kind).build(recipe_kind(kind).schema.model_validate(changed(tree, {"reference": section})))
    assert asked == [Quantisation.NF4]
    with pytest.raises(ValidationError, match="adapter trains above"):
        recipe_kind(kind).schema.model_validate(changed(tree, {"model": section}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reference": {"path": "p", "quantisation": "8bit"}}, "reference.quantisation 8bit .* bf16, or use 4bit"),
    ],
)
def test_combinations_without_a_sense_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ppo(**sections)


def test_8_bits_go_with_bf16() -> None:
    policy = {"path": "p", "lora": LORA, "quantisation": "8bit"}
    assert ppo("bf16", model=policy, value={"lora": LORA}).model.quantisation == "8bit"
    sft = {"run": {"folder": "r"}, "model": policy, "data": {"sources": [{"path": "d.jsonl"}]}}
    with pytest.raises(ValidationError, match="model.quantisation 8bit"):
        SFTRecipe.model_validate(sft)


@installed
@third_party
@pytest.mark.parametrize(
    ("kind", "precision"), [(Quantisation.NF4, Precision.FLOAT32), (Quantisation.INT8, Precision.BF16)]
)
def test_a_ppo_step_on_a_quantised_base_moves_the_adapters_alone(
    folder: Path, tmp_path: Path, kind: Quantisation, precision: Precision
) -> None:
    """Four roles on it; the engine's log-probs are the learner's, and what is saved loads on it again."""
    source = ModelSource(path=str(folder), quantisation=kind)
    scorer = load_scalar_model(source, fresh_head=HeadStart.NORMAL, device=CPU, precision=precision)
    save_pretrained(scorer.with_adapter(OPTIONS).model, tmp_path / "reward")
    policy = load(folder, kind, precision).with_adapter(OPTIONS)
    value = value_on_base(policy, OPTIONS, HeadStart.ZERO)
    reward = scalar_from_adapter(policy, tmp_path / "reward", role="reward")
    policy.use_activation_checkpointing()
    value.use_activation_checkpointing()
    options = {"num_steps": 2, "epochs_per_step": 1, "minibatch_responses": 2, "value_optimizer": LARGE}
    trainer = ppo_trainer(policy, value=value, reward=ModelReward(reward), **options)
    reference = trainer.roles.reference.model
    assert all(is_shared(model, policy) for model in (reference, value, reward))
    held = {id(p): p for model in (policy, value, reward, reference) for p in model.model.parameters()}
    before = {key: p.detach().clone() for key, p in held.items()}
    few_bits = {id(layer.weight) for layer in quantised_layers(policy.model)}
    assert few_bits
    assert all({id(w.weight) for w in quantised_layers(m.model)} == few_bits for m in (value, reward, reference))
    history = trainer.train(["ab", "cde", "f", "gh"])
    assert all(line["policy/skipped_updates"] == 0 for line in history)
    moved = {key for key, parameter in held.items() if not parameter.equal(before[key])}
    assert moved == {id(p) for learner in trainer.learners.values() for p in learner.parameters.values()}
    limit = 1e-5 if precision is Precision.FLOAT32 else 0.02
    assert all(line["first_minibatch/mean_abs_log_ratio"] < limit for line in history)
    save_pretrained(policy.model, tmp_path / "policy")
    packed = pack(random_sequences([9, 3]))
    again = LanguageModel(
        load_adapter(load(folder, kind, precision).base, tmp_path / "policy").eval(), precision=precision
    )
    with torch.no_grad():
        assert again.hidden_states(packed).equal(policy.hidden_states(packed))
    load_weights(again.model, tmp_path / "policy")


@installed
@third_party
@pytest.mark.parametrize(
    ("kind", "precision"), [(Quantisation.NF4, Precision.FLOAT32), (Quantisation.INT8, Precision.BF16)]
)
def test_a_student_learns_from_a_quantised_teacher(tmp_path: Path, kind: Quantisation, precision: Precision) -> None:
    """The KL is that from the teacher as it is stored, whose weights stay."""
    place = make_inputs(tmp_path)
    tiny_language_model(seed=9, hidden_size=64, vocab_size=63).save_pretrained(tmp_path / "teacher")
    changes = {
        "reference": {"path": str(tmp_path / "teacher"), "quantisation": kind.value},
        "reward": [],
        "gold": None,
        "value": {},
        "ppo.kl": {"kind": "loss", "estimator": "full", "coefficient": 1.0},
        "ppo.advantage": "return_to_go",
        "run.precision": precision.value,
    }
    recipe = PPORecipe.model_validate(changed(recipe_of("ppo", place), changes))
    task = recipe_kind("ppo").build(recipe)
    teacher = task.ppo.roles.reference.model
    assert len(list(quantised_layers(teacher.model))) == 14
    before = [parameter.detach().clone() for parameter in teacher.model.parameters()]
    lines = [task.step(step).metrics for step in (1, 2)]
    assert all(line["kl/full_per_token"].value > 0 for line in lines)
    assert all(line["policy/gradient_norm"].value > 0 for line in lines)
    assert all(map(torch.equal, before, teacher.model.parameters()))


@installed
@third_party
@pytest.mark.parametrize("kind", Quantisation)
@torch.no_grad()
def test_a_sequence_does_not_depend_on_its_company(folder: Path, kind: Quantisation) -> None:
    """Large inputs, which 8-bit products with outliers would treat by what else is in the batch."""
    model = build_architecture("llama")
    for parameter in model.parameters():
        parameter.mul_(3)
    model.save_pretrained(folder)
    model = load(folder, kind, Precision.FLOAT32)
    assert quantisation_of(model.base) is kind
    sequences = random_sequences([9, 3, 14])
    together = model.hidden_states(pack(sequences)).split([9, 3, 14])
    for sequence, hidden in zip(sequences, together, strict=True):
        torch.testing.assert_close(hidden, model.hidden_states(pack([sequence])), rtol=0, atol=1e-4)


@installed
@third_party
def test_few_bits_take_no_adapter_in(folder: Path) -> None:
    policy = load(folder, Quantisation.NF4, Precision.FLOAT32).with_adapter(OPTIONS)
    with pytest.raises(ModelError, match=r"few bits cannot hold the sum.*value_on_base.*export --merge"):
        merged_copy(policy.model)
    assert not any(p.requires_grad for p in base_alone(policy).model.parameters())
