"""A student with half of the teacher's layers, and how near students come to their teacher (docs/results.md).

    python examples/real/half.py make models/smollm2 models/smollm2-half
    python examples/real/half.py compare models/smollm2 models/smollm2-half runs/half-sft runs/half-distill

`make` keeps the first eight layers and the last seven of thirty, which harms a model without training least of what was
tried, and lets the teacher answer the prompts of training: `data/half/`. `compare` measures on held-out prompts.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from instructions import HELD_OUT_EVERY
from sentiment import Row
from torch import nn
from transformers import PreTrainedModel

from data import read_rows, write_rows
from proximo.commands.generate import load_engine
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row as DataRow
from proximo.models.pretrained.vocabulary import load_tokenizer
from proximo.records import Finish, Response
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.run.checkpoint_lookup import language_model_path

DATA = Path("data")
SYSTEM = "Answer in one short sentence."
TOKENS = 40
SAMPLES = 4
MOST_WORDS = 40
FIRST, LAST = 8, 7
SHOWN = 10


def prompts(*, held_out: bool) -> list[str]:
    """The tasks of self-instruct and the prompts of PandaLM that have at most 40 words; every fifth is held out."""
    tasks = read_rows(DATA / "instruct/self_instruct_seed_tasks.jsonl")
    pairs = read_rows(DATA / "preferences/prompts_train.jsonl")
    texts = [" ".join(row["instruction"].split()) for row in tasks] + [row["prompt"] for row in pairs]
    short = [text for text in texts if len(text.split()) <= MOST_WORDS]
    return [text for number, text in enumerate(short) if (number % HELD_OUT_EVERY == 0) is held_out]


def answers_of(model: str, texts: Sequence[str], *, samples: int) -> tuple[PreTrainedModel, list[Response]]:
    """The model, and what it answers."""
    path = language_model_path(model)
    tokenizer = load_tokenizer(path)
    language, engine = load_engine(path, tokenizer, device="cpu")
    rows = [DataRow(source="prompt", number=number, values={"prompt": text}) for number, text in enumerate(texts, 1)]
    asked, _ = load_prompts(rows, tokenizer, PromptOptions(as_messages=True, system=SYSTEM))
    options, key = SamplingOptions(max_new_tokens=TOKENS), RandomKey(seed=0, purpose="generate")
    answers = engine.generate(asked, num_samples=samples, options=options, key=key)
    language.base.set_attn_implementation("sdpa")  # From here on whole sequences are given to it directly.
    return language.base, answers


def make(teacher: str, folder: str) -> None:
    """Student and training data. An answer that was cut at the limit has no end to learn, and is left out."""
    texts = prompts(held_out=False)
    model, answers = answers_of(teacher, texts, samples=SAMPLES)
    write_rows(DATA / "half/prompts.jsonl", [{"prompt": text} for text in texts])
    rows = [
        {"prompt": texts[number // SAMPLES], "response": answer.text}
        for number, answer in enumerate(answers)
        if answer.finish is not Finish.LENGTH
    ]
    write_rows(DATA / "half/answers.jsonl", rows)
    layers = model.model.layers
    model.model.layers = nn.ModuleList([*layers[:FIRST], *layers[-LAST:]])
    model.config.num_hidden_layers = FIRST + LAST
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.save_pretrained(folder)
    load_tokenizer(teacher).save_pretrained(folder)


@torch.no_grad()
def divergence(model: PreTrainedModel, other: PreTrainedModel, answers: Sequence[Response]) -> tuple[float, float]:
    """KL(model || other) per token at the states of the answers, and the other's loss on their tokens, in nats."""
    kls, losses = [], []
    for answer in answers:
        ids = torch.tensor([[*answer.prompt.token_ids, *answer.token_ids]])
        first = len(answer.prompt.token_ids)
        mine, theirs = (each(ids).logits[0, first - 1 : -1].log_softmax(-1) for each in (model, other))
        kls += (mine.exp() * (mine - theirs)).sum(-1).tolist()
        losses += (-theirs.gather(-1, ids[0, first:, None])[:, 0]).tolist()
    return round(mean(kls), 3), round(mean(losses), 3)


def compare(teacher: str, *students: str) -> None:
    """A line for each student, and all in runs/half.json."""
    texts = prompts(held_out=True)
    model, answers = answers_of(teacher, texts, samples=2)
    found: list[Row] = []
    for name in students:
        student, own = answers_of(name, texts, samples=1)
        forward, loss = divergence(model, student, answers)
        backward, _ = divergence(student, model, own)
        ended = mean(answer.finish is not Finish.LENGTH for answer in own)
        figures = {"loss": loss, "kl from the teacher": forward, "kl from the student": backward}
        shown = [
            {"prompt": text, "teacher": answers[2 * n].text, "student": own[n].text}
            for n, text in enumerate(texts[:SHOWN])
        ]
        found.append({"student": name, **figures, "ended": round(ended, 3), "samples": shown})
        print({key: value for key, value in found[-1].items() if key != "samples"}, flush=True)
    found.append({"teacher's own loss": divergence(model, model, answers)[1]})
    print(found[-1])
    Path("runs/half.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    {"make": make, "compare": compare}[sys.argv[1]](*sys.argv[2:])
