"""What a run made, used: text from it, and folders that other tools load."""

import io
import json
import math
import re
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from builders import tiny_language_model, tiny_tokenizer
from fake_vllm import GENERATE, fake_servers
from proximo.checkpoint.run_folder import open_run
from proximo.checkpoint.store import CheckpointStore
from proximo.cli import main
from proximo.commands import evaluate
from proximo.commands.generate import GenerateOptions, generate
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions, add_adapter
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.rollout.sampling import SamplingOptions
from proximo.run.task import Record

IDS = torch.tensor([[1, 7, 8, 9, 10]])


def save_model(path, *, seed=0):
    tiny_language_model(seed=seed).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def save_run(folder, checkpoints, *, metrics=None):
    """A run with one model per role and step, as a trainer leaves it."""
    with open_run(folder) as run:
        store = CheckpointStore(run.path / "checkpoints")
        for step, models in checkpoints.items():
            writers = {role: _writer(model) for role, model in models.items()}
            store.save(step, writers, {}, metric=(metrics or {}).get(step))


def _writer(model):
    def write(path):
        save_pretrained(model, path)
        tiny_tokenizer().save_pretrained(path)

    return write


def adapted(model, seed=1):
    """A model with an adapter that does something."""
    adapter = add_adapter(model, LoRAOptions(rank=2, alpha=4))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, weight in adapter.named_parameters():
            if "lora_B" in name or "score" in name:
                torch.nn.init.normal_(weight.data, std=0.3)
    return adapter


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def test_a_model_folder_answers_a_prompt_and_the_same_seed_gives_the_same_text(folder, capsys):
    save_model(folder / "model")
    said = []
    for seed in ("3", "3", "4"):
        assert main(["generate", "model", "hello", "--max-new-tokens", "12", "--seed", seed]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert "#" not in said[0]


def test_greedy_text_is_that_of_transformers(folder, capsys):
    save_model(folder / "model")
    assert main(["generate", "model", "hello", "--max-new-tokens", "8", "--greedy"]) == 0
    tokenizer = tiny_tokenizer()
    asked = tokenizer("hello", return_tensors="pt")
    expected = tiny_language_model().generate(**asked, max_new_tokens=8, do_sample=False, pad_token_id=0)
    answer = tokenizer.decode(expected[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert capsys.readouterr().out == f"{answer}\n"


def test_every_line_of_standard_input_is_a_prompt(folder, capsys, monkeypatch):
    save_model(folder / "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\r\n"))
    assert main(["generate", "model", "--max-new-tokens", "3", "--num-samples", "2", "--chat"]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("# ")] == ["# one", "# two"]
    assert said.count("## sample 1, ") == said.count("## sample 2, ") == 2


@pytest.mark.parametrize(("chat", "asked"), [(False, "hello"), (True, "<|user|>hello<eos><|assistant|>")])
def test_chat_puts_the_prompt_into_the_template(folder, chat, asked):
    save_model(folder / "model")
    options = GenerateOptions(sampling=SamplingOptions(max_new_tokens=1), chat=chat)
    (response,) = generate("model", ["hello"], options)
    assert list(response.prompt.token_ids) == tiny_tokenizer()(asked)["input_ids"]


def test_of_a_run_the_policy_answers_from_the_checkpoint_that_is_named(folder, capsys):
    models = {step: {"policy": tiny_language_model(seed=step)} for step in (1, 2, 3)}
    save_run(folder / "runs" / "x", models, metrics={2: 0.9, 3: 0.1})
    for step in (1, 2, 3):
        save_model(folder / f"model{step}", seed=step)
    for name, step in (("latest", 3), ("best", 2), ("step-1", 1), ("step-000001", 1)):
        said = []
        for argv in (["generate", "runs/x", "--checkpoint", name], ["generate", f"model{step}"]):
            assert main([*argv, "hello", "--max-new-tokens", "8"]) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1], name


@pytest.mark.parametrize(
    ("argv", "pieces"),
    [
        ("generate runs/x hello --checkpoint step-9", ["no checkpoint step-9", "it has step-000001"]),
        ("generate runs/x hello --checkpoint newest", ["latest, best or step-N", "'newest'"]),
        ("generate runs/x hello --checkpoint best", ["none was evaluated"]),
        ("generate runs/x hello --temperature 0", ["temperature", "greedy"]),
        ("generate empty hello", ["empty holds no run"]),
        ("generate ./nowhere hello", ["no folder ./nowhere"]),
        ("export runs/x out --role value", ["has no value model; it has policy"]),
        ("export empty out", ["empty holds no run"]),
        ("export unsaved out", ["has saved no checkpoint yet"]),
    ],
)
def test_what_is_not_there_is_named(folder, capsys, argv, pieces):
    save_run(folder / "runs" / "x", {1: {"policy": tiny_language_model()}})
    save_run(folder / "unsaved", {})
    (folder / "empty").mkdir()
    assert main(argv.split()) == 2
    said = capsys.readouterr()
    assert said.err.removeprefix("loading torch and transformers\n").startswith("error: ")
    for piece in pieces:
        assert piece in said.err
    assert not (folder / "out").exists()


def test_an_exported_model_has_the_same_bits_and_its_tokenizer_template_and_generation_config(folder, capsys):
    model = tiny_language_model()
    save_run(folder / "runs" / "x", {1: {"policy": model}})
    assert main(["export", "runs/x", "models/out"]) == 0
    assert capsys.readouterr().out.startswith("models/out: policy of ")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("models/out")), logits(model))
    assert AutoTokenizer.from_pretrained("models/out").chat_template == tiny_tokenizer().chat_template
    assert json.loads(Path("models/out/generation_config.json").read_text())["eos_token_id"] == 2
    assert sorted(path.name for path in Path("models").iterdir()) == ["out"]


