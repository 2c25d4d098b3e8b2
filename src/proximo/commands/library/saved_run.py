"""A run folder as an object: its metrics and samples, and the commands for a run as methods."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, overload

from proximo import session_functions
from proximo.errors import UserError
from proximo.user_code import functions_of_the_working_directory

if TYPE_CHECKING:
    from proximo.commands.chat_session import Dialogue
    from proximo.commands.evaluate import Evaluation
    from proximo.commands.export import DType, Role
    from proximo.metrics.run_files import Run
    from proximo.rewards.weighted import Reward
    from proximo.rollout.responses import Ranked, Responses
    from proximo.rollout.sampling import SamplingOptions

Sampled = bool | int | float | tuple[int, ...] | tuple[str, ...] | None
"""Types of the fields of `SamplingOptions`."""
FRAME = '<iframe title="report" sandbox="" style="width: 100%; height: 640px; border: 0" srcdoc="{page}"></iframe>'


class ReportPage(PosixPath):
    """The path of a report. A notebook shows the page itself, in a frame in which no script runs."""

    def _repr_html_(self) -> str | None:
        if self.suffix != ".html" or not self.is_file():  # for example a parent, which has the same type
            return None
        return FRAME.format(page=escape(self.read_text(encoding="utf-8")))


class SavedRun:
    """A run in its folder, finished or not. In a pipeline's folder it is the last stage that has run."""

    def __init__(self, folder: str | Path, *, functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
        """`functions`: the Python functions of the run, by name; `Training.run` passes them on.

        Raises RunFolderError if there is no run in the folder.
        """
        from proximo.run.checkpoint_lookup import find_run

        self.folder = find_run(Path(folder))
        self._whole = Path(folder)
        self._functions = dict(functions or {})

    def __repr__(self) -> str:
        return f"SavedRun({str(self.folder)!r}, {self.progress})"

    def __fspath__(self) -> str:
        """The folder that was given, so that a run can be used as a path: `compare([one, other])`."""
        return str(self._whole)

    def read(self) -> "Run":
        """The files of the run: metrics, samples, configuration, outcome."""
        from proximo.metrics.run_files import read_run

        return read_run(self.folder)

    @property
    def progress(self) -> str:
        """How far the run has come: `step 3 of 5, unfinished`."""
        read = self.read()
        done = f"step {read.last_step} of {read.total_steps}"
        if read.outcome is None:
            return f"{done}, unfinished"
        reason = f", but {read.outcome.reason}" if read.outcome.state == "finished" and read.outcome.reason else ""
        return f"{done}, {read.outcome.state}{reason}"

    @property
    def metrics(self) -> list[Mapping[str, float]]:
        """The metrics of each step, with `step`. docs/metrics.md explains them."""
        return list(self.read().lines)

    def evaluate(
        self,
        *,
        checkpoint: str = "latest",
        num_prompts: int | None = None,
        samples_per_prompt: int | None = None,
        solved_score: float | None = None,
        greedy: bool | None = None,
        engine: str | None = None,
    ) -> "Evaluation":
        """The metrics and samples of a checkpoint on held-out data; None takes the value of the run's evaluations.

        `samples_per_prompt`: responses to each prompt, for pass@k. `solved_score`: the least score that solves one.
        `engine`: as for `generate`.

        Raises UserError if the run has no held-out data, or samples none and is asked to sample otherwise.
        """
        from proximo.commands.evaluate import evaluate

        with self._ready():
            return evaluate(
                self.folder,
                checkpoint=checkpoint,
                num_prompts=num_prompts,
                samples_per_prompt=samples_per_prompt,
                solved_score=solved_score,
                greedy=greedy,
                engine=engine,
            )

    @overload
    def generate(
        self, prompts: Sequence[str], *, reward: "Reward | str | os.PathLike[str]", **options: Any
    ) -> "Ranked": ...
    @overload
    def generate(self, prompts: Sequence[str], *, reward: None = None, **options: Any) -> "Responses": ...
    def generate(
        self,
        prompts: Sequence[str],
        *,
        reward: "Reward | str | os.PathLike[str] | None" = None,
        keep: int | None = None,
        num_samples: int = 1,
        seed: int = 0,
        chat: bool = False,
        checkpoint: str = "latest",
        engine: str = "local",
        **sampling: Sampled,
    ) -> "Responses | Ranked":
        """Responses of the run's policy, grouped by prompt. `sampling`: the fields of `SamplingOptions`.

        `chat`: render each prompt as a user turn with the chat template. `max_new_tokens` is 128 if it is not given.
        `reward`: scores the responses, which are then `Scored` and sorted best first for each prompt: a function, a
        source or a list as for training, an import path, or a reward model (a run, a folder, a name on the Hub).
        `keep`: at most so many of each prompt. `engine`: `local`, `vllm`, or the address of a running vLLM server.

        Raises UserError for no prompts, a too long one, and other options than these.
        """
        from proximo.commands.generate import GenerateOptions, generate, generate_ranked
        from proximo.config.engine import engine_named
        from proximo.ppo.trainer_arguments import as_source
        from proximo.rollout.responses import Ranked, Responses

        options = GenerateOptions(
            sampling=_sampling(sampling),
            num_samples=num_samples,
            seed=seed,
            chat=chat,
            checkpoint=checkpoint,
            reward=os.fspath(reward) if isinstance(reward, str | os.PathLike) else as_source(reward),
            keep=keep,
            engine=engine_named(engine),
        )
        with self._ready():
            if options.reward is None:
                return Responses(generate(str(self.folder), prompts, options))
            return Ranked(generate_ranked(str(self.folder), prompts, options))

    def chat(
        self,
        *,
        system: str | None = None,
        seed: int = 0,
        checkpoint: str = "latest",
        **sampling: Sampled,
    ) -> "Dialogue":
        """A dialogue with the run's policy: `answer("Hello").text`, and `reset()`. `sampling`: as for `generate`."""
        from proximo.commands.chat_session import Dialogue

        return Dialogue(str(self.folder), _sampling(sampling), seed=seed, system=system, checkpoint=checkpoint)

    def export(
        self,
        out: str | Path,
        *,
        role: "Role | None" = None,
        checkpoint: str = "latest",
        merge: bool = False,
        dtype: "DType | None" = None,
        push: str | None = None,
        private: bool = False,
    ) -> Path:
        """Write a model as a Hugging Face folder and return the folder; by default the model that was trained.

        `push`: also upload it to the Hub under this name, created as `private` if it is missing. Prints the folder and
        the address on the Hub.

        Raises RunFolderError if `out` exists, UserError for options that do not fit the model, and ProximoError if the
        folder was written but the upload failed.
        """
        from proximo.commands.export import run_export

        if not isinstance(out, str | os.PathLike):
            raise UserError(f"out is the folder to write, as text or a Path, got {out!r:.60}")
        run_export(
            self.folder,
            Path(out),
            role=role,
            checkpoint=checkpoint,
            merge=merge,
            dtype=dtype,
            push=push,
            private=private,
        )
        return Path(out)

    def report(self, out: str | os.PathLike[str] | None = None) -> ReportPage:
        """Write the report page, of a pipeline with all its stages, and return its path; a notebook shows it.

        `out`: the file, by default `report.html` in the run's folder.
        """
        from proximo.commands.report import make_report

        return ReportPage(make_report(self._whole, None if out is None else Path(out)).page)

    @contextmanager
    def _ready(self) -> Generator[None]:
        session_functions.publish(self._functions)
        with functions_of_the_working_directory():
            yield


def compare(
    runs: "Sequence[SavedRun | str | os.PathLike[str]]", out: str | os.PathLike[str] = "comparison.html"
) -> ReportPage:
    """Write a page that shows 2 to 9 runs side by side, as `proximo report` does for several, and return its path.

    A notebook shows the page.

    Raises RunFolderError for a folder without a run, a run without metrics, or nothing to compare, and UserError for
    the number of runs and an `out` that cannot be written or is not such a page.
    """
    from proximo.commands.report import make_comparison

    if isinstance(runs, str | os.PathLike):
        raise UserError(f"runs is a list of folders or SavedRuns, got one: write [{str(runs)!r}, ...]")
    return ReportPage(make_comparison([Path(run) for run in runs], Path(out)).page)


def _sampling(given_fields: Mapping[str, Any]) -> "SamplingOptions":
    """The sampling options. Raises TypeError for an unknown field."""
    from proximo.rollout.sampling import SamplingOptions

    asked: dict[str, Any] = {"max_new_tokens": 128, **given_fields}
    return SamplingOptions(**asked)
