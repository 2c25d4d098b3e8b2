"""The commands that train: sft, reward, dpo, ppo, pipeline. Not the training: that is ppo/, supervised/ and run/."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from proximo.cli.collection import imports_set_apart
from proximo.cli.working_directory import functions_of_the_working_directory
from proximo.config.kinds import Kind
from proximo.errors import ConfigError
from proximo.run.options import RunOptions

if TYPE_CHECKING:  # the schemas take longer to import than --help may
    from proximo.config.loader import LoadedRecipe

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the recipe's: run.seed=1")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the recipe and print what it would do; load no model, write nothing.")
]
Resume = Annotated[
    str,
    typer.Option(
        "--resume",
        metavar="[=auto]",
        show_default=False,
        help="Go on with the run in the folder; with =auto also start where there is none, and be done where it ended.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in the folder.")]
OtherEnvironment = Annotated[
    bool,
    typer.Option(
        "--allow-different-environment",
        help="Resume with other versions, processor or thread count; the last bits may differ.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]

HELP: dict[Kind, str] = {
    "sft": """Fine-tune a language model on texts, on prompts with answers, or on conversations.

    \b
    proximo sft sft.yaml --dry-run
    proximo sft sft.yaml sft.num_epochs=2 data.sources.0.path=mine.jsonl
    proximo sft sft.yaml --resume=auto        for schedulers: start, go on, or be done

    docs/configuration.md lists every key, docs/data.md the forms of data.
    """,
    "reward": """Train a reward model on pairs of a chosen and a rejected answer.

    \b
    proximo reward reward.yaml --dry-run
    proximo reward reward.yaml model.path=runs/sft-model reward.score_centring=0.01
    proximo reward reward.yaml --resume

    docs/configuration.md lists every key, docs/data.md the forms of preference data.
    """,
    "dpo": """Train a policy on preference pairs directly, without a reward model and without sampling (DPO).

    \b
    proximo dpo dpo.yaml --dry-run
    proximo dpo dpo.yaml model.path=models/sft dpo.beta=0.05
    proximo dpo dpo.yaml --resume

    docs/configuration.md lists every key, docs/dpo.md says what it does and when to take it.
    """,
    "ppo": """Train a policy with PPO, or with group-wise advantages, against a reward.

    The reward is a reward model, a Python function, or a weighted sum of several.

    \b
    proximo ppo ppo.yaml --dry-run            responses, updates and tokens of a step
    proximo ppo ppo.yaml ppo.kl.coefficient=0.1 run.folder=runs/kl-0.1
    proximo ppo ppo.yaml --resume             after an interruption: the same bits

    docs/configuration.md lists every key, docs/ppo.md says what each step does.
    """,
    "pipeline": """Run fine-tuning, reward model and PPO, each from what the one before made.

    Stages write to FOLDER/sft, FOLDER/reward and FOLDER/ppo. With --resume finished ones are skipped.

    \b
    proximo pipeline demo                     the shipped example, a few minutes on a CPU
    proximo pipeline my.yaml --dry-run
    proximo pipeline my.yaml ppo.ppo.num_steps=50 --resume=auto
    """,
}


def add_to(app: typer.Typer) -> None:
    """Add the commands that train."""
    for kind, text in HELP.items():
        app.command(name=kind, help=text)(_command(kind))


def _command(kind: Kind) -> Callable[..., int]:
    def command(
        recipe: RecipeName,
        overrides: Overrides = None,
        *,
        dry_run: DryRun = False,
        resume: Resume = "never",
        overwrite: Overwrite = False,
        allow_different_environment: OtherEnvironment = False,
        quiet: Quiet = False,
    ) -> int:
        if "auto" in (recipe, *(overrides or ())) and resume == "must":
            raise ConfigError("--resume stands alone or is --resume=auto, with an equals sign and without a blank")
        with functions_of_the_working_directory():
            loaded = checked(kind, recipe, overrides or ())
            options = RunOptions(
                resume=_resume(resume, overwrite=overwrite),
                overwrite=overwrite,
                allow_different_environment=allow_different_environment,
                quiet=quiet,
                recipe_text=loaded.text,
            )
            from proximo.commands.dry_run import describe
            from proximo.commands.foresight import cautions, device_problem
            from proximo.run.folders import check_folders

            if dry_run:
                for caution in cautions(loaded.recipe):
                    print(f"note: {caution}", file=sys.stderr)
                print(describe(loaded.recipe))
                return 0
            if problem := device_problem(loaded.recipe.run.device):
                raise ConfigError(f"run.device is {loaded.recipe.run.device}, but {problem}: say auto or cpu")
            check_folders(loaded.recipe, resume=options.resume, overwrite=overwrite)
            with imports_set_apart():
                run = _trainer(kind)
            return run(loaded.recipe, options)

    return command


def checked(kind: Kind, recipe: str, overrides: Sequence[str]) -> "LoadedRecipe":
    """The recipe, with everything found wrong that can be found before a model or data set is opened."""
    from proximo.config.ineffective_keys import unused_keys
    from proximo.config.loader import load_recipe
    from proximo.run.optional_dependencies import check_extras_of
    from proximo.run.preflight import check_inputs

    loaded = load_recipe(kind, recipe, overrides)
    check_inputs(loaded.recipe)
    check_extras_of(loaded.recipe)
    for sentence in unused_keys(loaded.recipe):
        print(f"note: {sentence}", file=sys.stderr)
    return loaded


def _resume(value: str, *, overwrite: bool) -> Literal["never", "must", "auto"]:
    if overwrite and value != "never":
        raise ConfigError("--overwrite replaces the run in the folder and --resume goes on with it: choose one")
    match value:
        case "never" | "must" | "auto":
            return value
    raise ConfigError(f"--resume stands alone or is --resume=auto, got --resume={value}")


def _trainer(kind: Kind) -> Callable[..., int]:
    """The trainer's entry point. Imported here: this is where torch comes in."""
    match kind:
        case "sft":
            from proximo.supervised.sft import run_sft

            return run_sft
        case "reward":
            from proximo.supervised.reward import run_reward

            return run_reward
        case "dpo":
            from proximo.supervised.dpo import run_dpo

            return run_dpo
        case "ppo":
            from proximo.ppo.from_recipe import run_ppo

            return run_ppo
        case "pipeline":
            from proximo.commands.pipeline import run_pipeline

            return run_pipeline
