"""A chat session with a trained model, for the terminal (`cli/chat.py`) or a program."""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.commands.generate import load_engine
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.errors import DataError, UserError
from proximo.models.pretrained.vocabulary import load_tokenizer
from proximo.records import Message
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.run.checkpoint_lookup import language_model_path


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply of the model."""

    text: str
    forgot: bool
    """True if the oldest turns were dropped because they no longer fit into the model's context."""


class Dialogue:
    """The conversation so far, and the model that replies.

    With a chat template turns are messages of user and assistant. Without one the model
    continues a text in which each turn is a line.
    """

    def __init__(
        self,
        model: str,
        sampling: SamplingOptions,
        *,
        seed: int = 0,
        system: str | None = None,
        checkpoint: str = "latest",
    ) -> None:
        """`seed`: the same one and the same turns give the same answers. `system`: for models with a chat template.

        Raises ModelError or RunFolderError if the model cannot be loaded, UserError for wrong options.
        """
        path = language_model_path(model, checkpoint)
        self.tokenizer = load_tokenizer(path)
        self.has_template = self.tokenizer.chat_template is not None
        if system is not None and not self.has_template:
            raise UserError(f"{path} has no chat template, so it cannot take a system message: remove it")
        self._sampling, self._seed, self._system = sampling, seed, system
        language, self._engine = load_engine(path, self.tokenizer, device="auto")
        limit = language.position_limit
        self._room = None if limit is None else limit - sampling.max_new_tokens
        if self._room is not None and self._room < 1:
            raise UserError(
                f"max_new_tokens ({sampling.max_new_tokens}) leaves no room for a question: the model has "
                f"{limit} positions"
            )
        self._turns: tuple[Message, ...] = ()

    def reset(self) -> None:
        """Forget all messages of the conversation."""
        self._turns = ()

    def answer(self, text: str) -> Answer:
        """The model's reply. Raises UserError if the text alone is too long; the conversation is then unchanged."""
        asked: tuple[Message, ...] = (*self._turns, {"role": "user", "content": text})
        values = {"messages": list(asked)} if self.has_template else {"prompt": _as_text(asked)}
        how = PromptOptions(max_tokens=self._room, too_long="truncate", system=self._system)
        try:
            (prompt,), report = load_prompts([Row(source="chat", number=1, values=values)], self.tokenizer, how)
        except DataError as error:
            raise UserError(f"the chat template failed: {error}") from error
        key = RandomKey(seed=self._seed, purpose="chat", step=len(self._turns))
        (response,) = self._engine.generate([prompt], num_samples=1, options=self._sampling, key=key)
        self._turns = (*asked, {"role": "assistant", "content": response.text})
        return Answer(text=response.text, forgot=bool(report.num_truncated))


def _as_text(turns: Sequence[Message]) -> str:
    """Each user turn as a line, followed by the model's reply."""
    pieces = [turn["content"] + ("\n" if turn["role"] == "assistant" else "") for turn in turns]
    return "".join(pieces)
