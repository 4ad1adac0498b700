"""The page that shows an agent at work: over HTTP as any program may ask, and in a real browser."""

import contextlib
import http.client
import itertools
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from fake_llm import FakeLLM, Failure, call, error
from fake_telegram import FakeTelegram
from test_command_line import Terminal, journal, needs_terminal, record_everything, settings

ROOT = Path(__file__).parent.parent
NANOBOT = [sys.executable, str(ROOT / "nanobot.py")]


class Page:
    """`nanobot web` as a process, and what a browser would do with its address."""

    def __init__(self, folder: Path, *flags: str, **environ: str):
        command = [*NANOBOT, "web", "--port", "0", *([] if environ else ["--no-open"]), *flags]
        with open(folder / "stderr", "w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=err,
                encoding="utf-8",
                env=os.environ | environ,
            )
        found = (re.search(r"http://\S+", line) for line in self.process.stdout)
        printed = (match[0] for match in found if match)
        first = next(printed)
        self.port = int(re.search(r":(\d+)/", first)[1])
        self._unused = itertools.chain([first], printed)
        self._cookie = ""

    def address(self) -> str:
        """An address that was not used: one is printed at the start, and one after each use."""
        return next(self._unused)

    def visit(self, address: str, cookie: str = ""):
        return self.request("GET", address.partition(str(self.port))[2], Cookie=cookie)

    @property
    def cookie(self) -> str:
        """The cookie of a browser that has used an address."""
        if not self._cookie:
            self._cookie = self.visit(self.address())[1]["Set-Cookie"].partition(";")[0]
        return self._cookie

    def request(self, method: str, path: str, body: str | None = None, **headers: str):
        """(status, headers, text). The cookie is sent unless `Cookie` is given."""
        if "Cookie" not in headers:
            headers["Cookie"] = self.cookie
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        headers = {"Content-Type": "application/json"} | headers
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text

    def say(self, text: str, chat: str = "page", number: str = "1"):
        return self.request("POST", "/say", json.dumps({"chat": chat, "text": text, "id": number}))

    def answer(self, asked: dict, text: str) -> int:
        return self.request("POST", "/answer", json.dumps({"id": asked["id"], "text": text}))[0]

    def events(self, until: str, chat: str = "page") -> list[dict]:
        """What a window is sent, up to the first event of that kind."""
        window = Window(self, chat)
        window.wait(until)
        window.close()
        return window.events

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(15)


class Window:
    """A window of the page that stays open: the events that it is sent."""

    def __init__(self, page: Page, chat: str = "page", lines: int = 300):
        self.connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        self.connection.request("GET", f"/events?{chat}&{lines}", headers={"Cookie": page.cookie})
        self.stream = self.connection.getresponse()
        self.events: list[dict] = []

    def wait(self, kind: str, **fields: str) -> dict:
        """The next event of this kind with these fields."""
        ends = time.monotonic() + 30
        while True:
            line = self.stream.readline().decode()  # at least every 0.1 s
            assert line and time.monotonic() < ends, (kind, fields, self.events)
            if line.startswith("data: "):
                self.events.append(json.loads(line[6:]))
                if {"kind": kind, **fields}.items() <= self.events[-1].items():
                    return self.events[-1]

    def close(self) -> None:
        self.stream.close()
        self.connection.close()


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "work"
    place.mkdir()
    (place / "a.txt").write_text("hello <script>document.title = 'owned'</script>\n")
    return place


@pytest.fixture
def open_page(folder):
    pages = []

    def start(*flags: str, **environ: str) -> Page:
        pages.append(Page(folder, *(flags or ("--offline",)), **environ))
        return pages[-1]

    yield start
    for page in pages:
        assert not page.end() or os.name == "nt"


def test_only_whoever_has_the_token_sees_or_says_anything(open_page):
    page = open_page()
    body = json.dumps({"chat": "page", "text": "hi", "id": "1"})
    strangers = {
        "no cookie": {"Cookie": ""},
        "a wrong token": {"Cookie": f"nanobot_{page.port}=x"},
        "another page in the same browser": {"Origin": "https://evil.example"},
        "a sandboxed frame": {"Origin": "null"},
        "another port": {"Origin": "http://127.0.0.1:1"},
        "a rebound name": {"Host": f"evil.example:{page.port}"},
        "IPv6": {"Host": f"[::1]:{page.port}"},
        "the owner of [::1]": {"Host": f"localhost:{page.port}"},
    }
    for who, headers in strangers.items():
        for method, path in [
            ("GET", "/"),
            ("GET", "/events?page&300"),
            ("GET", "/x"),
            ("POST", "/say"),
        ]:
            assert page.request(method, path, body, **headers)[0] == 403, (who, path)
    assert page.request("GET", "/?token=wrong", Cookie="")[0] == 403
    status, headers, _ = page.visit(page.address())
    assert (status, headers["Refresh"]) == (200, "0; url=/")
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
    status, headers, text = page.request("GET", "/")
    policy = headers["Content-Security-Policy"]
    nonce = re.search(r"script-src 'nonce-([^']+)'", policy)[1]
    assert status == 200 and "frame-ancestors 'none'" in policy and "default-src 'none'" in policy
    assert f'<script nonce="{nonce}">' in text and page.request("GET", "/")[2] != text
    assert page.request("POST", "/say", Content_Length="1000001")[0] == 413
    assert page.request("POST", "/say", body, Content_Type="text/plain")[0] == 413
    for size in ("-1", "x"):  # -1 would be read without end
        assert page.request("POST", "/say", Content_Length=size)[0] in (400, 413)
    assert page.request("POST", "/say", Transfer_Encoding="chunked")[0] == 400
    assert page.request("POST", "/say", "[]")[0] == 400
    tossed = f"nanobot_{page.port}=x; {page.cookie}"  # by another port of this host
    assert page.request("GET", "/", Cookie=tossed)[0] == 200


