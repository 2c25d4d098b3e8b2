"""`proximo generate`: samples responses from a trained model, ranked by a reward on request."""

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from proximo.checkpoint import atomic
from proximo.config.engine import EngineConfig, LocalEngineConfig
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.errors import UserError
from proximo.message_text import count_of, format_number
from proximo.models.language import LanguageModel
from proximo.models.loading import check_tokenizer, load_language_model
from proximo.models.precision.placement import Precision, resolve_device
from proximo.models.pretrained.sources import ModelSource
from proximo.models.pretrained.vocabulary import load_tokenizer, resize_vocabulary, vocabulary_size
from proximo.ppo.trainer_arguments import as_source
from proximo.records import Prompt, Response, Scored
from proximo.rewards.function_binding import import_function
from proximo.rewards.source import CheckingSource, RewardSource
from proximo.rollout.engine import Engine, push_to
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.stopping import ending_ids
from proximo.run.checkpoint_lookup import language_model_path, reward_model_path
from proximo.run.make.engine import Sampling, check_engine, engine_of, make_servers
from proximo.run.make.models import DeviceSpec, build_reward_source, reward_model_config
from proximo.user_code import IMPORT_PATH


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Options of `proximo generate`."""

    sampling: SamplingOptions
    num_samples: int = 1
    """Responses per prompt."""
    seed: int = 0
    """The same seed, prompts and number of samples give the same responses."""
    chat: bool = False
    """Render each prompt as a user turn with the chat template."""
    checkpoint: str = "latest"
    """If the model is a run: `latest`, `best` or `step-N`."""
    device: str = "auto"
    reward: str | RewardSource | None = None
    """Ranks responses: a source, `package.module:function`, or a reward model (a run, a folder, a Hub name)."""
    keep: int | None = None
    """Keep this many of the best responses per prompt; needs `reward`."""
    engine: EngineConfig = field(default_factory=LocalEngineConfig)
    """The engine. With vLLM the server uses the devices, and this process reads the model to host memory."""
    output: Path | None = None
    """Write one JSON line per response to this new file instead of printing text."""


def run_generate(model: str, prompts: Sequence[str], options: GenerateOptions) -> int:
    """Print the responses to each prompt and return the exit status. A single response is printed without a heading."""
    if options.reward is None:
        responses = generate(model, prompts, options)
        shown, scores = responses, [None] * len(responses)
    else:
        ranked = generate_ranked(model, prompts, options)
        shown, scores = [each.response for each in ranked], [each.score if each.valid else None for each in ranked]
    if options.output is not None:
        lines = [
            json.dumps(_record(each, score), ensure_ascii=False) for each, score in zip(shown, scores, strict=True)
        ]
        atomic.write_bytes_atomically(options.output, ("\n".join(lines) + "\n").encode(errors="replace"))
        return 0
    for line in response_lines(shown, scores, num_samples=options.num_samples):
        print(line)
    return 0


def _record(response: Response, score: float | None) -> dict[str, Any]:
    asked = response.prompt
    return {
        "prompt": asked.text if asked.messages is None else [dict(message) for message in asked.messages],
        "response": response.text,
        "finish": response.finish.value,
        "num_tokens": len(response.token_ids),
        "score": score,
    }


def generate_ranked(model: str, prompts: Sequence[str], options: GenerateOptions) -> list[Scored]:
    """Scored responses, best first for each prompt; at most `keep` per prompt if given. Needs a reward.

    Raises what `generate` raises.
    """
    _check_keep(options)
    given = options.reward
    if isinstance(given, str) and IMPORT_PATH.fullmatch(given):  # before a model is loaded
        given = as_source(import_function(given))
    assert given is not None
    if isinstance(given, CheckingSource):
        asked = [Prompt(id=str(number), token_ids=(), text=text) for number, text in enumerate(prompts, start=1)]
        given.check_prompts(asked, {})
    path = language_model_path(model, options.checkpoint)
    responses = _generate(path, prompts, options)
    if not isinstance(given, str):
        source = given
    else:
        config = reward_model_config(reward_model_path(given))
        tokenizer = load_tokenizer(path)
        device_spec = DeviceSpec(device=resolve_device(options.device), precision=Precision.FLOAT32, seed=options.seed)
        source = build_reward_source(config, tokenizer, device_spec=device_spec, tokens_per_microbatch=8192)
    return rank_by_score(source.score(responses), size=options.num_samples, keep=options.keep or options.num_samples)


def rank_by_score(scored: Sequence[Scored], *, size: int, keep: int) -> list[Scored]:
    """The best `keep` of each group of `size` responses, highest score first; unscored responses come last."""

    def rank(each: Scored) -> tuple[bool, float]:
        return not each.valid, -each.score if each.valid else 0.0

    groups = [scored[start : start + size] for start in range(0, len(scored), size)]
    return [each for group in groups for each in sorted(group, key=rank)[:keep]]


def generate(model: str, prompts: Sequence[str], options: GenerateOptions) -> list[Response]:
    """Responses of a run's policy, a model folder or a Hub name, grouped by prompt.

    Raises ModelError, RunFolderError or DataError if the model cannot be loaded, UserError for no prompt, a too long
    one, and a `keep` without reward or above the number of samples.
    """
    _check_keep(options)
    return _generate(language_model_path(model, options.checkpoint), prompts, options)


def _check_keep(options: GenerateOptions) -> None:
    if options.keep is None:
        return
    if options.reward is None:
        raise UserError("keep selects the best responses and needs a reward to rank them")
    if not 1 <= options.keep <= options.num_samples:
        raise UserError(
            f"keep ({options.keep}) chooses among num_samples ({options.num_samples}): give a number from 1 to that"
        )


def _generate(path: str, prompts: Sequence[str], options: GenerateOptions) -> list[Response]:
    if isinstance(prompts, str) or not prompts:
        raise UserError(f"prompts are a list of at least one text, such as ['Say hello.'], got {prompts!r:.60}")
    tokenizer = load_tokenizer(path)
    rows = [Row(source="prompt", number=number, values={"prompt": text}) for number, text in enumerate(prompts, 1)]
    asked, _ = load_prompts(rows, tokenizer, PromptOptions(as_messages=options.chat))
    key = RandomKey(seed=options.seed, purpose="generate")
    with _engine(path, tokenizer, asked, options) as engine:
        return engine.generate(asked, num_samples=options.num_samples, options=options.sampling, key=key)


@contextmanager
def _engine(
    path: str, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: GenerateOptions
) -> Generator[Engine]:
    """The engine that samples from a model. Servers that it starts end with it."""
    if options.engine.kind == "local":
        yield load_engine(path, tokenizer, device=options.device)[1]
        return
    check_engine(options.engine)
    language, _ = load_engine(path, tokenizer, device="cpu")
    longest = max(len(prompt.token_ids) for prompt in prompts) + options.sampling.max_new_tokens
    # A server of an address may be one that returns sampling masks.
    sampling = Sampling(
        temperature=options.sampling.temperature,
        max_tokens=longest,
        leaves_out_tokens=options.engine.kind == "vllm" and bool(options.engine.addresses),
    )
    with ExitStack() as started:
        servers = make_servers(options.engine, language, tokenizer, sampling, path=path, started=started)
        engine = engine_of(servers, language, tokenizer)
        assert engine is not None
        push_to(engine, language, version=0)
        yield engine


def load_engine(path: str, tokenizer: PreTrainedTokenizerBase, *, device: str) -> tuple[LanguageModel, LocalEngine]:
    """A model, with its adapter if it has one, and an engine that samples from it."""
    check_tokenizer(ModelSource(path=path), tokenizer, role="policy")
    language = load_language_model(ModelSource(path=path), device=resolve_device(device))
    resize_vocabulary(language.base, vocabulary_size(tokenizer))  # an adapter's tokenizer may have more tokens
    return language, LocalEngine(language, tokenizer, eos_token_ids=ending_ids(language.base, tokenizer))


def response_lines(responses: Sequence[Response], scores: Sequence[float | None], *, num_samples: int) -> Iterator[str]:
    """The text of a single response; several are listed under their prompts with number, finish reason and score."""
    if len(responses) == 1:
        yield responses[0].text
        return
    shown = None
    for response, score in zip(responses, scores, strict=True):
        if response.prompt.id != shown:
            shown = response.prompt.id
            yield f"# {response.prompt.text or (response.prompt.messages or ({},))[-1].get('content')}"
        number = f"sample {response.sample_index + 1}, " if num_samples > 1 else ""
        judged = "" if score is None else f", score {format_number(score)}"
        yield f"## {number}{count_of(len(response.token_ids), 'token')}, ended by {response.finish.value}{judged}"
        yield f"{response.text}\n"
