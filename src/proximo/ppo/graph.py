"""The graph of calls of a PPO step, as data. The calls' handlers: roles/."""

from collections.abc import Sequence

from proximo.config.ppo.options import PPOConfig
from proximo.dataflow.graph import Call, Graph, build_graph

OWN_CALLS = (
    *("generate", "generate_greedy", "score", "select", "reference_logprobs", "values", "experience"),
    *("sampled_logprobs", "policy_logprobs", "policy_logprobs_and_values"),
    *("train_value", "train_policy", "train_policy_and_value"),
    *("push_weights", "move_average", "follow_policy"),
)
"""Names of the built-in calls of a step and of its end."""


def step_graph(
    config: PPOConfig,
    *,
    reuse_sampled: bool,
    given: str = "prompts",
    policy_learns: bool = True,
    shares_trunk: bool = False,
    extra: Sequence[Call] = (),
) -> Graph:
    """The graph of one step. With `given="scored"` the inputs are scored responses instead of prompts.

    `reuse_sampled`: the sampler's log-probs serve as old log-probs (float32, and only the temperature shaped the
    distribution); otherwise the policy recomputes them. `policy_learns`: False during critic warm-up. `shares_trunk`:
    the value model is a head on the policy's trunk, so calls that need both take one pass. `extra`: user-defined calls;
    those that read or replace something that this step does not have are left out. The input `state` is the run's
    `TrainState` before the step.
    """
    shares_trunk = shares_trunk and config.uses_critic
    full_kl = config.kl.estimator == "full"
    sampled, scored = ("responses", "scored") if config.samples_per_prompt is None else ("samples", "candidates")
    passes = ("old_logprobs", "reference_logprobs", "full_kl", "values")
    made = ("experience", "raw_advantages", "shaped_scores")
    calls = [Call(name="experience", role=None, reads=("scored", *passes), writes=made)]
    if reuse_sampled:
        calls.append(Call(name="sampled_logprobs", role=None, reads=("responses",), writes=("old_logprobs",)))
    elif shares_trunk:
        both = Call(
            name="policy_logprobs_and_values",
            role="policy",
            reads=("responses",),
            writes=("old_logprobs", "values"),
            beside=("value",),
        )
        calls.append(both)
    else:
        calls.append(Call(name="policy_logprobs", role="policy", reads=("responses",), writes=("old_logprobs",)))
    if policy_learns:
        calls.append(
            Call(
                name="train_policy_and_value" if shares_trunk else "train_policy",
                role="policy",
                reads=("experience", "state"),
                writes=("policy_report", "value_report") if shares_trunk else ("policy_report",),
                beside=(("value",) if shares_trunk else ())
                + (("reference",) if full_kl and config.kl.apply_to == "loss" else ()),
            )
        )
    if given == "prompts":
        calls += _sampling_calls(config, sampled, scored)
    if config.samples_per_prompt is not None:
        calls.append(Call(name="select", role=None, reads=("candidates",), writes=("responses", "scored")))
    absent = []
    if config.kl.apply_to == "none":
        absent += ["reference_logprobs", "full_kl"]
    else:
        calls.append(
            Call(
                name="reference_logprobs",
                role="reference",
                reads=("responses",),
                writes=("reference_logprobs", "full_kl"),
                beside=("policy",) if full_kl and config.kl.apply_to == "reward" else (),
            )
        )
    if not config.uses_critic:
        absent.append("values")
    elif reuse_sampled or not shares_trunk:
        calls.append(Call(name="values", role="value", reads=("responses",), writes=("values",)))
    if config.uses_critic and not (shares_trunk and policy_learns):
        calls.append(Call(name="train_value", role="value", reads=("experience", "state"), writes=("value_report",)))
    brought = ["responses", "scored"] if config.samples_per_prompt is None else ["candidates"]
    inputs = ["prompts"] if given == "prompts" else brought
    missing = ({"prompts"} - set(inputs)) | (set() if policy_learns else {"policy_report"})
    return build_graph(_with_extra(calls, extra, missing), inputs=["state", *inputs, *absent])


def sampling_graph(config: PPOConfig, *, extra: Sequence[Call] = ()) -> Graph:
    """The graph of the calls that sample and score. `extra`: user-defined calls, of which those that replace one."""
    calls = _sampling_calls(config, "responses", "scored")
    replacing = [call for call in extra if call.name in {own.name for own in calls}]
    return build_graph(_with_extra(calls, replacing, set()), inputs=["state", "prompts"])


def end_graph(config: PPOConfig) -> Graph:
    """The graph of calls after a step: update models that follow the policy, and send its weights to the engine."""
    calls = [Call(name="push_weights", role="policy", reads=(), writes=())]
    if config.average_decay is not None:
        calls.append(Call(name="move_average", role="average", reads=(), writes=(), beside=("policy",)))
    if config.kl.apply_to != "none" and config.kl.reference_every_steps is not None:
        calls.append(Call(name="follow_policy", role="reference", reads=("state",), writes=(), beside=("policy",)))
    return build_graph(calls, inputs=["state"])


def _sampling_calls(config: PPOConfig, sampled: str, scored: str) -> list[Call]:
    """The calls that sample and score, including greedy responses if they are the baseline."""
    generate = Call(name="generate", role="policy", reads=("prompts", "state"), writes=(sampled,))
    if config.baseline_answer != "greedy":
        return [generate, Call(name="score", role="reward", reads=("state", sampled), writes=(scored,))]
    greedy = Call(name="generate_greedy", role="policy", reads=("prompts", "state"), writes=("greedy",))
    return [generate, greedy, Call(name="score", role="reward", reads=("state", sampled, "greedy"), writes=(scored,))]


def _with_extra(calls: Sequence[Call], extra: Sequence[Call], missing: set[str]) -> list[Call]:
    """All calls of the step, with extra calls that need a missing value dropped.

    A replacement stands in place of the replaced call. Other extra calls come first, so that each runs as soon as its
    inputs are ready.
    """
    kept = [call for call in extra if call.name not in OWN_CALLS or call.name in {own.name for own in calls}]
    # Dropping a call makes the values that it writes missing, too: repeat until nothing changes.
    while dropped := [call for call in kept if missing.intersection(call.reads)]:
        missing = missing.union(*(call.writes for call in dropped))
        kept = [call for call in kept if call not in dropped]
    replacing = {call.name: call for call in kept if call.name in OWN_CALLS}
    added = [call for call in kept if call.name not in OWN_CALLS]
    return [*added, *(replacing.get(call.name, call) for call in calls)]


def absent_inputs(graph: Graph) -> dict[str, None]:
    """Inputs of the graph that this run does not compute, with the value None."""
    given = ("state", "prompts", "responses", "scored", "candidates")
    return {name: None for name in graph.inputs if name not in given}