def test_an_address_works_once_and_no_other_account_can_read_it(open_page, folder, own_home):
    pytest.importorskip("fcntl")  # Windows starts no script
    script = folder / "browser"
    script.write_text(
        f'#!/bin/sh\nprintf %s "$1" > {folder}/part; mv {folder}/part {folder}/opened\n'
    )
    script.chmod(0o700)
    page = open_page("--offline", BROWSER=str(script))
    while not (folder / "opened").exists():
        time.sleep(0.02)
    opened = (folder / "opened").read_text()  # every account can read this command line
    assert opened == (own_home / "nanobot-page.html").as_uri()
    file = own_home / "nanobot-page.html"
    assert file.stat().st_mode & 0o077 == 0
    address = re.search(r'url=(http://[^"]+)', file.read_text())[1]
    assert address == page.address()
    with ThreadPoolExecutor(8) as browsers:
        answers = list(browsers.map(page.visit, [address] * 8))
    cookies = [headers["Set-Cookie"] for status, headers, _ in answers if status == 200]
    refusals = [text for status, _, text in answers if status == 403]
    assert len(cookies) == 1 and len(refusals) == 7
    assert "works once" in refusals[0] and "in its terminal" in refusals[0]
    assert address.partition("token=")[2] not in cookies[0]
    cookie = cookies[0].partition(";")[0]
    assert page.visit(address, cookie)[0] == 200  # a reload, or another window of this browser
    second = page.address()  # the terminal shows a new one, for another browser
    assert not file.exists() and page.visit(second)[0] == 200 and page.visit(second)[0] == 403
    (folder / "opened").unlink()
    page.end()
    unused = open_page("--offline", BROWSER=str(script))
    while not (folder / "opened").exists():
        time.sleep(0.02)
    assert file.exists() and unused.end() == 0 and not file.exists()


def test_a_turn_from_telegram_is_denied_at_once_and_the_page_is_still_asked(
    open_page, folder, own_home
):
    def script(body):
        last = body["messages"][-1]
        is_result = last["role"] == "tool"
        return f"Told: {last['content']}" if is_result else call("exec", command="touch made")

    with FakeTelegram() as telegram, FakeLLM(script) as server:
        bot = {"token": telegram.token, "apiBase": telegram.base_url, "allowFrom": ["*"]}
        config = settings(own_home, channels={"telegram": bot, "sendToolHints": False})
        page = open_page(*config, "--approve", "--base-url", server.base_url, "--model", "m")
        window = Window(page)
        for sender in range(8):  # as many turns as may run at once
            telegram.say("make it", sender=7 + sender)
        telegram.wait_until(lambda: len(telegram.texts()) == 8)
        assert all("nobody can be asked here" in text for text in telegram.texts())
        page.say("make it")
        asked = window.wait("ask")
        assert asked["session"] == "page" and "touch made" in asked["text"]
        assert not [event for event in window.events[:-1] if event["kind"] == "ask"]
        assert page.answer(asked, "a") == 204 and "Told" in window.wait("say")["content"]
        made = [path.name for path in folder.rglob("made")]
        telegram.say("make it")  # "always" was said on the page, not here
        telegram.wait_until(lambda: len(telegram.texts()) == 9)
        assert made == ["made"] and "nobody can be asked here" in telegram.texts()[-1]


