"""The work that all sides are measured on: models made at random, prompts, and what a job says. No side's own code.

Imported under every side's versions, so it needs torch, transformers and the standard library alone.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PAD_ID, EOS_ID, FIRST_ID = 0, 1, 4
"""Padding, the stop token, and the first token that prompts are made of."""
MEAN_EOS_PROBABILITY = 0.0475
"""Of the stop token in regime `eos`: 64 draws then end after (1 - (1 - p)^64) / p = 20 on average."""


@dataclass(frozen=True)
class Size:
    """A Llama without tied embeddings, and with as many key-value heads as heads."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    mlp: int


SIZES = {
    "tiny": Size(vocabulary=256, width=64, layers=2, heads=2, mlp=128),  # for a smoke test; no row of any table
    "S": Size(vocabulary=2048, width=256, layers=4, heads=4, mlp=688),
    "M": Size(vocabulary=8192, width=512, layers=8, heads=8, mlp=1376),
}


@dataclass(frozen=True)
class Job:
    """What one side does in one process."""

    models: str
    """Folder with `policy`, `reward`, `value` and `tokenizer`."""
    size: str
    regime: str
    """`none`: no response ends early. `eos`: they end after about 20 tokens."""
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
        return [[draw.randrange(FIRST_ID, vocabulary) for _ in range(length)] for length in lengths]

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
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        **more,
    )


def make_models(folder: Path, size: Size, *, regime: str, seed: int = 0) -> None:
    """Write policy, value model, reward model and tokenizer in a form that every version reads."""
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    policy = LlamaForCausalLM(model_config(size)).eval()
    set_stop_probability(policy, MEAN_EOS_PROBABILITY if regime == "eos" else 1e-9)
    for name, model in (
        ("policy", policy),
        ("value", LlamaForSequenceClassification(model_config(size, num_labels=1))),
        ("reward", LlamaForSequenceClassification(model_config(size, num_labels=1))),
    ):
        model.save_pretrained(folder / name)
        _write_plain_config(folder / name, size, type(model).__name__)
    _write_tokenizer(folder / "tokenizer", size)


def forbid_ends(policy: Any) -> None:
    """Never draw the stop token, nor the padding token, which a peer takes for the end of a response.

    Every input embedding gets the same large number in its first place. The residual stream carries it to the output
    layer, where the rows of these two tokens read that place alone, as a bias would.
    """
    import torch

    with torch.no_grad():
        inputs, outputs = policy.get_input_embeddings().weight, policy.get_output_embeddings().weight
        inputs[:, 0] = 0.5
        outputs[:, 0] = 0.0
        outputs[[PAD_ID, EOS_ID]] = 0.0
        outputs[[PAD_ID, EOS_ID], 0] = -10.0


def set_stop_probability(policy: Any, wanted: float) -> None:
    """Move the weights until the stop token has this probability on average over random contexts.

    How strongly its row reads what `forbid_ends` put into every hidden state is found by bisection.
    """
    import torch

    forbid_ends(policy)
    with torch.no_grad():
        outputs = policy.get_output_embeddings().weight
        contexts = torch.randint(FIRST_ID, outputs.shape[0], (32, 48), generator=torch.Generator().manual_seed(1))
        hidden = policy.base_model(contexts).last_hidden_state[:, 8:].flatten(0, 1)
        others = hidden @ outputs.t()
        others[:, EOS_ID] = -torch.inf
        rest, carried = others.logsumexp(dim=1), hidden[:, 0]
        low, high = -64.0, 64.0
        for _ in range(60):
            middle = (low + high) / 2
            found = torch.sigmoid(middle * carried - rest).mean().item()
            low, high = (middle, high) if found < wanted else (low, middle)
        outputs[EOS_ID, 0] = (low + high) / 2


def _write_plain_config(folder: Path, size: Size, architecture: str) -> None:
    """Older and newer names of the same settings: each version keeps to its own."""
    plain = {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.mlp,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.width // size.heads,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
    }
    if architecture.endswith("SequenceClassification"):
        plain |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    (folder / "config.json").write_text(json.dumps(plain, indent=1))


def _write_tokenizer(folder: Path, size: Size) -> None:
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
