"""What a caller of the library may hand over that is of the wrong kind: one clear error, before anything is sampled."""

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from ppo.test_library_mistakes import PROMPTS, trainer
from ppo_trainers import lengths
from proximo.algorithms.controllers import AdaptiveKLController
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ProximoError, TrainingError
from proximo.learner.optimizers import OwnOptimizer
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Prompt, Response, Scored
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rewards.weighted import WeightedReward
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import SamplingOptions

SGD = torch.optim.SGD


def classifier() -> Any:
    return scalar_from_language_model(LanguageModel(tiny_language_model(seed=3)), HeadStart.NORMAL).model


def own(**given: Any) -> PPOTrainer:
    made = OwnOptimizer(**({"make": lambda parameters: SGD(parameters, lr=1e-3)} | given))
    return trainer(optimizers={"policy": made})


def spoilt(value: float) -> Any:
    model = tiny_language_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = value
    return model


class Source:
    """A reward source that answers what it is told to."""

    name = "mine"

    def __init__(self, answer: Callable[[Sequence[Response]], Any]) -> None:
        self.answer = answer

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        return self.answer(responses)


class Nameless:
    async def score(self, responses: Sequence[Response]) -> list[Scored]:
        return []


class Controller:
    coefficient = 0.1

    def update(self) -> float:
        return 1.0


def scores(numbers: Callable[[int], Any], responses: Sequence[Response]) -> list[Scored]:
    return [Scored(response=each, score=numbers(i)) for i, each in enumerate(responses)]


def trained(reward: Any, **given: Any) -> Callable[[], Any]:
    return lambda: trainer().train(PROMPTS, reward=reward, **given)


def answering(answer: Callable[[Sequence[Response]], Any]) -> Callable[[], Any]:
    return trained(Source(answer))


def stepped(**given: Any) -> Callable[[], Any]:
    return lambda: trainer().step(**({"prompts": PROMPTS, "responses": [[5], [6]], "scores": [1.0, 2.0]} | given))


def prompt(**given: Any) -> Prompt:
    return Prompt(**({"id": "a", "token_ids": (5,), "text": "x"} | given))


