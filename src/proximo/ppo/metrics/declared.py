"""Metrics, curves and alarms of PPO, gathered. The curves of the report: the most important first."""

from proximo.metrics.definitions import Curve, Section, Trace, held_out
from proximo.metrics.shared_declarations import COMMON_RULES, MEMORY, TrainerMetrics
from proximo.ppo.metrics.alarms import PPO_RULES
from proximo.ppo.metrics.experience import EPISODES, EXPERIENCE, GENERATED, ROLLOUT, SCORE, SOURCES
from proximo.ppo.metrics.updates import FIRST_MINIBATCH, MISMATCH, PAIRS, POLICY, PTX, STALENESS, VALUE

PPO_MAIN = (
    Curve("score", "Score", "mean over answers").draws(
        Trace("score/mean", "training"),
        held_out("evaluation/score"),
        healthy="Rises, quickly at first, then levels off. Flat from the start: the learning rate is too small, the "
        "KL coefficient is too large, or the score does not distinguish answers.",
    ),
    Curve("gold", "Gold score", "mean over answers").draws(
        Trace("gold/mean", "training"),
        held_out("evaluation/gold"),
        healthy="Rises with the score. It is never used for training. If it falls while the score still rises, the "
        "policy exploits the reward model: stop there, or raise the KL coefficient.",
    ),
    Curve("kl", "KL from the reference", "nats per answer", guide=0.0).draws(
        Trace("kl/sequence", "training"),
        held_out("evaluation/kl"),
        healthy="Starts at 0, grows, and settles where its cost balances the score. Growing ever faster: the policy "
        "moves far from its start. Below 0 for long: answers were not sampled from the distribution whose log-probs "
        "are used.",
    ),
    Curve("length", "Answer length", "tokens").draws(
        Trace("response/tokens_mean", "training"),
        held_out("evaluation/tokens"),
        healthy="Steady, or drifting slowly to the length that the task needs. Rising together with the score: the "
        "reward may favour length.",
    ),
    Curve("entropy", "Entropy", "nats per token").draws(
        Trace("policy/entropy", "training"),
        healthy="Falls slowly and stays well above 0. A collapse towards 0 means that the policy always gives the "
        "same answer and has nothing left to learn from.",
    ),
    Curve("clip", "Clip fraction", "fraction of tokens", share=True).draws(
        Trace("policy/clip_fraction", "policy"),
        Trace("value/clip_fraction", "value"),
        healthy="Policy: 0.01 to 0.2. Exactly 0: the updates hardly change it, or a step has one update. Above 0.3: "
        "updates are too large, so lower the learning rate or the epochs per step.",
    ),
    Curve("explained", "Explained variance of the critic", "fraction", view=(-1.05, 1.05), guide=0.0).draws(
        Trace("value/explained_variance", "critic"),
        healthy="Starts at or below 0 and climbs towards 1. At 0 the critic is no better than a constant; below 0 it "
        "is harmful.",
    ),
    Curve("finished", "Finished answers", "fraction of answers", share=True).draws(
        Trace("response/finished_fraction", "training"),
        held_out("evaluation/finished_fraction"),
        healthy="Near 1 if answers should end with a stop token. Falling: responses run into the limit.",
    ),
)

PPO_MORE = (
    Curve("components", "Parts of the score", "score", section=Section.MORE).draws(
        Trace("score/<component>/mean", ""),
        healthy="All components rise or stay level. If one rises while the others fall, the policy exploits that one.",
    ),
    Curve("distinct", "Distinct-2", "fraction of token pairs", section=Section.MORE, share=True).draws(
        Trace("response/distinct_2", "training"),
        held_out("evaluation/distinct_2"),
        healthy="May fall as answers become alike; below half of its start, answers become repetitive.",
    ),
    Curve("approx-kl", "Movement within a step", "nats per token", section=Section.MORE).draws(
        Trace("policy/approx_kl", "policy against the one that sampled"),
        healthy="Small and steady, about 0.001 to 0.02. A spike is an update that was too large.",
    ),
    Curve("advantage", "Advantages", "score", section=Section.MORE, guide=0.0).draws(
        Trace("advantage/std", "deviation"),
        Trace("advantage/mean", "mean"),
        healthy="The mean is near 0. The deviation falls as the critic learns; at 0 there is nothing left to learn.",
    ),
    Curve("groups", "Groups with and without a signal", "fraction", section=Section.MORE, share=True).draws(
        Trace("group/effective_fraction", "effective sample fraction"),
        Trace("group/zero_variance_fraction", "prompts whose answers are all right or all wrong"),
        Trace("group/zero_advantage_fraction", "prompts without an advantage"),
        healthy="The effective sample fraction is well above 0: this fraction of the answers teaches something about "
        "the task. Near 0 the step teaches nothing, whatever the other curves show.",
    ),
    Curve("pairs", "Pairs: margin of the better response", "score", section=Section.MORE, guide=0.0).draws(
        Trace("pairs/margin", "margin"),
        Trace("pairs/accuracy", "fraction ranked rightly"),
        healthy="The margin rises and settles, and the fraction stays above 0.5. Both near their start: the policy "
        "does not learn from the pairs.",
    ),
    Curve("coefficient", "KL coefficient", "score per nat", section=Section.MORE).draws(
        Trace("kl/coefficient", "coefficient"),
        healthy="Constant; an adaptive coefficient settles.",
    ),
    Curve("value-loss", "Value loss", "score squared", section=Section.MORE).draws(
        Trace("value/loss", "value"),
        healthy="Falls, then follows the spread of the scores.",
    ),
    Curve("ptx", "Loss on the texts in the updates", "nats per token", section=Section.MORE).draws(
        Trace("ptx/loss", "texts"),
        healthy="Level or falling. Rising: the policy forgets the texts, so ppo.ptx.coefficient is too small.",
    ),
    Curve("filter", "Prompts in use", "prompts", section=Section.MORE, from_zero=True).draws(
        Trace("filter/active", "in use"),
        Trace("filter/too_easy", "too easy"),
        Trace("filter/too_hard", "too hard"),
        healthy="Falls at the ends of epochs. At the number of prompts of a step, nothing is left to learn.",
    ),
    Curve("gradients", "Gradient norms", "norm before clipping", section=Section.MORE).draws(
        Trace("policy/gradient_norm", "policy"),
        Trace("value/gradient_norm", "value"),
        healthy="Steady. Clipping handles occasional spikes; a steady rise indicates trouble.",
    ),
    Curve("first-minibatch", "First minibatch: sampler against learner", "nats", section=Section.MORE).draws(
        Trace("first_minibatch/max_abs_log_ratio", "largest log-ratio"),
        healthy="Only rounding: below 0.001 in float32. More means that sampler and learner compute different "
        "log-probs.",
    ),
)

