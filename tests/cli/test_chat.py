"""`proximo chat`: a dialogue over the lines of a pipe, and at a terminal."""

import io
import sys
from pathlib import Path

import pytest

from builders import tiny_language_model, tiny_tokenizer
from proximo.cli import main
from proximo.commands.chat_session import Dialogue
from proximo.commands.generate import GenerateOptions, generate
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.pretrained.saving import save_pretrained
from proximo.rollout.sampling import SamplingOptions

SHORT = ["--max-new-tokens", "12"]
SAMPLING = SamplingOptions(max_new_tokens=12, greedy=True)
GREEDY = GenerateOptions(sampling=SAMPLING)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return save(tmp_path / "model")


def save(folder: Path, *, chat: bool = True, **options: int) -> str:
    tiny_language_model(**options).save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return str(folder)


def said_to(model: str, *lines: str, options: tuple[str, ...] = ("--greedy",), monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", model, *SHORT, *options]) == 0
    return capsys.readouterr().out


@pytest.fixture
def say(monkeypatch, capsys):
    def said(model: str, *lines: str, options: tuple[str, ...] = ("--greedy",)) -> str:
        return said_to(model, *lines, options=options, monkeypatch=monkeypatch, capsys=capsys)

    return said


def written(model: str, prompt: str) -> str:
    return generate(model, [prompt], GREEDY)[0].text


def test_turns_are_rendered_by_the_template_with_all_that_was_said(model: str, say) -> None:
    first = written(model, "<|user|>abc<eos><|assistant|>")
    second = written(model, f"<|user|>abc<eos><|assistant|>{first}<eos><|user|>de<eos><|assistant|>")
    third = f"<|user|>abc<eos><|assistant|>{first}<eos><|user|>de<eos><|assistant|>{second}<eos><|user|>f<eos>"
    assert say(model, "abc", "", "de", "f") == f"{first}\n{second}\n{written(model, third + '<|assistant|>')}\n"
    assert second != written(model, "<|user|>de<eos><|assistant|>")


def test_a_model_without_a_template_writes_on(tmp_path: Path, say) -> None:
    plain = save(tmp_path / "plain", chat=False)
    first = written(plain, "once")
    assert say(plain, "once", "and") == f"{first}\n{written(plain, f'once{first}' + chr(10) + 'and')}\n"


def test_reset_forgets_and_quit_ends(model: str, say) -> None:
    first = written(model, "<|user|>abc<eos><|assistant|>")
    assert say(model, "abc", "/reset", "abc", "/quit", "abc") == f"{first}\n{first}\n"


def test_the_system_text_stands_before_the_first_turn(model: str, say) -> None:
    told = written(model, "<|system|>be<eos><|user|>abc<eos><|assistant|>")
    assert say(model, "abc", options=("--greedy", "--system", "be")) == f"{told}\n"


def test_sampling_options_reach_the_model(model: str, say) -> None:
    hot = say(model, "abc", options=("--temperature", "3"))
    assert hot == say(model, "abc", options=("--temperature", "3"))
    assert hot != say(model, "abc", options=("--temperature", "3", "--seed", "1"))
    greedy = say(model, "abc")
    assert say(model, "abc", options=("--temperature", "3", "--top-k", "1")) == greedy
    assert say(model, "abc", options=("--temperature", "3", "--top-p", "1e-9")) == greedy


def test_an_unknown_command_is_not_said_to_the_model(model: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/rest\n"))
    assert main(["chat", model]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "no command /rest: /reset clears" in said.err


def test_what_no_longer_fits_is_left_out_from_the_oldest_turn(tmp_path: Path) -> None:
    small = save(tmp_path / "small", max_position_embeddings=48)
    dialogue = Dialogue(small, SAMPLING)
    answers = [dialogue.answer("a" * 16) for _ in range(3)]
    assert [answer.forgot for answer in answers] == [False, True, True]
    assert answers[0].text == written(small, f"<|user|>{'a' * 16}<eos><|assistant|>")


def test_an_adapter_of_a_run_speaks(model: str, tmp_path: Path) -> None:
    adapted = LanguageModel(tiny_language_model()).with_adapter(LoRAOptions(rank=2, alpha=400))
    for name, parameter in adapted.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=1.0)
    adapted.base.config._name_or_path = model
    adapted.model.peft_config["default"].base_model_name_or_path = model
    save_pretrained(adapted.model, tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    spoken = Dialogue(str(tmp_path / "adapter"), SAMPLING).answer("abc").text
    assert spoken == written(str(tmp_path / "adapter"), "<|user|>abc<eos><|assistant|>")
    assert spoken != Dialogue(model, SAMPLING).answer("abc").text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch):
    """Answers `input` with lines; an exception in their place is raised, and the end is Ctrl-D."""

    def use(*lines: object) -> None:
        left = iter(lines)

        def read(prompt: str) -> object:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", read)

    return use


def test_a_terminal_is_greeted_and_control_d_ends(model: str, at_terminal, capsys) -> None:
    at_terminal("abc")
    assert main(["chat", model, *SHORT, "--greedy"]) == 0
    said = capsys.readouterr()
    assert said.out == written(model, "<|user|>abc<eos><|assistant|>") + "\n\n"
    assert "its chat template" in said.err


def test_control_c_stops_an_answer_and_at_the_prompt_the_chat(model: str, at_terminal, monkeypatch, capsys) -> None:
    answer, interrupted = Dialogue.answer, []

    def first_is_stopped(self: Dialogue, text: str):
        if not interrupted:
            interrupted.append(text)
            raise KeyboardInterrupt
        return answer(self, text)

    monkeypatch.setattr(Dialogue, "answer", first_is_stopped)
    at_terminal("de", "abc", KeyboardInterrupt())
    assert main(["chat", model, *SHORT, "--greedy"]) == 130
    said = capsys.readouterr()
    assert said.out == written(model, "<|user|>abc<eos><|assistant|>") + "\n"
    assert "this turn was removed" in said.err


def test_a_line_that_is_too_long_ends_a_pipe_and_not_a_terminal(tmp_path, at_terminal, monkeypatch, capsys) -> None:
    small = save(tmp_path / "small", max_position_embeddings=32)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 40 + "\nabc\n"))
    assert main(["chat", small, *SHORT]) == 2
    assert capsys.readouterr().out == ""
    at_terminal("a" * 40, "abc")
    assert main(["chat", small, *SHORT, "--greedy"]) == 0
    said = capsys.readouterr()
    assert "the chat template failed" in said.err
    assert said.out.strip() == written(small, "<|user|>abc<eos><|assistant|>").strip()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "x"], "no chat template"),
        (["--max-new-tokens", "300"], "leaves no room"),
        (["--top-p", "2"], "top_p"),
    ],
)
def test_what_has_no_place_is_a_mistake(options: list[str], message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    plain = save(tmp_path / "plain", chat=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    assert main(["chat", plain, *options]) == 2
    assert message in capsys.readouterr().err
