"""Texts in the policy's updates: one gradient of both losses, whatever the cut; which texts, and when it is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from builders import tiny_language_model, tiny_tokenizer
from ppo.test_updates import Gathered, config, make, models, worst_difference
from proximo.commands.dry_run import describe
from proximo.config.ppo.options import PPOConfig
from proximo.data.examples import TextExample
from proximo.errors import ConfigError, DataError
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.metrics.values import Mean, Sum
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.models.transformers_model import disable_dropout
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.trainer import PPOTrainer
from proximo.ppo.update.epochs import Report
from proximo.ppo.update.ptx import TextLoss
from proximo.run.options import RunOptions
from roles_made import state
from tiny_runs import changed, make_inputs, recipe_of, run

COEFFICIENT = 0.7


def double_model() -> PreTrainedModel:
    """GPT-2, since Llama's norm goes through float32."""
    model = tiny_language_model("gpt2", dtype=torch.float64, n_embd=16, n_layer=2, n_head=2)
    disable_dropout(model)
    return model


def example(identity: str, ids: list[int], first_target: int = 1) -> TextExample:
    return TextExample(
        id=identity, token_ids=tuple(ids), loss_mask=tuple(index >= first_target for index in range(len(ids)))
    )


EXAMPLES = [
    example("a", [5, 9, 30, 2]),
    example("b", [7, 8, 9, 10, 11, 12, 13, 14, 15], first_target=4),
    example("c", [40, 41]),
    example("d", [3, 50, 3, 50, 3, 50, 3], first_target=2),
]


def trained(coefficient: float | None, budget: int = 8192) -> tuple[dict[str, torch.Tensor], Report]:
    """The gradient of the one policy update over an experience, and what it reports; in float64."""
    policy = LanguageModel(double_model())
    value = scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)
    roles, experience = make(policy, value, config(tokens_per_microbatch=budget))
    roles.policy.learner = learner = Gathered(policy.model)
    options = config(ptx={"coefficient": coefficient or 1.0, "examples_per_update": len(EXAMPLES)}).ptx
    assert options is not None
    if coefficient is not None:
        roles.policy.texts = TextLoss(policy, EXAMPLES, options, seed=0, token_budget=budget)
    report = roles.policy.train(experience, state(0.1))
    (gathered,) = learner.gradients
    return gathered, report


def text_gradient() -> tuple[dict[str, torch.Tensor], float]:
    """Of the mean negative log-likelihood of the targets, by transformers' own forward, text by text; and that mean."""
    model, nats, count = double_model(), torch.zeros((), dtype=torch.float64), 0
    for each in EXAMPLES:
        logprobs = model(input_ids=torch.tensor([each.token_ids])).logits[0].log_softmax(-1)
        for position in range(1, len(each.token_ids)):
            if each.loss_mask[position]:
                nats = nats - logprobs[position - 1, each.token_ids[position]]
                count += 1
    (nats / count).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(nats.detach()) / count


@pytest.mark.parametrize("budget", [8192, 12, 1])
def test_the_gradient_is_that_of_the_policy_loss_plus_the_weighted_mean_of_the_texts_in_any_cut(budget: int) -> None:
    joint, _ = trained(COEFFICIENT, budget)
    (alone, _), (texts, _) = trained(None), text_gradient()
    wanted = {name: gradient + COEFFICIENT * texts[name] for name, gradient in alone.items()}
    assert worst_difference(wanted, joint) < 1e-10
    assert worst_difference(alone, joint) > 1e-2


def test_the_loss_of_the_texts_is_reported_by_itself_and_that_of_the_policy_as_without_them() -> None:
    _, joint = trained(COEFFICIENT, 12)
    _, alone = trained(None, 12)
    count = sum(each.num_targets for each in EXAMPLES)
    found, policy_loss, wanted_loss = (
        joint.metrics["ptx/loss"],
        joint.metrics["policy/loss"],
        alone.metrics["policy/loss"],
    )
    assert isinstance(found, Mean)
    assert isinstance(policy_loss, Mean)
    assert isinstance(wanted_loss, Mean)
    assert (found.count, joint.metrics["ptx/tokens"]) == (count, Sum(count))
    assert found.total / count == pytest.approx(text_gradient()[1], rel=1e-10)
    assert policy_loss.total == pytest.approx(wanted_loss.total, abs=1e-10)
    assert joint.metrics["policy/approx_kl"] == alone.metrics["policy/approx_kl"]


