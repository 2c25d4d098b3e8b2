"""Text from a trained model, for a person to read. Not the rollouts of training, and no scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.models.language import LanguageModel
from proximo.models.loading import load_language_model
from proximo.models.placement import resolve_device
from proximo.models.sources import ModelSource
from proximo.models.vocabulary import check_vocabulary, load_tokenizer, resize_vocabulary, vocabulary_size
from proximo.records import Response
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.trainers.endings import ending_ids
from proximo.trainers.saved import language_model_path


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What is asked for, beside the prompts."""

    sampling: SamplingOptions
    num_samples: int = 1
    """Responses to each prompt."""
    seed: int = 0
    """The same seed, prompts and number of samples give the same text."""
    chat: bool = False
    """Render a prompt as the user's turn with the chat template, instead of continuing it."""
    checkpoint: str = "latest"
    """Where the model is a run: `latest`, `best` or `step-N`."""
    device: str = "auto"


def run_generate(model: str, prompts: Sequence[str], options: GenerateOptions) -> int:
    """Print responses to each prompt; a single response is printed alone. Returns the exit status."""
    for line in response_lines(generate(model, prompts, options), num_samples=options.num_samples):
        print(line)
    return 0


def generate(model: str, prompts: Sequence[str], options: GenerateOptions) -> list[Response]:
    """Responses of a run's policy, a model folder or a Hub name; prompt after prompt, sample after sample.

    Raises ModelError, RunFolderError or DataError for what cannot be loaded, UserError for a prompt that does not fit.
    """
    path = language_model_path(model, options.checkpoint)
    tokenizer = load_tokenizer(path)
    rows = [Row(source="prompt", number=number, values={"prompt": text}) for number, text in enumerate(prompts, 1)]
    asked, _ = load_prompts(rows, tokenizer, PromptOptions(as_messages=options.chat))
    _, engine = load_engine(path, tokenizer, device=options.device)
    key = RandomKey(seed=options.seed, purpose="generate")
    return engine.generate(asked, num_samples=options.num_samples, options=options.sampling, key=key)


def load_engine(path: str, tokenizer: PreTrainedTokenizerBase, *, device: str) -> tuple[LanguageModel, LocalEngine]:
    """A model, with its adapter where it has one, and the engine that samples from it."""
    language = load_language_model(ModelSource(path=path), device=resolve_device(device))
    if language.has_adapter:  # its base has no rows for the tokens that the run added
        resize_vocabulary(language.base, vocabulary_size(tokenizer))
    check_vocabulary(language.base, tokenizer, role="policy")
    return language, LocalEngine(language, tokenizer, eos_token_ids=ending_ids(language.base, tokenizer))


def response_lines(responses: Sequence[Response], *, num_samples: int) -> Iterator[str]:
    """The text of one response; of several, each below its prompt, with its number and why it ended."""
    if len(responses) == 1:
        yield responses[0].text
        return
    for response in responses:
        if response.sample_index == 0:
            yield f"# {response.prompt.text or (response.prompt.messages or ({},))[-1].get('content')}"
        number = f"sample {response.sample_index + 1}, " if num_samples > 1 else ""
        yield f"## {number}{len(response.token_ids)} tokens, ended by {response.finish.value}"
        yield f"{response.text}\n"
