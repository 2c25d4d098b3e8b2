"""Metrics, curves and alarms of PPO, gathered."""

from proximo.metrics.shared_declarations import COMMON_RULES, MEMORY
from proximo.metrics.trainer_metrics import TrainerMetrics
from proximo.ppo.metrics.alarms import PPO_RULES
from proximo.ppo.metrics.curves import PPO_MAIN, PPO_MORE, PPO_SPEED
from proximo.ppo.metrics.experience import EXPERIENCE, GENERATED, ROLLOUT, SCORE, SOURCES
from proximo.ppo.metrics.updates import FIRST_MINIBATCH, MISMATCH, PAIRS, POLICY, PTX, STALENESS, VALUE

PPO_METRICS = TrainerMetrics(
    tables={
        "PPO: scores": (*SCORE, *SOURCES),
        "PPO: experience": EXPERIENCE,
        "PPO: responses": ROLLOUT,
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
    curves=(*PPO_MAIN, *PPO_SPEED, MEMORY, *PPO_MORE),
    rules=(*PPO_RULES, *COMMON_RULES),
    num_headlines=4,
)
