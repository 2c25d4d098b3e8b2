"""The page: complete, self-contained, safe, and made from whatever a run left behind."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_runs import HOSTILE, sample, write_lines, write_ppo_run, write_reward_run, write_sft_run

from proximo.metrics.report.page import write_pipeline_report, write_report
from proximo.metrics.report.run_summary import pair_samples
from proximo.metrics.run_files import read_run

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags close in turn; keeps ids, attributes and words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ppo_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_ppo_run(tmp_path_factory.mktemp("report") / "run"))


def test_a_ppo_report_shows_headline_curves_samples_and_configuration(ppo_report: Path):
    page = read_page(ppo_report)
    for words in (
        "Score", "Gold score", "KL from the reference", "Answer length", "Entropy", "Clip fraction",
        "Explained variance of the critic", "Throughput", "Time of a step by phase", "-0.40 →", "60 steps",
        "Before step 0", "After step 60", "Write about item 0:", "cut at the limit", "warmth", "coefficient: 0.05",
        "threads: 2", "No alarms.", "an unbiased estimate of KL(policy || reference) of whole responses. [nats]",
    ):  # fmt: skip
        assert words in page.text, words
    assert page.tags.count("svg") > 12


def test_the_head_says_model_task_device_duration_and_outcome(tmp_path: Path):
    run = write_ppo_run(tmp_path / "run", num_steps=12)
    settings = {
        "run": {"precision": "bf16"},
        "model": {"path": "runs/sft", "lora": {"rank": 8}},
        "data": {"sources": [{"path": "prompts.jsonl", "function": None}]},
        "reward": [{"kind": "model", "path": "runs/judge"}, {"kind": "maths", "name": "maths"}],
        "ppo": {"num_steps": 40, "advantage": {"kind": "gae"}},
    }
    (run / "config.resolved.json").write_text(json.dumps(settings))
    (run / "environment.json").write_text(json.dumps({"device": "cuda", "accelerator": "H200", "processor": "EPYC"}))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [line | {"time/step_seconds": 7, "time/evaluate_seconds": 1} for line in lines])
    text = read_page(write_report(run)).text
    head = text[text.index("Model") : text.index("No alarm")]
    assert head.split("Outcome")[0] == (
        "Model runs/sft, with LoRA of rank 8 Task PPO (gae) on prompts.jsonl, rewarded by runs/judge, maths "
        "Device cuda, H200, bf16 Duration 1m44s of steps and evaluations "
    )


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (None, "running, or killed, after step 12 of 40"),
        ({"state": "finished", "total_steps": 12, "reason": None}, "finished after step 12 of 12"),
        (
            {"state": "stopped", "total_steps": 40, "reason": "SIGUSR1"},
            "stopped by SIGUSR1 after step 12 of 40; --resume",
        ),
        ({"state": "failed", "total_steps": 40, "reason": f"no answer: {HOSTILE}"}, "failed after step 12 of 40"),
        ({"half": "written"}, "running"),
    ],
)
def test_the_head_says_how_the_run_ended_and_a_failure_stands_above_all(tmp_path: Path, outcome, words: str):
    run = write_ppo_run(tmp_path / "run", num_steps=12)
    (run / "config.resolved.json").write_text(json.dumps({"ppo": {"num_steps": 40}}))
    if outcome:
        (run / "outcome.json").write_text(json.dumps(outcome))
    page = read_page(write_report(run))
    assert words in page.text
    failed = f"PPO failed. no answer: {HOSTILE} The full output is in log.txt."
    assert (failed in page.text.partition("12 steps")[0]) == ("failed" in words)


def test_alarms_that_another_explains_are_folded_under_it(tmp_path: Path):
    run = write_ppo_run(tmp_path / "run")
    flat = {"score/mean": 1.0, "score/std": 0.0, "group/zero_variance_fraction": 1.0}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [line | flat for line in lines])
    page = read_page(write_report(run))
    whole, folded = page.text, "It explains 2 more: Most groups have zero variance, The score does not rise"
    assert whole.index("Every score is the same number.") < whole.index(folded)
    assert (run / "report.html").read_text().count('<li class="') == 1


def test_the_page_asks_for_nothing_outside_itself(ppo_report: Path):
    page = read_page(ppo_report)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert page.tags.count("script") == 1
    for name, value in page.attributes:
        if name in ("src", "href", "srcset", "action", "data", "xlink:href", "poster"):
            assert value.startswith("#")
        assert not name.startswith("on")
    text = ppo_report.read_text()
    assert "http" not in text.replace("http-equiv", "", 1).replace("http://www.w3.org/2000/svg", "", 1)
    assert not re.search(r"url\((?!#)|@import", text)


def test_the_policy_of_the_page_forbids_whatever_it_does_not_need(ppo_report: Path):
    """It stands before everything that it is about; styles and the one script in the page are allowed, and no other."""
    page = ppo_report.read_text(encoding="utf-8")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    (own,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'", "style-src": "'unsafe-inline'", "script-src": f"'sha256-{digest}'",
        "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    assert re.findall(r"<(\w+)", page[: policy.start()]) == ["html", "head", "meta"]


def test_a_password_in_an_address_is_not_passed_around_with_the_page(tmp_path: Path):
    folder = write_ppo_run(tmp_path / "run", num_steps=3)
    config = {"run": {"sinks": [{"kind": "function", "tracking_uri": "postgresql://me:hunter2@host/db?key=hunter2"}]}}
    (folder / "config.resolved.json").write_text(json.dumps(config), encoding="utf-8")
    page = write_report(folder).read_text(encoding="utf-8")
    assert "tracking_uri: postgresql://***@host/db?***" in page
    assert "hunter2" not in page


def test_whatever_comes_from_data_or_the_name_of_the_folder_is_escaped(tmp_path: Path):
    path = write_report(write_ppo_run(tmp_path / "<i>run & more", num_steps=3, hostile=True))
    page = read_page(path)
    assert page.tags.count("script") == 1
    assert page.text.count(HOSTILE) >= 20
    assert path.read_text().count("<script") == 1
    assert "<i>run & more" in page.text
    assert "i" not in page.tags[: page.tags.index("main")]


def test_the_same_files_give_the_same_bytes_and_no_other_is_left_or_changed(tmp_path: Path):
    run = write_ppo_run(tmp_path / "run", num_steps=3)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    page = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == page
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before | {"report.html": page}


def test_ids_are_unique_in_a_page_of_three_stages(tmp_path: Path):
    write_sft_run(tmp_path / "demo" / "sft")
    write_reward_run(tmp_path / "demo" / "reward")
    write_ppo_run(tmp_path / "demo" / "ppo")
    page = read_page(write_pipeline_report(tmp_path / "demo"))
    assert len(page.ids) == len(set(page.ids))
    assert {"s1", "s2", "s3"} <= set(page.ids)
    links = [value for name, value in page.attributes if name == "href" and value]
    assert {link.removeprefix("#") for link in links} <= set(page.ids)
    for words in (
        "Supervised fine-tuning",
        "Bits per character",
        "Calibration error",
        "Held-out pairs",
        "Wrong order",
        "PPO",
    ):
        assert words in page.text, words


def test_labelled_answers_are_shown_with_their_label_and_not_as_written_by_the_policy(tmp_path: Path):
    answer = {"kind": "labelled", "prompt": "Name a colour.", "response": "Seven.", "score": -0.5}
    rows = [{**answer, "step": 4, "prompt_id": str(label), "desirable": label} for label in (True, False)]
    run = write_sft_run(tmp_path / "run", num_steps=4)
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = read_page(write_report(run)).text
    for words in ("Desirable answer", "Undesirable answer", "Seven."):
        assert words in text
    assert "After" not in text


def test_a_missing_folder_or_one_without_stages_is_an_error_and_an_empty_one_is_not(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="sft, reward, prm, dpo, kto, ppo"):
        write_pipeline_report(tmp_path)
    assert "no step recorded yet" in read_page(write_report(tmp_path)).text


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (sample(3, 0, "train", response="newest of all"), "newest of all"),
        (sample(0, 0, response="the very first", score=None, components={}), "Before step 0 the very first"),
        ({"step": 4, "kind": "evaluation", "prompt_id": "a", "prompt": "Once", "response": " upon a"}, "upon a"),
        (sample(0, 0, response="broken \ud83d here\x00"), "broken ? here"),
    ],
)
def test_one_answer_of_any_kind_is_shown(answer: dict, shown: str, tmp_path: Path):
    write_lines(tmp_path / "samples.jsonl", [answer])
    text = read_page(write_report(tmp_path)).text
    assert shown in text
    assert "None" not in text
    (tmp_path / "config.resolved.json").write_text(json.dumps({"model": {"path": None, "layers": [1, 2]}}))
    assert "model:\n  path: null\n  layers:\n  - 1\n" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("present", ["metrics.jsonl", "samples.jsonl", "config.resolved.json", "environment.json"])
def test_any_file_may_be_the_only_one(tmp_path: Path, present: str):
    run = write_ppo_run(tmp_path / "run", num_steps=3)
    for path in run.iterdir():
        if path.name != present:
            path.unlink()
    shown = {"metrics.jsonl": "3 steps", "config.resolved.json": "Configuration"}
    assert shown.get(present, "") in read_page(write_report(run)).text


def test_half_written_lines_are_counted_and_the_rest_is_shown(tmp_path: Path):
    run = write_ppo_run(tmp_path / "run", num_steps=8)
    for name in ("metrics.jsonl", "samples.jsonl"):
        whole = (run / name).read_text()
        (run / name).write_text(whole[: len(whole) - 40])
    (run / "config.resolved.json").write_text("{")
    text = read_page(write_report(run)).text
    assert "7 steps, 2 lines could not be read" in text
    assert "Configuration" not in text


def test_lines_that_hold_no_numbers_do_no_harm(tmp_path: Path):
    lines = [{"step": 1, "score/mean": "high", "future/metric": 3.0, "kl/sequence": float("nan"), "policy/loss": True}]
    write_lines(tmp_path / "metrics.jsonl", [*lines, {"step": 2, "score/mean": 1.5}, [], {"score/mean": 1.0}])
    run = read_run(tmp_path)
    assert run.lines == ({"step": 1, "future/metric": 3.0}, {"step": 2, "score/mean": 1.5})
    assert run.num_unreadable == 2
    assert "future/metric" not in read_page(write_report(tmp_path)).text


def test_a_run_of_one_step_has_points_and_no_judgement(tmp_path: Path):
    page = read_page(write_report(write_ppo_run(tmp_path / "run", num_steps=1)))
    assert "Too few steps for the alarms." in page.text
    assert page.tags.count("svg") > 8


def test_sample_pairs_join_the_same_prompts_and_show_each_prompt_before_one_of_them_again(tmp_path: Path):
    answers = [("p0", "a"), ("p0", "b"), ("p1", "c"), ("p2", "d")]
    records = [sample(0, 0, prompt_id=prompt, response=text) for prompt, text in answers]
    records += [sample(5, 0, prompt_id=prompt, response="middle") for prompt, _ in answers]
    records += [sample(9, 0, prompt_id=prompt, response=text.upper()) for prompt, text in reversed(answers[:3])]
    write_lines(tmp_path / "samples.jsonl", records)
    pairs = pair_samples(read_run(tmp_path))
    found = [(pair.before.response, pair.after.response if pair.after else None) for pair in pairs if pair.before]
    assert found == [("a", "B"), ("c", "C"), ("d", None), ("b", "A")]
