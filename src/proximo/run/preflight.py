"""Checks before a start: models, data, functions, secrets, optional packages, folder. Opens no model and no data.

Imports no torch, so that a mistake is reported at once.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proximo import session_functions
from proximo.checkpoint.run_folder import Resume, check_run, is_run_folder
from proximo.config.data import DataConfig, SourceConfig
from proximo.config.environment import PlayedEnvironmentConfig, ProgramEnvironmentConfig
from proximo.config.functions import function_problem
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.config.rewards.kinds import RewardSourceConfig
from proximo.config.rewards.sources import FunctionRewardConfig, ModelRewardConfig, RemoteRewardConfig
from proximo.config.rewards.verifiers import CodeRewardConfig, CustomVerifierRewardConfig, VerifierRewardConfig
from proximo.config.run import ModelConfig, RunConfig, ScalarModelConfig, TokenizerConfig
from proximo.config.schema.base import Section
from proximo.config.schema.own_sections import is_own_kind
from proximo.config.sinks import FunctionSinkConfig
from proximo.errors import ConfigError, ModelError, RunFolderError, UserError
from proximo.hub import TOKENIZER_FILES, is_hub_name, is_local, not_there
from proximo.message_text import count_of
from proximo.models.pretrained.folders import check_folder, refuse_bare_adapter, refuse_second_adapter, tokenizer_place
from proximo.user_code import IMPORT_PATH
from proximo_verifiers.sandbox.packages import package_problem

FILE_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
FILE_FORMATS = ("json", "jsonl", "csv", "parquet", "text")
DISK_FILES = ("dataset_dict.json", "state.json")
MODEL_FILES = ("config.json", "adapter_config.json")
VALUE_HEAD = "value_head.safetensors"
VALUE_FILES = (*MODEL_FILES, VALUE_HEAD)
"""Files that identify a value model. In a checkpoint it may be a head alone, on the trunk of the policy."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a run, with the key that names it."""

    key: str
    name: str
    kind: str
    """`folder`, `file`, `Hub`, `function`, `environment`, `service`, `secret`, `verifier`, `stage`, `random start` or
    `package`."""
    problem: str | None = None
    num_rows: int | None = None
    """For rows given in Python, how many there are."""

    def __str__(self) -> str:
        """For example `models/sft (folder)`. It shows the kind because a mistyped folder can look like a Hub name."""
        if self.num_rows is not None:
            return f"{count_of(self.num_rows, 'row')} given in Python"
        return f"{self.name} ({'from the Hub: no local folder has that name' if self.kind == 'Hub' else self.kind})"


def check_inputs(recipe: Recipe) -> None:
    """Raises ConfigError that lists every missing input."""
    _check(inputs_of(recipe))


def check_reward_inputs(sources: Sequence[RewardSourceConfig]) -> None:
    """Like `check_inputs`, for reward sources only."""
    _check(each for index, source in enumerate(sources) for each in reward_inputs(source, f"reward.{index}"))


def _check(inputs: Iterable[Input]) -> None:
    problems = [f"{each.key}: {each.problem}" for each in inputs if each.problem]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} inputs of the recipe are missing:", *problems]))


def inputs_of(recipe: Recipe) -> Iterator[Input]:
    """All inputs that a recipe refers to."""
    stages = recipe.stages()
    left_out = {f"@{name}" for name, stage in stages.items() if stage is None}
    for prefix, stage in recipe.given_stages():
        trained = stage.models().get("model")
        start = None if trained is None else trained.path
        for key, section in stage.sections().items():
            name = f"{prefix}{key}"
            for each in (*_section_inputs(section, name, start), *environment_inputs(section, name)):
                yield _with_stage(each, Path(recipe.run.folder)) if each.name in left_out else each