OWN_FAULTS: list[tuple[str, Callable[[], Any], str]] = [
    ("path as tokenizer", lambda: trainer(tokenizer="gpt2"), r"must be a tokenizer of transformers, got str: load the"),
    ("fraction as seed", lambda: trainer(seed=1.5), "got 1.5"),
    ("truth as seed", lambda: trainer(seed=True), "got True"),
    ("huge seed", lambda: trainer(seed=2**200), "below 2"),
    ("number as controller", lambda: trainer(kl_controller=3), r"it \(int\) has no method update\(kl_values\)"),
    (
        "class as controller",
        lambda: trainer(kl_controller=AdaptiveKLController),
        "is the class AdaptiveKLController, not",
    ),
    ("controller of other arguments", lambda: trainer(kl_controller=Controller()), r"update\(kl_values\) cannot"),
    ("optimizer as optimizers", lambda: trainer(optimizers=SGD([torch.ones(1)])), "mapping from roles.*; got SGD"),
    ("tuple as optimizers", lambda: trainer(optimizers=(None, None)), r"mapping from roles.*; got \(None"),
    (
        "bare optimizer",
        lambda: trainer(optimizers={"policy": SGD([torch.ones(1)])}),
        "mapping from roles to their OwnOptimizer",
    ),
    ("rate that torch refuses", lambda: own(make=lambda p: SGD(p, lr=-1)), "make.*raised ValueError: Invalid learning"),
    ("number as schedule", lambda: own(schedule=3), "schedule.*it is a int, which cannot be called"),
    ("text as norm", lambda: own(max_gradient_norm="a"), "max_gradient_norm must be a number above 0"),
    (
        "schedule without a number",
        lambda: own(schedule=lambda update, of: None).train(PROMPTS, reward=lengths),
        "must return the number.*None",
    ),
    (
        "schedule that raises",
        lambda: own(schedule=lambda update, of: 1 / 0).train(PROMPTS, reward=lengths),
        r"schedule\(0, 4\) raised ZeroDivisionError.*test_library_objects.py, line",
    ),
    ("mapping as prompts", lambda: trainer().train({"a": 1}, reward=lengths), "got dict: put its values in a list"),
    ("generator as prompts", lambda: trainer().train(iter(PROMPTS), reward=lengths), r"write list\(prompts\)"),
    ("set as prompts", lambda: trainer().train(set(PROMPTS), reward=lengths), r"got set: write list\(prompts\)"),
    ("rows as prompts", lambda: trainer().train([{"text": "a"}], reward=lengths), "prompt 0 must be a text.*got {"),
    (
        "ids beyond in a record",
        lambda: trainer().train([prompt(token_ids=(999,))], reward=lengths),
        "999, but.*64 tokens",
    ),
    (
        "text as ids of a record",
        lambda: trainer().train([prompt(token_ids="ab")], reward=lengths),
        "prompt 0 must be.*got 'ab'",
    ),
    ("no reward", lambda: trainer().train(PROMPTS), "no reward: pass reward="),
    ("setting without a name", lambda: PPOConfig(3), "takes its settings by name, got 3: write PPOConfig"),
    ("settings in a mapping", lambda: PPOConfig({"num_steps": 3}), r"write PPOConfig\(\*\*settings\)"),
    ("text as engine", lambda: trainer(engine="vllm"), "engine must be an object with the methods of .*got 'vllm'"),
    ("class as config", lambda: trainer(config=PPOConfig), "must be a PPOConfig, got <class"),
    ("classifier as own reward", lambda: trainer(reward=classifier()), r"is a model \(LlamaForSeq.*ModelReward"),
    ("scalar model as reward", trained(ScalarModel(classifier())), r"is a model \(ScalarModel.*ModelReward"),
    ("language model as reward", trained([(1.0, LanguageModel(tiny_language_model()))]), "is a model.*ModelReward"),
    ("class as reward", trained(Source), r"is the class Source, not an object of it: write reward=Source\(...\)$"),
    ("source that is async, without a name", trained(Nameless()), "it is async.*no attribute name"),
    ("source of numbers", answering(lambda r: [1.0, 2.0]), "must return Scored.*returned 1.0"),
    (
        "source of too few",
        answering(lambda r: scores(float, r)[:1]),
        "one Scored for each of 2 responses, it returned 1",
    ),
    ("source of None", answering(lambda r: None), "returned a NoneType"),
    ("source of another order", answering(lambda r: scores(float, r)[::-1]), "in another order"),
    ("source of texts", answering(lambda r: scores(str, r)), "a number as its score, got '0'"),
    ("source that raises", answering(lambda r: {}["a"]), "'mine' raised KeyError: 'a' .*test_library_objects.py, line"),
    ("source of no numbers", answering(lambda r: scores(lambda i: np.nan, r)), "2 of 2 responses could not be scored"),
    (
        "score beyond floats",
        trained(lambda prompts, responses, metadata: [10**400 for _ in responses]),
        "must return a number",
    ),
    (
        "generator as scores",
        trained(lambda prompts, responses, metadata: (1.0 for _ in responses)),
        "returned generator; return a list",
    ),
    ("error without words", trained(lambda prompts, responses, metadata: next(iter(()))), r"raised StopIteration \("),
    ("no responses", stepped(responses=None), "responses must be a list.*NoneType"),
    ("no prompts", stepped(prompts=None), "prompts must be a list of texts.*got NoneType$"),
    ("number as masks", stepped(response_masks=3), "response_masks must be a list.*int"),
    ("digits as scores", stepped(scores=["1", "2"]), "a score is one number.*'1'"),
    ("function as own call", lambda: trainer(own_calls=[lengths]), r"list of OwnCall.*got \[<function"),
    ("classifier as policy", lambda: trainer(policy=classifier()), "no output layer.*AutoModelForCausalLM"),
    ("policy without numbers", lambda: trainer(policy=tiny_language_model().to("meta")), "embed_tokens.*meta device"),
    ("policy with NaN", lambda: trainer(policy=spoilt(torch.nan)), r"layers.1.mlp.up_proj.weight .*1 of \d+ values"),
    ("policy with infinity", lambda: trainer(policy=spoilt(torch.inf)), "layers.1.mlp.up_proj.weight .*not finite"),
    ("number as function", lambda: FunctionReward(3), "is a int, which cannot be called"),
    ("text as time-out", lambda: FunctionReward(lengths, timeout_seconds="a"), "number of seconds above 0, got 'a'"),
    ("number as arguments", lambda: FunctionReward(lengths, kwargs=3), "must be a mapping from their names"),
    ("number as name", lambda: FunctionReward(lengths, name=3), "is part of metric names: use letters.*got 3"),
    ("classifier in a ModelReward", lambda: ModelReward(classifier()), r"write ModelReward\(ScalarModel\(model\)\)"),
    ("weight on the wrong side", lambda: WeightedReward([(FunctionReward(lengths), 1.0)]), r"pairs \(weight, source\)"),
    ("number as weighted", lambda: WeightedReward(3), r"at least one pair \(weight, source\), got int"),
    ("no engine's model", lambda: LocalEngine(3, tiny_tokenizer(), eos_token_ids=[1]), "from a LanguageModel, got int"),
    (
        "one id to end by",
        lambda: LocalEngine(LanguageModel(tiny_language_model()), tiny_tokenizer(), eos_token_ids=1),
        r"write \[id\]",
    ),
    ("path as language model", lambda: LanguageModel("gpt2"), "expected a transformers model, got str"),
    ("text as temperature", lambda: SamplingOptions(max_new_tokens=2, temperature="a"), "temperature must be a number"),
    ("one stop string", lambda: SamplingOptions(max_new_tokens=2, stop_strings="."), r"write \(value,\) for one"),
]


