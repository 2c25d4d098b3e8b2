"""`proximo chat`: a dialogue at the terminal or over a pipe, with the model of `commands/chat_session.py`."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from proximo.cli.arguments import CheckpointName, RunOrModel, check_model_path, lines_of_stdin, loading
from proximo.errors import UserError

if TYPE_CHECKING:
    from proximo.commands.chat_session import Dialogue

HELP = "/reset clears the conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer"
INTERRUPTED = 130


def add_to(app: typer.Typer) -> None:
    """Add `proximo chat` to the command line."""
    app.command()(chat)


def chat(
    model: RunOrModel,
    *,
    system: Annotated[str | None, typer.Option(help="System message before the first turn.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="Divides the logits; below 1 is less random.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample only among the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample only among the tokens that together have this probability.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    checkpoint: CheckpointName = "latest",
) -> int:
    """Talk to the policy of a run, or to any model. Lines of a pipe are turns of one dialogue.

    With the chat template of the tokenizer; a model without one continues the text.

    \b
    proximo chat runs/ppo
    proximo chat runs/sft --system "You are brief." --temperature 0.7
    proximo chat Qwen/Qwen2.5-0.5B-Instruct --greedy < questions.txt

    /reset clears the conversation, /quit ends.
    """
    check_model_path(model)
    with loading():
        from proximo.commands.chat_session import Dialogue
    from proximo.rollout.sampling import SamplingOptions

    sampling = SamplingOptions(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy
    )
    dialogue = Dialogue(model, sampling, seed=seed, system=system, checkpoint=checkpoint)
    interactive = sys.stdin.isatty()
    if interactive:
        mode = "its chat template" if dialogue.has_template else "plain continuation: it has no chat template"
        print(f"{model}, {mode}\n{HELP}", file=sys.stderr)
    try:
        for line in _lines(interactive=interactive):
            if line == "/quit":
                return 0
            _turn(dialogue, line, interactive=interactive)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return 0


def _lines(*, interactive: bool) -> Iterator[str]:
    """The user's lines, stripped, without empty ones."""
    if not interactive:
        yield from (line for line in map(str.strip, lines_of_stdin()) if line)
        return
    import readline  # noqa: F401  (line editing and history for `input`)

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def _turn(dialogue: "Dialogue", line: str, *, interactive: bool) -> None:
    """Answer one line, or run its / command.

    In an interactive session Ctrl-C stops only the answer and errors are printed; otherwise both end the program."""
    if line == "/reset":
        dialogue.reset()
    elif line.startswith("/"):
        print(f"there is no command {line.split(maxsplit=1)[0]}: {HELP}", file=sys.stderr)
    else:
        try:
            answer = dialogue.answer(line)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("(stopped; this turn was removed from the conversation)", file=sys.stderr)
        except UserError as error:
            if not interactive:
                raise
            print(f"error: {error}", file=sys.stderr)
        else:
            if answer.forgot:
                print("(the oldest turns no longer fit and were removed)", file=sys.stderr)
            print(answer.text, flush=True)