def _section_inputs(section: Section, key: str, start: str | None) -> Iterator[Input]:
    """The inputs of a section. `start`: folder or Hub name of the model that is trained."""
    match section:
        case RunConfig():
            yield from _run_inputs(section, key)
        case ModelConfig() | ScalarModelConfig():
            if section.path is not None or section.config is not None:  # otherwise it starts from another role
                yield model_input(section, key)
            elif isinstance(section, ScalarModelConfig) and section.init_from == "policy" and section.lora and start:
                yield from _problem_of(start, f"{key}.lora", lambda name: refuse_second_adapter(Path(name)))
        case TokenizerConfig():
            if section.path is not None:
                yield _folder_or_hub(section.path, f"{key}.path", TOKENIZER_FILES, "tokenizer")
            elif section.train_vocab_size is None and start:
                yield from _problem_of(start, f"{key}.path", tokenizer_place)
        case DataConfig():
            yield from data_inputs(section, key)
        case FunctionRewardConfig() | VerifierRewardConfig() | ModelRewardConfig() | RemoteRewardConfig():
            yield from reward_inputs(section, key)
        case _:
            yield from _own_sections(section, key)


def _own_sections(section: Section, key: str) -> Iterator[Input]:
    """The classes of the user's own among a section and those in it, such as an estimator of advantages."""
    if is_own_kind(kind := getattr(section, "kind", None)):
        yield _function(str(kind), key)
        formula = str(getattr(section, "formula_path", "proximo."))
        if not formula.startswith(("proximo.", "__main__:")):
            yield _function(formula, f"{key}.formula")
    for name, each in section:
        if isinstance(each, Section):
            yield from _own_sections(each, f"{key}.{name}")


def _run_inputs(run: RunConfig, key: str) -> Iterator[Input]:
    if run.token_cache is not None and (cache := Path(run.token_cache).expanduser()).is_file():
        problem = f"{cache} is a file; a folder is wanted, which is made where there is none"
        yield Input(key=f"{key}.token_cache", name=run.token_cache, kind="file", problem=problem)
    for index, sink in enumerate(run.sinks):
        name = f"{key}.sinks.{index}"
        if isinstance(sink, FunctionSinkConfig):
            yield _function(sink.function, f"{name}.function")
        elif find_spec("wandb") is None:
            problem = "its package is not installed: run pip install 'proximo[wandb]', or leave the sink out"
            yield Input(key=name, name=sink.kind, kind="package", problem=problem)


def _with_stage(given: Input, pipeline: Path) -> Input:
    """The input with a problem if it is a stage that the pipeline leaves out and that has not run."""
    folder = pipeline / given.name.removeprefix("@")
    if is_run_folder(folder):
        return given
    return replace(given, problem=f"{given.name} is left out, and there is no earlier run of it in {folder}")


def reward_inputs(source: RewardSourceConfig | VerifierRewardConfig, key: str) -> Iterator[Input]:
    """The inputs of a reward source."""
    match source:
        case FunctionRewardConfig():
            yield _function(source.function, f"{key}.function")
        case CustomVerifierRewardConfig():
            path = source.verifier_class
            yield Input(key=f"{key}.verifier_class", name=path, kind="verifier", problem=function_problem(path))
        case CodeRewardConfig():
            yield Input(
                key=f"{key}.packages", name=source.kind, kind="verifier", problem=package_problem(source.packages)
            )
        case VerifierRewardConfig():
            yield Input(key=key, name=source.kind, kind="verifier")
        case ModelRewardConfig():
            found = _folder_or_hub(source.path, f"{key}.path", MODEL_FILES)
            yield found if found.problem or source.share_base else _with_problem(found, refuse_bare_adapter)
            if source.tokenizer is None:
                yield from _problem_of(source.path, f"{key}.tokenizer", tokenizer_place)
            else:
                yield _folder_or_hub(source.tokenizer, f"{key}.tokenizer", TOKENIZER_FILES, "tokenizer")
        case RemoteRewardConfig():
            yield Input(key=f"{key}.url", name=source.url, kind="service")
            if (name := source.token_env) is not None:
                yield Input(key=f"{key}.token_env", name=name, kind="secret", problem=secret_problem(name))


def environment_inputs(environment: Section, key: str) -> Iterator[Input]:
    """The code of an environment, by its module, file or package. It is imported when its processes start."""
    for name, code, problem in environment.code() if isinstance(environment, PlayedEnvironmentConfig) else ():
        yield Input(key=f"{key}.{name}", name=code, kind="environment", problem=problem)
    if isinstance(environment, ProgramEnvironmentConfig) and environment.token_env is not None:
        name = environment.token_env
        yield Input(key=f"{key}.token_env", name=name, kind="secret", problem=secret_problem(name))


