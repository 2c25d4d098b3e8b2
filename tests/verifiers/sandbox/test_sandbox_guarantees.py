"""Guarantees by name: which means hold them, what is refused without, and what the doctor finds."""

import json
import platform
import sys

import pytest

from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox.doctor import PROBES, State, _status, examine, main, report
from proximo_verifiers.sandbox.guarantees import GUARANTEES, NAMES, refuse_missing
from proximo_verifiers.sandbox.jobs import Program
from proximo_verifiers.sandbox.mechanisms import MECHANISMS, Mechanisms
from proximo_verifiers.sandbox.runner import Sandbox

ALL = Mechanisms(namespaces=None, landlock=None, seccomp=None, thread_count=None)


def without(*names: str) -> Mechanisms:
    return Mechanisms(**dict.fromkeys(MECHANISMS) | dict.fromkeys(names, "not in this kernel"))


def missing(mechanisms: Mechanisms) -> set[str]:
    return {each.name for each in GUARANTEES if each.held_by(mechanisms) is None}


def test_every_guarantee_has_a_probe():
    assert set(PROBES) == set(NAMES)


@pytest.mark.parametrize(
    ("absent", "lost"),
    [
        ((), set()),
        (("landlock",), set()),
        (("thread_count",), set()),
        (("namespaces", "thread_count"), {"names"}),
        (("namespaces", "landlock", "thread_count"), {"names", "reading", "writing"}),
        (("seccomp",), {"network", "memory", "processes", "signals", "survivors", "privileges"}),
    ],
)
def test_what_a_machine_cannot_promise_without_a_means(absent, lost):
    assert missing(without(*absent)) == lost


def test_a_missing_guarantee_is_refused_by_name_with_the_reason_and_the_way_out():
    with pytest.raises(SandboxError) as caught:
        refuse_missing(without("namespaces", "landlock"), ["reading"])
    message = str(caught.value)
    assert "- names: not even the names" in message
    assert "namespaces: not in this kernel" in message
    assert "waive them by name: names, writing (docs/sandbox.md)" in message
    assert "- reading" not in message
    refuse_missing(without("namespaces", "landlock"), ["names", "reading", "writing"])


@pytest.mark.usefixtures("whole_sandbox")
def test_a_sandbox_starts_without_a_guarantee_only_where_it_is_waived():
    with pytest.raises(SandboxError, match="- names: "):
        Sandbox(without=["namespaces"])
    with Sandbox(without=["namespaces"], waived=["names"]) as sandbox:
        assert sandbox.mechanisms.namespaces == "left out by the caller"
        assert sandbox.run(Program(source="print(1)")).stdout == b"1\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"waived": ["nams"]}, "no guarantee 'nams'; did you mean 'names'"),
        ({"waived": ["everything at all"]}, "there are: network, reading"),
        ({"without": ["landlok"]}, "no mechanism 'landlok'; did you mean 'landlock'"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(given, words):
    with pytest.raises(ValueError, match=words):
        Sandbox(**given)


@pytest.mark.usefixtures("whole_sandbox")
def test_the_doctor_finds_what_is_held_and_what_is_not():
    findings = {finding.name: finding for finding in examine(without=["namespaces"], waived=["names"])}
    assert list(findings) == list(NAMES)
    assert findings["names"].state is State.WAIVED
    assert {name for name, finding in findings.items() if finding.state is not State.HELD} == {"names"}


@pytest.mark.usefixtures("whole_sandbox")
def test_the_doctor_sees_programs_get_through():
    findings = {finding.name: finding for finding in examine(without=["seccomp"])}
    # Nobody forbids them without the filter, and the probes do it.
    for name in ("processes", "survivors", "memory", "network", "signals", "privileges"):
        assert findings[name].state is State.MISSING
    assert findings["reading"].state is State.HELD


def test_a_probe_that_gets_through_is_no_guarantee_held():
    finding = _status("network", ALL, "got through: socket", waived=False)
    assert (finding.state, finding.reason) == (State.BROKEN, "got through: socket")
    assert _status("network", ALL, "got through: socket", waived=True).state is State.WAIVED


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "i686"), ("win32", "AMD64")])
def test_a_machine_of_another_kind_is_refused_in_words(monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(SandboxError, match=f"needs 64-bit Linux on x86_64 or aarch64; this is {system} {machine}"):
        Sandbox()


@pytest.mark.usefixtures("whole_sandbox")
def test_the_report_says_how_each_guarantee_stands(capsys):
    status = report()
    said = capsys.readouterr().out
    for guarantee in GUARANTEES:
        assert f"{guarantee.name:18}{guarantee.promise}" in said
    assert status == (0 if said.count("held ") >= len(NAMES) else 1)


@pytest.mark.usefixtures("whole_sandbox")
def test_the_command_of_the_package_alone_speaks_to_programs_too(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doctor", "--json"])
    status = main()
    findings = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in findings] == list(NAMES)
    assert (status == 0) == all(finding["state"] == "held" for finding in findings)


def test_an_unknown_waiver_is_the_users_mistake(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doctor", "--waive", "netwrk"])
    assert main() == 2
    assert "did you mean 'network'" in capsys.readouterr().err
