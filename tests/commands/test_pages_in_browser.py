"""What pages do in a browser: values under the pointer and by key, the search, pages that follow, narrow windows."""

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from chromium import Browser, chromium_path, opened_browser
from proximo.metrics.report.comparison import NamedRun, comparison_page
from proximo.metrics.report.page import report_page
from proximo.metrics.run_files import read_run

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(chromium_path() is None, reason="there is no Chromium here (apt-get install chromium)"),
]
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"
VALUES = "document.querySelector('.values')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    with opened_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def write(run: Path, num_steps: int, slope: float = 1.0) -> Path:
    run.mkdir(exist_ok=True)
    lines = [{"step": step, "sft/loss": 9 - slope * step, "evaluation/loss": 8.5 - step} for step in range(num_steps)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [
        {
            "step": step,
            "kind": "evaluation",
            "prompt_id": f"p{index}",
            "prompt": f"item {index} {HOSTILE}",
            "response": word,
        }
        for step in (0, num_steps)
        for index, word in enumerate(["red tea", "green tea", "red wine"] * 4)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    (run / "config.resolved.json").write_text(
        json.dumps({"sft": {"num_steps": num_steps}, "very": {"long" * 20: "x" * 90}})
    )
    return run


def read_values(browser: Browser) -> list[str]:
    """The lines of the box of values."""
    return browser.evaluate(f"[...{VALUES}.children].map(line => line.textContent)")


def read_plot(browser: Browser, share: float) -> list[str]:
    """The box of values with the pointer at a share of the first plot's width."""
    browser.evaluate("document.querySelector('.plot').scrollIntoView({block: 'center', behavior: 'instant'})")
    place = browser.evaluate(
        "(() => { const p = document.querySelector('.plot svg').getBoundingClientRect();"
        " const area = JSON.parse(document.querySelector('.plot').dataset.readout).box;"
        " const scale = p.width / document.querySelector('.plot svg').viewBox.baseVal.width;"
        f" return [p.left + scale * (area[0] + {share} * (area[2] - area[0])), p.top + p.height / 3]; }})()"
    )
    browser.hover(1, 1)
    browser.hover(*place)
    browser.wait(f"!{VALUES}.hidden")
    return read_values(browser)


def test_values_show_under_the_pointer_and_by_key_and_samples_can_be_searched(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report_page([read_run(write(tmp_path / "run", 7))], title="run"))
    browser.look(1200, 900)
    browser.open(page.as_uri())
    assert read_plot(browser, 0.02) == ["step 0", "9training", "8.5held out"]
    assert read_plot(browser, 0.67)[:2] == ["step 4", "5training"]
    marks = browser.evaluate("document.querySelectorAll('.marks circle').length")
    assert marks == 2
    browser.hover(1, 1)
    browser.wait(f"{VALUES}.hidden")
    assert browser.evaluate("document.querySelectorAll('.marks').length") == 0

    browser.evaluate("document.querySelector('.plot').focus()")
    for _ in range(3):
        browser.key("ArrowRight")
    assert read_values(browser)[:2] == ["step 6", "3training"], "from where the pointer was, to the end"
    browser.key("ArrowLeft")
    assert read_values(browser)[:2] == ["step 5", "4training"]

    browser.evaluate("document.querySelector('.filter input').focus()")
    browser.type("RED wine")
    assert browser.evaluate("document.querySelector('.filter output').textContent") == "4 of 12"
    shown = (
        "[...document.querySelectorAll('.sample')].filter(each => each.checkVisibility()).map(each => each.innerText)"
    )
    assert all("red wine" in text for text in browser.evaluate(shown))
    assert len(browser.evaluate(shown)) == 4
    browser.evaluate("document.querySelector('.filter input').value = ''")
    browser.type(" ")
    assert len(browser.evaluate(shown)) == 6
    assert browser.evaluate("document.title") == "run: Proximo"
    assert browser.failures == []


def test_a_script_that_is_not_the_page_s_own_does_not_run(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = report_page([read_run(write(tmp_path / "run", 3))], title="run")
    page.write_text(text.replace("</main>", "<script>document.title = 'taken'</script></main>"))
    browser.open(page.as_uri())
    assert browser.evaluate("document.title") == "run: Proximo"
    assert any("Content Security Policy" in text for text in browser.failures)
    browser.failures.clear()


@pytest.mark.parametrize("dark", [False, True])
def test_no_page_is_wider_than_a_phone(browser: Browser, tmp_path: Path, dark: bool) -> None:
    runs = [read_run(write(tmp_path / name, 7, slope)) for name, slope in (("one", 1.0), ("other", 0.5))]
    named = [NamedRun(label=run.name, colour=colour, run=run) for colour, run in enumerate(runs, 1)]
    browser.look(360, 740, dark=dark, phone=True)
    for text in (report_page(runs[:1], title="run"), comparison_page([named])):
        (tmp_path / "page.html").write_text(text)
        browser.open((tmp_path / "page.html").as_uri())
        assert browser.evaluate("document.documentElement.scrollWidth") == 360
        ink, paper = (
            browser.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        light = [sum(int(part) for part in colour[4:-1].split(",")) for colour in (ink, paper)]
        assert (light[0] > light[1]) is dark
    assert browser.failures == []


def test_a_page_that_follows_a_run_keeps_what_is_open_and_waits_for_its_reader(
    browser: Browser, tmp_path: Path
) -> None:
    page, run = tmp_path / "page.html", tmp_path / "run"

    def write_page(num_steps: int, reload_seconds: int | None) -> None:
        page.write_text(report_page([read_run(write(run, num_steps))], title="run", reload_seconds=reload_seconds))

    status = "document.querySelector('.status').textContent"
    last_fold = "[...document.querySelectorAll('details')].at(-1)"
    browser.look(1200, 900)
    write_page(4, 1)
    browser.open(page.as_uri())
    browser.evaluate(f"{last_fold}.open = true; scrollTo(0, 100)")
    write_page(6, 1)
    browser.wait(f"{status} === '5 steps'")
    assert browser.evaluate(f"{last_fold}.open")
    assert browser.evaluate("scrollY") == 100
    browser.evaluate("document.querySelector('.filter input').focus()")
    browser.type("green")
    write_page(8, None)
    assert browser.evaluate("new Promise(done => setTimeout(() => done(document.body.dataset.reload), 2500))") == "1"
    assert browser.evaluate("document.querySelector('.filter output').textContent") == "4 of 12"
    browser.evaluate("document.querySelector('.filter input').value = ''")
    browser.wait(f"{status} === '7 steps'")
    assert browser.evaluate("document.body.dataset.reload ?? 'over'") == "over"