def test_every_window_shows_the_questions_of_all_sessions_until_one_of_them_answers(
    open_page, own_home
):
    page = open_page("--provider", "human")
    here, there = Window(page), Window(page, "work")
    page.say("hi")
    asked = here.wait("ask")
    assert there.wait("ask")["id"] == asked["id"] and asked["session"] == "page"
    assert page.answer(asked, "Hello.") == 204 and page.answer(asked, "Too late.") == 400
    there.wait("asked", id=asked["id"])  # it is taken away
    here.wait("say", content="Hello.")

    page.say("/new", number="2")  # what is said before goes into the memory
    asked = there.wait("ask")
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["save_memory"]
    assert "Hello." in asked["messages"][-1]["content"] and asked["session"] == "memory"
    saved = {"history_entry": "The user said hi.", "memory_update": "- says hi"}
    assert page.answer(asked, f"save_memory {json.dumps(saved)}") == 204
    answer = there.wait("answer", who="memory")["answer"]
    assert answer["tool_calls"][0]["arguments"] == saved
    memory = own_home / ".nanobot" / "workspace" / "memory"
    while "says hi" not in (memory / "MEMORY.md").read_text():
        time.sleep(0.02)

    page.say("remind me to stretch", number="3")
    at = (datetime.now() + timedelta(seconds=3)).isoformat(timespec="seconds")
    job = json.dumps({"action": "add", "message": "stretch", "at": at})
    page.answer(there.wait("ask", session="page"), f"cron {job}")
    page.answer(there.wait("ask", session="page"), "I will.")
    asked = there.wait("ask")
    assert asked["session"].startswith("cron-") and "stretch" in str(asked["messages"][-1])
    page.answer(asked, "Stretch!")
    here.wait("say", content="Stretch!")


def first_mark(mark: str, workspace: Path, chat: str = "page") -> dict:
    """The first line with this mark in the journal of a session; waits for it."""
    file = workspace / "sessions" / f"web%3A{chat}.jsonl"
    ends = time.monotonic() + 30
    while True:
        text = file.read_text() if file.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        found = [line for line in lines if line.get("mark") == mark]
        if found:
            return found[0]
        assert time.monotonic() < ends, text
        time.sleep(0.05)


@pytest.mark.long
def test_a_message_that_cannot_be_stored_yet_waits_and_runs_once_however_often_it_is_sent(
    open_page, folder, own_home
):
    home = own_home / ".nanobot" / "workspace" / "sessions"
    with FakeLLM(["first", "second"]) as server:
        page = open_page("--base-url", server.base_url, "--model", "m")
        window = Window(page)
        (home / "web%3Apage.inbox").mkdir(parents=True)  # no line can be written, as on a full disk
        for _ in range(2):
            status, _, text = page.say("do it", number="7")
            assert status == 202 and text.startswith("waiting: the disk is full")
        (home / "web%3Apage.inbox").rmdir()
        window.wait("say", content="first")
        assert page.say("and now?", number="8")[0] == 204
        window.wait("say", content="second")
        window.close()
    journal = (home / "web%3Apage.jsonl").read_text()
    said = [line for line in map(json.loads, journal.splitlines()) if line.get("role") == "user"]
    assert [line["content"] for line in said] == ["do it", "and now?"]


def test_a_question_is_answered_with_no_if_no_window_is_open(open_page, folder, own_home):
    def script(body):
        last = body["messages"][-1]
        is_result = last["role"] == "tool"
        return f"Told: {last['content']}" if is_result else call("exec", command="touch made")

    home = own_home / ".nanobot" / "workspace"
    with FakeLLM(script) as server:
        human = open_page("--provider", "human", "--workspace", str(folder / "other"))
        human.say("anyone?")
        page = open_page("--approve", "--base-url", server.base_url, "--model", "m")
        window = Window(page)
        page.say("make it")
        window.wait("ask")
        window.close()  # a question that waits ends, too
        page.request("POST", "/step", '{"chat": "steps", "on": true}')
        page.say("make it", chat="steps", number="2")
        assert "open a window" in first_mark("ended", folder / "other")["why"]
        assert first_mark("ended", home, "steps") and first_mark("delivered", home)
        assert "nobody can be asked here" in page.events("say")[-1]["content"]
        assert len(server.bodies) == 2 and not list(folder.rglob("made"))
        window = Window(page)
        page.say("make it", number="3")
        asked = window.wait("ask")
        window.close()
        window = Window(page)  # a reload: the question is still there
        assert window.wait("ask", id=asked["id"]) and page.answer(asked, "y") == 204
        assert "Told" in window.wait("say")["content"]
        assert list(folder.rglob("made"))


def test_no_name_leads_out_of_the_sessions_and_a_window_that_breaks_off_is_no_traceback(
    open_page, folder
):
    page = open_page()
    assert page.say("hi", "../my session\r\n\r\nx")[0] == 204
    assert page.events("say", "..-my-session-x")[0]["chats"] == ["..-my-session-x"]
    with socket.create_connection(("127.0.0.1", page.port)) as window:
        window.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        head = (
            f"GET /events?page&300 HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nCookie: {page.cookie}"
        )
        window.sendall(f"{head}\r\n\r\n".encode())
        window.recv(100)
    assert page.say("hi", number="2")[0] == 204 and page.events("say")
    assert "Traceback" not in (folder / "stderr").read_text()


def test_keys_are_in_nothing_that_a_window_is_sent(open_page):
    page = open_page()
    page.say("my key is sk-abcdefghijklmnopqrst")
    assert "abcdefghijklmnop" not in json.dumps(page.events("say") + page.events("say"))
    page.request("POST", "/step", '{"chat": "steps", "on": true}')
    page.say("my key is sk-abcdefghijklmnopqrst", chat="steps")
    assert "abcdefghijklmnop" not in json.dumps(page.events("ask", chat="steps"))


