"""What `import proximo` offers: public names that load when first used, and nothing heavy before."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import proximo
from proximo import api
from records_made import response

LOADS_LATE = """
import sys
import proximo

def loaded(*names):
    return [name for name in names if name in sys.modules]

assert not loaded("torch", "transformers", "pydantic", "numpy", "proximo.api")
assert proximo.__version__.count(".") == 2
assert not hasattr(proximo, "__wrapped__")
assert "proximo.api" not in sys.modules
proximo.PPOConfig
assert "torch" in sys.modules
from proximo.api import PPOConfig, PPOTrainer
heavy = ("transformers", "peft", "accelerate", "datasets", "tensorboard", "matplotlib", "pandas", "scipy", "sympy")
further = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "huggingface_hub")
assert not loaded(*heavy, *further), loaded(*heavy, *further)

from builders import tiny_language_model, tiny_tokenizer
from proximo.models.transformers_model import is_adapted

def trained(model):
    config = PPOConfig(num_steps=1, prompts_per_step=1, responses_per_prompt=2, rollout={"max_new_tokens": 2})
    trainer = PPOTrainer(model, tiny_tokenizer(), reward=lambda prompts, responses, metadata: [0.0, 1.0], config=config)
    trainer.train(["a"])
    return trainer.policy

plain = trained(tiny_language_model())
assert not plain.has_adapter and not is_adapted(plain.model)
assert "peft" not in sys.modules
from proximo.models.lora import LoRAOptions
adapted = trained(plain.with_adapter(LoRAOptions(rank=2)))
assert "peft" in sys.modules
assert adapted.has_adapter and is_adapted(adapted.model) and adapted.adapter_config.r == 2
assert adapted.base is plain.model
"""


def test_each_import_loads_what_it_needs_and_leaves_the_rest_to_the_first_use() -> None:
    """Nothing heavy until a public name is used, torch with the trainer, what runs models with the first model, and
    peft with the first adapter."""
    done = subprocess.run(
        [sys.executable, "-c", LOADS_LATE],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", api.__all__)
def test_every_public_name_is_that_of_the_api(name: str) -> None:
    assert getattr(proximo, name) is getattr(api, name)


def test_the_list_holds_exactly_what_the_module_offers() -> None:
    offered = [
        name
        for name, value in vars(api).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert sorted(offered) == list(api.__all__)
    assert len(set(api.__all__)) == len(api.__all__)


@pytest.mark.parametrize("name", ["PPOTrainr", "LanguageModels", "_Private", "import_module_"])
def test_an_unknown_name_is_an_attribute_error_that_says_where_to_look(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no public name '{name}'; proximo.api lists them"):
        getattr(proximo, name)


def test_an_unknown_name_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Unheard'"):
        from proximo import Unheard  # noqa: F401


def test_a_star_import_gives_the_public_names() -> None:
    given: dict[str, object] = {}
    exec("from proximo import *", given)
    assert set(api.__all__) <= given.keys()
    assert set(api.__all__) <= set(dir(proximo))


def test_a_printed_response_shows_its_text_and_no_tensor() -> None:
    printed = repr(response(text="a cat"))
    assert "'a cat'" in printed
    assert "tensor(" not in printed
