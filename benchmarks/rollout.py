"""Tokens per second of the local engine beside `generate` of transformers, on one thread, in alternating rounds.

    python benchmarks/rollout.py

A random Llama (width 256, 4 layers, 8 heads over 4, 2048 tokens), prompts of 32 tokens, up to 64 new ones. Times are
CPU time; only tokens up to the end of a response count. transformers gets batches of 64, repeated per sample.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from proximo.models.language import LanguageModel
from proximo.records import Prompt
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions

VOCABULARY, WIDTH, LAYERS = 2048, 256, 4
PROMPT_TOKENS, NEW_TOKENS, ROWS = 32, 64, 64


def make_model() -> PreTrainedModel:
    """The same weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def run_engine(engine: LocalEngine, prompts: Tensor, num_samples: int) -> int:
    """Useful tokens."""
    records = [Prompt(id=str(index), token_ids=tuple(row)) for index, row in enumerate(prompts.tolist())]
    responses = engine.generate(
        records,
        num_samples=num_samples,
        options=SamplingOptions(max_new_tokens=NEW_TOKENS),
        key=RandomKey(seed=0, purpose="benchmark"),
    )
    return sum(len(response.token_ids) for response in responses)


def run_transformers(model: PreTrainedModel, prompts: Tensor, num_samples: int, eos_token_ids: Sequence[int]) -> int:
    """Useful tokens."""
    useful = 0
    for batch in prompts.repeat_interleave(num_samples, dim=0).split(ROWS):
        whole = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=0,
        )
        for row in whole[:, PROMPT_TOKENS:].tolist():
            useful += next((place + 1 for place, token in enumerate(row) if token in eos_token_ids), len(row))
    return useful


def tokens_per_second(work: Callable[[], int]) -> float:
    """Useful tokens over CPU time of one round."""
    start = time.process_time()
    return work() / (time.process_time() - start)


def compare(name: str, *, num_prompts: int, num_samples: int, num_eos: int, rounds: int) -> None:
    """Print one line: the median of `rounds` for each side."""
    eos_token_ids = range(VOCABULARY - num_eos, VOCABULARY)
    prompts = torch.randint(1, VOCABULARY - num_eos, (num_prompts, PROMPT_TOKENS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    engine = LocalEngine(LanguageModel(make_model()), tokenizer, eos_token_ids=eos_token_ids, max_num_seqs=ROWS)
    model = make_model()
    sides: tuple[Callable[[], int], Callable[[], int]] = (
        lambda: run_engine(engine, prompts, num_samples),
        lambda: run_transformers(model, prompts, num_samples, eos_token_ids),
    )
    rates = [[tokens_per_second(side) for side in sides] for _ in range(rounds + 1)][1:]
    ours, theirs = (statistics.median(rate) for rate in zip(*rates, strict=True))
    print(f"{name:42} {ours:8.0f} {theirs:14.0f} {ours / theirs:8.2f}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per line after one that does not count")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{'tokens per second':42} {'engine':>8} {'transformers':>14} {'ratio':>8}")
    compare("64 prompts, none ends early", num_prompts=64, num_samples=1, num_eos=0, rounds=rounds)
    compare("64 prompts, ends after 36 on average", num_prompts=64, num_samples=1, num_eos=48, rounds=rounds)
    compare("256 prompts, ends after 36", num_prompts=256, num_samples=1, num_eos=48, rounds=rounds)
    compare("64 prompts of 4 samples, ends after 36", num_prompts=64, num_samples=4, num_eos=48, rounds=rounds)


if __name__ == "__main__":
    main()