def test_a_window_gets_the_request_the_call_the_answer_and_the_journal(open_page):
    page = open_page()
    assert page.say("read a.txt")[0] == 204
    events = page.events("say")
    first, second = [event for event in events if event["kind"] == "request"]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert (first["sent"], second["sent"]) == ([1, 2], [1, 2, 3, 4])  # each message is sent once
    assert [message["role"] for message in second["messages"]] == ["assistant", "tool"]
    call = next(event for event in events if event["kind"] == "answer")["answer"]["tool_calls"][0]
    assert call["name"] == "read_file" and call["arguments"] == {"path": "a.txt"}
    assert next(event for event in events if event["kind"] == "result")["text"].startswith(
        "1| hello"
    )
    again = page.events("say")  # a reload: the same from the beginning, and the journal before it
    lines = [
        json.loads(line) for event in again if event["kind"] == "lines" for line in event["lines"]
    ]
    assert [line["role"] for line in lines if "n" in line] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [event for event in again if event["kind"] == "request"] == [first, second]
    assert page.say("read a.txt")[0] == 204  # the same id: taken once
    assert len([e for e in page.events("say") if e["kind"] == "request"]) == 2


def test_the_window_of_a_chat_gets_what_the_endpoint_said_before_it_was_asked_again(
    open_page, folder
):
    slow_down = Failure(503, {"error": {"message": "slow down"}}, {"Retry-After": "0.01"})
    no_temperature = error(
        400, "Unsupported parameter: 'temperature' is not supported with this model."
    )
    with FakeLLM([slow_down, no_temperature, "ok"]) as server:
        page = open_page("--base-url", server.base_url, "--model", "m", "--trace", "run.jsonl")
        assert page.say("hello", chat="work")[0] == 204
        told = [event for event in page.events("say", chat="work") if event["kind"] == "retry"]
    assert "slow down" in told[0]["error"] and "Unsupported parameter" in told[1]["error"]
    assert told[1]["changed"] == {"temperature": None}
    recorded = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert [event for event in recorded if event["kind"] == "retry"] == told


def test_a_trace_is_shown_as_text_and_as_a_page_that_needs_no_server(folder):
    def nanobot(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*NANOBOT, *words],
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
        )

    (folder / "a.txt").write_text("hello <script>document.title = 'owned'</script> %NONCE% %RUN%\n")
    nanobot("agent", "--offline", "--trace", "run.jsonl", "-m", "read a.txt")
    shown = nanobot("trace", "run.jsonl").stdout
    for words in (
        "turn request: offline",
        "{'path': 'a.txt'}",
        "1| hello",
        "turn answer: a.txt says",
    ):
        assert words in shown
    done = nanobot("trace", "run.jsonl", "--html", "run.html")
    assert "prompts" in done.stderr and done.returncode == 0
    html = (folder / "run.html").read_text()
    assert "<script>document.title" not in html and html.count("</script>") == 2
    assert re.findall(r"(?:src|href)=\S+", html) == ['href="/runs"']  # nothing of the network
    run = json.loads(re.search('id="run" nonce="%NONCE%">(.*)</script>', html)[1])
    messages = [event["messages"] for event in run["events"] if event["kind"] == "request"]
    assert "</script> %NONCE% %RUN%" in messages[1][-1]["content"]
    missing = nanobot("trace", "nothing.jsonl")
    assert missing.returncode == 1 and "nanobot agent --trace" in missing.stderr


@needs_terminal
def test_at_the_terminal_a_step_waits_for_enter_and_a_call_runs_as_it_was_changed(own_home, folder):
    (folder / "b.txt").write_text("this is b\n")
    terminal = Terminal("--offline", "--step", "-s", "direct", cwd=folder)
    terminal.expect("> ")
    terminal.say("read a.txt", "Enter sends them")
    terminal.say("", "Enter runs it")
    terminal.say('{"path": "b.txt"}', "this is b", "Enter sends them")
    terminal.say("", "this is b")
    terminal.expect("> ")
    terminal.say("read a.txt", "Enter sends them")
    terminal.say("", "Enter runs it")
    terminal.say("b.txt", "read_file was not run: ", "Enter sends them")  # no JSON object
    terminal.say("", "> ")
    assert terminal.close() == 0
    assert any(
        "this is b" in str(line.get("content"))
        for line in journal(own_home)
        if line.get("role") == "tool"
    )


# ---- In a real browser ----


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("there is no chromium")
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def answers(tab) -> int:
    return tab.run("document.querySelectorAll('.said.agent').length")


def opened(browser, address, **more):
    tab = browser.open(address, **more)
    tab.wait("document.readyState === 'complete' && typeof RECORDED !== 'undefined'")
    tab.wait("RECORDED || byId('sessions').children.length > 0")
    return tab