def model_input(model: ModelConfig | ScalarModelConfig, key: str) -> Input:
    """The folder, Hub name or random start of a model."""
    if model.path is None:
        name = str((model.config or {}).get("model_type", "a model without model_type"))
        return Input(key=f"{key}.config", name=name, kind="random start")
    if isinstance(model, ScalarModelConfig):
        found = _folder_or_hub(model.path, f"{key}.path", VALUE_FILES)
        is_head = (Path(model.path).expanduser() / VALUE_HEAD).is_file()
        return found if is_head else _with_problem(found, refuse_bare_adapter)
    found = _folder_or_hub(model.path, f"{key}.path", MODEL_FILES)
    return found if model.lora is None else _with_problem(found, refuse_second_adapter)


def _problem_of(path: str, key: str, refuse: Callable[[str], object]) -> Iterator[Input]:
    """A model's folder as the input of another key, if that use has a problem."""
    if Path(path).expanduser().is_dir() and (problem := _refusal(refuse, path)) is not None:
        yield Input(key=key, name=path, kind="folder", problem=problem)


def _with_problem(found: Input, refuse: Callable[[Path], None]) -> Input:
    """The input with the error of `refuse` as its problem, if it is a folder without another problem."""
    if found.kind != "folder" or found.problem is not None:
        return found
    return replace(found, problem=_refusal(refuse, Path(found.name).expanduser()))


def _refusal(refuse: Callable[[Any], object], given: object) -> str | None:
    """The message of the error that the function raises; None if it raises none."""
    try:
        refuse(given)
    except ModelError as error:
        return str(error)
    return None


def data_inputs(data: DataConfig, key: str) -> Iterator[Input]:
    """One input for each data source."""
    for index, source in enumerate(data.sources):
        yield _source(source, f"{key}.sources.{index}")
    for index, source in enumerate(data.evaluation_sources or ()):
        yield _source(source, f"{key}.evaluation_sources.{index}")


def _folder_or_hub(name: str, key: str, wanted_files: tuple[str, ...], what: str = "model") -> Input:
    """A folder if it exists, otherwise a Hub name if it can be one; an `@` path refers to a pipeline stage."""
    if name.startswith("@"):
        return Input(key=key, name=name, kind="stage")
    path = Path(name).expanduser()
    if path.is_dir():
        problem = _folder_problem(path, wanted_files, what) or (
            _refusal(check_folder, path) if what == "model" else None
        )
        return Input(key=key, name=name, kind="folder", problem=problem)
    if path.exists():
        return Input(key=key, name=name, kind="file", problem=f"{name} is a file; a folder or a Hub name is wanted")
    if not is_local(name):
        return Input(key=key, name=name, kind="Hub")
    return Input(key=key, name=name, kind="folder", problem=not_there(name))


def _folder_problem(folder: Path, wanted_files: tuple[str, ...], what: str) -> str | None:
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"the permissions of the folder {folder} refuse to read it"
    if found := [folder / file for file in wanted_files if (folder / file).is_file()]:
        refused = next((file for file in found if not os.access(file, os.R_OK)), None)
        return None if refused is None else f"the permissions of {refused} refuse to read it"
    if is_run_folder(folder):
        return f"{folder} is a run, not a {what}: name the model in it, or write it with `proximo export {folder} OUT`"
    return f"the folder {folder} holds no {what}: it has no {' and no '.join(wanted_files)}"


def _function(import_path: str, key: str) -> Input:
    return Input(key=key, name=import_path, kind="function", problem=function_problem(import_path))


