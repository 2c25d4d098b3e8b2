"""Trajectories of several turns, for tests of sessions: what they read between two calls depends on what they wrote."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from architectures import VOCABULARY
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall, Session, SessionEngine

KEY = RandomKey(seed=5, purpose="test")
OPTIONS = SamplingOptions(max_new_tokens=1)
"""Each call has its own limit."""


@dataclass(kw_only=True)
class Played:
    """One trajectory: all its ids, and which of them the policy wrote."""

    index: int
    ids: list[int]
    prompt_length: int
    num_turns: int
    written: list[tuple[int, float]] = field(default_factory=list)
    """Place in `ids` and log-prob of each token of the policy."""
    calls: list[ModelCall] = field(default_factory=list)

    def request(self) -> CallRequest:
        turn = len(self.calls)
        return CallRequest(
            id=(self.index, turn),
            lane=self.index,
            token_ids=tuple(self.ids),
            stream=KEY.stream(self.index, 0),
            first_position=len(self.written),
            max_new_tokens=1 + random.Random(31 * self.index + turn).randrange(5),
        )

    def take(self, call: ModelCall) -> bool:
        """Append what the policy wrote and what is answered; whether a further turn follows."""
        self.written += [(len(self.ids) + i, logprob) for i, logprob in enumerate(call.logprobs)]
        self.ids += call.token_ids
        self.calls.append(call)
        answer = random.Random(sum(self.ids) + len(self.ids))
        self.ids += [answer.randrange(VOCABULARY) for _ in range(answer.randrange(4))]
        return len(self.calls) < self.num_turns

    def facts(self) -> list[tuple]:
        """What was sampled, to the bit."""
        return [(call.token_ids, call.logprobs, call.finish) for call in self.calls]


def trajectories(num: int, *, num_turns: int, prompts: Sequence[int] = (3, 20, 7)) -> list[Played]:
    """Every other one begins as the one before it, as the members of a group do."""
    made = []
    for index in range(num):
        chosen = random.Random(index // 2)
        length = prompts[index // 2 % len(prompts)]
        ids = [chosen.randrange(VOCABULARY) for _ in range(length)]
        made.append(Played(index=index, ids=ids, prompt_length=length, num_turns=num_turns))
    return made


def play(
    engine: SessionEngine,
    played: list[Played],
    *,
    options: SamplingOptions = OPTIONS,
    max_tokens: int = 100,
    delay: Callable[[Played], int] = lambda _: 0,
    before: Callable[[Session], object] = lambda _: None,
) -> list[Played]:
    """Play them all to their ends. `delay`: of an answer, in calls of `advance`; `before` is called before each."""
    late = {each.index: delay(each) for each in played}
    of_index = {each.index: each for each in played}
    with engine.session(options, max_tokens=max_tokens) as session:
        while late or session.num_running:
            for index in [index for index, passes in late.items() if passes <= 0]:
                session.submit(of_index[index].request())
                del late[index]
            late = {index: passes - 1 for index, passes in late.items()}
            before(session)
            for call in session.advance(0 if late else 10):
                each = of_index[call.request.id[0]]
                if each.take(call):
                    late[each.index] = delay(each)
                else:
                    session.forget(each.index)
    return played


def learners_logprobs(model: LanguageModel, played: Sequence[Played]) -> list[Tensor]:
    """Of the tokens that the policy wrote in each trajectory."""
    cuts = [(each.ids[: each.prompt_length], each.ids[each.prompt_length :]) for each in played]
    batch = pack_responses(*zip(*cuts, strict=True))
    with torch.no_grad():
        logprobs = model.response_logprobs(batch).logprobs.split(list(batch.response_lengths))
    return [
        found[[place - each.prompt_length for place, _ in each.written]]
        for found, each in zip(logprobs, played, strict=True)
    ]
