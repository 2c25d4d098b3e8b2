"""One trajectory as token ids. What the policy wrote is never tokenised again.

Each prompt is made of the whole conversation (`prompt_layout.py`): pieces of text that are tokenised, and between them
the ids that the policy wrote. So a prompt begins with all ids before it for as long as the template renders earlier
turns as they were, and *forks* where it does not: templates of thinking models leave out the thoughts of earlier turns.
Of such a turn the ids of the answer are kept. If the answer begins inside a token, the rest of this token is written as
text.
"""

from collections.abc import Sequence
from itertools import groupby

from proximo.data.codec import end_of_prompt
from proximo.data.formats.prompt_response import no_template
from proximo.data.templates.chat import render_conversation
from proximo.data.templates.limits import RenderingError
from proximo.data.tokenise import Place
from proximo.environments.environment import Observation
from proximo.environments.prompt_layout import Item, Piece, PolicyTurn, PromptLayout, joined
from proximo.environments.tool_calls import Tools, tools_as_text, without_thought
from proximo.environments.turn_renderer import TurnRenderer
from proximo.errors import DataError, ModelError
from proximo.records import Finish, Message


class Dialogue:
    """The conversation of one trajectory, and the ids that the policy reads next."""

    def __init__(self, renderer: TurnRenderer, observation: Observation, *, tools: Tools | None = None) -> None:
        """Begins with the first observation of an environment, which is never cut. `tools`: JSON schemas.

        Raises DataError if the chat template refuses it, and ModelError for messages or tools without a template.
        """
        self.prompt_ids: tuple[int, ...] = ()
        """All ids that the policy reads in its next turn."""
        self.num_cut_observations = 0
        """Messages that were longer than `max_observation_tokens`."""
        self._renderer = renderer
        self._tools: Tools = ()
        self._before: tuple[int, ...] = ()
        """The last ids of the prompt, after which a turn decodes as after all."""
        self._turns: list[PolicyTurn] = []
        self._conversation: tuple[Item, ...] = ()
        self._opening = ""
        """The text after the last turn, or from the beginning on."""
        self._known: dict[tuple[str, Place], tuple[int, ...]] = {}
        """Ids of the pieces of text of the last prompt."""
        self.ask(self._messages(observation), tools=tools)

    def turn_text(self, token_ids: Sequence[int], finish: Finish) -> str:
        """What the environment is given of a turn, a stop string included, without special tokens but those of a call.

        Of a model whose chat template knows thoughts, the answer after them: "" for a turn that ended in its thought.
        """
        del finish
        text = self._renderer.visible_text(self._before, token_ids)
        if not self._renderer.knows_thoughts:
            return text
        return "" if self._is_only_thought(text) else without_thought(text).lstrip()

    def answered(self, token_ids: Sequence[int], finish: Finish, observation: Observation) -> None:
        """Go on after a turn of the policy with what the environment answered. Raises DataError as `ask`."""
        turn = self.wrote(token_ids, finish)
        messages, num_cut = self._renderer.shortened(self._messages(observation))
        self.num_cut_observations += num_cut
        self.ask([*self._conversation, turn, *messages])

    def wrote(self, token_ids: Sequence[int], finish: Finish) -> int:
        """Keep a turn of the policy, its answer to `prompt_ids`. Returns its number, for `ask`."""
        renderer, ids = self._renderer, tuple(token_ids)
        text = renderer.text(self._before, ids)
        last_mark = renderer.added_tokens.get(ids[-1], "") if ids else ""
        is_only_thought = renderer.knows_thoughts and self._is_only_thought(text)
        turn = PolicyTurn(
            token_ids=ids,
            before=self._before,
            opening=self._opening,
            text=text,
            is_thinking=is_only_thought or (renderer.knows_thoughts and "</think>" in text),
            is_only_thought=is_only_thought,
            is_ended=renderer.ends(text, last_mark, finish),
            last_mark=last_mark,
        )
        self._turns.append(turn)
        return len(self._turns) - 1

    def ask(self, conversation: Sequence[Item], *, tools: Tools | None = None) -> None:
        """Make `prompt_ids` of a whole conversation, in which turns of the policy are given by their numbers.

        It may leave out or replace earlier messages, as programs do that compact their history. `tools`: replace those
        before, unless None. Raises DataError if the chat template refuses the conversation, and ModelError if it does
        not write turns of the policy in one piece.
        """
        self._conversation = tuple(conversation)
        self._tools = self._tools if tools is None else tuple(tools)
        pieces = self._pieces()
        ids: list[int] = []
        known: dict[tuple[str, Place], tuple[int, ...]] = {}
        for piece in pieces:
            if isinstance(piece, str):
                key = piece, self._renderer.place_behind(ids)
                known[key] = self._known.get(key) or self._renderer.encoder.placed([key])[0]
            ids += known[key] if isinstance(piece, str) else piece
        if not ids:
            raise DataError("environment: the first observation is empty, and the policy needs a token to begin with")
        self._known, self.prompt_ids = known, tuple(ids)
        self._before = end_of_prompt(self._renderer.tokenizer, ids)
        self._opening = last if isinstance(last := pieces[-1], str) else ""

    def _is_only_thought(self, text: str) -> bool:
        is_begun = self._opening.rstrip().endswith("<think>") or text.lstrip().startswith("<think>")
        return is_begun and "</think>" not in text

    def _messages(self, observation: Observation) -> list[Message]:
        if isinstance(observation, str):
            return [{"role": "user", "content": _encodable(observation)}]
        if self._renderer.template is None:
            raise ModelError(no_template("environment", self._renderer.encoder.name))
        return [{**message, "content": _encodable(str(message.get("content") or ""))} for message in observation]

    def _pieces(self) -> list[Piece]:
        template, variables = self._renderer.template, dict(self._renderer.variables)
        if template is None:
            return self._plain()
        if self._tools and self._renderer.writes_tools:
            variables["tools"] = [dict(tool) for tool in self._tools]
        items = self._taken()
        try:
            if any(isinstance(item, int) for item in items):
                return PromptLayout(self._renderer, template, self._turns, items, variables).pieces()
            encoder, messages = self._renderer.encoder, [item for item in items if not isinstance(item, int)]
            rendered = render_conversation(encoder, messages, origin="environment", variables=variables)
        except RenderingError as error:
            raise RenderingError(
                f"{error}; an answer of an environment is one text, which becomes a turn of the user, or messages in "
                "roles that the template takes there: join messages of one role, leave out a role that it refuses, or "
                "give another template as tokenizer.chat_template"
            ) from error
        text = "".join(segment.text for segment in rendered.prompt)
        self._known[text, ""] = encoder.rendered([rendered])[0].prompt.ids  # those of data with the same messages
        return [text]

    def _plain(self) -> list[Piece]:
        """Texts and turns, one after the other."""
        if self._tools:
            raise ModelError(no_template("environment: tools", self._renderer.encoder.name))
        said = [
            self._turns[item].token_ids if isinstance(item, int) else str(item["content"])
            for item in self._conversation
        ]
        encoder, pieces = self._renderer.encoder, joined(said)
        if not pieces or not isinstance(pieces[0], str):
            return pieces
        begins = tuple(token for segment in encoder.start(pieces[0]) for token in segment.token_ids or ())
        key = pieces[0], self._renderer.place_behind(begins)
        self._known[key] = self._known.get(key) or encoder.placed([(pieces[0], "")])[0]
        return joined([begins, *pieces])

    def _taken(self) -> tuple[Item, ...]:
        """The conversation as the template takes it: one that knows no tools gets them, and results, in the text."""
        items = list(self._conversation)
        if self._renderer.template is None:
            return tuple(items)
        if self._tools and not self._renderer.writes_tools and not isinstance(items[0], int):
            told = tools_as_text(self._tools, self._renderer.tool_style)
            items[0] = {**items[0], "content": f"{told}\n\n{items[0]['content']}"}
        if self._renderer.knows_results:
            return tuple(items)
        taken: list[Item] = []
        for is_result, group in groupby(items, lambda item: not isinstance(item, int) and item["role"] == "tool"):
            same = list(group)
            taken += [_as_user(same)] if is_result else same
        return tuple(taken)


def _as_user(results: Sequence[Item]) -> Message:
    contents = [item["content"] for item in results if not isinstance(item, int)]
    return {
        "role": "user",
        "content": "\n".join(f"<tool_response>\n{content}\n</tool_response>" for content in contents),
    }


def _encodable(text: str) -> str:
    """The text, with halves of surrogate pairs replaced: no tokenizer reads them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
