"""Trajectories of several turns beside the same tokens in one turn, on one thread, in alternating rounds.

    python benchmarks/sessions.py

64 trajectories, whose environments answer at once, in a session; beside them `generate` with one response each. A
random Llama, prompts of 32 tokens of which 8 trajectories share one. Times are CPU time. "written" compares tokens per
second that the policy writes with a response of as many tokens: what is read between turns costs time and is not
counted. "all" compares with a response of as many tokens as policy and environment write together.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from proximo.models.language import LanguageModel
from proximo.records import Prompt
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.session import CallRequest

TRAJECTORIES, GROUP, PROMPT_TOKENS, TURN_TOKENS = 64, 8, 32, 16
SIZES = {"tiny": (512, 64, 2), "small": (2048, 256, 4)}
"""Vocabulary, width, layers."""
KEY = RandomKey(seed=0, purpose="benchmark")


def make_engine(size: str) -> LocalEngine:
    """Nothing ends a response before its limit."""
    vocabulary, width, layers = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    return LocalEngine(LanguageModel(LlamaForCausalLM(config).eval()), tokenizer, eos_token_ids=[])


def prompt_of(index: int) -> tuple[int, ...]:
    return tuple((7 * place + 31 * (index // GROUP)) % 500 for place in range(PROMPT_TOKENS))


def play_turns(engine: LocalEngine, *, num_turns: int, observed: int) -> int:
    """Tokens that the policy wrote."""
    ids = {index: list(prompt_of(index)) for index in range(TRAJECTORIES)}
    written = dict.fromkeys(ids, 0)
    most = PROMPT_TOKENS + num_turns * (TURN_TOKENS + observed)
    with engine.session(SamplingOptions(max_new_tokens=TURN_TOKENS), max_tokens=most) as session:

        def ask(index: int) -> None:
            session.submit(
                CallRequest(
                    id=(index, written[index]),
                    lane=index,
                    token_ids=tuple(ids[index]),
                    stream=KEY.stream(index, 0),
                    first_position=written[index],
                    max_new_tokens=TURN_TOKENS,
                )
            )

        for index in ids:
            ask(index)
        while session.num_running:
            for call in session.advance(1):
                index = call.request.lane
                written[index] += len(call.token_ids)
                ids[index] += [*call.token_ids, *range(observed)]
                if written[index] < num_turns * TURN_TOKENS:
                    ask(index)
    return sum(written.values())


def sample_once(engine: LocalEngine, *, num_tokens: int) -> int:
    """Tokens of one response for each trajectory."""
    responses = engine.generate(
        [Prompt(id=str(index), token_ids=prompt_of(GROUP * index)) for index in range(TRAJECTORIES // GROUP)],
        num_samples=GROUP,
        options=SamplingOptions(max_new_tokens=num_tokens),
        key=KEY,
    )
    return sum(len(response.token_ids) for response in responses)


def tokens_per_second(work: Callable[[], int]) -> float:
    """Tokens over CPU time of one round."""
    start = time.process_time()
    return work() / (time.process_time() - start)


def compare(engine: LocalEngine, *, size: str, num_turns: int, observed: int, rounds: int) -> None:
    """One line of the table: medians over the rounds, and of the ratios of pairs."""
    written = num_turns * TURN_TOKENS
    share = written / (written + (num_turns - 1) * observed)
    rows = []
    for _ in range(rounds):
        turns = tokens_per_second(lambda: play_turns(engine, num_turns=num_turns, observed=observed))
        once = tokens_per_second(lambda: sample_once(engine, num_tokens=written))
        whole = tokens_per_second(lambda: sample_once(engine, num_tokens=round(written / share)))
        rows.append((turns, once, turns / once, turns / share / whole))
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print("{:6}{:6}{:9}{:12,.0f}{:12,.0f}{:10.2f}{:8.2f}".format(size, num_turns, observed, *medians), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", choices=[*SIZES], default=[*SIZES])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("size   turns  observed  written/s  one turn/s   written     all")
    for size in given.sizes:
        engine = make_engine(size)
        for num_turns, observed in ((8, 0), (8, 4), (8, 16), (8, 48), (2, 16)):
            compare(engine, size=size, num_turns=num_turns, observed=observed, rounds=given.rounds)


if __name__ == "__main__":
    main()
