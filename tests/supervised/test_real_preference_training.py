"""Every form of real preference data trains a reward model, by the recipe that the documentation shows."""

import math
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from proximo.config.loader import load_recipe
from proximo.metrics.values import MetricValue
from proximo.supervised.reward_recipe import RewardRecipe
from proximo.supervised.reward_trainer import build_task
from real_data import real_data

RECIPE = Path(__file__).parents[2] / "examples" / "preferences.yaml"
NUM_ROWS = 24
NUM_HELD_OUT = 8
TINY = (
    "run.num_threads=1",
    "model.config.hidden_size=16",
    "model.config.intermediate_size=16",
    f"data.held_out_rows={NUM_HELD_OUT}",
    "reward.pairs_per_step=16",
    "reward.num_epochs=8",
    "reward.optimizer.learning_rate=0.01",
    "reward.optimizer.warmup_updates=0",
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer as a folder, the way docs/real-data.md makes it."""
    folder = tmp_path_factory.mktemp("tiny_bpe")
    file = real_data("tokenizers", "tiny_bpe", "tiny_bpe_tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def recipe(tokenizer_folder: Path, run_folder: Path, *overrides: str) -> RewardRecipe:
    """The example with the real paths, and small."""
    plain = load_recipe("reward", str(RECIPE)).recipe
    assert isinstance(plain, RewardRecipe)
    paths = [
        f"data.sources.{index}.path={real_data(str(source.path).removeprefix('data/'))}"
        for index, source in enumerate(plain.data.sources)
    ]
    places = (f"run.folder={run_folder}", f"tokenizer.path={tokenizer_folder}")
    loaded = load_recipe("reward", str(RECIPE), [*places, *paths, *TINY, *overrides]).recipe
    assert isinstance(loaded, RewardRecipe)
    return loaded


def number(metric: MetricValue) -> float:
    assert metric.value is not None
    return metric.value


@pytest.mark.parametrize("name", ["hh_rlhf", "pandalm", "oasst", "sharegpt", "llmbar"])
def test_a_reward_model_learns_pairs_of(name: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    whole = recipe(tokenizer_folder, tmp_path)
    chosen = [source for source in whole.data.sources if name in str(source.path)]
    sources = tuple(source.model_copy(update={"max_rows": NUM_ROWS}) for source in chosen)
    data = whole.data.model_copy(update={"sources": sources})
    task = build_task(whole.model_copy(update={"data": data}))
    losses = [number(task.step(step).metrics["reward_model/loss"]) for step in range(1, task.num_steps + 1)]
    assert all(math.isfinite(loss) for loss in losses)
    # Few pairs seen often are learnt by heart; that the training pairs are the right way round is tested in data/.
    assert losses[-1] < 0.8 * losses[0]
    record = task.evaluate()
    assert 0 <= number(record.metrics["evaluation/pair_accuracy"]) <= 1


def test_the_five_sets_train_as_one_mixture(tokenizer_folder: Path, tmp_path: Path) -> None:
    caps = [f"data.sources.{index}.max_rows=8" for index in range(5)]
    task = build_task(recipe(tokenizer_folder, tmp_path, *caps, "reward.num_epochs=1"))
    assert 0 < len(task.examples) <= 40 - NUM_HELD_OUT
    origins = {pair.id.rpartition("-")[0] for pair in task.examples}
    assert len(origins) == 5
    assert math.isfinite(number(task.step(1).metrics["reward_model/loss"]))
