"""Episodes of several turns beside the same tokens in one turn: `PPOTrainer.generate`, in alternating pairs.

    python benchmarks/episodes.py

64 episodes in 8 groups, whose environments answer at once, of a random Llama; in texts one after the other (`plain`) or
with a chat template. Rates are by CPU time: one thread of torch, and those of the environments. "written" compares the
tokens that the policy writes with a response of as many, so that what is read between turns costs time and is not
counted; "all" compares the tokens of policy and environment with a response of as many. The shares are those of the
wall-clock time of the episodes, as the report has them: environments work beside the other three.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from proximo.config.ppo.options import PPOConfig
from proximo.environments.engine import Arena
from proximo.models.language import LanguageModel
from proximo.ppo.trainer import PPOTrainer
from proximo.rollout.local import LocalEngine
from proximo.run.make.environments import PythonEnvironment

EPISODES, GROUP, FIRST_LETTERS, TURN_TOKENS = 64, 8, 32, 16
SIZES = {"tiny": (512, 64, 2), "small": (2048, 256, 4)}
"""Vocabulary, width, layers."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "<|im_start|>assistant\n"
)
CASES = [("plain", 8, 0), ("chat", 8, 8), ("chat", 2, 8)]
"""How turns are written, their number, and the letters of an observation."""


@dataclass(kw_only=True)
class Echo:
    """Answers at once with so many letters, and pays nothing."""

    num_turns: int
    num_letters: int
    turns: int = 0

    def reset(self, **given: Any) -> tuple[str, dict[str, Any]]:
        """What the policy reads first."""
        self.turns = 0
        return letters(given["seed"], FIRST_LETTERS), {}

    def step(self, _: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Ends with the last turn."""
        self.turns += 1
        return letters(self.turns, self.num_letters), 0.0, self.turns == self.num_turns, False, {}


def letters(start: int, count: int) -> str:
    """Each is one token."""
    return "".join(chr(97 + (7 * place + start) % 26) for place in range(count))


def make_trainer(size: str, form: str, *, num_tokens: int, environment: PythonEnvironment | None = None) -> PPOTrainer:
    """Each response, or turn, has so many tokens."""
    vocabulary, width, layers = SIZES[size]
    torch.manual_seed(0)
    shape = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 4 * width, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=4096, **shape)
    characters = ["\n", *map(chr, range(32, 127)), *map(chr, range(0x4E00, 0x4E00 + vocabulary - 98))]
    inner = Tokenizer(models.WordLevel({each: index for index, each in enumerate(characters)}, unk_token="?"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE if form == "chat" else None
    model = LanguageModel(LlamaForCausalLM(config).eval())
    engine = LocalEngine(model, tokenizer, eos_token_ids=[])  # nothing ends a response before its limit
    rollout = {"max_new_tokens": num_tokens}
    options = PPOConfig(responses_per_prompt=GROUP, advantage="group_centred", rollout=rollout)
    return PPOTrainer(model, tokenizer, config=options, engine=engine, environment=environment)


def sample(trainer: PPOTrainer, prompts: Any) -> tuple[float, float, int, int]:
    """CPU seconds, wall-clock seconds; of each response, tokens and those of the policy."""
    wall, start = time.perf_counter(), time.process_time()
    responses = trainer.generate(prompts)
    seconds = time.process_time() - start, time.perf_counter() - wall
    counts = ((len(each.token_ids), int(each.response_mask.sum())) for each in responses)
    return (*seconds, *(sum(column) // EPISODES for column in zip(*counts, strict=True)))


def compare(size: str, form: str, num_turns: int, num_letters: int, *, rounds: int) -> None:
    """One line of the table: medians over the rounds, and of the ratios of pairs."""
    make = partial(Echo, num_turns=num_turns, num_letters=num_letters)
    given = PythonEnvironment(make=make, max_turns=num_turns + 1, max_tokens=4000)
    episodes = make_trainer(size, form, num_tokens=TURN_TOKENS, environment=given)
    assert isinstance(episodes.environments, Arena)
    num_groups, times = EPISODES // GROUP, episodes.environments.times
    *_, total, written = sample(episodes, num_groups)  # threads begin
    prompts = [letters(number, FIRST_LETTERS) for number in range(num_groups)]
    once, whole = (make_trainer(size, form, num_tokens=count) for count in (written, total))
    rows = []
    for _ in range(rounds):
        times.clear()
        seconds, wall, *_ = sample(episodes, num_groups)
        of_written, of_all = (sample(each, prompts)[0] for each in (once, whole))
        rates = [EPISODES * written / each for each in (seconds, of_written)]
        shares = [each / wall for each in (times.model, times.waiting, times.environments)]
        rows.append((*rates, of_written / seconds, of_all / seconds, 1 - sum(shares[:2]), *shares))
    episodes.close()
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    cells = "{:10,.0f}{:12,.0f}{:9.2f}{:6.2f}{:7.0%}{:7.0%}{:9.0%}{:14.0%}".format(*medians)
    print(f"{size:6}{form:6}{num_turns:6}{(total - written) // (num_turns - 1):6}{cells}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("size  form   turns  read  written/s  one turn/s  written   all   rest  model  waiting  environments")
    for size, case in product(SIZES, CASES):
        compare(size, *case, rounds=rounds)


if __name__ == "__main__":
    main()
