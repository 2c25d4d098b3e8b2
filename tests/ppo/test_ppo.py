"""PPO as a library: it learns, it checks itself, and it takes your own loop and scores."""

from functools import partial

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import LARGE, PROMPTS, count_a, ppo_trainer
from proximo.config.ppo.advantage import Advantage
from proximo.config.schema.fields import kinds_of, sections_of
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.errors import DataError, ModelError, TrainingError
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.step import experience_of
from proximo.ppo.step_arguments import as_prompts
from proximo.ppo.train_state import TrainState, adapted_coefficient
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Finish, Passes, Response, Scored
from proximo.rollout.stopping import ending_ids
from records_made import prompt

trainer = partial(
    ppo_trainer,
    num_steps=2,
    responses_per_prompt=2,
    rollout={"max_new_tokens": 6, "max_num_seqs": 3},
    value_optimizer=LARGE,
)


def parameters(made: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.policy.model.named_parameters()}


@pytest.mark.parametrize("advantage", [kind for section in sections_of(Advantage) for kind in kinds_of(section)])
def test_training_returns_the_metrics_of_every_step(advantage: str) -> None:
    seen = []
    history = trainer(advantage=advantage).train(PROMPTS, reward=count_a, on_step=lambda step, line: seen.append(step))
    assert seen == [1, 2]
    for line in history:
        assert line["policy/skipped_updates"] == 0
        assert line["first_minibatch/max_abs_log_ratio"] < 1e-4
        assert ("value/explained_variance" in line) == (advantage == "gae")
        groups = advantage not in ("gae", "return_to_go", "greedy_baseline")
        assert ("group/zero_advantage_fraction" in line) == groups
        assert line["response/tokens_max"] <= 6
    assert abs(history[0]["kl/sequence"]) < 1e-5
    assert abs(history[1]["kl/sequence"]) > 1e-4


def test_two_runs_of_one_seed_are_equal_to_the_bit_and_another_seed_differs() -> None:
    def run(seed: int) -> dict[str, torch.Tensor]:
        made = trainer(seed=seed)
        made.train(PROMPTS, reward=count_a)
        return parameters(made)

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_your_own_loop_does_what_train_does() -> None:
    driven, own = trainer(num_steps=1), trainer(num_steps=1)
    driven.train(PROMPTS, reward=count_a)
    from proximo.data.order import rows_at

    prompts = [PROMPTS[row] for row in rows_at(0, 4, num_rows=4, seed=0)]
    responses = own.generate(prompts)
    own.step(prompts, responses, count_a(None, [r.text for r in responses], None))
    first, second = parameters(driven), parameters(own)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_sampler_that_is_not_the_policy_stops_the_run() -> None:
    made, other = trainer(), trainer(policy=tiny_language_model(seed=5))
    made.roles.policy.engine.generate = other.roles.policy.engine.generate  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="sampler and learner disagree"):
        made.train(PROMPTS, reward=count_a)


def test_small_disagreement_is_a_warning() -> None:
    made = trainer(num_steps=1)
    with torch.no_grad():
        responses = made.generate(PROMPTS)
        made.policy.model.lm_head.weight.mul_(1.0005)
    with pytest.warns(UserWarning, match="likely causes"):
        made.step(PROMPTS, responses, [0.0] * len(responses))


def test_answers_that_are_left_out_as_cut_off_do_not_steer_the_kl_coefficient() -> None:
    made = trainer(num_steps=1, truncation="mask", kl={"adaptive": {"target": 1.0, "horizon": 10}, "coefficient": 1.0})
    base = {"response_mask": torch.ones(2, dtype=torch.bool), "policy_version": 0, "text": ""}
    cut, ended = (
        Response(prompt=prompt(), sample_index=0, token_ids=(5, 2), logprobs=torch.zeros(2), finish=finish, **base)
        for finish in (Finish.LENGTH, Finish.EOS)
    )
    passes = Passes(old_logprobs=torch.zeros(8), reference_logprobs=torch.full((8,), -0.6), values=torch.zeros(12))
    scored = [Scored(response=each, score=1.0) for each in (cut, cut, cut, ended)]
    experience, *_ = experience_of(scored, passes, TrainState(kl_coefficient=1.0), config=made.config)
    # 1.2 nats in the one answer that counts are above the target; with three zeros beside it, they would be below.
    assert adapted_coefficient(1.0, experience, made.config.kl) == pytest.approx(1 + 0.2 / 10)


def test_without_kl_there_is_no_reference() -> None:
    made = trainer(num_steps=1, kl="none")
    assert made.roles.reference is None
    (line,) = made.train(PROMPTS, reward=count_a)
    assert "kl/sequence" not in line


