"""The commands that use a trained model: generate, evaluate, export. `commands/` does their work."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from proximo.cli.arguments import (
    CheckpointName,
    EngineName,
    Run,
    RunOrModel,
    check_model_path,
    check_new_file,
    lines_of_stdin,
    loading,
)
from proximo.config.functions import function_problem
from proximo.errors import UserError
from proximo.user_code import IMPORT_PATH, functions_of_the_working_directory

Role = Literal["policy", "value", "reward", "average", "reference"]
DType = Literal["float32", "bfloat16"]


def add_to(app: typer.Typer) -> None:
    """Add generate, evaluate and export to the command line."""
    for command in (generate, evaluate, export):
        app.command()(command)


def generate(  # noqa: PLR0913 - typer reads the options from the signature
    model: RunOrModel,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; by default every line of standard input.")
    ] = None,
    *,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a response.")] = 128,
    temperature: Annotated[float, typer.Option(help="Divides the logits; below 1 is less random.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample only among the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample only among the tokens that together have this probability.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a response, such as $'\\n' in a shell; may be repeated.")
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Format the prompt as a user turn with the chat template.")
    ] = False,
    checkpoint: CheckpointName = "latest",
    reward: Annotated[
        str | None, typer.Option(metavar="FUNCTION_OR_MODEL", help="Score the responses and show the best first.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Show only this many best responses per prompt.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write one JSON line per response to this new file.")] = None,
    engine: EngineName = None,
) -> int:
    """Write responses to prompts, with the policy of a run or any model.

    \b
    proximo generate runs/ppo "Once upon a time"
    proximo generate runs/sft --chat "What is PPO?" --greedy
    proximo generate Qwen/Qwen2.5-0.5B-Instruct --chat --num-samples 3 < questions.txt
    proximo generate runs/ppo "Once upon a time" --num-samples 8 --keep 1 --reward runs/reward
    proximo generate runs/ppo --output answers.jsonl < prompts.txt
    proximo generate runs/ppo --output answers.jsonl --engine vllm < prompts.txt
    """
    check_model_path(model)
    _check_reward(reward)
    check_new_file(output)
    texts = prompts or _prompts_from_stdin()
    with loading():
        from proximo.commands.generate import GenerateOptions, run_generate
    from proximo.config.engine import engine_named
    from proximo.rollout.sampling import SamplingOptions

    options = GenerateOptions(
        sampling=SamplingOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
            stop_strings=tuple(stop or ()),
        ),
        num_samples=num_samples,
        seed=seed,
        chat=chat,
        checkpoint=checkpoint,
        reward=reward,
        keep=keep,
        output=output,
        engine=engine_named(engine or "local"),
    )
    with functions_of_the_working_directory():
        return run_generate(model, texts, options)


def _prompts_from_stdin() -> list[str]:
    if sys.stdin.isatty():
        raise UserError("no prompt: pass one in quotes after the model, or pipe a file of prompts to standard input")
    prompts = [line.rstrip("\r\n") for line in lines_of_stdin() if line.strip()]
    if not prompts:
        raise UserError("no prompt: standard input has only empty lines")
    return prompts


def _check_reward(reward: str | None) -> None:
    if reward is None:
        return
    if not IMPORT_PATH.fullmatch(reward):
        check_model_path(reward)
        return
    with functions_of_the_working_directory():
        if problem := function_problem(reward):
            raise UserError(f"--reward: {problem}")


def evaluate(
    run: Run,
    *,
    checkpoint: CheckpointName = "latest",
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Use only this many held-out prompts.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write every response and score to this file.")] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(min=1, help="Responses per prompt, for pass@k.")] = None,
    solved_score: Annotated[float | None, typer.Option(help="Minimum score that solves a prompt.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily.")] = False,
    engine: EngineName = None,
) -> int:
    """Score a run's policy on its held-out prompts, and print the table.

    \b
    proximo evaluate runs/ppo
    proximo evaluate runs/ppo --checkpoint best --output answers.jsonl
    proximo evaluate runs/ppo --samples-per-prompt 16 --solved-score 1
    proximo evaluate runs/ppo --greedy
    proximo evaluate runs/ppo --engine local           another engine than the run's
    """
    from proximo.run.checkpoint_lookup import find_run

    find_run(run)  # again later, but before torch is imported
    check_new_file(output)
    with loading():
        from proximo.commands.evaluate import run_evaluate

    with functions_of_the_working_directory():
        return run_evaluate(
            run,
            checkpoint=checkpoint,
            num_prompts=num_prompts,
            output=output,
            samples_per_prompt=samples_per_prompt,
            solved_score=solved_score,
            greedy=greedy or None,
            engine=engine,
        )


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder; it must not exist.")],
    *,
    role: Annotated[Role | None, typer.Option(help="The model to export; default the trained one.")] = None,
    checkpoint: CheckpointName = "latest",
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base.")] = False,
    dtype: Annotated[DType | None, typer.Option(help="Type of the weights; default as saved.")] = None,
    push: Annotated[str | None, typer.Option(metavar="NAME", help="Also upload it to the Hub under this name.")] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: create a private model.")] = False,
) -> int:
    """Write a run's model as a Hugging Face folder, with tokenizer, chat template, generation config and model card.

    \b
    proximo export runs/ppo models/mine
    proximo export runs/ppo models/mine --checkpoint best --merge --dtype bfloat16
    proximo export runs/ppo models/critic --role value
    proximo export runs/ppo models/mine --merge --push me/mine --private
    """
    from proximo.checkpoint.run_folder import check_new_folder
    from proximo.run.checkpoint_lookup import find_run
    from proximo.run.preflight import check_push_name

    find_run(run)  # all again later, but before torch is imported
    check_push_name(push, private=private)
    check_new_folder(out)
    with loading():
        from proximo.commands.export import run_export

    return run_export(run, out, role=role, checkpoint=checkpoint, merge=merge, dtype=dtype, push=push, private=private)
