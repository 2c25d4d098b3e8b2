"""The real chat model of the results page."""

from proximo.cli import main
from real_data import real_model


def test_it_answers_by_its_chat_template(capsys) -> None:
    asked = ["generate", str(real_model()), "What is the capital of France?", "--chat", "--greedy"]
    assert main([*asked, "--max-new-tokens", "12"]) == 0
    assert "Paris" in capsys.readouterr().out
