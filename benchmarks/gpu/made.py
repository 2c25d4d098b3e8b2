"""What the sections compute with: models with random weights, prompts, a score, trainers. All made on the spot."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from endings import EOS_ID, FIRST_ID
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from work import SIZES, model_config, write_tokenizer

from proximo import LocalEngine, PPOConfig, PPOTrainer, Prompt, RandomKey, Response, SamplingOptions
from proximo.models.language import LanguageModel
from proximo.models.loading import load_language_model
from proximo.models.lora import LoRAOptions
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.sources import ModelSource
from proximo.models.quantised import Quantisation
from proximo.models.scalar import HeadStart, ScalarModel
from proximo.models.sharing import value_on_base

TINY = "tiny-qwen"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gpt2")


def config_of(size: str, *, model_type: str = "qwen2", **more: Any) -> Any:
    """Of transformers. Gemma's windows are shorter than the longest sequence here."""
    windows = {"sliding_window": 32} if model_type.startswith("gemma") else {}
    return model_config(replace(SIZES[size], model_type=model_type), **windows, **more)


def causal(size: str, *, device: str = "cpu", model_type: str = "qwen2", wide: bool = False) -> nn.Module:
    """In float32, made on the device. `wide`: larger weights, since what random models say is nearly uniform."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(size, model_type=model_type), dtype=torch.float32)
    if wide:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2 and "norm" not in name:
                    weight.mul_(3.0)
    return model.eval()


def classifier(size: str, *, device: str = "cpu") -> nn.Module:
    """One number at each position, in float32."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    with torch.device(device):
        made = AutoModelForSequenceClassification.from_config(config_of(size, num_labels=1), dtype=torch.float32)
    return made.eval()


@cache
def tokenizer_of(size: str) -> Any:
    """One word for each token."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), SIZES[size])
        return AutoTokenizer.from_pretrained(folder)


def prompts_of(count: int, length: int, size: str) -> list[Prompt]:
    """Of random words, the same in each call."""
    draw, vocabulary = random.Random(0), SIZES[size].vocabulary
    ids = [tuple(draw.randrange(FIRST_ID, vocabulary) for _ in range(length)) for _ in range(count)]
    return [Prompt(id=str(number), token_ids=each) for number, each in enumerate(ids)]


def even_words(prompts: Any, responses: Sequence[str], metadata: Any) -> list[float]:  # noqa: ARG001
    """The share of words with an even number: any change of the tokens moves it."""
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in responses]
    return [sum(number % 2 == 0 for number in row) / max(1, len(row)) for row in numbers]


def language_model(size: str, *, device: str) -> LanguageModel:
    """In bf16, made on the device."""
    return LanguageModel(causal(size, device=device), precision=Precision("bf16"))


def engine_of(model: LanguageModel, size: str, *, rows: int) -> LocalEngine:
    """With as many slots as rows."""
    return LocalEngine(model, tokenizer_of(size), eos_token_ids=[EOS_ID], max_num_seqs=rows)


def generated(engine: LocalEngine, prompts: Sequence[Prompt], *, new_tokens: int) -> Sequence[Response]:
    """One response to each prompt, the same in each call."""
    options, key = SamplingOptions(max_new_tokens=new_tokens), RandomKey(seed=0, purpose="rollout")
    return engine.generate(prompts, num_samples=1, options=options, key=key)


def in_4_bits(size: str, *, device: str) -> LanguageModel:
    """Saved, and loaded with matrices of 4 bits."""
    with TemporaryDirectory() as folder:
        causal(size, device=device).bfloat16().save_pretrained(folder)
        source = ModelSource(path=folder, quantisation=Quantisation.NF4)
        return load_language_model(source, device=torch.device(device), precision=Precision("bf16"))


def fast_trainer(kind: str, size: str, config: Mapping[str, Any], *, device: str) -> PPOTrainer:
    """In bf16, made on the device.

    `kind`: `critic` trains two models in full, `lora` two adapters on one base, `4bit` the same above 4 bits.
    """
    policy = (in_4_bits if kind == "4bit" else language_model)(size, device=device)
    if kind != "critic":
        policy = policy.with_adapter(LoRAOptions(rank=16))
        value = value_on_base(policy, LoRAOptions(rank=16), HeadStart.ZERO)
    else:
        value = ScalarModel(classifier(size, device=device), precision=Precision("bf16"))
    rate = {"learning_rate": 1e-6}
    given = {"num_steps": 4, "epochs_per_step": 1, "policy_optimizer": rate, "value_optimizer": rate, **config}
    return trainer_of(policy, value, given, size=size)


def tiny_trainer(kind: str, *, device: str, how: str) -> PPOTrainer:
    """Eight prompts a step. `kind`: `critic`, `group`, `lora`, or `trunk` that policy and value model share.

    Weights are made on the CPU and then moved, so that they are the same on every device.
    """
    policy = LanguageModel(causal(TINY, wide=True).to(device), precision=Precision(how))
    rate = {"learning_rate": 1e-4}
    given: dict[str, Any] = {
        "num_steps": 4,
        "prompts_per_step": 8,
        "epochs_per_step": 1,
        "minibatch_responses": 8,
        "rollout": {"max_new_tokens": 24},
        "policy_optimizer": rate,
    }
    value: Any = None
    if kind == "critic":
        value = ScalarModel(classifier(TINY).to(device), precision=Precision(how))
    elif kind == "trunk":
        value = "trunk"
    elif kind == "group":
        given |= {"responses_per_prompt": 4, "minibatch_responses": 16}
        given["advantage"] = {"kind": "group_standardised"}
    else:
        torch.manual_seed(5)
        policy = policy.with_adapter(LoRAOptions(rank=8))
        value = value_on_base(policy, LoRAOptions(rank=8), HeadStart.ZERO)
    if kind in ("critic", "lora"):
        given["value_optimizer"] = rate
    return trainer_of(policy, value, given, size=TINY)


def trainer_of(policy: LanguageModel, value: Any, config: Mapping[str, Any], *, size: str) -> PPOTrainer:
    """That scores even words."""
    checked = PPOConfig.model_validate(config)
    return PPOTrainer(policy, tokenizer_of(size), value=value, reward=even_words, config=checked, seed=0)


class OperatorCounts(TorchDispatchMode):
    """Counts the operators that run inside it, to say which attention ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def attention(self) -> dict[str, int]:
        """Those of attention."""
        return {name: count for name, count in self.counts.items() if "attn" in name or "attention" in name}


def relative(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()
