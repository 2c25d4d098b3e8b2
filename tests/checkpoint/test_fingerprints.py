"""What differs since a run was saved is listed, and what may differ is let through."""

import json

import pytest
import torch

from proximo.checkpoint.environment import PACKAGES, describe_environment
from proximo.checkpoint.fingerprints import Fingerprints, Permission, check_fingerprints, relocatable, relocated
from proximo.errors import RunFolderError

SAVED = Fingerprints(
    config={"ppo": {"learning_rate": 1e-6, "epochs": 2}, "run": {"folder": "a", "save_every_steps": 10}},
    inputs={"prompts": {"num_rows": 100, "sha256": "aa"}},
    environment={"torch": "2.13.0", "num_threads": 2},
    functions={"mine:score": "source with sha256 aa"},
)


def changed(**parts) -> Fingerprints:
    return Fingerprints(**(SAVED.to_json() | parts))


def test_nothing_changed_is_fine_also_through_json():
    check_fingerprints(Fingerprints.from_json(json.loads(json.dumps(SAVED.to_json()))), SAVED)


def test_every_differing_field_is_listed_with_both_values():
    now = Fingerprints(
        config={"ppo": {"learning_rate": 1e-5, "clip": None}, "run": SAVED.config["run"]},
        inputs={"prompts": {"num_rows": 101, "sha256": "ab"}},
        environment={"torch": "2.14.0", "num_threads": 2},
    )
    with pytest.raises(RunFolderError) as caught:
        check_fingerprints(SAVED, now)
    for part in (
        "settings (saved -> now):",
        "ppo.learning_rate: 1e-06 -> 1e-05",
        "ppo.epochs: 2 -> (absent)",
        "ppo.clip: (absent) -> null",
        "inputs (saved -> now):",
        "prompts.num_rows: 100 -> 101",
        'prompts.sha256: "aa" -> "ab"',
        'torch: "2.13.0" -> "2.14.0"',
        "--allow-different-environment",
    ):
        assert part in str(caught.value)
    assert "num_threads" not in str(caught.value)
    assert "save_every_steps" not in str(caught.value)


def test_some_settings_may_change():
    now = changed(config={"ppo": SAVED.config["ppo"], "run": {"folder": "b", "save_every_steps": 5}})
    check_fingerprints(SAVED, now, Permission(settings={"run.folder", "run.save_every_steps"}))
    check_fingerprints(SAVED, now, Permission(settings={"run"}))
    with pytest.raises(RunFolderError, match=r"run\.save_every_steps: 10 -> 5"):
        check_fingerprints(SAVED, now, Permission(settings={"run.folder", "run.save"}))


def test_another_environment_is_allowed_on_request_and_nothing_else_is():
    check_fingerprints(SAVED, changed(environment={"torch": "3"}), Permission(allow_different_environment=True))
    now = changed(environment={"torch": "3"}, inputs={})
    with pytest.raises(RunFolderError) as caught:
        check_fingerprints(SAVED, now, Permission(allow_different_environment=True))
    assert "environment" not in str(caught.value)
    assert 'prompts: {"num_rows": 100, "sha256": "aa"} -> (absent)' in str(caught.value)


def test_an_allowed_environment_is_told():
    told = check_fingerprints(SAVED, changed(environment={"torch": "3"}), Permission(allow_different_environment=True))
    assert told == [
        "resumed in another environment: num_threads: 2 -> (absent)",
        'resumed in another environment: torch: "2.13.0" -> "3"',
    ]
    assert check_fingerprints(SAVED, SAVED) == []


REWARDS = {"reward_settings": ("reward",), "environment_settings": ("reward.0.device",)}


def test_a_changed_reward_is_allowed_by_a_flag_of_its_own_and_by_no_other():
    before = changed(config={"reward": [{"weight": 1, "device": "cpu"}]})
    functions = {"mine:score": "source with sha256 bb"}
    after = Fingerprints(**(before.to_json() | {"functions": functions}))
    for now, line in (
        (after, 'mine:score: "source with sha256 aa" -> "source with sha256 bb"'),
        (changed(config={"reward": [{"weight": 2, "device": "cpu"}]}), "reward.0.weight: 1 -> 2"),
    ):
        with pytest.raises(RunFolderError, match=r"rewards \(saved -> now\):\n  ") as caught:
            check_fingerprints(before, now, Permission(**REWARDS, allow_different_environment=True))
        told = str(caught.value)
        assert line in told
        assert "--allow-changed-rewards (in Python allow_changed_rewards=True)" in told
        assert "--allow-different-environment" not in told
        allowed = check_fingerprints(before, now, Permission(**REWARDS, allow_changed_rewards=True))
        assert allowed == [f"resumed with changed rewards: {line}"]
    moved = changed(config={"reward": [{"weight": 1, "device": "cuda"}]}, environment={"torch": "3", "num_threads": 2})
    with pytest.raises(RunFolderError, match=r"(?s)environment \(saved.*reward.0.device.*torch") as caught:
        check_fingerprints(before, moved, Permission(**REWARDS, allow_changed_rewards=True))
    assert "rewards (saved" not in str(caught.value)


