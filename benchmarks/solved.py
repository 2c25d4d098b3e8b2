"""A solved task that is trained on: does the policy stay what it was? Ten seeds, 100 further steps of each.

    python benchmarks/solved.py --seeds 10

Each prompt is a letter, and the score the share of that letter in four; a model of two layers learns it from nothing in
seconds. Once the mean score of three steps is above 0.97, the same policy goes on under each rule for steps whose
returns are all the same, and its held-out score is taken after every step. Prints the table of benchmarks/README.md.
"""

import argparse
import copy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from proximo.algorithms.shaping import RunningMoments
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.trainer import PPOTrainer
from proximo.rollout.sampling import RandomKey

LETTERS = "abcdef"
LENGTH = 4
RULES: dict[str, dict[str, Any]] = {"learn from every step": {"least_spread": None}, "least_spread 0.01": {}}
KINDS: dict[str, dict[str, Any]] = {
    "no KL": {"kl": "none"},
    "KL in the reward": {"kl": {"coefficient": 0.02}},
    "scores a hundredth as large": {"kl": "none", "score": {"scale": 0.01}},
    "running scores": {"kl": "none", "score": {"normalise": "standardise"}},
    "a shared trunk": {"kl": "none"},
}


def main() -> None:
    """Run every kind and rule; print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--further", type=int, default=100, help="steps after the task is solved")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["no KL", "KL in the reward"])
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the further steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| kind | rule | seeds solved | below 0.95 of the best | worst share of the best | mean | steps flat |")
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        found: dict[str, list[tuple[float, float, float]]] = {rule: [] for rule in RULES}
        for seed in range(options.first, options.first + options.seeds):
            start = solved(kind, seed)
            if start is None:
                continue
            for rule, changes in RULES.items():
                found[rule].append(go_on(start, kind, seed, changes, num_steps=options.further, rate=options.rate))
                print("#", kind, rule, seed, found[rule][-1], flush=True)
        for rule, rows in found.items():
            if not rows:
                continue
            worst, mean, flat = zip(*rows, strict=True)
            fallen = sum(each < 0.95 for each in worst)
            cells = [kind, rule, len(rows), fallen, f"{min(worst):.3f}", f"{statistics.mean(mean):.3f}"]
            print("|", " | ".join(map(str, [*cells, f"{statistics.mean(flat):.0%}"])), "|", flush=True)


def share(prompts: Sequence[Any], responses: Sequence[str], metadata: Any) -> list[float]:
    """Of the letters of a response those that are the prompt's."""
    del metadata
    return [text.replace(" ", "").count(prompt) / LENGTH for prompt, text in zip(prompts, responses, strict=True)]


def trainer(kind: str, seed: int, advantage: dict[str, Any]) -> PPOTrainer:
    """From nothing."""
    core = Tokenizer(models.WordLevel(vocab={letter: n for n, letter in enumerate([*LETTERS, "<eos>"])}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=16, eos_token_id=len(LETTERS), **shape)
    )
    optimizer = {"learning_rate": 4e-3}
    config = PPOConfig(
        num_steps=10_000,
        prompts_per_step=48,
        epochs_per_step=1,
        rollout={"max_new_tokens": LENGTH, "min_new_tokens": 0},
        policy_optimizer=optimizer,
        value_optimizer={"learning_rate": 1e-5} if kind == "a shared trunk" else optimizer,
        advantage=advantage,
        **KINDS[kind],
    )
    return PPOTrainer(model, tokenizer, value="trunk" if kind == "a shared trunk" else None, config=config, seed=seed)


def steps(made: PPOTrainer, num_steps: int) -> Iterator[dict[str, float]]:
    """So many more steps."""
    letters = list(LETTERS) * 8
    for _ in range(num_steps):
        responses = made.generate(letters)
        yield made.step(letters, responses, share([each.prompt.text for each in responses], texts(responses), None))


def texts(responses: Sequence[Any]) -> list[str]:
    """What was written."""
    return [each.text for each in responses]


def solved(kind: str, seed: int) -> dict[str, Any] | None:
    """State of a trainer whose policy has solved the task; None where 150 steps were too few."""
    made, scores = trainer(kind, seed, {}), []
    for line in steps(made, 150):
        scores.append(line["score/mean"])
        if statistics.mean(scores[-3:]) > 0.97:
            return {
                "models": {name: copy.deepcopy(each.module.state_dict()) for name, each in made.learners.items()},
                "optimizers": {
                    name: copy.deepcopy(each.optimizer.state_dict()) for name, each in made.learners.items()
                },
                "steps": made.state.steps_done,
                "moments": (asdict(made.state.score_moments), asdict(made.state.return_moments)),
                "coefficient": made.state.kl_coefficient,
            }
    return None


def go_on(
    start: dict[str, Any], kind: str, seed: int, advantage: dict[str, Any], *, num_steps: int, rate: float
) -> tuple[float, float, float]:
    """Worst held-out score as a share of the best before it, mean held-out score, share of the steps that were flat."""
    made = trainer(kind, seed, advantage)
    for name, learner in made.learners.items():
        learner.module.load_state_dict(start["models"][name])
        learner.optimizer.load_state_dict(copy.deepcopy(start["optimizers"][name]))
        learner.peak_rates = [rate for _ in learner.peak_rates]
    scores, returns = (RunningMoments(**each) for each in start["moments"])
    made.state = replace(
        made.state,
        steps_done=start["steps"],
        kl_coefficient=start["coefficient"],
        score_moments=scores,
        return_moments=returns,
    )
    seen, worst, flat = [], 1.0, 0.0
    for line in steps(made, num_steps):
        flat += line["advantage/flat"] / num_steps
        seen.append(held_out(made))
        worst = min(worst, seen[-1] / max(seen))
    return worst, statistics.mean(seen), flat


def held_out(made: PPOTrainer) -> float:
    """Mean score of 96 samples with random numbers of their own."""
    prompts = made._prompts(list(LETTERS) * 16)
    key = RandomKey(seed=99, purpose="evaluation", step=0)
    policy = made.roles.policy
    policy.push_weights()
    size = made.config.responses_per_prompt
    responses = policy.engine.generate(prompts, num_samples=size, options=sampling_options(made.config), key=key)
    return statistics.mean(share([each.prompt.text for each in responses], texts(responses), None))


if __name__ == "__main__":
    main()