@pytest.mark.slow
def test_a_question_is_asked_and_answered_in_the_page_and_nothing_in_it_is_markup(
    browser, open_page
):
    page = open_page()
    tab = opened(browser, page.address())
    assert "token" not in tab.run("location.href")
    tab.say("read a.txt")
    tab.wait("document.querySelectorAll('.said.agent').length === 1")
    assert tab.run("document.title") == "nanobot behind glass"
    assert "hello <script>" in tab.run("byId('requests').textContent")
    assert tab.run("document.querySelectorAll('article').length") == 2
    again = tab.run("location.href")
    second = opened(browser, again)  # another window of the same session
    second.wait("document.querySelectorAll('.said.agent').length === 1")
    second.say("what time is it?")
    tab.wait("document.querySelectorAll('.said.agent').length === 2")
    tab.do("Page.reload")
    tab.wait(
        "typeof RECORDED !== 'undefined' && document.querySelectorAll('.said.agent').length === 2"
    )
    tab.click("Journal")
    assert "1 user read a.txt" in tab.run("byId('journal').textContent")
    third = opened(browser, f"http://127.0.0.1:{page.port}/")  # the session of before
    third.wait("document.querySelectorAll('.said.agent').length === 2")
    assert third.run("location.href") == again
    third.click("New session")
    third.wait("byId('sessions').options.length === 2")
    assert answers(third) == 0 and third.run("location.href") != again


@pytest.mark.slow
def test_calls_are_approved_changed_skipped_and_stopped_in_the_page(browser, open_page, folder):
    tab = opened(browser, open_page("--offline", "--approve").address())
    tab.say("run echo one > one.txt")
    tab.wait("document.activeElement.textContent === 'No'")  # Enter refuses
    tab.click("No")
    tab.wait("document.querySelectorAll('.said.agent').length === 1")
    tab.say("run echo two > two.txt")
    tab.click("Yes, run it")
    tab.wait("document.querySelectorAll('.said.agent').length === 2")
    assert [path.name for path in folder.glob("*.txt")] and not (folder / "one.txt").exists()
    assert (folder / "two.txt").read_text() == "two\n"
    tab.run("byId('step').click()")
    tab.click("Journal")
    tab.say("read a.txt")
    tab.wait("byId('chat').textContent.includes('The next request is ready.')")
    assert "read a.txt" in tab.run("document.querySelector('.question').textContent")
    seen = "(box => box.bottom > box.top && box.top >= 0 && box.bottom <= innerHeight)(last.element.getBoundingClientRect())"
    tab.click("Send it")
    tab.wait("Boolean(document.querySelector('.question textarea'))")
    tab.do("Page.reload")
    tab.wait(
        f"typeof RECORDED !== 'undefined' && last && document.querySelectorAll('article').length === 5 && {seen}"
    )
    tab.do("Page.reload")  # in mid-turn: the question is asked again
    tab.wait(
        "typeof RECORDED !== 'undefined' && Boolean(document.querySelector('.question textarea'))"
    )
    tab.run("""document.querySelector('.question textarea').value = '{"path": "two.txt"}'""")
    tab.click("Run it")
    tab.click("Send it")
    tab.wait("document.querySelectorAll('.said.agent').length === 3")
    assert "arguments that ran" in tab.run("byId('requests').textContent")
    tab.click("Journal")
    assert "two.txt" in tab.run("byId('journal').textContent")
    tab.say("read a.txt")
    tab.click("Stop the turn")
    tab.wait("byId('chat').textContent.includes('The turn ended')")


@pytest.mark.slow
def test_a_person_is_the_model_in_the_page(browser, open_page):
    tab = opened(browser, open_page("--provider", "human").address())
    tab.say("What is in a.txt?")
    tab.wait("Boolean(document.querySelector('.question select'))")
    tab.run("""(chooser => {
        chooser.value = 'read_file';
        chooser.dispatchEvent(new Event('change'));
        const path = document.querySelector('.question label textarea');
        path.value = 'a.txt';
        path.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, cancelable: true}));
    })(document.querySelector('.question select'))""")
    tab.wait(
        "document.querySelectorAll('article').length === 2 && Boolean(document.querySelector('.question textarea'))"
    )
    tab.run("document.querySelector('.question textarea').value = 'It says hello.'")
    tab.click("Answer")
    tab.wait("byId('chat').textContent.includes('It says hello.')")


