"""The table of test_every_knob.py: for each key of a recipe another value of it, and the run in which it shows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proximo.config.ppo.advantage import Advantage
from proximo.config.schema.fields import sections_of
from tiny_runs import LORA, Kind

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Knob:
    """A key, and another value of it; `base` holds in both runs. `$` in a text is the folder of the inputs.

    The key of an item of a list is that of its `kind`.
    """

    kind: Kind
    key: str
    value: Any
    base: Changes
    stops: str
    """What the error says, where the other value ends the run."""


def knobs(kind: Kind, values: Changes, base: Changes | None = None, *, stops: str = "") -> Iterator[Knob]:
    """Each key by itself."""
    return (Knob(kind, key, value, base or {}, stops) for key, value in values.items())


def texts(**options: Any) -> dict[str, Any]:
    return {"data.sources": [{"path": "$/texts.jsonl", **options}]}


def problems(**options: Any) -> dict[str, Any]:
    return {"data.sources": [{"function": "knobs:echoes", **options}]}


MODEL = {"kind": "model", "path": "$/reward_model"}
JUDGE = {"kind": "prm", "path": "$/step_model"}
FUNCTION = {"kind": "function", "function": "knobs:share_of"}
VERIFIER = {"kind": "verifier", "verifier_class": "example_verifiers:Letters", "workers": 1}
FROM_POLICY = {"value": {"init_from": "policy"}}
SCORED = {"reward": [MODEL]}
JUDGED = {"reward": [JUDGE]}
CALLED = FROM_POLICY | {"reward": [FUNCTION]}
GRADED = FROM_POLICY | {"reward": [VERIFIER]}


def share_of(prompts: Any, responses: Any, metadata: Any, *, letter: str = "a") -> list[float]:
    return [text.count(letter) / (len(text) + 1) for text in responses]


class Nowhere:
    def write(self, step: int, metrics: Any) -> None: ...

    def close(self) -> None: ...


def open_sink(run: Any) -> Nowhere:
    return Nowhere()


def rows(word: str = "ab") -> list[dict[str, str]]:
    return [{"prompt": word * (row % 3 + 1), "response": word * (row % 2 + 1)} for row in range(12)]


def labelled_pairs() -> list[dict[str, Any]]:
    return [
        {"prompt": "a" * n, "chosen": "b" * n, "rejected": "c", "response": "d" * n, "label": n % 2}
        for n in range(1, 9)
    ]


def echoes() -> list[dict[str, Any]]:
    """In AReaL's form, with another response beside its solution."""
    cases = {"inputs": ["a"], "outputs": ["a"]}
    return [{"prompt": "ab" * n, "response": "ba", "input_output": cases, "solutions": ["c" * n]} for n in range(1, 13)]


def graded() -> list[dict[str, Any]]:
    """Six grades twice, and what earlier responses got: other prompts than now."""
    return [{"prompt": "a" * (n % 6 + 1), "base_scores": [n % 6 / 5 - 0.5, n % 6 / 5 - 0.7]} for n in range(12)]


def grade(prompts: Any, responses: Any, metadata: Any) -> list[float]:
    """The longer the prompt, the better: from -1 to 1."""
    return [len(prompt) * 0.4 - 1.4 for prompt in prompts]


