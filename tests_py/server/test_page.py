"""The page at /, in headless Chromium."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltaic import AsyncLLM
from deltaic.server import ServerSettings
from harness import SMALL, Maker, running_server, until

TOY = ServerSettings(served_model_names=["toy"])

HOW_TO_INSTALL = "apt-get install chromium fonts-dejavu-core; pip install playwright axe-playwright-python"


def find_chromium() -> str:
    """Return the path of a Chromium; the test fails where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.fail(f"the page is tested in Chromium, which is not installed: {HOW_TO_INSTALL}", pytrace=False)


def load_module(name: str) -> Any:
    """Import what the tests need; the test fails where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.fail(f"the page is tested with {error.name}, which is not installed: {HOW_TO_INSTALL}", pytrace=False)


def test_tests_of_the_page_fail_without_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(pytest.fail.Exception, match="Chromium, which is not installed: apt-get install chromium"):
        find_chromium()
    with pytest.raises(pytest.fail.Exception, match=r"no_such_module, which is not installed: .* pip install playw"):
        load_module("no_such_module")


def test_page_is_one_file_that_reaches_no_other_host(make: Maker) -> None:
    server = make(settings=ServerSettings(api_keys=["secret"]))
    answer = server.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", answer.text.replace("http://www.w3.org/2000/svg", "")) == []
    assert re.findall(r"<link(?![^>]*href=\"data:)|<script [^>]*src|@import", answer.text) == []
    assert len(answer.text) < 20_000
    assert server.ask(("HEAD", "/", {}))[0].status_code == 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with load_module("playwright.sync_api").sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield made
        made.close()


class Page:
    """A tab, and what went wrong in it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(20_000)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", lambda line: self.wrong.append(line.text) if line.type == "error" else None)
        self.tab.on("request", lambda request: self.requests.append(request.url))

    def send(self, text: str) -> None:
        self.tab.get_by_label("Message").fill(text)
        self.tab.get_by_role("button", name="Send").click()

    def answers(self) -> Any:
        return self.tab.locator("article.assistant:not(.busy)")

    def wait(self, number: int) -> str:
        """Wait for the end of the answer with this number; return its text."""
        self.answers().nth(number).wait_for()
        return str(self.answers().nth(number).locator(":scope > .text").inner_text())


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    pages: list[Page] = []

    def opened(url: str, **options: Any) -> Page:
        pages.append(Page(browser, **options))
        pages[-1].tab.goto(f"{url}/")
        return pages[-1]

    yield opened
    for page in pages:
        page.context.close()


@pytest.fixture(scope="module")
def caching_server() -> Iterator[str]:
    """Yield the URL of a server that keeps the states of short prompts too."""
    with AsyncLLM(**SMALL, mamba_block_size=16) as llm, running_server(llm, TOY) as url:
        yield url


@pytest.mark.slow
def test_conversation_with_the_bundled_model(caching_server: str, opened: Any) -> None:
    page = opened(caching_server, viewport={"width": 1200, "height": 760})
    page.tab.get_by_text("toy, 4,096 tokens of context").wait_for()
    page.tab.get_by_label("Temperature").fill("0")
    page.send("What is the capital of France?")
    assert "Paris" in page.wait(0)
    page.tab.get_by_label("Message").fill("What is the capital of Italy?")
    page.tab.get_by_label("Message").press("Enter")
    assert "Rome" in page.wait(1)
    figures = page.answers().nth(1).locator(".figures").inner_text()
    assert re.search(r"\d+ tokens", figures)
    cached = re.search(r"(\d+) of (\d+) prompt tokens from the cache \((\d+) %\)", figures)
    assert cached is not None, figures
    num_cached, num_prompt, percent = map(int, cached.groups())
    assert 16 <= num_cached < num_prompt  # the first turn is in the cache
    assert percent == round(100 * num_cached / num_prompt)
    if folder := os.environ.get("DELTAIC_SCREENSHOTS"):
        page.tab.screenshot(path=str(Path(folder) / "page.png"))
    page.send("Tell me a story about a boy and a boat.")  # long enough not to come in one piece, which has no rate
    page.wait(2)
    assert re.search(r"[\d.]+ tokens/s", page.answers().nth(2).locator(".figures").inner_text())
    page.tab.get_by_role("button", name="New conversation").click()
    assert page.tab.locator("article").count() == 0
    assert page.wrong == []
    assert {url.split("/")[2] for url in page.requests if not url.startswith("data:")} == {
        caching_server.removeprefix("http://")
    }


