"""Without a network a name of the Hub is refused after one try, and what was loaded before is found in the cache."""

import huggingface_hub
import pytest
from huggingface_hub import constants

from proximo import hub
from proximo.errors import ModelError
from proximo.hub import within_reach
from proximo.models.pretrained.vocabulary import load_tokenizer


class Session:
    """The Hub's client, where nothing, or something, answers."""

    def __init__(self, answers: bool) -> None:
        self.answers = answers
        self.asked = 0

    def head(self, address: str, *, timeout: float) -> None:
        assert address == constants.ENDPOINT
        assert timeout == hub.ANSWER_SECONDS
        self.asked += 1
        if not self.answers:
            raise ConnectionError("no route")


@pytest.fixture
def session(monkeypatch, request):
    made = Session(request.param)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: made)
    monkeypatch.setattr(hub, "_asked", {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return made


@pytest.mark.parametrize(("session", "offline"), [(True, False), (False, True)], indirect=["session"])
def test_the_libraries_are_told_where_the_hub_does_not_answer(session, offline):
    for _ in range(3):
        with within_reach("owner/model"):
            assert constants.HF_HUB_OFFLINE is offline
        assert constants.HF_HUB_OFFLINE is False
    assert session.asked == 1


@pytest.mark.parametrize("session", [False], indirect=True)
def test_a_name_that_is_not_in_the_cache_is_refused_without_trying_again(session, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: pytest.fail("it tried again"))
    with pytest.raises(ModelError, match="as a folder|there is no folder owner/no-such-model"):
        load_tokenizer("owner/no-such-model")
    assert session.asked == 1


@pytest.mark.parametrize("session", [False], indirect=True)
def test_nobody_is_asked_about_a_folder(session, tmp_path):
    with within_reach(str(tmp_path)):
        assert constants.HF_HUB_OFFLINE is False
    assert session.asked == 0