def _source(source: SourceConfig, key: str) -> Input:
    if source.path is None:
        function = str(source.function)
        return replace(_function(function, f"{key}.function"), num_rows=session_functions.num_rows(function))
    key, name, path = f"{key}.path", source.path, Path(source.path).expanduser()
    if path.is_dir():
        return Input(key=key, name=name, kind="folder", problem=_data_folder_problem(path, source))
    is_file = source.format in FILE_FORMATS or (source.format == "auto" and path.suffix.lower() in FILE_ENDINGS)
    if path.exists():
        if not path.is_file():
            pipe = f"{name} is not a regular file, and data is read more than once: write it to a file"
            return Input(key=key, name=name, kind="file", problem=pipe)
        known = is_file or source.format != "auto"
        wanted = f"{name}: the ending names no format: set format of the source, to one of {', '.join(FILE_FORMATS)}"
        return Input(key=key, name=name, kind="file", problem=None if known else wanted)
    if source.format == "hub" or (source.format == "auto" and not is_file and not is_local(name)):
        return Input(key=key, name=name, kind="Hub")
    kind = "folder" if source.format == "disk" else "file"
    hint = f"; for a function write function: {name}" if IMPORT_PATH.fullmatch(name) else ""
    return Input(key=key, name=name, kind=kind, problem=f"{not_there(name, kind)}{hint}")


def _data_folder_problem(folder: Path, source: SourceConfig) -> str | None:
    if source.format in FILE_FORMATS:
        return f"{source.path} is a folder; format {source.format} wants a file"
    if source.format == "auto" and not any((folder / name).is_file() for name in DISK_FILES):
        return f"the folder {source.path} was not written by save_to_disk of datasets: name the files in it"
    return None


def check_folders(recipe: Recipe, *, resume: Resume, overwrite: bool) -> None:
    """Raises RunFolderError if `open_run` would refuse the folder, or if the run reads files that it would move."""
    if "" not in recipe.stages():
        # A later stage may have no run yet, so for stages `--resume` means "start or continue".
        resume = "never" if resume == "never" else "auto"
    for _, stage in recipe.given_stages():
        folder = Path(stage.run.folder)
        check_run(folder, resume=resume, overwrite=overwrite)
        if overwrite:
            _refuse_own_inputs(stage, folder)


def _refuse_own_inputs(recipe: TrainerRecipe, folder: Path) -> None:
    """Raises RunFolderError if the run reads files from `folder`: moved aside, they would be missing on resume."""
    for each in inputs_of(recipe):
        if each.kind in ("folder", "file") and folder.resolve() in Path(each.name).expanduser().resolve().parents:
            raise RunFolderError(
                f"{each.key} is {each.name}, in the folder {folder} that --overwrite would move aside: give "
                "run.folder another name"
            )


def secret_problem(variable: str) -> str | None:
    """Why the environment variable gives no token; None if it gives one."""
    value = os.environ.get(variable, "")
    if not value.strip():
        return f"the environment variable {variable} is not set: it should hold the token of the reward service"
    if not value.isascii() or not value.isprintable() or " " in value:
        return f"the environment variable {variable} has blanks or other characters that no token has"
    return None


def read_secret(variable: str) -> str:
    """The token. Raises ConfigError if there is none."""
    if problem := secret_problem(variable):
        raise ConfigError(problem)
    return os.environ[variable]


def check_push_name(push: str | None, *, private: bool) -> None:
    """Raises UserError if an export cannot be pushed under this name."""
    if push is None and private:
        raise UserError("private is for a model that push creates: give the model's name on the Hub as push too")
    if push is not None and not is_hub_name(push):
        raise UserError(f"push needs a name on the Hub, for example me/my-model, got {push!r}")


def check_push(recipe: TrainerRecipe) -> None:
    """Raises ConfigError for a push that cannot work. The Hub is not asked."""
    push = recipe.run.push
    if push is None:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError("run.push needs the Hub, and HF_HUB_OFFLINE is set: unset it, or leave run.push out")
    if not get_token():
        raise ConfigError(
            f"run.push.name is {push.name}, and there is no token of the Hub: run `hf auth login`, or set HF_TOKEN"
        )
    key, model = next(iter(recipe.models().items()))
    if model.lora is not None and model.path is not None and is_local(model.path):
        raise ConfigError(
            f"run.push would push an adapter whose base, {key}.path, is the folder {model.path} of this machine, so "
            "that it would load nowhere else: leave run.push out, and use proximo export --merge --push at the end"
        )