@pytest.mark.slow
def test_stop_gives_everything_back(bundled_server: str, bundled_llm: AsyncLLM, opened: Any) -> None:
    page = opened(bundled_server)
    for stop in (
        lambda: page.tab.get_by_role("button", name="Stop").click(),
        lambda: page.tab.keyboard.press("Escape"),
    ):
        # The model would end by itself: let it go on.
        page.tab.route("**/v1/chat/completions", go_on)
        page.send("Tell me a long story.")
        page.tab.locator(".busy > .text").filter(has_text=re.compile(".{20}", re.DOTALL)).wait_for()
        assert bundled_llm.num_unfinished == 1
        stop()
        page.tab.locator(".busy").wait_for(state="detached")
        until(lambda: bundled_llm.num_unfinished == 0)
        assert page.answers().last.locator(".figures").inner_text() == "stopped"
    until(lambda: bundled_llm.stats().num_free_blocks == bundled_llm.stats().num_total_blocks)
    assert page.wrong == []


def go_on(route: Any) -> None:
    body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": 3000}
    route.continue_(post_data=body)


@pytest.mark.slow
def test_settings_reach_the_engine_and_stay(make: Maker, opened: Any) -> None:
    server = make("fine")
    with running_server(server.llm, server.settings) as url:
        page = opened(url)
        settings = {
            "System prompt": "Be kind.",
            "Temperature": "0.5",
            "Top p": "0.8",
            "Top k": "7",
            "Repeat penalty": "1.2",
            "Most tokens": "9",
            "Seed": "3",
        }
        for label, value in settings.items():
            page.tab.get_by_label(label).fill(value)
        page.tab.get_by_label("Let the model think").uncheck()
        page.send("Hi")
        assert page.wait(0) == "fine"
        assert "3 of 22 prompt tokens from the cache (14 %)" in page.answers().locator(".figures").inner_text()
        (request,) = server.engine.seen.values()
        params = request.params
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.5, 0.8, 7, 1.2)
        assert (params.max_tokens, params.seed) == (9, 3)
        prompt = server.llm.get_tokenizer().decode(request.prompt_token_ids)
        assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
        page.tab.reload()
        for label, value in settings.items():
            assert page.tab.get_by_label(label).input_value() == value
        page.tab.get_by_label("Temperature").fill("3")  # the field itself says what is wrong
        page.send("Hi")
        time.sleep(0.2)
        assert len(server.engine.seen) == 1


@pytest.mark.slow
def test_reasoning_code_and_what_looks_like_html(make: Maker, thinking_model: Path, opened: Any) -> None:
    server = make(
        "Hm.</think><b>no</b> `x<y` **bold**\n\n```py\n<script>alert(1)</script>\n```\n\nEnd", model=thinking_model
    )
    with running_server(server.llm, server.settings) as url:
        page = opened(url)
        page.send("Hi <i>there</i>")
        assert "<b>no</b> x<y bold" in page.wait(0)
        assert page.tab.locator("article.user .text").inner_text() == "Hi <i>there</i>"
        assert page.tab.locator("article pre code").inner_text() == "<script>alert(1)</script>"
        assert page.tab.locator("article strong").inner_text() == "bold"
        thoughts = page.tab.locator("details.thought .text")
        assert not thoughts.is_visible()
        page.tab.get_by_text("Thoughts").click()
        assert thoughts.inner_text() == "Hm."
        assert page.wrong == []


@pytest.mark.slow
def test_errors_are_told_and_the_question_comes_back(make: Maker, opened: Any) -> None:
    server = make(settings=ServerSettings(api_keys=["secret"]))
    with running_server(server.llm, server.settings) as url:
        page = opened(url)
        page.tab.get_by_text("the API key is missing or wrong").first.wait_for()
        page.send("Hi")
        page.tab.get_by_role("alert").filter(has_text="the API key is missing or wrong").wait_for()
        assert page.tab.get_by_label("Message").input_value() == "Hi"
        page.tab.get_by_label("API key").fill("secret")
        page.tab.get_by_role("button", name="Send").click()
        page.tab.get_by_text("fine").first.wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(make: Maker, opened: Any, scheme: str) -> None:
    """By the rules of axe-core; and all of it by the keyboard."""
    axe = load_module("axe_playwright_python.sync_playwright")
    server = make("`code` and\n\n```\nmore\n```")
    with running_server(server.llm, server.settings) as url:
        page = opened(url, color_scheme=scheme, viewport={"width": 390, "height": 800})
        page.send("Hi")
        page.wait(0)
        found = axe.Axe().run(page.tab).response["violations"]
        assert found == [], [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found]
        assert page.tab.evaluate("document.activeElement.id") == "message"
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 390
        if folder := os.environ.get("DELTAIC_SCREENSHOTS"):
            page.tab.screenshot(path=str(Path(folder) / f"page-{scheme}.png"))