GROUPS = {"ppo.responses_per_prompt": 2, "ppo.advantage": "group_centred", "value": {"init_from": "policy"}}
BF16 = {"run.precision": "bf16"}
EXPERTS = {
    "model.config.model_type": "qwen2_moe",
    "model.config.num_experts": 4,
    "model.config.num_experts_per_tok": 2,
    "model.config.moe_intermediate_size": 8,
    "model.config.shared_expert_intermediate_size": 8,
}
FILTERED = {
    "data.sources": [{"function": "knobs:graded"}],
    "data.held_out_rows": 0,
    "data.filter": {"above": 0.3, "below": -0.5},
    "ppo.num_steps": 4,
    "reward": [{"kind": "function", "function": "knobs:grade"}],
    "value.init_from": "policy",
}
SLOW = {"learning_rate": 1e-5}
TRUNK = {"value.init_from": "trunk", "ppo.value_optimizer": SLOW}
ONE_BASE = {
    "model.lora": LORA,
    "value.init_from": "policy",
    "reward": [MODEL | {"path": "$/reward_adapter", "share_base": True}],
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<eos>{% endfor %}"
DROPOUT = {"model": {"path": "$/with_dropout"}}
SAVED = {"model": {"path": "$/language_model"}}
FIRST_HALF = {"data.proportions": [1, 1], "data.phase": 0}
ROWS = {"data.sources": [{"function": "knobs:rows"}]}
TWO_SOURCES = {"data.sources": [{"path": path, "weight": 1} for path in ("$/texts.jsonl", "$/other.jsonl")]}
CHATTING = SCORED | {"data.as_messages": True, "data.max_prompt_tokens": 20}

KNOBS = [
    *knobs(
        "ppo",
        {
            "run.seed": 6,
            "run.samples_per_step": 2,
            "value.init_from": "policy",
            "value.lora": LORA,
            "data.max_prompt_tokens": 6,
            "data.first_words": 1,
            "data.fill_to_max": True,
            "gold": None,
            "ppo.rollout.max_num_seqs": 2,
            "ppo.rollout.staleness": 2,
            "ppo.kl": "none",
            "ppo.kl.coefficient": 0.2,
            "ppo.kl.adaptive": None,
            "ppo.kl.adaptive.horizon": 40,
            "ppo.kl.reference_every_steps": 1,
            "ppo.average_decay": 0.5,
            "ppo.num_steps": 3,
            "ppo.prompts_per_step": 5,
            "ppo.responses_per_prompt": 2,
            "ppo.samples_per_prompt": 3,
            "ppo.epochs_per_step": 2,
            "ppo.minibatch_responses": 2,
            "ppo.tokens_per_microbatch": 400,
            "ppo.critic_warmup_steps": 1,
            "ppo.evaluate_greedy": True,
            "ppo.evaluation_samples_per_prompt": 2,
            "ppo.solved_score": 0.5,
            "ppo.task_reward": "share_of_vowels",
            "ppo.evaluate_reference": True,
            "ppo.policy_optimizer": None,
            "ppo.value_optimizer": {"learning_rate": 1e-5},
        },
    ),
    *knobs(
        "sft",
        {
            "run.precision": "bf16",
            "run.save_every_steps": 3,
            "run.evaluate_every_steps": 1,
            "run.tensorboard": True,
            "run.sinks": [{"kind": "function", "function": "knobs:open_sink"}],
            "tokenizer.path": "$/other_tokenizer",
            "tokenizer.added_tokens": ["<new>"],
            "model.config.initializer_range": 0.5,
            "model.frozen_layers": 1,
            "model.activation_checkpointing": True,
            "sft.optimizer.learning_rate": 2e-2,
            "data.sources.0.path": "$/other.jsonl",
            "data.sources.0.columns": {"response": "prompt", "prompt": "response"},
            "data.sources.0.max_rows": 8,
            "data.sources": [{"path": "$/texts.jsonl"}, {"path": "$/other.jsonl"}],
            "data.held_out_rows": 1,
            "data.as_messages": True,
            "data.train_on": "everything",
            "data.max_tokens": 14,
            "sft.num_epochs": 3,
            "sft.examples_per_step": 3,
            "sft.tokens_per_microbatch": 400,
        },
    ),
    *knobs("sft", {"run.head_precision": "float32"}, BF16),
    *knobs("sft", {"run.keep_last": 3}, {"sft.num_epochs": 2}),
    *knobs("sft", {"run.save_every_minutes": 1e-9}, {"run.save_every_steps": None}),
    *knobs("sft", {"tokenizer.train_vocab_size": 262}, {"tokenizer": {"train_vocab_size": 300}}),
    *knobs("sft", {"tokenizer.chat_template": TEMPLATE, "data.system": "abc"}, {"data.as_messages": True}),
    *knobs("sft", {"model.path": "$/language_model"}, {"model": {"path": "$/other_model"}}),
    *knobs("sft", {"model.revision": "second"}, {"model": {"path": "owner/model"}}),
    *knobs("ppo", {"model.lora": LORA, "reference": {"path": "$/other_model"}}, SAVED),
    *knobs(
        "reward",
        {
            "data.form": "conversational",
            "data.max_tokens": 18,
            "reward.pairs_per_step": 3,
        },
    ),
    *knobs("sft", {"model.balancing_coefficient": 1.0}, EXPERTS),
    *knobs("ppo", {"value.path": "$/other_model"}, {"value": {"path": "$/language_model"}}),
    *knobs("ppo", {"value.revision": "second"}, {"value": {"path": "owner/model"}}),
    *knobs("sft", {"sft.optimizer.kind": "adamw_paged_8bit"}, stops="kind adamw_paged"),
    *knobs(
        "sft",
        {"model.lora.rank": 3, "model.lora.alpha": 8.0, "model.lora.target_modules": ["q_proj"]},
        {"model.lora": LORA},
    ),
    *knobs("sft", {"data.sources.0.function": "knobs:echoes", "data.sources.0.kwargs": {"word": "ba"}}, ROWS),
    *knobs("sft", {"data.sources.0.format": "parquet"}, stops="parquet"),
    *knobs("sft", {"data.sources.0.split": "second"}, texts(path="$/splits", split="first")),
    *knobs("sft", {"data.sources.0.separator": "--", "data.layout": "blocks"}, texts(path="$/lines.txt")),
    *knobs("sft", {"data.sources.0.problems": "areal_code"}, problems()),
    *knobs("sft", {"data.sources.0.template": "b{prompt}"}, problems(problems="areal_code")),
    *knobs("sft", {"data.sources.0.weight": 3}, TWO_SOURCES),
    *knobs(
        "sft",
        {
            "data.proportions": [3, 1],
            "data.phase": 1,
            "data.split_seed": 3,
            "data.sources.0.whole": True,
        },
        FIRST_HALF,
    ),
    *knobs("sft", {"data.evaluation_sources": [{"path": "$/other.jsonl"}]}, {"data.held_out_rows": 0}),
    *knobs("sft", {"data.too_long": "truncate"}, {"data.max_tokens": 14}),
    *knobs("sft", {"data.form": "text"}, texts(path="$/both.jsonl")),
    *knobs("reward", {"data.min_response_words": 3}, stops="too short a response"),
    *knobs("kto", {"data.form": "prompt_response"}, {"data.sources": [{"function": "knobs:labelled_pairs"}]}),
    *knobs(
        "kto",
        {
            "data.max_tokens": 14,
            "kto.examples_per_step": 3,
        },
    ),
    *knobs(
        "ppo",
        {
            "data.filter.above": 0.9,
            "data.filter.below": -0.8,
            "data.filter.max_fraction": 0.3,
            "data.filter.from_epoch": 0,
        },
        FILTERED,
    ),
    *knobs("sft", {"sft.dropout": True}, DROPOUT),
    *knobs("dpo", {"reference": {"path": "$/other_model"}}, SAVED),
    *knobs(
        "prm",
        {
            "data.step_separator": "; ",
            "data.train_on": "last",
            "data.max_tokens": 16,
            "prm.solutions_per_step": 3,
        },
    ),
    *knobs("prm", {"prm.dropout": True}, DROPOUT),
    *knobs(
        "dpo",
        {
            "dpo.pairs_per_step": 3,
        },
    ),
    *knobs("ppo", {"ppo.kl.adaptive.target": 1e-4}, {"ppo.num_steps": 3}),
    *knobs("ppo", {"ppo.kl.reference_decay": 0.5}, {"ppo.kl.reference_every_steps": 1}),
    *knobs("ppo", {"ppo.evaluate_average": True}, {"ppo.average_decay": 0.5}),
    *knobs("ppo", {"ppo.num_minibatches": 2}, {"ppo.minibatch_responses": None}),
    *knobs("ppo", {"ppo.keep_groups_together": True, "ppo.advantage": "group_standardised"}, GROUPS),
    *knobs("ppo", {"ppo.release_cache": True}, stops="release_cache"),
    *knobs(
        "ppo",
        {
            "ppo.value_loss.coefficient": 1.0,
            "value.path": "$/reward_model",
        },
        TRUNK,
    ),
    *knobs("ppo", {"value.init_from": "trunk"}, {"value.init_from": "policy", "ppo.value_optimizer": SLOW}),
    *knobs(
        "ppo",
        {
            "reward.0": MODEL,
            "reward.0.name": "other",
            "reward.0.function": "tiny_runs:share_of_vowels",
            "reward.0.kwargs": {"letter": "b"},
            "reward.0.weight": 2.0,
        },
        CALLED,
    ),
    *knobs("ppo", {"reward.0": VERIFIER}, CALLED),
    *knobs(
        "ppo",
        {
            "reward.0.name": "other",
            "reward.0.path": "$/other_scorer",
            "reward.0.dense": "deltas",
            "reward.0.weight": 2.0,
            "reward.0": JUDGE,
        },
        SCORED,
    ),
    *knobs("ppo", {"reward.0.revision": "second"}, {"reward": [MODEL | {"path": "owner/scorer"}]}),
    *knobs("ppo", {"reward.0.tokenizer": "$/other_template"}, CHATTING),
    *knobs("ppo", {"reward.0.share_base": False}, ONE_BASE, stops="an adapter only"),
    *knobs("ppo", {"reward.0.name": "other", "reward.0.step_separator": "a"}, JUDGED),
    *knobs("ppo", {"reward.0": FUNCTION}, FROM_POLICY | SCORED),
    *knobs(
        "ppo",
        {
            "reward.0.name": "other",
            "reward.0.verifier_class": "example_verifiers:Hostile",
            "reward.0.kwargs": {"letter": "b"},
        },
        GRADED,
    ),
]

ELSEWHERE = {
    # The tiny models of these runs write no programs.
    "test_the_defaults_of_verifier_and_section_are_the_same": "CodeRewardConfig.form",
    "test_a_source_of_a_recipe_scores_programs_in_workers": "CodeRewardConfig.(kind|name|program)",
    "test_two_runs_fit_into_the_time_of_an_answer": "CodeRewardConfig.answer_seconds",
    "test_an_answer_without_a_program_has_a_score_of_its_own": (
        "CodeRewardConfig.allow_unfenced|AnswerScores.no_answer"
    ),
    "test_a_limit_for_each_test_is_not_that_of_all": "CodeRewardConfig.(cpu_seconds|limit_per_test)",
    "test_memory_is_limited_as_asked": "CodeRewardConfig.memory_mib",
    "test_a_tolerance_is_for_outputs_and_returned_values": "CodeRewardConfig.float_tolerance",
    "test_a_share_of_the_tests_earns_a_share_of_the_score_by_choice": (
        "CodeRewardConfig.partial|AnswerScores.(correct|incorrect)"
    ),
    "test_a_guarantee_that_nobody_knows_cannot_be_waived": "CodeRewardConfig.sandbox_waived",
    "test_a_program_that_sleeps_is_at_fault_when_its_idle_time_is_over": "CodeRewardConfig.idle_seconds",
    "test_programs_and_tests_import_the_packages_that_are_named": "CodeRewardConfig.packages",
    "test_sources_add_up_by_weight_and_keep_their_own_scores_as_components": "VerifierRewardConfig.weight",
    # What all verifiers share; none of it changes a healthy run.
    "test_what_a_recipe_says_of_workers_reaches_them": "VerifierRewardConfig.workers",
    "test_a_time_out_is_the_answers_fault_with_the_score_that_the_verifier_wants": (
        "VerifierRewardConfig.answer_seconds"
    ),
    "test_what_is_not_graded_when_the_step_must_end_has_no_score_and_the_next_step_goes_on": (
        "VerifierRewardConfig.step_seconds"
    ),
    "test_what_a_verifier_does_to_its_worker_is_no_score_and_harms_no_other_answer": (
        "CustomVerifierRewardConfig.worker_memory_mib"
    ),
    # Responses of two steps are rare here.
    "test_the_score_of_a_response_is_an_aggregate_of_its_steps": "PRMRewardConfig.aggregate",
    "test_a_step_is_rewarded_at_the_token_that_ends_it_and_the_last_one_at_the_last_token": "PRMRewardConfig.dense",
    # Of a grade, which a test of the verifier shows without a run.
    "test_a_key_with_another_value_gives_another_grade": "(Pattern|ThinkAnswer)RewardConfig.*",
    # Another address, limit or token of a service, whose grades do not depend on them.
    "test_every_key_of_the_section_reaches_the_client": "RemoteRewardConfig.*",
    "test_weights_and_biases_is_told_the_id_of_the_run": "WandbSinkConfig.(kind|project|name)",
    "test_a_tracker_gets_a_table_of_them_where_it_is_told_to": "WandbSinkConfig.samples",
    "test_a_sink_of_ones_own_is_told_its_name_and_arguments": "FunctionSinkConfig.*",
    "test_the_last_model_is_pushed_once_and_privately": "PushConfig.name|RunConfig.push",
    "test_the_best_is_pushed_and_no_worse_one": "PushConfig.when",
    "test_a_run_writes_one_line_per_step_and_one_before_the_first": "RunConfig.folder",
    "test_a_recipe_puts_each_role_on_its_device": "(PlacedRoleDevices|ModelReward)Config.device",
    # Of vLLM servers.
    "test_every_key_of_the_section_reaches_servers_and_engine": "(LocalEngine|VLLMEngine)Config.*",
    "test_every_key_reaches_the_servers": "ServersConfig.*",
    # Of several ranks.
    "test_a_rank_holds_what_the_formula_says": "(Devices|RoleDevices)Config.shard",
    "test_gradients_are_reduced_once_per_update_whatever_the_accumulation": "DevicesConfig.reduce_gradients",
    "test_what_cannot_lie_on_several_ranks_is_refused_where_their_number_is_known": (
        "(Devices|RoleDevices)Config.(num|shard_size|offload)"
    ),
    "test_stages_of_a_pipeline_run_on_the_same_ranks_and_choose_how_their_models_lie": "DevicesConfig.timeout_seconds",
    "test_an_old_trajectory_begins_no_further_turn": "PlayedEnvironmentConfig.max_seconds",
    "test_a_prompt_with_an_empty_thought_is_forked_after_each_turn": "PlayedEnvironmentConfig.template_variables",
    "test_every_key_of_the_section_reaches_the_episodes": (
        "PlayedEnvironmentConfig.(num_rows|max_turns|max_tokens|max_observation_tokens)|OwnEnvironmentConfig.(path|kwargs)"
    ),
    "test_episodes_beyond_the_workers_wait_for_a_lane_that_is_stopped": "WorkerEnvironmentConfig.workers",
    "test_a_hanging_step_is_a_fault_at_its_deadline_and_only_there": "WorkerEnvironmentConfig.timeout_seconds",
    "test_faults_of_a_step_say_what_happened_and_harm_no_other": "WorkerEnvironmentConfig.memory_mib",
    "test_an_environment_runs_unchanged_from_a_short_recipe": (
        "RegisteredEnvironmentConfig.(id|kwargs)|(Class|Tools|Gymnasium|Gem|TextArena|ReasoningGym|SkyRLGym)EnvironmentConfig.kind"
    ),
    "test_public_methods_are_tools_and_the_last_turn_calls_none": "ToolsEnvironmentConfig.tool_style",
    "test_gymnasium_is_played_in_numbers_and_shown_as_text": "GymnasiumEnvironmentConfig.instructions",
    "test_textarena_against_an_opponent": "TextArenaEnvironmentConfig.opponent",
    "test_sections_that_cannot_be_are_refused": "ProgramEnvironmentConfig.kind",
    "test_an_address_of_another_machine_is_refused": "ProgramEnvironmentConfig.host",
    "test_a_token_is_asked_for": "ProgramEnvironmentConfig.token_env",
    "test_a_function_in_a_file_is_played_in_processes": "AgentEnvironmentConfig.path",
    "test_a_command_prints_its_reward": "AgentEnvironmentConfig.command",
    "test_an_environment_of_verifiers_plays_against_the_built_in_engine": "VerifiersEnvironmentConfig.(python|env)",
    "test_auto_takes_the_fastest_device_and_one_that_is_not_there_is_refused": "RunConfig.device",
    "test_a_resume_with_other_threads_needs_permission_and_is_noted": "RunConfig.num_threads",
    "test_a_step_that_takes_longer_than_its_grace_is_given_up": "RunConfig.grace_seconds",
    "test_a_run_says_so_to_its_device": "RunConfig.deterministic",
    "test_every_model_that_trains_is_compiled_as_the_recipe_says": "RunConfig.compile",
    "test_one_gradient_exists_at_a_time": "OptimizerConfig.in_backward",
    "test_a_gradient_that_is_not_finite_can_stop_the_run": "OptimizerConfig.non_finite_gradient",
    "test_what_is_rejected_is_in_neither_the_loss_nor_its_denominator": "DivergenceRejectionConfig.*",
    "test_what_is_out_of_the_bounds_of_a_ratio_is_rejected_and_counts_where_it_is_asked_to": "RatioRejectionConfig.*",
    # On a CPU sampler and learner round alike in bf16, and no weight is above any cap.
    "test_the_loss_of_the_policy_is_the_formula_of_its_settings": (
        "(GSPO|GMPO|CISPO|TruncatedWeight|MaskedWeight)Config.*|(PPOObjective|SAPO)Config.kind"
        "|PPOObjectiveConfig.(clip_low|clip_high|dual_clip)|SAPOConfig.(gate_positive|gate_negative)|TokenKLConfig.clamp"
    ),
    "test_m2po_leaves_out_the_tokens_of_the_whole_minibatch_that_are_furthest_from_the_old_policy": (
        "M2POConfig.(kind|max_second_moment)"
    ),
    "test_loss_metrics_and_gradient_are_those_of_one_response_at_a_time_in_any_cut": "(OnlineDPO|OnlineIPO)Config.kind",
    "test_advantages_are_the_formula_of_their_settings": "|".join(
        [
            *(f"{each.__name__}.kind" for each in sections_of(Advantage)),
            "AdvantageConfig.(standardise|unbiased_variance)|DiscountedConfig.gamma",
            "GAEConfig.(gae_lambda|length_adaptive)|PassAtKConfig.k",
        ]
    ),
    "test_returns_have_the_same_discount_and_the_decay_of_the_values": "GAEConfig.value_gae_lambda",
    "test_returns_of_the_steps_before_are_what_least_spread_is_a_share_of": "GAEConfig.least_spread",
    "test_noise_of_form_in_groups_that_all_fail_teaches_nothing_once_they_are_excluded": (
        "GroupAdvantageConfig.zero_variance_groups"
    ),
    "test_after_the_last_round_the_step_is_filled_up_with_groups_that_train_nothing": (
        "GroupAdvantageConfig.resample_rounds"
    ),
    "test_whitened_rewards_are_what_the_estimator_adds_up": "ScoreConfig.whiten_rewards",
    "test_the_policy_gradient_does_not_depend_on_the_micro_batches": "(LossKL|NoKL)Config.kind",
    "test_a_kl_in_the_loss_costs_what_it_has_come_to_cost": "LossKLConfig.estimator",
    "test_each_measure_of_the_kl_enters_the_reward": "RewardKLConfig.(kind|estimator)",
    "test_the_margin_is_the_kl_of_the_recipe_and_nothing_has_to_be_said_of_it": "MarginKLConfig.kind",
    "test_what_a_response_is_rewarded_with_is_the_formula_of_the_settings": (
        "(ScoredTruncation|UnscoredTruncation)Config.kind|ScoredTruncationConfig.scale"
        "|ScoreConfig.(bias|clip|scale|normalise|min_tokens|min_tokens_penalty|minus_reference_answer|penalty_mode)"
        "|ScoreConfig.(missing_eos_penalty|overlong_buffer_tokens|overlong_penalty)"
    ),
    "test_a_cut_answer_has_the_discounted_value_after_it_in_the_place_of_its_score": "BootstrapTruncationConfig.kind",
    "test_a_cut_response_can_be_left_out_and_then_counts_nowhere": "MaskTruncationConfig.kind",
    "test_an_average_is_over_what_it_says": "(TokenMean|ResponseMean)Config.kind|ConstantDivisorConfig.(kind|divisor)",
    "test_the_loss_of_the_values_is_the_formula_of_its_settings": (
        "(SquaredError|Huber|SmoothL1)Config.kind|HuberConfig.delta|ValueLossConfig.clip"
    ),
    "test_the_unit_of_values_is_the_deviation_of_the_returns_as_they_are_weighed": (
        "(Exponential|Cumulative)ScaleConfig.kind|ExponentialScaleConfig.decay"
    ),
    "test_a_run_keeps_its_ids_where_it_is_told_to": "RunConfig.token_cache",
    # An extra, which need not be installed.
    "test_a_recipe_says_how_the_base_is_stored": "(Model|ScalarModel)Config.quantisation",
    "test_a_hub_data_set_is_read_through_datasets": "SourceConfig.subset",
    "test_a_function_that_hangs_stops_the_run_and_says_what_was_waited_for": "FunctionRewardConfig.timeout_seconds",
    # What a verifier does with its options needs no run; that a run asks it, one of its tests shows.
    "test_an_option_of_the_maths_verifier_changes_a_grade": ("MathsRewardConfig.(answer_from|pattern)"),
    "test_always_demands_the_extra_when_the_verifier_is_made_and_auto_does_without": "MathsRewardConfig.symbolic",
    "test_an_option_of_the_countdown_verifier_changes_a_grade": ("CountdownRewardConfig.(answer_from|operators)"),
    "test_sources_of_both_kinds_score_through_workers": "(Maths|Countdown)RewardConfig.(kind|name)",
    "test_the_entropy_bonus_is_the_entropy_of_the_next_token_at_the_temperature": (
        "PolicyLossConfig.entropy_coefficient"
    ),
    "test_each_guard_holds_its_own_number_against_its_own_limit": "GuardConfig.(max_ratio|max_kl|target_kl)",
    "test_a_third_of_the_updates_skipped_is_more_than_three_tenths": "GuardConfig.max_skipped_fraction",
    "test_a_quarter_of_the_scores_missing_is_more_than_a_fifth": "GuardConfig.max_unscored_fraction",
    "test_the_run_stops_at_the_given_number_of_equal_steps_and_not_before": "GuardConfig.max_constant_reward_steps",
    "test_weights_changed_behind_a_servers_back_end_the_run_before_anything_is_trained_on_them": (
        "GuardConfig.max_mismatch"
    ),
    "test_the_engine_is_asked_for_all_that_the_section_says": (
        "RolloutConfig.(greedy|max_new_tokens|min_new_tokens|random_limit_min|stop_strings|stop_token_ids|temperature)"
        "|RolloutConfig.(top_k|top_p)"
    ),
    "test_the_texts_of_an_update_have_their_number_their_weight_and_the_tokens_of_a_micro_batch": (
        "PTXConfig.(coefficient|examples_per_update)"
    ),
    "test_the_weights_after_some_updates_are_those_of_adamw_with_these_settings": (
        "OptimizerConfig.(betas|eps|final_fraction|max_gradient_norm|schedule|warmup_updates|weight_decay)"
    ),
    "test_the_loss_of_a_reward_model_is_the_formula_of_its_settings": "RewardTrainingConfig.(loss|score_centring)",
    "test_loss_metrics_and_gradient_are_those_of_one_sequence_at_a_time": (
        "DPOConfig.(beta|label_smoothing|loss)|KTOConfig.(beta|desirable_weight|undesirable_weight)"
    ),
    "test_without_a_kl_term_the_reference_point_is_0_and_answers_meet_their_own_prompts_alone": (
        "KTOConfig.reference_point"
    ),
}
"""Test -> the keys that it shows, as a pattern of `Section.key`."""