@pytest.mark.parametrize(("mistake", "message"), [row[1:] for row in OWN_FAULTS], ids=[row[0] for row in OWN_FAULTS])
def test_what_is_of_the_wrong_kind_is_named(mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises(ProximoError, match=f"(?s){message}"):
        mistake()


NUMBERS: list[Any] = [
    np.ones(2, dtype=np.float16),
    [np.float32(1), np.bool_(True)],
    torch.ones(2, dtype=torch.bfloat16),
    torch.ones(2, dtype=torch.int64),
    [torch.tensor(1.0, dtype=torch.float64), torch.ones(1, requires_grad=True)],
    [True, Decimal(1)],
    (1, 1.0),
]


@pytest.mark.parametrize("given", NUMBERS, ids=range(len(NUMBERS)))
def test_numbers_of_whatever_kind_are_scores(given: Any) -> None:
    assert stepped(scores=given)()["score/mean"] == 1.0
    assert trained(lambda prompts, responses, metadata: given)()[0]["score/mean"] == 1.0


def test_a_source_may_give_numbers_of_whatever_kind() -> None:
    (line,) = answering(lambda r: scores(lambda i: torch.tensor(float(i)), r))()
    assert line["score/mean"] == 0.5


@pytest.mark.parametrize("seed", [np.int64(7), torch.tensor(7)], ids=["numpy", "tensor"])
def test_a_seed_may_be_a_whole_number_of_any_library(seed: Any) -> None:
    assert trainer(seed=seed).seed == 7


def test_ids_may_be_numbers_of_any_library() -> None:
    lines = [stepped()(), stepped(responses=[[np.int64(5)], [torch.tensor(6)]])()]
    first, second = lines
    names = [name for name in first if name.startswith(("policy/", "value/", "score/"))]
    assert len(names) > 5
    assert [first[name] for name in names] == [second[name] for name in names]


def test_a_function_may_be_the_trainers_own_reward() -> None:
    (line,) = trainer(reward=lengths).train(PROMPTS)
    assert line["score/mean"] >= 0


def test_a_module_may_be_the_reward_alone_and_among_others() -> None:
    class Called(torch.nn.Module):
        def forward(self, completions: Sequence[str], **others: Any) -> list[float]:
            return [2.0 for _ in completions]

    class Scoring(torch.nn.Module):
        name = "scoring"

        def score(self, responses: Sequence[Response]) -> list[Scored]:
            return scores(lambda index: 3.0, responses)

    for reward, wanted in ((Called(), 2.0), (Scoring(), 3.0), ([(1.0, Called()), (1.0, Scoring())], 5.0)):
        assert trained(reward)()[0]["score/mean"] == wanted


def test_what_on_step_raises_passes_with_a_note_and_the_step_is_done() -> None:
    class EnoughError(Exception):
        """The caller's own."""

    def enough(number: int, metrics: Any) -> None:
        raise EnoughError

    made = trainer()
    with pytest.raises(EnoughError) as caught:
        made.train(PROMPTS, reward=lengths, on_step=enough)
    assert "Training stops. Step 1 is complete; call train again to go on with step 2." in caught.value.__notes__[0]
    assert made.state.steps_done == 1


def test_what_proximo_says_through_a_source_stays_as_it_is() -> None:
    def refuse(responses: Sequence[Response]) -> Any:
        raise TrainingError("the other machine is down")

    with pytest.raises(TrainingError, match=r"^the other machine is down$"):
        answering(refuse)()
