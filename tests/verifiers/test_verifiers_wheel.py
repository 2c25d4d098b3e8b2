"""The wheel proximo-verifiers, alone in an environment without torch, and used there as TRL would."""

import re
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from proximo_verifiers import SandboxError
from proximo_verifiers.sandbox.runner import Sandbox
from wheels import ROOT, build_wheel, install_alone, run

PACKAGE = ROOT / "src" / "proximo_verifiers"
BEGIN = """
from importlib.util import find_spec
from proximo_verifiers import CodeVerifier, DataError, Grader, MathsVerifier, trl_reward, verl_score

assert not any(map(find_spec, ("torch", "proximo", "transformers", "numpy", "pydantic", "math_verify")))


def rewards_of(reward_func, inputs):
    # As TRL's GRPOTrainer: every column as a list beside prompts and completions, and what a function may ask for.
    names = [name for name in inputs[0] if name not in ("prompt", "completion", "completion_ids")]
    columns = {name: [row[name] for row in inputs] for name in names}
    given = {"trainer_state": object(), "log_extra": print, "log_metric": print}
    lists = {f"{name}s": [row[name] for row in inputs] for name in ("prompt", "completion")}
    rewards = reward_func(**lists, completion_ids=[[0]] * len(inputs), **columns, **given)
    assert len(rewards) == len(inputs) and reward_func.__name__
    return [float("nan") if reward is None else reward for reward in rewards]
"""
STAND_IN = (
    BEGIN
    + """
with Grader(MathsVerifier, num_workers=2) as maths:
    asked = {"prompt": [{"role": "user", "content": "a half?"}], "answer": "1/2", "source": "made"}
    said = ("\\\\boxed{0.5}", "The answer is 2.", "none")
    rows = [asked | {"completion": [{"role": "assistant", "content": text}]} for text in said]
    print(rewards_of(trl_reward(maths), rows))
    print(verl_score(maths)("made", "#### 0.50", "1/2", {"index": 1}))
    try:
        rewards_of(trl_reward(maths, reference="solution"), rows)
    except DataError as error:
        print(error)
"""
)
PROGRAMS = (
    BEGIN
    + """
with Grader(CodeVerifier, {"form": "asserts", "partial": True, "cpu_seconds": 1.0}, num_workers=1) as programs:
    row = {"prompt": "Write double(x).", "test_list": ["assert double(2) == 4", "assert double(0) == 0"]}
    ends = ("return 2 * x", "return 4", "__import__('os').fork()", "while True: pass")
    rows = [row | {"completion": f"```python\\ndef double(x):\\n    {end}\\n```"} for end in ends]
    print(rewards_of(trl_reward(programs, reference=None), rows))
"""
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT / "packaging" / "verifiers", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    install_alone(wheel, folder)
    return folder / "bin" / "python"


def test_it_holds_the_package_and_the_licence_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("dist-info/licenses/LICENSE") for name in archive.namelist())
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert held == {path.relative_to(PACKAGE.parent).as_posix() for path in files}


def test_it_has_the_version_of_the_trainer_and_requires_nothing_but_by_its_extra(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    assert (metadata["Name"], [metadata["Version"]]) == ("proximo-verifiers", versions)
    assert [line.rpartition("; ")[2] for line in metadata.get_all("Requires-Dist")] == ["extra == 'maths'"]
    (extra,) = re.findall(r"^maths = (.+?) ", project, re.MULTILINE)
    own = (ROOT / "packaging" / "verifiers" / "pyproject.toml").read_text(encoding="utf-8")
    assert f"maths = {extra} " in own, "the extra of both wheels is the same"


def test_it_scores_mathematics_for_trl_and_verl_without_torch(python: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STAND_IN)
    rewards, score, refused = run(python, "script.py", cwd=tmp_path).splitlines()
    assert (rewards, score) == ("[1.0, 0.0, 0.0]", "1.0")
    assert refused.startswith("row 0 of the batch: reward source 'MathsVerifier': a maths reward needs a reference")


def test_it_runs_programs_in_the_sandbox_without_torch(python: Path, tmp_path: Path) -> None:
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error}")
    (tmp_path / "script.py").write_text(PROGRAMS)
    assert run(python, "script.py", cwd=tmp_path).splitlines()[-1] == "[1.0, 0.5, 0.0, 0.0]"
    report = run(python, "-m", "proximo_verifiers.sandbox.doctor", cwd=tmp_path)
    assert "network" in report
