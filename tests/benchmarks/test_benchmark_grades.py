"""benchmarks/mixed_programs.py in small: honest programs win among sleepers and floods, in both of two passes."""

from collections import Counter

import pytest
from mixed_programs import KINDS, grade, misgraded, mixture

from proximo.config.rewards.verifiers import CodeRewardConfig
from proximo.errors import SandboxError
from proximo_verifiers.sandbox.runner import Sandbox
from proximo_verifiers.verifier import ScoreState


def test_a_mixture_has_every_kind_and_no_text_twice() -> None:
    pairs = mixture(1000, seed=0)
    counts = Counter(kind.name for kind, _ in pairs)
    assert {kind.name: max(1, round(1000 * kind.share)) for kind in KINDS} == counts
    assert len({response.text for _, response in pairs}) == len(pairs) == 1000
    assert [kind for kind, _ in mixture(1000, seed=1)] != [kind for kind, _ in pairs]


def test_no_honest_program_loses_among_hostile_ones_and_two_passes_agree() -> None:
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error}")
    pairs = mixture(20, seed=0)
    kinds, responses = [kind for kind, _ in pairs], [response for _, response in pairs]
    options = {"cpu_seconds": 1.0, "idle_seconds": 1.5, "workers": 2}
    config = CodeRewardConfig(kind="code", form="asserts", program="response", **options)
    first, second = (grade(responses, config) for _ in range(2))
    assert misgraded(kinds, first) == misgraded(kinds, second) == []
    assert [each[:2] for each in first] == [each[:2] for each in second]
    assert ScoreState.INFRASTRUCTURE_FAULT not in {state for _, state, _ in first}