def test_an_update_takes_the_next_texts_and_one_that_is_skipped_leaves_its_own_to_the_next() -> None:
    policy, value = models(torch.float32)
    options = config(
        minibatch_responses=2,
        ptx={"coefficient": 1.0, "examples_per_update": 2},
        guards={"max_ratio": 1.2, "max_skipped_fraction": 1.0},
    )
    assert options.ptx is not None
    texts = TextLoss(policy, EXAMPLES, options.ptx, seed=3, token_budget=8192)
    taken: list[int] = []
    texts.batches = lambda update, really=texts.batches: (taken.append(update), really(update))[1]  # type: ignore[method-assign]
    roles, experience = make(policy, value, options)
    # The guard sees a ratio far from 1 in the minibatch that holds the first response.
    lower = experience.old_logprobs.clone()
    lower[: experience.lengths[0]] -= 3
    learner = Learner(policy.model, OptimizerOptions(learning_rate=1e-6), num_updates=3)
    roles.policy.learner, roles.policy.texts = learner, texts
    report = roles.policy.train(replace(experience, old_logprobs=lower), state())
    assert report.metrics["policy/skipped_updates"] == Sum(1)
    assert learner.updates_done == 2
    assert sorted(taken) in ([0, 0, 1], [0, 1, 1], [0, 1, 2])
    seen = [tuple(b.packed.token_ids.tolist()) for update in (0, 1) for b in texts.batches(update)[0]]
    assert sorted(token for ids in seen for token in ids) == sorted(t for e in EXAMPLES for t in e.token_ids)


def test_texts_alone_teach_the_policy_when_nothing_else_does() -> None:
    """Scores that are all equal leave the policy loss without a gradient; the texts go on."""
    options = {"prompts_per_step": 2, "responses_per_prompt": 2, "advantage": "group_centred", "num_steps": 4}
    options |= {"epochs_per_step": 1, "minibatch_responses": 4}
    options |= {
        "kl": "none",
        "rollout": {"max_new_tokens": 3},
        "policy_optimizer": {"learning_rate": 0.03},
    }
    trainer = PPOTrainer(
        tiny_language_model(num_hidden_layers=1),
        tiny_tokenizer(),
        ptx=["abab"] * 4,
        config=PPOConfig(**options, ptx={"coefficient": 1.0, "examples_per_update": 2}),  # type: ignore[arg-type]
    )
    history = trainer.train(["ab", "cd"], reward=lambda prompts, responses, metadata: [1.0 for _ in responses])
    losses = [line["ptx/loss"] for line in history]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 3.5
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("ptx", "section", "error", "words"),
    [
        (["a text"], None, ConfigError, "config.ptx .* was not"),
        (None, {"coefficient": 1.0}, ConfigError, "ptx .texts. was not"),
        ("a text", {"coefficient": 1.0}, DataError, "must be a list"),
        ([], {"coefficient": 1.0}, DataError, "not empty"),
    ],
)
def test_texts_without_their_weight_are_refused_and_so_is_the_reverse(
    ptx: Any, section: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        PPOTrainer(tiny_language_model(), tiny_tokenizer(), ptx=ptx, config=PPOConfig(ptx=section))


def test_a_resume_finds_that_the_texts_have_changed(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    texts = {"ptx_data": {"sources": [{"path": str(place / "texts.jsonl")}]}, "ppo.ptx": {"coefficient": 0.5}}
    recipe = changed(recipe_of("ppo", place), {**texts, "ppo.num_steps": 2})
    assert run("ppo", recipe, RunOptions(quiet=True)) == 0
    lines = (place / "texts.jsonl").read_text().splitlines()
    (place / "texts.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    longer = changed(recipe, {"ppo.num_steps": 3})
    with pytest.raises(Exception, match=r"ptx_data\..*texts.jsonl"):
        run("ppo", longer, RunOptions(quiet=True, resume="must"))


def test_texts_beyond_what_the_policy_can_read_are_refused_before_training(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    (place / "long.txt").write_text("abcdefgh" * 10)
    long = {"ptx_data": {"sources": [{"path": str(place / "long.txt")}]}, "ppo.ptx": {"coefficient": 1.0}}
    with pytest.raises(ConfigError, match="81 .*the policy model .* at most 64"):
        build_task(PPORecipe.model_validate(changed(recipe_of("ppo", place), long)))


def test_a_dry_run_names_the_texts() -> None:
    recipe = changed(
        recipe_of("ppo", Path("x")), {"ptx_data": {"sources": [{"path": "a/b"}]}, "ppo.ptx": {"coefficient": 1.0}}
    )
    said = describe(PPORecipe.model_validate(recipe)).splitlines()
    at = said.index("  ptx          a/b (from the Hub: no local folder has that name)")
    assert said[at + 1].strip() == "8 texts in each update"
