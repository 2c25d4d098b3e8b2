"""`proximo doctor sandbox`: the report of the sandbox, with the exit status of the command line."""

import json

import pytest

from proximo.cli.program import main
from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox import doctor


def test_the_command_prints_the_report_and_returns_its_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = doctor.GuaranteeStatus(name="cpu", promise="p", mechanism="m", state=doctor.State.HELD, reason=None)
    monkeypatch.setattr(doctor, "examine", lambda waived: [held])
    assert main(["doctor", "sandbox", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "cpu", "promise": "p", "mechanism": "m", "state": "held", "reason": None}
    ]


def test_an_unknown_waiver_is_the_users_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sandbox", "--waive", "netwrk"]) == 2
    assert "did you mean 'network'" in capsys.readouterr().err


def test_a_machine_without_any_sandbox_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(waived: object) -> None:
        raise SandboxError("the sandbox needs 64-bit Linux")

    monkeypatch.setattr(doctor, "examine", fail)
    assert main(["doctor", "sandbox"]) == 1
    assert "the sandbox needs 64-bit Linux" in capsys.readouterr().err