@pytest.mark.slow
def test_a_window_shows_and_answers_what_other_sessions_and_the_memory_ask(
    browser, open_page, own_home
):
    page = open_page("--provider", "human", BROWSER="true")
    file = own_home / "nanobot-page.html"
    while not file.exists() or "url=" not in file.read_text():
        time.sleep(0.02)
    tab = opened(browser, file.as_uri())  # as the program opens it
    assert tab.run("location.href").startswith(f"http://127.0.0.1:{page.port}/#")
    page.address()  # the browser has used this one
    tab.run("byId('text').value = 'half a line'; byId('text').focus()")
    page.say("What is in a.txt?", chat="work")
    question = "(document.querySelector('.question')?.textContent ?? '')"
    tab.wait(f"{question}.includes('Session work')")
    assert tab.run("document.activeElement.id") == "text"
    assert tab.run("getComputedStyle(byId('write')).display") != "none"
    tab.click("Answer it here")
    tab.wait(f"{question}.includes('What is in a.txt?')")
    assert tab.run("getComputedStyle(byId('write')).display") == "none"  # one box to write in
    tab.run("document.querySelector('.question textarea').value = 'It says hello.'")
    tab.click("Answer")
    tab.wait("!document.querySelector('.question')")
    tab.run("byId('text').value = ''")
    tab.say("hello")
    tab.wait(f"{question}.includes('the request is on the right')")
    tab.run("document.querySelector('.question textarea').value = 'Hello.'")
    tab.click("Answer")
    tab.wait("byId('chat').textContent.includes('Hello.')")
    tab.say("/new")
    tab.wait(f"{question}.includes('The memory')")
    tab.click("Answer it here")
    tab.run("""(chooser => {
        chooser.value = 'save_memory';
        chooser.dispatchEvent(new Event('change'));
        for (const field of document.querySelectorAll('.question label textarea')) field.value = 'They said hello.';
    })(document.querySelector('.question select'))""")
    tab.click("Call the tool")
    tab.wait("byId('facts').textContent.includes('They said hello.')")


@pytest.mark.slow
def test_a_long_session_stays_responsive_and_a_reminder_appears(browser, open_page):
    page = open_page()
    tab = opened(browser, page.address())
    tab.say("remind me in 1 second to drink water")
    for number in range(200):
        assert page.say("hello", tab.run("chat"), f"n{number}")[0] == 204
    tab.wait(
        "byId('chat').textContent.includes('drink water') && document.querySelectorAll('.said.user').length > 100",
        120,
    )
    began = time.monotonic()
    tab.run("selectTab('tab-journal')")
    tab.run("document.body.getBoundingClientRect().height")
    assert time.monotonic() - began < 1


def year_of_messages(folder: Path, count: int) -> None:
    """The journal of a session on the page, as a year leaves it."""
    folder.mkdir(parents=True)
    first = {"mark": "session", "key": "web:year", "created_at": "2026-01-01T10:00:00+0000"}
    rows = [first]
    for n in range(1, count):
        moment = datetime(2025, 1, 1) + timedelta(hours=n)
        stamp = f"{moment:%Y-%m-%dT%H:%M:%S}+0000"
        role = "user" if n % 2 else "assistant"
        rows.append({"n": n, "role": role, "content": f"number {n} " * 30, "timestamp": stamp})
    rows.append({"mark": "delivered", "upto": count - 1})
    rows.append({"mark": "saved", "upto": count - 9, "summary": "They counted."})
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "web%3Ayear.jsonl").write_text(text)


@pytest.mark.slow
def test_a_year_of_one_session_opens_in_a_second_and_shows_older_lines_on_request(
    browser, open_page, own_home
):
    year_of_messages(own_home / ".nanobot" / "workspace" / "sessions", 9_001)
    page = open_page()
    tab = opened(browser, page.address())  # after a start: the session that was used last
    tab.wait("document.querySelectorAll('.said').length >= 290 && chat === 'year'")
    began = time.monotonic()
    tab.do("Page.reload")
    tab.wait(
        "typeof RECORDED !== 'undefined' && byId('chat').textContent.includes('number 9000 ')", 10
    )
    assert time.monotonic() - began < 5  # 1 s on an idle machine
    assert tab.run("byId('chat').textContent.includes('number 8699 ')") is False
    tab.run("byId('chat').querySelector('.older').click()")
    tab.wait("document.querySelectorAll('.said').length >= 890")
    tab.say("what is 15% of 240")
    tab.wait("[...document.querySelectorAll('.said.agent')].at(-1).textContent.includes('36')")


def test_silent_connections_do_not_stop_the_page_and_the_agent_keeps_its_file_descriptors(
    open_page,
):
    page = open_page()
    assert page.say("hi")[0] == 204
    silent = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(220)]
    opened_files = Path(f"/proc/{page.process.pid}/fd")
    if opened_files.exists():
        ends = time.monotonic() + 10
        while len(list(opened_files.iterdir())) > 200:  # `ulimit -n` is 256 on macOS
            assert time.monotonic() < ends
            time.sleep(0.05)
    ends = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert page.say("read a.txt", number="2")[0] == 204
            break
        assert time.monotonic() < ends
        time.sleep(0.2)
    assert "hello" in [e for e in page.events("result") if e["kind"] == "result"][0]["text"]
    for each in silent:
        each.close()


