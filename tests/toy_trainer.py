"""A trainer from outside of the package, whole in one file: fine-tuning whose loss has a weight. Registers nothing.

`register(TOY)` makes it a trainer like those of Proximo; TOY_CHAIN is a pipeline that has it as its second stage.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field

from proximo.commands.pipeline.recipe import StagedRecipe
from proximo.config.data import TextDataConfig
from proximo.config.recipe import TrainerRecipe
from proximo.config.run import ModelConfig, OptimizerConfig, TokenizerConfig
from proximo.config.schema.base import Section
from proximo.data.examples import ExampleOptions, TextExample, load_text_examples
from proximo.learner.text_batches import text_batches, text_nats
from proximo.learner.update import UpdateResult
from proximo.metrics.alarms import WARNING, Rule
from proximo.metrics.definitions import DOWN, Curve, Metric, Trace, held_out
from proximo.metrics.shared_declarations import COMMON_RULES, HELD_OUT_LOSS, SPEED, TrainerMetrics
from proximo.metrics.values import Last, Mean, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.plan.cost_model import likelihood_loss
from proximo.plan.fake_tensor_profiler import building
from proximo.plan.stages import StageContext, StageCosts
from proximo.plan.weightless_models import language_model
from proximo.run.dry_run import data_lines, describe_model, epoch_lines, trained_part
from proximo.run.make.data import options_of, read_split
from proximo.run.make.models import build_language_model, build_tokenizer, prepare_device
from proximo.run.resumption import inputs_fingerprint
from proximo.run.task import Record
from proximo.supervised.building import plan_update
from proximo.supervised.sft_recipe import SFTRecipe
from proximo.supervised.task import SupervisedTask, TaskInputs, mean_loss
from proximo.trainer_kinds import RecipeKind, TrainerKind


class ToyConfig(Section):
    """Fine-tuning with a weight."""

    num_epochs: float = Field(1.0, gt=0)
    """Passes over the data."""
    examples_per_step: int = Field(4, ge=1)
    """Examples of one update."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Tokens of one pass."""
    weight: float = Field(1.0, gt=0)
    """Factor of the loss."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2, schedule="linear")
    """Optimizer of the model."""

    @property
    def rows_per_update(self) -> int:
        return self.examples_per_step


class ToyRecipe(TrainerRecipe):
    """`proximo toy`."""

    memory_settings: ClassVar[str] = "lower toy.tokens_per_microbatch"

    model: ModelConfig
    """The model that is trained."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Its tokenizer."""
    data: TextDataConfig
    """What it learns from."""
    toy: ToyConfig = ToyConfig()
    """How it learns."""

    def longest_sequence(self) -> dict[str, int]:
        return {"data.max_tokens": self.data.max_tokens}


class ToyTask(SupervisedTask[LanguageModel, TextExample, ToyConfig]):
    role = "policy"
    metric_group = "toy"
    best_metric: str | None = "evaluation/loss"
    best_is_lowest: bool = True

    def learn(
        self, examples: Sequence[TextExample], *, seed: int | None
    ) -> tuple[UpdateResult, dict[str, MetricValue], int]:
        count = sum(example.num_targets for example in examples)
        weight = self.config.weight / count
        batches = text_batches(examples, token_budget=self.config.tokens_per_microbatch, device=self.model.device)
        result = self.learners[self.role].update(
            batches, lambda batch: (weight * text_nats(self.model, batch), None), seed=seed
        )
        return result, {"toy/loss": mean_loss(result, count)}, sum(len(example.token_ids) for example in examples)

    @torch.no_grad()
    def evaluate(self, num_rows: int | None = None) -> Record | None:
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        batches = text_batches(held_out, token_budget=self.config.tokens_per_microbatch, device=self.model.device)
        nats = sum(text_nats(self.model, batch).item() for batch in batches)
        return Record(metrics={"evaluation/loss": Mean(nats, sum(example.num_targets for example in held_out))})