def test_behaviour_weights_let_a_step_learn_from_responses_of_the_policy_before_the_last_step() -> None:
    """The weight is policy / sampler, and the ratio starts at 1: without the weights such a step is refused."""
    for weighing, stops in (({"kind": "truncated", "cap": 50.0}, False), (None, True)):
        made = trainer(policy_loss={"behaviour_weight": weighing})
        stale = made.generate(PROMPTS)
        scores = count_a(None, [r.text for r in stale], None)
        made.step(PROMPTS, stale, scores)
        now = made.roles.policy.logprobs(stale)
        if stops:
            with pytest.raises(DataError, match="generated by version 0 of the policy"):
                made.step(PROMPTS, stale, scores)
            continue
        weights = (now - torch.cat([r.logprobs for r in stale])).exp()
        assert (weights - 1).abs().max() > 0.05
        line = made.step(PROMPTS, stale, scores)
        assert line["policy/behaviour_weight"] == pytest.approx(weights.mean().item(), rel=1e-4)
        assert line["first_minibatch/max_abs_log_ratio"] < 1e-4


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "sapo", "m2po"])
def test_every_objective_trains_and_its_clip_fraction_is_a_fraction(objective: str) -> None:
    loss = {"objective": objective, "entropy_coefficient": 0.01, "aggregation": "response_mean"}
    history = trainer(policy_loss=loss, advantage="group_centred").train(PROMPTS, reward=count_a)
    for line in history:
        assert line["policy/skipped_updates"] == 0
        assert 0 <= line["policy/clip_fraction"] <= 1
        assert line["first_minibatch/clip_fraction"] == 0
    assert (history[-1]["policy/clip_fraction"] > 0) == (objective != "sapo")


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_full_kl_costs_one_pass_of_each_model(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(num_steps=1, prompts_per_step=4, minibatch_responses=8, epochs_per_step=1, kl=full_kl(place))
    passes: list[str] = []
    for name, model in (("policy", made.policy), ("reference", made.roles.reference.model)):
        monkeypatch.setattr(model, "hidden_states", counted(model.hidden_states, name, passes))
    made.train(PROMPTS, reward=count_a)
    # The policy once for the KL of the reward, and once in the only update; or once in the update for both.
    expected = {"reward": ["policy", "policy", "reference"], "loss": ["policy", "reference", "reference"]}
    assert sorted(passes) == expected[place]


def full_kl(place: str) -> dict[str, str]:
    return {"kind": place, "estimator": "full"}


def counted(run, name: str, passes: list[str]):
    def counting(*given):
        passes.append(name)
        return run(*given)

    return counting


def test_a_model_that_cannot_be_packed_is_refused_at_once() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ModelError, match="bloom"):
        PPOTrainer(model, tiny_tokenizer())


def test_an_answer_ends_at_the_chat_templates_end_of_turn_too() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos>", "<|system|>")
    model = tiny_language_model()
    assert ending_ids(model, tokenizer) == (2, tokenizer.convert_tokens_to_ids("<|system|>"))


def language_model(**options) -> LanguageModel:
    return LanguageModel(tiny_language_model(**options))


@pytest.mark.parametrize(
    ("policy", "others", "message"),
    [
        (language_model, lambda: {"reference": language_model(vocab_size=70)}, "logits for 70 tokens"),
        (
            lambda: language_model(vocab_size=70),
            lambda: {"value": scalar_from_language_model(language_model(), HeadStart.ZERO)},
            "value model embeds 64 tokens",
        ),
        (lambda: language_model(vocab_size=32), dict, "policy model embeds only 32"),
        (lambda: language_model(dtype=torch.bfloat16), dict, "policy model has weights in bfloat16.*torch.float32"),
        (lambda: language_model(dtype=torch.float16), dict, "weights in float16"),
    ],
)
def test_models_that_do_not_fit_together_are_refused_before_the_first_step(policy, others, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        PPOTrainer(policy(), tiny_tokenizer(), **others())


def test_a_text_has_the_ids_that_a_row_of_data_has_and_no_end_of_sequence() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    rows = [Row(source="s", number=n, values={"prompt": text}) for n, text in enumerate(PROMPTS)]
    loaded, _ = load_prompts(rows, tokenizer, PromptOptions())
    assert [p.token_ids for p in as_prompts(tokenizer, PROMPTS)] == [p.token_ids for p in loaded]
    assert loaded[0].token_ids == (1, *tiny_tokenizer()("ab")["input_ids"])


def test_a_template_that_rewrites_turns_does_not_keep_plain_text_from_being_trained_on() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>{% endif", "<|assistant|>think:{% endif")
    assert ending_ids(tiny_language_model(), tokenizer) == (2,)


def test_where_memory_runs_out_in_a_step_its_call_is_named() -> None:
    made = trainer()

    def fail(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    made.roles.policy.engine.generate = fail
    with pytest.raises(TrainingError, match="step 1: memory ran out in generate; lower ppo.tokens_per_microbatch"):
        made.train(PROMPTS, reward=count_a)
