"""PPO on a mixture of experts: policy and value model are balanced, and the metrics say how well."""

from typing import Any

import pytest

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.trainer import PPOTrainer

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
PROMPTS = ["one", "two", "three", "four"]


def metrics(*, value: Any = None, asked: bool = True, **options: Any) -> dict[str, float]:
    policy = tiny_language_model("mixtral", **EXPERTS, output_router_logits=asked)
    config = PPOConfig(
        **{
            "num_steps": 1,
            "prompts_per_step": 4,
            "minibatch_responses": 4,
            "epochs_per_step": 1,
            "rollout": {"max_new_tokens": 8},
            "ptx": {"coefficient": 1.0, "examples_per_update": 2},
            **options,
        }
    )
    trainer = PPOTrainer(policy, tiny_tokenizer(), value=value, config=config, ptx=["a text", "another"], seed=1)
    responses = trainer.generate(PROMPTS)
    return trainer.step(PROMPTS, responses, [1.0, 0.0, -1.0, 2.0])


@pytest.mark.parametrize(("value", "roles"), [(None, {"policy", "value"}), ("trunk", {"policy"})])
def test_each_trained_model_is_balanced_however_its_updates_are_cut(value: str | None, roles: set[str]) -> None:
    found = [metrics(value=value, tokens_per_microbatch=budget) for budget in (4096, 16)]
    names = {f"{role}/balancing_loss" for role in roles}
    for each in found:
        assert {name for name in each if name.endswith("balancing_loss")} == names
    of_updates = ("balancing_loss", "gradient_norm", "/loss")
    for name in (name for name in found[0] if name.endswith(of_updates) and name in found[1]):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-5), name
    assert all(1.5 < found[0][name] < 4.0 for name in names)


def test_losses_are_reported_without_it_and_gradients_with_it() -> None:
    balanced, plain = metrics(), metrics(asked=False)
    assert not any(name.endswith("balancing_loss") for name in plain)
    for name in ("policy/loss", "value/loss", "ptx/loss"):
        assert balanced[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-5)
    for role in ("policy", "value"):
        assert balanced[f"{role}/gradient_norm"] != pytest.approx(plain[f"{role}/gradient_norm"], rel=1e-3)
