"""Importing torch once puts its objects out of the search for garbage; objects of a run stay in it."""

import gc
import sys

import pytest

from proximo.cli.collection import loading


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with every freeze, which is not done: the objects of the other tests are to go."""
    calls: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(gc.isenabled()))
    return calls


def test_the_first_import_is_not_searched_and_set_apart(frozen, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with loading():
        assert not gc.isenabled()
        assert frozen == []
    assert gc.isenabled()
    assert frozen == [False]


def test_where_torch_was_there_before_nothing_is_set_apart(frozen, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == []


def test_an_import_that_fails_leaves_the_search_on(frozen, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ImportError), loading():
        raise ImportError("no torch")
    assert gc.isenabled()
    assert frozen == []


def test_a_search_that_was_off_stays_off(frozen, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