def test_of_a_pipeline_the_last_stage_is_meant(folder):
    save_run(folder / "runs" / "p" / "sft", {1: {"policy": tiny_language_model(seed=1)}})
    save_run(folder / "runs" / "p" / "ppo", {1: {"policy": tiny_language_model(seed=2)}})
    assert main(["export", "runs/p", "out"]) == 0
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("out")), logits(tiny_language_model(seed=2)))


def test_a_report_is_written_for_a_run_and_for_a_pipeline(folder, capsys):
    for stage in ("sft", "ppo"):
        path = folder / "runs" / "p" / stage / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text('{"step": 1, "loss/sft": 2.5}\n{"step": 2, "loss/sft": 2.0}\n')
    assert main(["report", "runs/p/sft"]) == 0
    assert capsys.readouterr().out == "runs/p/sft/report.html\n"
    assert main(["report", "runs/p"]) == 0
    assert "<html" in Path("runs/p/report.html").read_text()


def test_a_report_says_its_alarms_beside_the_place_of_the_file(folder, capsys):
    losses = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0]
    for stage in ("sft", "ppo"):
        path = folder / "runs" / "p" / stage / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(f'{{"step": {n}, "sft/loss": {loss}}}\n' for n, loss in enumerate(losses, 1)))
    assert main(["report", "runs/p/sft"]) == 0
    said = capsys.readouterr()
    assert said.out == "runs/p/sft/report.html\n"
    _, alarm, *_ = said.err.splitlines()
    assert alarm.startswith("sft: problem: The training loss jumped. It rose from 1.00 to 4.00 at step 4,")
    assert main(["report", "runs/p"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()[1:]] == ["sft", "ppo"]


class Evaluated:
    """A run's task with one sample that could not be scored."""

    inputs_fingerprint = MappingProxyType({})

    def restore(self, checkpoint):
        pass

    def evaluate(self, num_rows):
        return Record(metrics={}, samples=[{"response": "ab", "components": {"r": math.nan}}])

    def close(self):
        pass


def test_samples_of_an_evaluation_are_valid_json_whatever_their_numbers(folder, monkeypatch, capsys):
    save_run(folder / "run", {1: {"policy": tiny_language_model()}})
    monkeypatch.setattr(evaluate, "build_task", lambda run, changes: Evaluated())
    assert main(["evaluate", "run", "--output", "samples.jsonl"]) == 0
    assert "null" in Path("samples.jsonl").read_text()
    assert json.loads(Path("samples.jsonl").read_text())["components"] == {"r": None}


@pytest.mark.parametrize("content", ["{", "[]", '{"policy": {}}'])
def test_a_damaged_configuration_is_named(folder, capsys, content):
    save_run(folder / "run", {1: {"policy": tiny_language_model()}})
    Path("run/config.resolved.json").write_text(content)
    assert main(["evaluate", "run"]) == 2
    assert "run/config.resolved.json is damaged" in capsys.readouterr().err


def write_reward(folder):
    (folder / "my_length.py").write_text(
        "def long(prompts, responses, metadata):\n    return [None if 'q' in r else float(len(r)) for r in responses]\n"
    )


def test_the_best_of_several_come_first_and_the_rest_may_be_left_out(folder, capsys):
    save_model("model")
    write_reward(folder)
    asked = ["generate", "model", "ab", "cd", "--max-new-tokens", "6", "--num-samples", "4"]
    assert main([*asked, "--reward", "my_length:long"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n# ") + shown.startswith("# ") == 2
    scores = [float(score) for score in re.findall(r"score ([\d.]+)", shown)]
    assert shown.count("## sample") == 8
    assert scores[: len(scores) // 2] == sorted(scores[: len(scores) // 2], reverse=True)
    assert main([*asked, "--reward", "my_length:long", "--keep", "2"]) == 0
    assert capsys.readouterr().out.count("## sample") == 4
    assert main([*asked[:3], *asked[4:], "--reward", "my_length:long", "--keep", "1"]) == 0
    alone = generate("model", ["ab"], GenerateOptions(sampling=SamplingOptions(max_new_tokens=6), num_samples=4))
    assert len(capsys.readouterr().out.rstrip("\n")) == max(len(each.text) for each in alone if "q" not in each.text)


def test_an_object_with_a_method_score_may_judge(folder, capsys):
    save_model("model")
    (folder / "my_judge.py").write_text(
        "from proximo import Scored\n\n\nclass Judge:\n    name = 'judge'\n\n    def score(self, responses):\n"
        "        return [Scored(response=each, score=float(len(each.token_ids))) for each in responses]\n\n\n"
        "judge = Judge()\n"
    )
    assert main(["generate", "model", "ab", "--max-new-tokens=4", "--num-samples=2", "--reward=my_judge:judge"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"(\d+) tokens, ended by \w+, score (\d+)", shown) == [("4", "4"), ("4", "4")]


def test_responses_go_to_a_file_that_is_new(folder, capsys):
    save_model("model")
    write_reward(folder)
    asked = ["generate", "model", "ab", "cd", "--max-new-tokens=3", "--reward=my_length:long", "--output", "new.jsonl"]
    assert main(asked) == 0
    assert capsys.readouterr().out == ""
    rows = [json.loads(line) for line in Path("new.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == ["ab", "cd"]
    assert all(row["score"] in (len(row["response"]), None) and row["num_tokens"] <= 3 for row in rows)
    assert main(asked) == 2
    assert "new.jsonl exists and is left as it is" in capsys.readouterr().err
    assert main([*asked[:-1], "nowhere/new.jsonl"]) == 2


def test_the_draw_may_be_cut_to_the_most_probable_tokens(folder, capsys):
    """One token to draw among is the most likely one."""
    save_model("model")
    said = []
    for more in (["--greedy"], ["--top-k=1"], ["--top-p=0.000001"], []):
        assert main(["generate", "model", "ab", "--max-new-tokens=8", *more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] != said[3]


def test_a_text_that_is_named_ends_a_response(folder, capsys):
    save_model("model")
    asked = ["generate", "model", "ab", "--max-new-tokens=8", "--greedy"]
    assert main(asked) == 0
    whole = capsys.readouterr().out.removesuffix("\n")
    first, second = whole[2], whole[4]
    assert main([*asked, "--stop", first, "--stop", second]) == 0
    assert capsys.readouterr().out == whole[: min(whole.index(first), whole.index(second))] + "\n"


def test_a_wrong_reward_function_costs_no_model(folder, capsys, monkeypatch):
    (folder / "my_later.py").write_text("async def later(responses, answer):\n    return []\n")
    monkeypatch.setattr("proximo.commands.generate.load_language_model", lambda *_, **__: pytest.fail("loaded"))
    assert main(["generate", "model", "ab", "--reward", "my_later:later"]) == 2
    assert "prompt '1': reward function 'later' has a parameter 'answer'" in capsys.readouterr().err


def test_a_reward_model_may_judge_from_a_run_or_a_folder(folder, capsys):
    save_model("model")
    model = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL, seed=1).model
    save_run(folder / "run", {1: {"reward": model}})
    asked = ["generate", "model", "ab", "--max-new-tokens", "4", "--num-samples", "3", "--reward"]
    assert main([*asked, "run"]) == 0
    shown = capsys.readouterr().out
    scores = [float(score) for score in re.findall(r"score (-?[\d.]+)", shown)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert main([*asked, str(next(folder.glob("run/checkpoints/step-*/reward")))]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("more", "piece"),
    [
        (["--keep", "1"], "needs a reward"),
        (["--keep", "3", "--num-samples", "2", "--reward", "my_length:long"], "keep (3) chooses among num_samples (2)"),
        (["--reward", "my_length:short"], "defines no short"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(folder, capsys, more, piece):
    save_model("model")
    write_reward(folder)
    assert main(["generate", "model", "ab", *more]) == 2
    assert piece in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "adapter"])
def test_a_vllm_server_samples_with_the_model_that_is_named(folder, capsys, whole):
    """Greedily, and so the same text. The server starts with other weights."""
    tiny_language_model(seed=0).save_pretrained("base")
    model = AutoModelForCausalLM.from_pretrained("base")
    save_pretrained(model if whole else adapted(model), Path("model"))
    tiny_tokenizer().save_pretrained("model")
    assert main(["generate", "model", "ab", "cde", "--greedy", "--max-new-tokens=8"]) == 0
    here = capsys.readouterr().out
    first = LanguageModel(tiny_language_model(seed=1) if whole else tiny_language_model(seed=0))
    with fake_servers(first) as (server,):
        assert main(["generate", "model", "ab", "cde", "--greedy", "--max-new-tokens=8", "--engine", server.url]) == 0
        assert server.counts[GENERATE] >= 2
    assert capsys.readouterr().out == here
    assert main(["generate", "model", "ab", "--engine", server.url]) == 2
    assert f"no vLLM server answers at {server.url}" in capsys.readouterr().err
    assert main(["generate", "model", "ab", "--engine", "vlm"]) == 2
    assert "engine is local, vllm, or the address of a vLLM server" in capsys.readouterr().err