TOY_METRICS = TrainerMetrics(
    tables={
        "Toy": (
            Metric("toy/loss", Mean, "nats", DOWN, "The loss."),
            Metric("toy/gradient_norm", Mean, "norm", definition="Before clipping."),
            Metric("toy/learning_rate", Last, "per update", definition="Of the last update."),
            Metric("toy/skipped_updates", Sum, "updates", definition="Updates left out."),
        )
    },
    evaluation=(HELD_OUT_LOSS,),
    watched={"toy/loss": "toy loss", "evaluation/loss": "held-out loss"},
    before_after={"Toy loss": ("evaluation/loss", "toy/loss")},
    curves=(
        Curve("loss", "Loss of the toy", "nats").draws(
            Trace("toy/loss", "training"),
            held_out("evaluation/loss"),
            healthy="Falls.",
        ),
        *SPEED,
    ),
    rules=(
        Rule(
            "The toy is heavy",
            WARNING,
            lambda run: "It is above 1." if max(run.series("toy/loss").values, default=0) > 1 else None,
        ).worded(
            when="toy/loss is above 1 in any step",
            advice="Lower toy.weight.",
        ),
        *COMMON_RULES,
    ),
)


class ToyKind(TrainerKind[ToyRecipe]):
    name = "toy"
    help = """Fine-tune with a weight.

    \b
    proximo toy toy.yaml --dry-run
    """
    title = "Toy training"
    short_title = "Toy"
    task = "training as a toy"
    card_settings = ("toy.num_epochs", "toy.weight")
    schema = ToyRecipe
    metrics = TOY_METRICS

    def build(self, recipe: ToyRecipe) -> ToyTask:
        device_spec, rows = prepare_device(recipe.run), read_split(recipe.data, seed=recipe.run.seed)
        tokenizer = build_tokenizer(recipe.tokenizer, model_path=recipe.model.path)
        how = options_of(ExampleOptions, recipe.data)
        inputs = TaskInputs(
            model=build_language_model(recipe.model, tokenizer, device_spec=device_spec),
            tokenizer=tokenizer,
            examples=load_text_examples(rows.training, tokenizer, how)[0],
            held_out=load_text_examples(rows.held_out, tokenizer, how)[0] if rows.held_out else [],
            config=recipe.toy,
            seed=recipe.run.seed,
            fingerprint=inputs_fingerprint(rows, tokenizer, {}),
        )
        return ToyTask(inputs)

    def dry_run(self, recipe: ToyRecipe) -> Iterator[tuple[str, str]]:
        yield "model", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
        yield from data_lines(recipe, recipe.data)
        batch = f"{recipe.toy.examples_per_step} examples with weight {recipe.toy.weight:g}"
        yield from epoch_lines(batch, recipe.toy.num_epochs, "examples", recipe.data.max_tokens)

    def plan(self, recipe: ToyRecipe, context: StageContext) -> StageCosts:
        configs = context.configs
        config = configs.sized(recipe.model, configs.num_tokens(recipe.tokenizer, recipe.model))
        with building():
            model = language_model(config, recipe.model, precision=context.precision)
        return plan_update(
            {"policy": model},
            recipe.toy,
            likelihood_loss(model),
            max_tokens=recipe.data.max_tokens,
            sequences_per_row=1,
            context=context,
        )

    def ineffective_keys(self, recipe: ToyRecipe, prefix: str) -> Iterator[str]:
        if recipe.toy.weight == 1:
            yield f"{prefix}toy.weight is 1: it changes nothing"


class ToyChainRecipe(StagedRecipe):
    """`proximo toy-chain`."""

    sft: SFTRecipe | None = None
    """First stage."""
    toy: ToyRecipe
    """Second stage."""


class ToyChainKind(RecipeKind):
    name = "toy-chain"
    help = "Fine-tune, then train the toy."
    schema = ToyChainRecipe

    def recognises(self, tree: Any) -> bool:
        return isinstance(tree.get("toy"), dict) and "model" not in tree


TOY, TOY_CHAIN = ToyKind(), ToyChainKind()