@pytest.mark.slow
def test_the_header_says_which_tool_runs_and_a_stopped_call_says_so(browser, open_page):
    tab = opened(browser, open_page().address())
    tab.click("what is 15% of 240")  # an empty page offers sentences
    tab.wait("byId('chat').textContent.includes('36') && !byId('offers')")
    tab.say("run sleep 60")
    tab.wait("byId('state').textContent === 'exec: sleep 60'")
    lit = "document.querySelector('#loop .lit').dataset.station"
    assert tab.run(lit) == "tool" and tab.run("byId('place').textContent") == "step 1"
    tab.click("Stop")
    tab.wait("byId('requests').textContent.includes('stopped before it finished')")
    tab.wait("byId('state').textContent === ''")
    tab.click("Journal")
    assert "the turn ended: it was stopped" in tab.run("byId('journal').textContent")
    tab.say("my name is Ada")
    tab.wait("byId('chat').textContent.includes('Ada')")
    tab.click("Memory")
    tab.wait("byId('files').textContent.includes('Ada')")
    tab.click("Projector")
    tab.do("Page.reload")
    tab.wait("typeof RECORDED !== 'undefined' && document.readyState === 'complete'")
    assert tab.run("getComputedStyle(document.body).fontSize") == "24px"
    tab.run("localStorage.clear()")


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1024, 1280, 1920])
def test_no_width_scrolls_sideways_and_a_long_header_leaves_the_message_box_in_view(
    browser, open_page, folder, width
):
    (folder / "long.txt").write_text("x" * 3_000)
    tab = opened(browser, open_page().address(), width=width, scheme="dark")
    tab.say("read long.txt")
    tab.wait("document.querySelectorAll('.said.agent').length === 1")
    tab.run(
        "setState('No connection: the program has ended or starts again. A new start prints a new address.')"
    )
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("byId('write').getBoundingClientRect().bottom <= innerHeight")


