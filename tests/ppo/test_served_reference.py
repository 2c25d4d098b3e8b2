"""A reference on vLLM servers: the log-probs of a local one, whatever a server does, and nothing of it in memory."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from builders import tiny_language_model, tiny_tokenizer
from fake_vllm import CUT, GENERATE, FakeVLLM, fake_servers
from models.test_forked_trajectories import trajectories
from proximo.checkpoint.store import CheckpointStore
from proximo.commands.dry_run import describe
from proximo.config.engine import ServersConfig
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, RunFolderError, TrainingError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions, add_adapter
from proximo.models.pretrained.saving import save_pretrained
from proximo.plan.profiling import make_plans
from proximo.ppo import from_recipe
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.worker import ReferenceWorker, ServedReferenceWorker
from proximo.ppo.trainer import PPOTrainer
from proximo.rewards.source import NoReward
from proximo.rollout.vllm import dispatch
from proximo.rollout.vllm.server import ServerLimits, VLLMServer
from proximo.run.make.engine import find_reference
from proximo.run.options import RunOptions
from records_made import drawn, prompt, response
from tiny_runs import LLAMA, changed, make_inputs, recipe_of, run

K1 = {"kind": "reward", "estimator": "k1", "coefficient": 1.0}
ANSWERS = [each.response for each in drawn([(3, 5), (2, 1), (6, 9)])]
RESPONSES = [*ANSWERS, *trajectories(), response([], to=prompt("empty"), logprobs=[]), ANSWERS[0]]


def teacher() -> LanguageModel:
    return LanguageModel(tiny_language_model(seed=2, initializer_range=0.3))


def worker_on(*fakes: FakeVLLM, **limits: Any) -> ServedReferenceWorker:
    made = ServerLimits(max_concurrent_requests=32, section="devices.reference", **limits)
    return ServedReferenceWorker([VLLMServer(fake.url, limits=made) for fake in fakes])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(dispatch, "LONGEST_PAUSE_SECONDS", 0.01)


def check_equal(model: LanguageModel, *fakes: FakeVLLM) -> None:
    with closing(worker_on(*fakes)) as worker:
        found = worker.logprobs(RESPONSES).logprobs
    local = ReferenceWorker(model, PPOConfig()).logprobs(RESPONSES).logprobs
    torch.testing.assert_close(found, local, rtol=0, atol=1e-5)


def test_log_probs_are_those_of_a_local_reference_and_each_sequence_is_asked_for_once() -> None:
    with fake_servers(model := teacher(), 2) as fakes:
        check_equal(model, *fakes)
        counts = [fake.counts[GENERATE] for fake in fakes]
    assert min(counts) > 1
    assert sum(counts) == sum(len(tokens) > 0 for each in RESPONSES for _, tokens in each.sequences)


def test_a_server_that_is_killed_within_a_request_is_replaced_by_the_other(caplog: pytest.LogCaptureFixture) -> None:
    with fake_servers(model := teacher(), 2, lambda fake, *_: CUT if fake is fakes[0] else None) as fakes:
        check_equal(model, *fakes)
        assert fakes[0].counts[GENERATE] >= 1
    assert sum("requests to the servers of the reference were repeated" in said for said in caplog.messages) == 1


def test_a_server_that_stays_away_ends_the_run_with_its_section() -> None:
    fake = FakeVLLM(teacher())
    fake.close()
    said = r"for 0 s \(devices.reference.start_seconds\), the last at"
    with closing(worker_on(fake, start_seconds=0.0)) as worker, pytest.raises(TrainingError, match=said):
        worker.logprobs(RESPONSES)


def says(value: Any) -> Callable[[Any], object]:
    return lambda reply: next(iter(reply["prompt_logprobs"][-1].values())).update(logprob=value)


NOT_FINITE = "has no log-prob that is finite"
WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda reply: reply["prompt_logprobs"].pop(), "ids were asked for"),
    (lambda reply: reply["prompt_logprobs"].insert(1, reply["prompt_logprobs"].pop()), NOT_FINITE),
    *((says(value), NOT_FINITE) for value in (math.nan, None, -9999.0, 3.5)),
    (lambda reply: reply["choices"][0]["weight_versions"][0].update(version="p-3"), "was given other weights, p-3,"),
]
"""Too few log-probs, those of other ids, no numbers, minus infinity, a logit; and those of other weights."""


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_reply_is_asked_for_again_and_at_last_ends_the_run(change: Any, said: str) -> None:
    def wrong(fake: FakeVLLM, _: str, body: dict[str, Any]) -> Any:
        change(reply := fake.generate(body))
        return reply

    with fake_servers(model := teacher()) as (fake,):
        fake.fault = lambda *asked: wrong(*asked) if fake.counts[GENERATE] == 1 else None
        check_equal(model, fake)
        fake.fault = wrong
        with closing(worker_on(fake)) as worker, pytest.raises(TrainingError, match=f"after 5 attempts.*{said}"):
            worker.logprobs(RESPONSES)


def trained(reference: Any, **options: Any) -> tuple[PPOTrainer, list[float]]:
    base: dict[str, Any] = {"num_steps": 8, "prompts_per_step": 96, "num_minibatches": 1, "epochs_per_step": 1}
    base |= {"advantage": {"kind": "return_to_go", "gamma": 0.0}, "kl": K1, "rollout": {"max_new_tokens": 1}}
    config = PPOConfig(**base | {"policy_optimizer": {"learning_rate": 5e-2}} | options)
    student, tokenizer = tiny_language_model(seed=1), tiny_tokenizer(chat=False)
    made = PPOTrainer(student, tokenizer, reference=reference, reward=NoReward(), config=config)
    return made, [line["kl/per_token"] for line in made.train(["a", "b", "c", "d"], quiet=True)]


def test_a_student_learns_from_a_served_teacher_what_it_learns_from_a_local_one() -> None:
    """Over six seeds of the teacher, the KL of the last steps is 0.38 to 0.72 of that of the first ones."""
    model = LanguageModel(tiny_language_model(seed=2))
    with torch.no_grad():
        model.base.get_output_embeddings().weight.mul_(20)
    with fake_servers(model) as (fake,), closing(worker_on(fake)) as worker:
        made, found = trained(worker)
    assert "reference" not in {each.role for each in made.roles.workers}, "no model of it is in memory, or saved"
    assert found == pytest.approx(trained(model)[1], abs=1e-4)
    assert mean(found[-3:]) < 0.8 * mean(found[:2])


REFUSED = [{"kl": "none"}, {"kl": K1 | {"estimator": "full"}}, {"rollout": {"temperature": 0.7}}]
REFUSED += [{"kl": K1 | {"reference_every_steps": 5}}, {"evaluate_reference": True}]


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_servers_cannot_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="or remove devices.reference.addresses"):
        trained(ServedReferenceWorker([]), **options)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[dict[str, Any], list[FakeVLLM]]]:
    """A recipe that distils from two servers, and the servers."""
    path = str(make_inputs(tmp_path) / "language_model")
    with fake_servers(LanguageModel(AutoModelForCausalLM.from_pretrained(path)), 2) as fakes:
        changes = {"model": {"config": LLAMA | {"vocab_size": 64}}, "reference": {"path": path}, "reward": []}
        changes |= {"value": {}, "ppo.kl": K1, "ppo.advantage": "return_to_go", "ppo.num_steps": 2}
        changes |= {"devices.reference.addresses": [fake.url for fake in fakes]}
        yield changed(recipe_of("ppo", tmp_path), changes), fakes


def test_a_run_asks_its_servers_loads_no_reference_and_resumes_with_others(
    served: tuple[dict[str, Any], list[FakeVLLM]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(VLLMServer, "close", lambda server: closed.append(server.url))
    monkeypatch.delattr(from_recipe, "build_reference")
    recipe, fakes = served
    assert run("ppo", recipe, RunOptions(quiet=True)) == 0
    more = changed(recipe, {"ppo.num_steps": 3, "devices.reference.addresses": [fakes[1].url + "/"]})
    fakes[0].counts.clear()
    assert run("ppo", more, RunOptions(quiet=True, resume="must")) == 0
    said = "the servers of the reference have base; of language_model (reference.path) only the vocabulary is read"
    assert said in (tmp_path / "run" / "log.txt").read_text()
    assert not fakes[0].counts
    assert closed == [fakes[0].url, fakes[1].url, fakes[1].url]
    checkpoint = CheckpointStore(tmp_path / "run" / "checkpoints").load()
    assert checkpoint.state["fingerprints"]["inputs"]["models"] == {"reference": "served: base"}
    for fake in fakes:
        fake.root = "models/another"
    with pytest.raises(RunFolderError, match=r"models\.reference: .*served: base.* -> .*served: another"):
        run("ppo", more, RunOptions(quiet=True, resume="must"))


def test_servers_are_checked_before_a_model_is_loaded(served: tuple[dict[str, Any], list[FakeVLLM]]) -> None:
    recipe, fakes = served

    def problem(**changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            from_recipe.build_task(PPORecipe.model_validate(changed(recipe, changes)))
        return str(caught.value)

    assert f"{fakes[0].url} (devices.reference.ad" in problem(**{"ppo.rollout.max_new_tokens": 120})
    fakes[1].root = "another"
    assert f"one model, they have base at {fakes[0].url}, another at {fakes[1].url}" in problem()
    fakes[0].fault = lambda *_: 401
    assert "no vLLM server answers at" in problem()


def test_an_adapter_that_servers_would_leave_out_is_refused(
    served: tuple[dict[str, Any], list[FakeVLLM]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As reference.path, or on a server."""
    recipe, fakes = served
    monkeypatch.delattr(from_recipe, "build_language_model")
    model = AutoModelForCausalLM.from_pretrained(recipe["reference"]["path"])
    save_pretrained(add_adapter(model, LoRAOptions(rank=2, seed=5)), tmp_path / "adapter")
    named = changed(recipe, {"reference.path": str(tmp_path / "adapter")})
    fakes[1].adapters["taught"] = fakes[1].base
    for given, said in ((named, "adapter is an adapter, and servers of a ref"), (recipe, r"\) has adapters, taught, ")):
        with pytest.raises(ConfigError, match=said):
            from_recipe.build_task(PPORecipe.model_validate(given))


def test_every_key_reaches_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    with fake_servers(teacher()) as (fake,), ExitStack() as opened:
        keys = {"addresses": (fake.url,), "token_env": "TOKEN", "request_seconds": 3, "start_seconds": 4}
        (server,) = find_reference(ServersConfig(**keys), opened)
    assert (server.url, server.limits.request_seconds, server.limits.start_seconds) == (fake.url, 3, 4)
    assert server._client._client.headers["Authorization"] == "Bearer secret"


def test_plan_and_dry_run_count_nothing_of_it(served: tuple[dict[str, Any], list[FakeVLLM]]) -> None:
    made = PPORecipe.model_validate(served[0])
    (plan,) = make_plans(made)
    assert "reference" not in {role.name for role in plan.roles}
    assert "reference_logprobs" not in {phase.name for phase in plan.phases}
    assert any("the log-probs of the reference" in note for note in plan.notes)
    assert f"not loaded: vLLM at {', '.join(fake.url for fake in served[1])}" in describe(made)
