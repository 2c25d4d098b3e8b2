"""The reward of the recipe trl-classic on a tiny random classifier, and the recipe trained with it for a step."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, DistilBertConfig

from builders import tiny_language_model, tiny_tokenizer
from proximo.cli import main
from proximo.recipes.sentiment import positive

LONGEST = 24


@pytest.fixture
def classifier(tmp_path):
    """A folder with a classifier that is no causal model, and a tokenizer that pads and knows its limit."""
    config = DistilBertConfig(
        vocab_size=64,
        dim=16,
        hidden_dim=32,
        n_layers=1,
        n_heads=2,
        max_position_embeddings=LONGEST,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    tokenizer = tiny_tokenizer(chat=False)
    tokenizer.pad_token = "<eos>"
    tokenizer.model_max_length = LONGEST
    folder = tmp_path / "classifier"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model.eval(), tokenizer


def test_a_score_is_the_logit_of_the_label_for_prompt_and_response_together(classifier):
    folder, model, tokenizer = classifier
    prompts, responses = ["a film ", "what ", "so "], ["good", "a bad and long one", "x" * 60]
    scores = positive(prompts, responses, [{}] * 3, model=str(folder), batch_size=2)
    for prompt, response, score in zip(prompts, responses, scores, strict=True):
        ids = tokenizer(prompt + response)["input_ids"][:LONGEST]
        with torch.no_grad():
            assert score == pytest.approx(model(torch.tensor([ids])).logits[0, 1].item(), abs=1e-5)
    assert len({round(score, 3) for score in scores}) == 3
    other = positive(prompts, responses, [{}] * 3, model=str(folder), label="NEGATIVE")
    assert other[0] != pytest.approx(scores[0], abs=1e-3)


def test_a_label_that_the_classifier_has_not_is_named(classifier):
    with pytest.raises(ValueError, match="labels .*NEGATIVE.* not GOOD"):
        positive(["a"], ["b"], [{}], model=str(classifier[0]), label="GOOD")


def test_the_recipe_trains_with_it(classifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_language_model().save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    rows = [{"text": f"the film was {n} times as long as a day and more"} for n in range(12)]
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["ppo.num_steps=1", "ppo.prompts_per_step=4", "ppo.minibatch_responses=4", "data.held_out_rows=2"]
    where = ["model.path=model", "data.sources.0.path=reviews.jsonl", f"reward.0.kwargs.model={classifier[0]}"]
    # The tiny tokenizer has a token for each character.
    length = ["data.max_prompt_tokens=60", "ppo.rollout.max_new_tokens=5"]
    assert main(["ppo", "trl-classic", *where, *small, *length, "run.tensorboard=false", "run.device=cpu"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/trl-classic/samples.jsonl").read_text().splitlines()]
    assert lines
    assert all(line["prompt"].count(" ") == 4 for line in lines)
