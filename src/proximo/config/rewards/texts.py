"""The kinds of rewards that read a response as text: form, pattern, schema, length, repetition."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from proximo.config.rewards.code import CodeRewardConfig
from proximo.config.rewards.maths import CountdownRewardConfig, MathsRewardConfig
from proximo.config.rewards.sources import JudgedRewardConfig
from proximo.config.rewards.text_rules import pattern_problem, schema_problem
from proximo.metrics.definitions import COMPONENT

JUDGES = "proximo.rewards.texts"


class QuickRewardConfig(JudgedRewardConfig):
    """What judges share that take a fraction of a millisecond for an answer."""

    workers: int | None = Field(1, ge=1)
    """Worker processes of this source; null for one per core."""


class PatternRewardConfig(QuickRewardConfig):
    """A regular expression that responses should match, or should not. docs/text-rewards.md."""

    judge: ClassVar[str] = f"{JUDGES}.pattern:PatternJudge"

    kind: Literal["pattern"]
    """Score by matches of a regular expression."""
    name: str = Field("pattern", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    pattern: str
    """As of the `regex` package: Python's regular expressions, and more. In single quotes, so that YAML keeps
    backslashes."""
    match: Literal["full", "search"] = "search"
    """`full`: the whole response must match. `search`: some part of it."""
    max_matches: int = Field(1, ge=1)
    """As many matches count at most; they do not overlap. 1 asks only whether there is one."""
    match_score: float = 1.0
    """Score of each match that counts."""
    no_match_score: float = 0.0
    """Score of a response without a match."""
    match_seconds: float = Field(1.0, gt=0)
    """Processor time after which a response gets the lowest score that one can get, by its own fault."""

    @field_validator("pattern")
    @classmethod
    def _is_an_expression(cls, pattern: str) -> str:
        if problem := pattern_problem(pattern):
            raise ValueError(problem)
        return pattern

    @model_validator(mode="after")
    def _counts_parts(self) -> Self:
        if self.match == "full" and self.max_matches > 1:
            raise ValueError("a response matches as a whole once: max_matches needs match: search")
        return self

    @model_validator(mode="after")
    def _gives_up_first(self) -> Self:
        if self.match_seconds >= self.answer_seconds:
            raise ValueError(
                f"match_seconds ({self.match_seconds:g}) must be below answer_seconds ({self.answer_seconds:g}), at "
                "which the worker is killed"
            )
        return self


class JSONSchemaRewardConfig(QuickRewardConfig):
    """JSON that satisfies a schema. docs/text-rewards.md."""

    judge: ClassVar[str] = f"{JUDGES}.json_schema:JSONSchemaJudge"

    kind: Literal["json_schema"]
    """1 for JSON that satisfies the schema, else 0. Needs the extra json-schema."""
    name: str = Field("json", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    satisfies: dict[str, Any]
    """The JSON schema, written out here. It may refer to its own parts (`#/$defs/...`) and to nothing else."""
    reads: Literal["last_block", "response"] = "last_block"
    """The last block between lines of three backticks, or the whole response."""
    max_bytes: int = Field(65536, ge=1)
    """Longer JSON is refused unread."""
    max_nesting: int = Field(32, ge=1, le=64)
    """JSON with lists and objects deeper within each other is refused unread."""

    @field_validator("satisfies")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if problem := schema_problem(schema):
            raise ValueError(problem)
        return schema


class LengthRewardConfig(QuickRewardConfig):
    """A range that a response's length should be in. docs/text-rewards.md."""

    judge: ClassVar[str] = f"{JUDGES}.length:LengthJudge"

    kind: Literal["length"]
    """1 within the range, both ends included; outside it falls to 0 over `slack` units. What the limit of the rollout
    cuts off is `ppo.score`'s subject: `overlong_buffer_tokens`, `missing_eos_penalty`."""
    name: str = Field("length", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    unit: Literal["tokens", "words", "characters"] = "words"
    """What is counted. Words are what blanks separate; tokens include the end-of-sequence token."""
    shortest: int | None = Field(None, ge=0)
    """Shortest good length; null for any."""
    longest: int | None = Field(None, ge=0)
    """Longest good length; null for any. The same as `shortest` for a target."""
    slack: int = Field(0, ge=0)
    """So many units outside the range the score reaches 0; with 0 it is 0 at once."""

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.shortest is None and self.longest is None:
            raise ValueError("a length needs shortest, longest or both")
        if self.shortest is not None and self.longest is not None and self.shortest > self.longest:
            raise ValueError(f"shortest ({self.shortest}) must not exceed longest ({self.longest})")
        return self


class RepetitionRewardConfig(QuickRewardConfig):
    """A penalty for repeating oneself. docs/text-rewards.md."""

    judge: ClassVar[str] = f"{JUDGES}.repetition:RepetitionJudge"

    kind: Literal["repetition"]
    """Minus the share of n-grams that came before in the response: from 0 down to nearly -1."""
    name: str = Field("repetition", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    unit: Literal["words", "characters"] = "words"
    """What n-grams are made of; characters for languages that write no blanks."""
    ngram: int = Field(4, ge=1, le=64)
    """Units of an n-gram, and of the longest block whose runs are counted."""
    longest_run: int | None = Field(None, ge=1)
    """-1 where a block of up to `ngram` units stands more often in a row; null for no such limit."""


Verifier = Annotated[
    PatternRewardConfig | JSONSchemaRewardConfig | MathsRewardConfig | CountdownRewardConfig | CodeRewardConfig,
    Field(discriminator="kind"),
]
"""What can say within `think_answer` that an answer is right: a score of 1 or more."""


def _scores_of(verifier: Verifier) -> tuple[float, float]:
    """The highest score of a verifier, and the highest of what is wrong; of a pattern, which may be one for wrong
    answers, the lowest."""
    match verifier:
        case MathsRewardConfig() | CountdownRewardConfig():
            return verifier.right, max(verifier.wrong, verifier.no_answer)
        case CodeRewardConfig():
            return verifier.right, max(verifier.wrong, verifier.no_program)
        case PatternRewardConfig():
            scores = (verifier.match_score * verifier.max_matches, verifier.match_score, verifier.no_match_score)
            return max(scores), min(scores)
    return 1.0, 0.0


class ThinkAnswerRewardConfig(JudgedRewardConfig):
    """The form `<think>…</think><answer>…</answer>`, alone or beside a verifier. docs/text-rewards.md."""

    judge: ClassVar[str] = f"{JUDGES}.think_answer:ThinkAnswerJudge"

    kind: Literal["think_answer"]
    """1 for a response of that form, else 0. With a verifier in `right`, 1 where the answer is right in whatever form,
    and the form counts among the wrong ones."""
    name: str = Field("form", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    right: Verifier | None = None
    """A verifier with its own keys, such as `{kind: pattern, pattern: ...}`: right is what it scores 1 or more."""
    right_reads: Literal["response", "answer"] = "response"
    """What the verifier is shown: the whole response, or of a well-formed one what stands between the answer tags."""
    well_formed_credit: float | None = Field(None, ge=0)
    """What a wrong answer in good form gets above one in bad form; null for 0.2. With a verifier only."""
    zero_as_minus_one: bool = False
    """-1 in place of 0, from which the credit then counts: AReaL's 1, -0.8 and -1."""
    opened_by_prompt: bool = False
    """The prompt's text (its chat template) ends in `<think>`, so that responses begin behind it."""

    @model_validator(mode="before")
    @classmethod
    def _one_worker_for_both(cls, given: Any) -> Any:
        """The verifier's name, worker and limits are those of the form, and its own checks hold for them."""
        right = given.get("right") if isinstance(given, Mapping) else None
        if isinstance(right, JudgedRewardConfig):
            right = right.model_dump(exclude_unset=True)
        if not isinstance(right, Mapping):
            return given
        names = {*JudgedRewardConfig.model_fields} - {"kind"}
        shared = {name: given.get(name, cls.model_fields[name].default) for name in names}
        others = sorted(name for name in shared if name in right and right[name] != shared[name])
        if others:
            raise ValueError(
                f"the verifier in right runs in the worker of the form, whose {', '.join(others)} holds for both: move "
                f"{'them' if len(others) > 1 else 'it'} out of right"
            )
        return {**given, "right": {**right, **shared}}

    @model_validator(mode="after")
    def _needs_a_verifier(self) -> Self:
        if self.right is None and (self.well_formed_credit is not None or self.right_reads == "answer"):
            raise ValueError("well_formed_credit and right_reads are about a verifier: give right, or leave them out")
        return self

    @model_validator(mode="after")
    def _scores_on_both_sides_of_one(self) -> Self:
        best, worst = (math.inf, -math.inf) if self.right is None else _scores_of(self.right)
        if not worst < 1 <= best:
            raise ValueError(
                f"the verifier in right scores {best:g} what is right and {worst:g} what is wrong, but right is what "
                "it scores 1 or more, and nothing else: give it other scores"
            )
        return self

    def caveats(self) -> tuple[str, ...]:
        """Those of the verifier."""
        return () if self.right is None else self.right.caveats()

    def judge_options(self) -> dict[str, Any]:
        """With the verifier's judge and options in place of its section."""
        if self.right is None:
            return {**super().judge_options(), "right": None}
        verifier = {"judge": self.right.judge, "options": self.right.judge_options()}
        return {**super().judge_options(), "right": verifier}
