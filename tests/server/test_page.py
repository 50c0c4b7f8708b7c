"""The page in a real browser: by keyboard, on a phone's width and a desk's, in light and in dark."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.engine.fakes import EOS, ScriptRunner
from tests.server.browser import Browser, Page, find_chromium, run_browser
from tests.server.conftest import Serve, Served, running
from tests.server.test_gate import is_idle, until
from tests.server.test_live import caching

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt-get install chromium")
HELLO = (*b"hello", EOS)
QUESTION = "Please say hello to everyone who reads this."
# Where it is set, what the tests saw is written there, to be looked at.
SHOTS = os.environ.get("JAXINFER_PAGE_SHOTS")

# The least contrast of any text that is shown, and whose it is; buttons that cannot be pressed are let be.
CONTRAST = """(() => {
  const rgba = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const under = (node) => { for (let n = node; n; n = n.parentElement) {
    const c = rgba(getComputedStyle(n).backgroundColor); if (c[3] === 1) return c; } };
  let least = [21, ""];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !node.checkVisibility({ visibilityProperty: true }) || node.closest(":disabled")) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(under(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least[0]) least = [ratio, node.outerHTML.slice(0, 80)];
  }
  return least;
})()"""
# What has the focus: a name to tell it by, and whether it can be seen to have it.
FOCUSED = """(() => { const n = document.activeElement, s = getComputedStyle(n);
  if (n === document.body) return ["BODY", true];
  return [n.id || n.dataset.view || n.dataset.window || n.type || n.tagName,
    n.matches(":focus-visible") && s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2]; })()"""


@dataclass
class Talk:
    """What the engine says. Attributes: script: tokens. seconds: that a step takes. served: behind it."""

    script: tuple[int, ...] = HELLO
    seconds: float = 0.0
    served: Served = field(init=False)

    def rest(self, _: object) -> bool:
        """Takes its time; no step fails."""
        time.sleep(self.seconds)
        return False


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with run_browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def talk() -> Iterator[Talk]:
    """A server whose engine says what a test wants, with a prefix cache."""
    talk = Talk()
    engine = caching(num_pages=96)
    runner = engine.runner
    assert isinstance(runner, ScriptRunner)
    runner.script, runner.fails = lambda *_: talk.script, talk.rest
    with running(engine) as talk.served:
        yield talk


def open_page(browser: Browser, served: Served, width: int = 1280, scheme: str = "light") -> Page:
    page = browser.page(width, 720 if width < 600 else 900, scheme)
    page.open(f"{served.url}/")
    page.wait("document.getElementById('model-name').textContent === 'fake'")
    return page


def say(page: Page, text: str, state: str = "Done") -> None:
    """Sends a message by keyboard, and waits for the state that it ends in."""
    page.run("document.getElementById('message').focus()")
    page.type(text)
    page.press("Enter")
    page.wait(f"document.getElementById('state').textContent.startsWith({state!r})", 60)


def answers(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('.answer .text')].map((n) => n.textContent)")


def show(page: Page, view: str) -> None:
    """Goes to a view, by keyboard, where there is room for one only."""
    if page.run("getComputedStyle(document.querySelector('nav')).display") != "none":
        page.run(f"document.querySelector('nav [data-view={view}]').focus()")
        page.press("Enter")
    page.wait(f"document.getElementById('{view}').checkVisibility()")


def look(page: Page, name: str) -> None:
    """Checks what can be measured of how it looks, and keeps a picture for who wants to see the rest."""
    size = page.run("[document.documentElement.scrollWidth, innerWidth]")
    assert size[0] <= size[1], f"{name} is wider than the screen"
    wide = "[...document.querySelectorAll('main *')].filter((n) => n.checkVisibility() && "
    wide += "n.getBoundingClientRect().right > innerWidth + 1).map((n) => n.outerHTML.slice(0, 80))"
    assert page.run(wide) == []
    ratio, where = page.run(CONTRAST)
    assert ratio >= 4.5, f"{name}: {where}"
    if SHOTS:
        page.shoot(Path(SHOTS) / f"{name}.png")


def check_quiet(page: Page, served: Served) -> None:
    assert page.complaints() == []
    strangers = [url for url in page.requests() if not url.startswith(f"{served.url}/")]
    assert strangers == ["about:blank"] * len(strangers)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_conversation_by_keyboard(browser: Browser, talk: Talk, width: int, scheme: str):
    page, engine = open_page(browser, talk.served, width, scheme), talk.served.engine
    dark = page.run("matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (scheme == "dark")
    look(page, f"empty-{width}-{scheme}")
    assert page.run("document.activeElement.id") == "message"
    say(page, QUESTION)
    assert answers(page) == ["hello"]
    figures = page.text(".figures")
    assert re.search(r"TTFT[\d.]+ m?s", figures), figures
    assert re.search(r"ITL[\d.]+ m?s.*speed[\d,.]+ tokens/s", figures), figures
    assert f"out{engine.metrics.output_tokens} tokens" in figures
    assert f"prompt{engine.metrics.prompt_tokens} tokens, 0 cached" in figures
    assert figures.endswith("complete")

    say(page, "And once more, please.")
    assert answers(page) == ["hello", "hello"]
    cached = re.search(r"(\d+) cached", page.text(".turn:last-child .figures"))
    assert cached
    assert int(cached[1]) == engine.metrics.prefix_hits >= 32
    look(page, f"chat-{width}-{scheme}")

    talk.script, talk.seconds = tuple(b"la la la "), 0.05
    say(page, "Sing without an end.", "Answering")
    assert page.run("document.querySelector('.turn:last-child .answer').ariaBusy") == "true"
    show(page, "live")
    page.wait("document.getElementById('running').textContent === '1'")
    page.wait("Number(document.getElementById('pages-1').textContent) > 0")
    look(page, f"live-{width}-{scheme}")
    page.run("document.getElementById('live').scrollTop = 9999")
    look(page, f"live-end-{width}-{scheme}")
    page.press("Escape")
    show(page, "chat")
    page.wait("document.getElementById('state').textContent === 'Stopped'")
    until(lambda: is_idle(talk.served))
    assert engine.metrics.finished["abort"] == 1
    assert answers(page)[2].startswith("la la"[: len(answers(page)[2])])
    assert page.text(".turn:last-child .figures").endswith("stopped")
    assert page.run("document.querySelector('.turn:last-child .answer').ariaBusy") == "false"
    show(page, "settings")
    look(page, f"settings-{width}-{scheme}")
    check_quiet(page, talk.served)


def test_the_live_view_shows_the_engines_numbers(browser: Browser, talk: Talk):
    page, engine = open_page(browser, talk.served), talk.served.engine
    for _ in range(3):
        talk.served.chat(QUESTION)
    page.wait("document.getElementById('totals').textContent.includes('stop 3')")
    page.wait("document.getElementById('running').textContent === '0'")
    states = engine.page_states()
    for state in range(4):
        assert page.text(f"#pages-{state}") == str(states.count(state))
    metrics = engine.metrics
    assert page.text("#hits") == f"{round(100 * metrics.prefix_hits / metrics.prefix_queries)} %"
    assert page.text("#hits-sub") == f"{metrics.prefix_hits} of {metrics.prefix_queries}"
    assert page.text("#waiting") == page.text("#preemptions") == page.text("#compilations") == "0"
    assert page.text("#running-sub") == "of 8 rows"
    assert f"{metrics.prompt_tokens} prompt tokens, {metrics.output_tokens} generated" in page.text("#totals")
    for name, histogram in ("ttft", metrics.ttft), ("itl", metrics.itl):
        label = page.run(f"document.getElementById('{name}-chart').ariaLabel")
        assert label.startswith(f"{name.upper()} of {histogram.count} values: p50 "), label
    drawn = "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v)"
    for name in ("pool", "rate-chart", "rows-chart", "ttft-chart", "itl-chart"):
        assert page.run(f"({drawn})(document.getElementById('{name}'))"), name
    assert page.run("document.getElementById('pool').ariaLabel").startswith("96 pages: ")
    page.run("document.querySelector('[data-window=minute]').focus()")
    page.press("Enter")
    assert page.run("document.querySelector('[data-window=minute]').ariaPressed") == "true"
    check_quiet(page, talk.served)


def test_snapshots_are_asked_for_only_while_they_can_be_seen(browser: Browser, talk: Talk):
    page = open_page(browser, talk.served, 360)

    def count() -> int:
        return sum(url.endswith("/live") for url in page.requests())

    say(page, QUESTION)
    assert count() == 0
    show(page, "live")
    page.wait("document.getElementById('totals').textContent.includes('stop 1')")
    show(page, "chat")
    before = count()
    talk.script, talk.seconds = tuple(b"la " * 100), 0.05
    say(page, "Sing.", "Answering")
    page.wait(
        "document.querySelector('.turn:last-child .answer .text').textContent.length > 50", 60
    )  # 2.5 seconds
    assert count() <= before + 1  # one may have been on its way
    page.press("Escape")
    page.wait("document.getElementById('state').textContent === 'Stopped'")


def test_the_models_text_is_never_markup(browser: Browser, talk: Talk):
    text = "<img src=x onerror=alert(1)><b>bold</b>&amp;<script>throw 1</script>"
    talk.script = (*text.encode(), EOS)
    page = open_page(browser, talk.served)
    say(page, "<i>question</i>")
    assert answers(page) == [text]
    assert page.text(".question") == "<i>question</i>"
    assert page.run("document.querySelectorAll('#log :is(img, b, i, script)').length") == 0
    with pytest.raises(AssertionError, match="TrustedHTML"):
        page.run("document.body.innerHTML = '<b>x</b>'")


def test_settings_are_sent(browser: Browser, talk: Talk):
    page, runner = open_page(browser, talk.served), talk.served.engine.runner
    assert isinstance(runner, ScriptRunner)
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "seed": 11, "max_tokens": 99}
    wanted |= {"repetition_penalty": 1.25, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    for name, value in wanted.items():
        page.run(f"document.getElementById('{name}').value = ''; document.getElementById('{name}').focus()")
        page.type(str(value))
    page.run("document.getElementById('stop').focus()")
    page.type("lo\\n\nxyz")
    page.run("document.getElementById('system').focus()")
    page.type("Be kind.")
    say(page, QUESTION)
    admitted = runner.admitted[-1].params
    assert {name: getattr(admitted, name) for name in wanted} == wanted
    assert admitted.stop == ("lo\n", "xyz")
    system = {"role": "system", "content": "Be kind."}
    assert page.bodies()[-1]["messages"] == [system, {"role": "user", "content": QUESTION}]
    page.run("document.querySelector('#settings [type=reset]').click()")
    say(page, "Again.")
    assert runner.admitted[-1].params.stop == ()
    assert runner.admitted[-1].params.max_tokens == 512
    check_quiet(page, talk.served)


def test_retry_and_clear(browser: Browser, talk: Talk):
    page = open_page(browser, talk.served)
    assert page.run("document.getElementById('retry').disabled && document.getElementById('clear').disabled")
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    say(page, "")
    assert page.text(".question") == "one\ntwo"
    talk.script = (*b"other", EOS)
    page.run("document.getElementById('retry').focus()")
    page.press("Enter")
    page.wait("document.querySelector('.answer .text')?.textContent === 'other'")
    page.wait("document.getElementById('state').textContent === 'Done'")
    assert page.run("document.activeElement.id") == "message"
    asked = [{"role": "user", "content": "one\ntwo"}]
    assert [body["messages"] for body in page.bodies()] == [asked, asked]
    say(page, "And?")
    told = [*asked, {"role": "assistant", "content": "other"}, {"role": "user", "content": "And?"}]
    assert page.bodies()[-1]["messages"] == told
    page.run("document.getElementById('clear').focus()")
    page.press("Enter")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.run("document.getElementById('empty').checkVisibility()")
    say(page, "three")
    assert page.bodies()[-1]["messages"] == [{"role": "user", "content": "three"}]


def test_errors_are_told_in_words(browser: Browser, talk: Talk):
    page = open_page(browser, talk.served, 360)
    say(page, "x" * 2000, "No answer")
    assert "The server refused the request (400): " in page.text(".answer .error")
    assert "1024" in page.text(".answer .error")
    page.run("document.getElementById('temperature').value = '-1'")
    say(page, QUESTION, "Temperature: ")
    assert page.run("document.activeElement.id") == "temperature"
    assert page.run("document.body.dataset.view") == "settings"
    assert page.run("document.getElementById('message').value") == QUESTION


def test_a_key_is_asked_for_and_kept_for_the_tab_only(browser: Browser, serve: Serve):
    served = serve(config={"api_keys": ("a secret",)})
    page = browser.page(1280, 900, "light")
    page.open(f"{served.url}/")
    page.wait("document.getElementById('settings-note').textContent.includes('asks for an API key')")
    say(page, QUESTION, "No answer")
    assert "asks for an API key" in page.text(".answer .error")
    page.run("document.getElementById('api-key').focus()")
    page.type("a secret")
    page.press("Tab")
    page.wait("document.getElementById('model-name').textContent === 'fake'")
    page.run("document.getElementById('retry').click()")
    page.wait("document.getElementById('state').textContent === 'Done'")
    page.wait("document.getElementById('running').textContent === '0'")
    assert answers(page) == ["hello"]
    assert page.run("JSON.stringify(localStorage) + document.cookie") == "{}"
    assert page.run("sessionStorage.getItem('api_key')") == "a secret"


def test_a_server_that_is_gone_is_told_of(browser: Browser):
    with running(caching()) as served:
        page = open_page(browser, served)
    say(page, QUESTION, "No answer")
    assert page.text(".answer .error") == "The server cannot be reached. Is it still running?"
    page.wait("document.getElementById('contact').textContent === 'no contact with the server'")


def test_the_theme_can_be_chosen_and_is_kept(browser: Browser, talk: Talk):
    page = open_page(browser, talk.served)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    for theme, label in ("light", "light"), ("dark", "dark"):
        page.run("document.getElementById('theme').focus()")
        page.press(" ")
        assert page.run("document.documentElement.dataset.theme") == theme
        assert page.run("document.getElementById('theme').ariaLabel") == f"Theme: {label}"
        assert (page.run(background) == light) == (theme == "light")
    look(page, "chosen-dark")
    page.open(f"{talk.served.url}/?again")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    check_quiet(page, talk.served)


@pytest.mark.parametrize("width", [360, 1280])
def test_tab_reaches_everything_and_is_seen_to(browser: Browser, talk: Talk, width: int):
    page = open_page(browser, talk.served, width)
    say(page, QUESTION)
    page.run("document.activeElement.blur()")
    controls = page.run(
        "[...document.querySelectorAll('button, input, select, textarea')]"
        ".filter((n) => n.checkVisibility() && !n.disabled)"
        ".map((n) => n.id || n.dataset.view || n.dataset.window || n.type)"
    )
    reached: dict[str, bool] = {}
    for _ in range(2 * len(controls) + 6):
        page.press("Tab")
        name, seen = page.run(FOCUSED)
        reached[name] = seen
    assert set(controls) <= reached.keys()
    unseen = [name for name, seen in reached.items() if not seen]
    assert unseen == []


def test_every_control_and_picture_has_a_name(browser: Browser, talk: Talk):
    page = open_page(browser, talk.served, 1280)  # where all views are seen at once
    roles = {"button", "textbox", "spinbutton", "combobox", "image", "img", "region", "group", "log"}
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    names = [(n["role"]["value"], n.get("name", {}).get("value")) for n in nodes if not n["ignored"]]
    found = {(role, name) for role, name in names if role in roles}
    assert {role for role, _ in found} >= {"button", "textbox", "spinbutton", "combobox", "image", "region"}
    assert len(found) > 25
    assert [role for role, name in found if not name] == []