@pytest.mark.slow
def test_a_recorded_run_opens_without_a_server(browser, folder):
    for words in (
        ["agent", "--offline", "--trace", "run.jsonl", "-m", "read a.txt"],
        ["trace", "run.jsonl", "--html", "run.html"],
    ):
        subprocess.run(
            [*NANOBOT, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
    tab = opened(browser, (folder / "run.html").as_uri())
    assert tab.run("document.querySelectorAll('article').length") == 2
    assert answers(tab) == 1
    subprocess.run(
        [*NANOBOT, "trace", "mistake", "--html", "run.html"],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    shown = opened(browser, (folder / "run.html").as_uri()).run(
        "document.querySelector('main').textContent"
    )
    assert shown.count("✓") == 2 and "✗ failed" in shown and "window" not in shown
    assert "The programYou sent nothing" in shown
    for words in ("(nothing: no text, no call)", "new (nothing)", "no tools"):
        assert words in shown


@needs_terminal
@pytest.mark.slow
def test_helpers_memory_steps_shortened_and_healed_requests_are_shown(browser, own_home, folder):
    record_everything(own_home, folder)
    command = [*NANOBOT, "trace", "t.jsonl", "--html", "run.html"]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    tab = opened(browser, (folder / "run.html").as_uri())
    shown = tab.run("document.querySelector('main').textContent")
    words = (
        "Helper, step 1",
        "Memoryrequest to ",
        "The helper has looked.",
        "↻ local, test-model: temperature is left out",
        "remembered: temperature is left out",
        "tool results cut",
        "arguments that ran",
        "this is a",
    )
    assert [each for each in words if each not in shown] == [] and "cannot be shown" not in shown
    assert answers(tab) == 4


STRANGE = "</script><img src=x onerror=\"document.title='owned'\">"


@pytest.mark.slow
def test_the_file_of_a_stranger_is_shown_as_text_with_a_card_for_each_run(browser, folder):
    """A helper speaks while the turn waits; one event has odd fields that only a page reads."""

    def event(kind, run="r1", who="turn", **fields):
        return {"time": 1.0, "run": run, "who": who, "key": "cli:a", "kind": kind, **fields}

    def request(text, run="r1", who="turn"):
        said = [{"role": "system", "content": STRANGE}, {"role": "user", "content": text}]
        sizes = {"sent": [1, 2], "tokens": [3, 4], "messages": said}
        return event("request", run, who, model=STRANGE, healed=[STRANGE], **sizes)

    answer = {"content": "", "error": None, "tool_calls": [], "finish_reason": "stop", "usage": {}}
    calls = [{"id": "c1", "name": STRANGE, "arguments": {"x": STRANGE}}]
    events = [
        request("from Ada"),
        event("retry", text=STRANGE, error=STRANGE, changed={"stop": None}),
        event("answer", seconds=1, answer=answer | {"tool_calls": calls}),
        event("call", id="c1", name=STRANGE, arguments={"x": "changed"}),
        request("for the helper", "r2", "helper"),
        event("answer", "r2", "helper", seconds=1, answer=answer | {"content": "helped"}),
        event("result", id="c1", text=STRANGE, is_error=True, outcome="not run", seconds=0.5),
        event("request", model="m", sent=[1, 2, 9], tokens=[1], messages=[], tools=7),
        event("answer", seconds=1, answer=answer | {"tool_calls": [None]}),
        event("answer", seconds=1, answer=answer | {"content": STRANGE}),
        event("journal", who="session", line={"n": 1, "role": "assistant", "content": STRANGE}),
        event("journal", who="session", line={"mark": "ended", "why": STRANGE}),
    ]
    (folder / "run.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))
    command = [*NANOBOT, "trace", "run.jsonl", "--html", "run.html"]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    tab = opened(browser, (folder / "run.html").as_uri())
    assert tab.run("document.title") == "nanobot behind glass" and answers(tab) == 1
    assert tab.run("document.querySelectorAll('img').length") == 0
    cards = tab.run("[...document.querySelectorAll('article')].map((card) => card.innerText)")
    assert "Helper" in cards[1] and "helped" in cards[1] and "✗" not in cards[1]
    assert (
        "✗ not run" in cards[0] and "arguments that ran" in cards[0] and '"stop":null' in cards[0]
    )
    said = tab.run("byId('chat').innerText")
    assert "from Ada" in said and "cannot be shown" in said and "The turn ended" in said


SHIPPED = sorted((ROOT / "templates" / "traces").glob("*.jsonl"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_run_that_is_shipped_is_small_labelled_shown_and_replayed_by_its_name(folder, file):
    text = file.read_text(encoding="utf-8")
    first = json.loads(text.partition("\n")[0])
    assert len(text) < 200_000 and first["kind"] == "label" and "Who answered: " in first["text"]
    assert str(ROOT) not in text and "/root" not in text  # nothing of the machine that recorded it
    for command in (["trace"], ["replay", "--fast"]):
        done = subprocess.run(
            [*NANOBOT, *command, file.stem], cwd=folder, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_the_runs_are_played_step_by_step_in_a_view_that_cannot_act(browser, open_page, folder):
    page = open_page()
    tab = opened(browser, page.address())
    tab.do("Page.navigate", url=f"http://127.0.0.1:{page.port}/runs")
    tab.wait("typeof RECORDED !== 'undefined' && RECORDED && byId('run-list').options.length > 0")
    assert tab.run("self.origin") == "null"
    for act in ("fetch('/say', {method: 'POST'})", "Promise.resolve().then(() => document.cookie)"):
        assert tab.run(f"{act}.then(() => 'done', () => 'refused')") == "refused"
    assert "token=" not in tab.run("document.documentElement.outerHTML")
    assert sorted(tab.run("Object.keys(RUN.runs)")) == sorted(file.stem for file in SHIPPED)
    for name in tab.run("Object.keys(RUN.runs)"):
        tab.run(f"byId('run-list').value = '{name}'")
        tab.run("byId('run-list').dispatchEvent(new Event('change'))")
        assert "Who answered: " in tab.run("byId('label').textContent")
        first = tab.run("document.querySelector('main').textContent")
        tab.run("while (!byId('next').disabled) byId('next').click()")
        shown = tab.run("document.querySelector('main').textContent")
        assert "Answer" in shown and "cannot be shown" not in shown and "not run yet" not in shown
        tab.run("while (!byId('back').disabled) byId('back').click()")
        assert tab.run("document.querySelector('main').textContent") == first
    tab.run("byId('run-list').value = 'two-tools'")
    tab.run("byId('run-list').dispatchEvent(new Event('change'))")
    stations = ["you"]
    while tab.run("!byId('next').disabled"):
        tab.click("Next")
        stations.append(tab.run("document.querySelector('#loop .lit').dataset.station"))
    step = ["request", "model", "call", "tool", "tool"]
    assert stations == ["you", *step, *step, "request", "model", "answer"]
    tab.click("Start")
    tab.click("Play")
    tab.wait("document.querySelector('#loop .lit').dataset.station === 'model'")
    stranger = {"time": 1.0, "run": "r", "who": "turn", "key": "k", "step": 1}
    said = [{"role": "user", "content": STRANGE}]
    odd = [{**stranger, "kind": "request", "model": STRANGE, "sent": [1], "messages": said}]
    odd.append({**stranger, "kind": "label", "text": STRANGE})
    odd.append({**stranger, "kind": "answer", "answer": STRANGE})
    (folder / "own.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in odd))
    root = tab.do("DOM.getDocument")["root"]["nodeId"]
    field = tab.do("DOM.querySelector", nodeId=root, selector="#own-run")["nodeId"]
    tab.do("DOM.setFileInputFiles", nodeId=field, files=[str(folder / "own.jsonl")])
    tab.wait("byId('chat').textContent.includes('<img')")
    tab.run("while (!byId('next').disabled) byId('next').click()")
    assert tab.run("document.title") == "nanobot behind glass"
    assert tab.run("document.querySelectorAll('img').length") == 0
    (folder / "broken.jsonl").write_text("{oops")
    tab.do("DOM.setFileInputFiles", nodeId=field, files=[str(folder / "broken.jsonl")])
    tab.wait("byId('label').textContent.includes('is not a recorded run')")