PPO_SPEED = (
    Curve("throughput", "Throughput", "tokens per second", section=Section.SPEED, from_zero=True).draws(
        Trace("throughput/rollout_tokens_per_second", "rollout"),
        Trace("throughput/train_tokens_per_second", "training"),
        healthy="Constant. Rollout throughput falls as answers become longer or end at very different lengths.",
    ),
    Curve("time", "Time of a step by phase", "seconds", section=Section.SPEED, from_zero=True).draws(
        Trace("time/rollout_seconds", "rollout"),
        Trace("time/generate_greedy_seconds", "greedy rollout"),
        Trace("time/score_seconds", "score"),
        Trace("time/reference_seconds", "reference"),
        Trace("time/values_seconds", "values"),
        Trace("time/policy_logprobs_seconds", "policy log-probs"),
        Trace("time/policy_logprobs_and_values_seconds", "policy log-probs and values"),
        Trace("time/experience_seconds", "experience"),
        Trace("time/train_value_seconds", "train value"),
        Trace("time/train_policy_seconds", "train policy"),
        Trace("time/train_policy_and_value_seconds", "train policy and value"),
        healthy="The highest line has the most potential for a speed-up. Evaluation and saving are not included.",
    ),
)

TURNS = Curve("turns", "Turns of an episode", "turns").draws(
    Trace("environment/turns_mean", "training"),
    held_out("evaluation/turns"),
    healthy="Falls where fewer turns earn more, rises where the task takes several. At the limit of turns: the policy "
    "does not come to an end.",
)
WAITING = Curve("waiting", "Time of the rollout", "seconds", section=Section.SPEED, from_zero=True).draws(
    Trace("environment/model_seconds", "model"),
    Trace("environment/waiting_seconds", "waiting for environments"),
    healthy="Mostly the model. Much waiting: environments are slower than the model, so play more of them "
    "at once (`environment.workers`), or more episodes in a step.",
)


PPO_METRICS = TrainerMetrics(
    tables={
        "PPO: scores": (*SCORE, *SOURCES),
        "PPO: experience": EXPERIENCE,
        "PPO: responses": ROLLOUT,
        "PPO: environments": EPISODES,
        "PPO: engine and learner": MISMATCH,
        "PPO: asynchronous rollouts": STALENESS,
        "PPO: policy updates": (*FIRST_MINIBATCH, *POLICY, *PAIRS, *PTX),
        "PPO: value updates": VALUE,
    },
    evaluation=GENERATED,
    watched={
        "score/mean": "score",
        "gold/mean": "gold",
        "evaluation/score": "held-out score",
        "evaluation/gold": "held-out gold",
        "kl/sequence": "kl",
        "response/tokens_mean": "length",
        "environment/turns_mean": "turns",
        "policy/entropy": "entropy",
        "policy/clip_fraction": "clipped",
        "policy/skipped_updates": "skipped updates",
        "value/explained_variance": "explained var",
        "value/skipped_updates": "skipped of value",
        "group/effective_fraction": "effective",
        "throughput/rollout_tokens_per_second": "tokens/s",
    },
    before_after={
        "Score": ("evaluation/score", "score/mean"),
        "Gold score": ("evaluation/gold", "gold/mean"),
        "KL": ("evaluation/kl", "kl/sequence"),
        "Length": ("evaluation/tokens", "response/tokens_mean"),
        "Finished": ("evaluation/finished_fraction", "response/finished_fraction"),
        "Distinct-2": ("evaluation/distinct_2", "response/distinct_2"),
    },
    curves=(*PPO_MAIN, TURNS, *PPO_SPEED, WAITING, MEMORY, *PPO_MORE),
    rules=(*PPO_RULES, *COMMON_RULES),
    num_headlines=4,
)
