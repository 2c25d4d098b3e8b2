"""What a PPO run reads besides models: prompts or rows of episodes, reference answers, PTX texts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from proximo.data.difficulty import DifficultyFilter
from proximo.data.examples import ExampleOptions, TextExample, load_text_examples
from proximo.data.load_report import LoadReport
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.token_cache import TokenCache
from proximo.environments.prompts import row_prompts
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.worker import answer_responses
from proximo.ppo.task import make_difficulty_filter
from proximo.records import Prompt, Response
from proximo.run.make.data import SplitRows, evaluation_notes, options_of, read_split


class Texts(NamedTuple):
    """PTX texts; None if the recipe has no `ptx_data`."""

    examples: Sequence[TextExample] | None
    fingerprints: Mapping[str, Any]
    notes: tuple[str, ...]


def _load_texts(recipe: PPORecipe, tokenizer: PreTrainedTokenizerBase, cache: TokenCache) -> Texts:
    if recipe.ptx_data is None:
        return Texts(None, {}, ())
    rows = read_split(recipe.ptx_data, seed=recipe.run.seed)
    examples, report = load_text_examples(
        rows.training, tokenizer, options_of(ExampleOptions, recipe.ptx_data), cache=cache
    )
    notes = (f"ptx data: {rows.description}", f"ptx texts: {report}")
    return Texts(examples, {"ptx_data": rows.fingerprints}, notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What a run reads besides models: prompts, their reference answers where asked for, PTX texts."""

    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    answers: list[Response]
    texts: Texts
    difficulty: DifficultyFilter | None
    notes: tuple[str, ...]

    @property
    def all_prompts(self) -> Iterator[Prompt]:
        """Training prompts, then held-out prompts."""
        return chain(self.prompts, self.held_out)


def load_data(recipe: PPORecipe, rows: SplitRows, tokenizer: PreTrainedTokenizerBase, cache: TokenCache) -> Data:
    """Tokenise the rows, or take them as they are where they begin episodes. Raises DataError for a row of no use."""
    if recipe.environment is not None:
        return _load_rows(recipe, rows, tokenizer, cache)
    options = options_of(PromptOptions, recipe.data, max_tokens=recipe.data.max_prompt_tokens)
    held_out: Sequence[Prompt] = []
    prompts, report = load_prompts(rows.training, tokenizer, options, cache=cache)
    difficulty = make_difficulty_filter(recipe, prompts)
    texts = _load_texts(recipe, tokenizer, cache)
    answers = answer_responses(prompts, tokenizer) if recipe.ppo.score.minus_reference_answer else []
    held_out_report: LoadReport | None = None
    if rows.held_out:
        held_out, held_out_report = load_prompts(rows.held_out, tokenizer, options, cache=cache)
    evaluated = evaluation_notes(recipe.data, held_out_report)
    notes = (f"data: {rows.description}", f"prompts: {report}", *evaluated, *texts.notes)
    return Data(prompts=prompts, held_out=held_out, answers=answers, texts=texts, difficulty=difficulty, notes=notes)


def _load_rows(recipe: PPORecipe, rows: SplitRows, tokenizer: PreTrainedTokenizerBase, cache: TokenCache) -> Data:
    """The rows that episodes begin with."""
    prompts, texts = row_prompts(rows.training), _load_texts(recipe, tokenizer, cache)
    return Data(
        prompts=prompts,
        held_out=row_prompts(rows.held_out),
        answers=[],
        texts=texts,
        difficulty=make_difficulty_filter(recipe, prompts),
        notes=(f"data: {rows.description}", *texts.notes),
    )