def test_a_section_that_was_null_is_one_line():
    saved = Fingerprints(config={"lora": None}, inputs={}, environment={})
    now = Fingerprints(config={"lora": {"rank": 4, "alpha": 8.0}}, inputs={}, environment={})
    for before, after, line in (
        (saved, now, 'lora: null -> {"rank": 4, "alpha": 8.0}'),
        (now, saved, 'lora: {"rank": 4, "alpha": 8.0} -> null'),
    ):
        with pytest.raises(RunFolderError) as caught:
            check_fingerprints(before, after)
        assert [each.strip() for each in str(caught.value).splitlines()[2:-1]] == [line]


def test_files_are_not_blamed_for_an_order_that_settings_decide():
    saved = Fingerprints(config={"run": {"seed": 1}}, inputs={"data": {"a.jsonl": "x"}, "model": "y"}, environment={})
    now = Fingerprints(config={"run": {"seed": 2}}, inputs={"data": {"a.jsonl": "z"}, "model": "w"}, environment={})
    with pytest.raises(RunFolderError, match=r"run.seed: 1 -> 2") as caught:
        check_fingerprints(saved, now)
    assert "a.jsonl" not in str(caught.value)
    assert "model" in str(caught.value)


def test_of_a_list_of_sections_the_item_and_its_key_are_named():
    saved = changed(config={"reward": [{"kind": "a", "weight": 1.0}, {"kind": "b", "weight": 1.0}]})
    now = changed(config={"reward": [{"kind": "a", "weight": 1.0}, {"kind": "b", "weight": 2.0}]})
    with pytest.raises(RunFolderError, match=r"now\):\n  reward\.1\.weight: 1\.0 -> 2\.0\n  give"):
        check_fingerprints(saved, now)
    check_fingerprints(saved, now, Permission(settings={"reward"}))


def test_an_input_that_was_not_looked_at_before_is_let_through():
    check_fingerprints(SAVED, changed(inputs={"prompts": {**SAVED.inputs["prompts"], "new": 1}, "template": "cc"}))


def test_an_empty_section_differs_from_an_absent_one():
    with pytest.raises(RunFolderError, match=r"lora: \(absent\) -> \{\}"):
        check_fingerprints(SAVED, changed(config=SAVED.config | {"lora": {}}))


def test_the_environment_says_what_decides_the_bits():
    torch.set_num_threads(1)
    found = describe_environment(device="cpu")
    assert found == describe_environment(device="cpu") == json.loads(json.dumps(found))
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["num_threads"] == 1
    assert found["device"] == "cpu"
    assert found["accelerator"] is None
    assert set(PACKAGES) <= set(found)
    assert all(found[name] for name in ("python", "transformers", "system", "machine", "instructions"))


def test_a_variable_that_chooses_other_instructions_is_part_of_the_environment(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    before = Fingerprints(config={}, inputs={}, environment=describe_environment(device="cpu"))
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    now = Fingerprints(config={}, inputs={}, environment=describe_environment(device="cpu"))
    with pytest.raises(RunFolderError, match=r'variables.MKL_CBWR: .absent. -> "COMPATIBLE"'):
        check_fingerprints(before, now)


def test_a_package_that_is_not_installed_is_none(monkeypatch):
    monkeypatch.setattr("proximo.checkpoint.environment.PACKAGES", ("no-such-package-here",))
    assert describe_environment(device="cpu")["no-such-package-here"] is None


def test_names_and_values_below_a_pipelines_folder_move_with_it():
    inputs = {"data": {"/old/demo/rows.jsonl": "3 rows"}, "path": "/old/demo/sft", "other": ["/old/demonstration"]}
    free = relocatable(inputs, "/old/demo")
    moved = {"data": {"@pipeline/rows.jsonl": "3 rows"}, "path": "@pipeline/sft"}
    assert free == {**moved, "other": ["/old/demonstration"]}
    assert relocated(free, "/old/demo") == inputs
    assert relocated(free, "/new")["data"] == {"/new/rows.jsonl": "3 rows"}
    assert relocatable(inputs, "") == relocated(inputs, "") == inputs
