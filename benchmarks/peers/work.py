"""The work that all sides are measured on: models made at random, prompts, and what a job says. No side's own code.

Imported under every side's versions, so it needs torch, transformers and the standard library alone.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from endings import (
    EOS_ID,
    FIRST_ID,
    MEAN_EOS_PROBABILITY,
    PAD_ID,
    count_down,
    forbid_ends,
    geometric_lengths,
    last_prompt_token,
    set_stop_probability,
)


@dataclass(frozen=True)
class Size:
    """A Llama without tied embeddings, and with as many key-value heads as heads, where nothing else is said."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    mlp: int
    key_value_heads: int | None = None
    """None: as many as heads."""
    model_type: str = "llama"
    tied: bool = False
    """The output layer is the embedding."""

    @property
    def key_value_width(self) -> int:
        """Of the keys of a token, all heads together."""
        return self.width // self.heads * (self.key_value_heads or self.heads)


_S: dict[str, Any] = {"vocabulary": 2048, "width": 256, "layers": 4, "heads": 4}
QWEN = {"vocabulary": 151_936, "key_value_heads": 2, "model_type": "qwen2", "tied": True}
SIZES = {
    "tiny": Size(vocabulary=256, width=128, layers=2, heads=2, mlp=128),  # for a smoke test; no row of any table
    "S": Size(**_S, mlp=688),
    # Other architectures of the same shape.
    **{f"S-{kind}": Size(**_S, mlp=688, model_type=kind) for kind in ("qwen2", "qwen3", "gemma2", "gpt2")},
    "M": Size(vocabulary=8192, width=512, layers=8, heads=8, mlp=1376),
    "M-150k": Size(vocabulary=150_000, width=512, layers=8, heads=8, mlp=1376),
    "tiny-qwen": Size(**{**QWEN, "vocabulary": 256}, width=128, layers=2, heads=4, mlp=128),
    "qwen-0.5b": Size(**QWEN, width=896, layers=24, heads=14, mlp=4864),
    "qwen-1.5b": Size(**QWEN, width=1536, layers=28, heads=12, mlp=8960),
    "qwen-4b": Size(**{**QWEN, "key_value_heads": 4}, width=2560, layers=36, heads=20, mlp=9728),
    "qwen-7b": Size(
        vocabulary=152_064, width=3584, layers=28, heads=28, mlp=18_944, key_value_heads=4, model_type="qwen2"
    ),
}


@dataclass(frozen=True)
class Job:
    """What one side does in one process."""

    models: str
    """Folder with `policy`, `reward`, `value` and `tokenizer`."""
    size: str
    regime: str
    """`none`: no response ends early. `eos`: after 20 tokens on average, each where its prompt says. `random`: every
    token ends its response with the same probability."""
    precision: str = "float32"
    shared_trunk: bool = False
    num_prompts: int = 64
    group: int = 1
    """Responses to each prompt; every peer is given the prompt so many times."""
    prompt_tokens: int = 32
    """Of half of the prompts; the other half have 8 to so many, but all have them in groups."""
    new_tokens: int = 64
    epochs: int = 4
    minibatch: int = 16
    learning_rate: float = 1e-9
    """So small that lengths stay put."""
    steps: int = 3
    """Steps that count; one more is taken before them."""
    threads: int = 2
    seed: int = 0
    device: str = "cpu"
    adapter_rank: int = 0
    """Of LoRA on all linear layers of policy and value model; 0 trains them in full. TRL's value model has none."""

    @property
    def num_responses(self) -> int:
        """Of a step."""
        return self.num_prompts * self.group

    def prompts(self) -> list[list[int]]:
        """Token ids, the same in every step."""
        vocabulary = SIZES[self.size].vocabulary
        draw = random.Random(self.seed)
        lengths = [self.prompt_tokens] * self.num_prompts
        if self.group == 1:
            short = range(self.num_prompts // 2, self.num_prompts)
            for index in short:
                lengths[index] = draw.randint(min(8, self.prompt_tokens), self.prompt_tokens)
        prompts = [[draw.randrange(FIRST_ID, vocabulary) for _ in range(length)] for length in lengths]
        if self.regime == "eos":
            for prompt, length in zip(prompts, self._lengths_by_prompt(), strict=True):
                prompt[-1] = last_prompt_token(length)
        return prompts

    def response_lengths(self) -> list[int] | None:
        """Of every response of a step, the stop token counted; None where it is drawn."""
        if self.regime == "random":
            return None
        lengths = [self.new_tokens] * self.num_prompts if self.regime == "none" else self._lengths_by_prompt()
        return [min(length, self.new_tokens) for length in lengths for _ in range(self.group)]

    def _lengths_by_prompt(self) -> list[int]:
        """One more than `new_tokens` for a response that is cut."""
        lengths = geometric_lengths(self.num_prompts, longest=self.new_tokens + 1)
        random.Random(f"lengths/{self.seed}").shuffle(lengths)
        return lengths

    def save(self, path: Path) -> Path:
        """Write it where a process reads it."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str) -> "Job":
        """As it was saved."""
        return cls(**json.loads(Path(path).read_text()))


def model_config(size: Size, **more: Any) -> Any:
    """What transformers makes the model from."""
    from transformers import AutoConfig

    head_width = size.width // size.heads
    more |= {
        "gemma2": {"head_dim": head_width, "query_pre_attn_scalar": head_width},
        "qwen3": {"head_dim": head_width},
        # Two matrices after attention instead of three, with as many weights.
        "gpt2": {"n_inner": size.mlp * 3 // 2},
    }.get(size.model_type, {})
    return AutoConfig.for_model(
        size.model_type,
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads or size.heads,
        max_position_embeddings=8192,
        tie_word_embeddings=size.tied,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        **more,
    )


def make_models(
    folder: Path, size: Size, *, regime: str, seed: int = 0, stop_probability: float = MEAN_EOS_PROBABILITY
) -> None:
    """Write policy, value model, reward model and tokenizer in a form that every version reads.

    `stop_probability` is of a token in the regime `random`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(model_config(size)).eval()
    if regime == "eos":
        count_down(policy)
    elif regime == "random":
        set_stop_probability(policy, stop_probability)
    else:
        forbid_ends(policy)
    scalars = {
        name: AutoModelForSequenceClassification.from_config(model_config(size, num_labels=1))
        for name in ("value", "reward")
    }
    for name, model in {"policy": policy, **scalars}.items():
        model.save_pretrained(folder / name)
        if size.model_type in ("llama", "qwen2"):  # the others are read by the newest versions alone
            _write_plain_config(folder / name, size, type(model).__name__)
    write_tokenizer(folder / "tokenizer", size)


def _write_plain_config(folder: Path, size: Size, architecture: str) -> None:
    """Older and newer names of the same settings: each version keeps to its own."""
    plain = {
        "architectures": [architecture],
        "model_type": size.model_type,
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.mlp,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads or size.heads,
        "head_dim": size.width // size.heads,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": size.tied,
        "torch_dtype": "float32",
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
    }
    if architecture.endswith("SequenceClassification"):
        plain |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    (folder / "config.json").write_text(json.dumps(plain, indent=1))


def write_tokenizer(folder: Path, size: Size) -> None:
    """One word per token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": PAD_ID, "<eos>": EOS_ID} | {f"w{i}": i for i in range(2, size.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "model_max_length": 8192,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
