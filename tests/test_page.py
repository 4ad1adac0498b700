"""The page that shows an agent at work: over HTTP as any program may ask, and in a real browser."""

import contextlib
import http.client
import itertools
import json
import os
import re
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from conftest import lines_of
from fake_llm import Failure, call, error
from fake_telegram import FakeTelegram
from test_command_line import (
    LLM,
    ROOT,
    nanobot,
    needs_terminal,
    of_kind,
    prompt,
    said_by,
    settings,
    start,
    wait_until,
    workspace,
)


class Page:
    """`nanobot web` as a process, and what a browser would do with its address."""

    def __init__(self, folder: Path, *flags: str, **environ: str):
        more = [*([] if environ else ["--no-open"]), *flags]
        with open(folder / "stderr", "w") as err:
            options = {"stderr": err, "cwd": folder, "env": os.environ | environ}
            self.process = start("web", "--port", "0", *more, **options)
        found = (re.search(r"http://\S+", line) for line in self.process.stdout)
        printed = (match[0] for match in found if match)
        first = next(printed)
        self.port = int(re.search(r":(\d+)/", first)[1])
        self._unused = itertools.chain([first], printed)
        self._cookie = ""
        self.request("GET", "/", Cookie="")  # answered once it serves: `end` is a signal to it

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

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def request(self, method: str, path: str, body: str | None = None, **headers: str):
        """(status, headers, text). The cookie is sent unless `Cookie` is given."""
        if "Cookie" not in headers:
            headers["Cookie"] = self.cookie
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def post(self, path: str, **fields) -> int:
        return self.request("POST", path, json.dumps(fields))[0]

    def say(self, text: str, chat: str = "page", number: str = "1") -> int:
        """The status. As the page does, it says it again while it has to wait."""
        ends = time.monotonic() + 60
        while True:
            status = self.post("/say", chat=chat, text=text, id=number)
            if status != 202 or time.monotonic() > ends:
                return status

    def answer(self, asked: dict, text: str) -> int:
        return self.post("/answer", id=asked["id"], text=text)

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

    def __init__(self, page: Page, chat: str = "page"):
        self.connection = page.connect()
        self.connection.request("GET", f"/events?{chat}&300", headers={"Cookie": page.cookie})
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
def folder(tmp_path, monkeypatch):
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    (place / "a.txt").write_text("hello <script>document.title = 'owned'</script>\n")
    return place


@pytest.fixture
def open_page(folder):
    pages = []

    def open_one(*flags: str, **environ: str) -> Page:
        pages.append(Page(folder, *flags, **environ))
        return pages[-1]

    yield open_one
    for page in pages:
        assert not page.end() or os.name == "nt"


STRANGERS = [
    {"Cookie": ""},
    {"Cookie": "nanobot_{port}=x"},
    {"Origin": "https://evil.example"},  # another page in the same browser
    {"Origin": "null"},  # a sandboxed frame
    {"Host": "evil.example:{port}"},  # a rebound name
    {"Host": "localhost:{port}"},  # [::1] may be somebody else's
]


def test_only_whoever_has_the_token_sees_or_says_anything(open_page):
    page = open_page()
    body = json.dumps({"chat": "page", "text": "hi", "id": "1"})
    for stranger in STRANGERS:
        headers = {name: value.format(port=page.port) for name, value in stranger.items()}
        for method, path in (("GET", "/"), ("GET", "/events?page&300"), ("POST", "/say")):
            assert page.request(method, path, body, **headers)[0] == 403, (headers, path)
    assert page.request("GET", "/?token=wrong", Cookie="")[0] == 403
    status, headers, _ = page.visit(page.address())
    assert (status, headers["Refresh"]) == (200, "0; url=/")
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
    status, headers, text = page.request("GET", "/")
    policy = headers["Content-Security-Policy"]
    nonce = re.search(r"script-src 'nonce-([^']+)'", policy)[1]
    assert status == 200 and "frame-ancestors 'none'" in policy and "default-src 'none'" in policy
    assert f'<script nonce="{nonce}">' in text and page.request("GET", "/")[2] != text
    assert page.request("POST", "/say", body, Content_Type="text/plain")[0] == 413
    for size, refusals in (("1000001", [413]), ("-1", [400, 413])):  # -1: read without end
        assert page.request("POST", "/say", Content_Length=size)[0] in refusals
    assert page.request("POST", "/say", Transfer_Encoding="chunked")[0] == 400
    assert page.request("POST", "/say", "[]")[0] == 400
    tossed = f"nanobot_{page.port}=x; {page.cookie}"  # by another port of this host
    assert page.request("GET", "/", Cookie=tossed)[0] == 200


def test_an_address_works_once_and_no_other_account_can_read_it(open_page, folder, own_home):
    pytest.importorskip("fcntl", reason="Windows starts no script as a browser")
    script, opened, file = folder / "browser", folder / "opened", own_home / "nanobot-page.html"
    script.write_text(f'#!/bin/sh\nprintf %s "$1" > part; mv part {opened}\n')
    script.chmod(0o700)
    page = open_page("--offline", BROWSER=str(script))
    wait_until(opened.exists)
    assert opened.read_text() == file.as_uri()  # every account can read this command line
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
    opened.unlink()
    page.end()
    unused = open_page("--offline", BROWSER=str(script))
    wait_until(opened.exists)
    assert file.exists() and unused.end() == 0 and not file.exists()


def touches(body: dict):
    """Every question leads to a call, and its result to an answer."""
    last = body["messages"][-1]
    is_result = last["role"] == "tool"
    return f"Told: {last['content']}" if is_result else call("write_file", path="made", content="x")


def test_a_turn_from_telegram_is_denied_at_once_and_the_page_is_still_asked(open_page, folder):
    with FakeTelegram() as telegram, LLM(touches):
        bot = {"token": telegram.token, "apiBase": telegram.base_url, "allowFrom": ["*"]}
        config = settings(channels={"telegram": bot, "sendToolHints": False})
        page = open_page(*config, "--approve")
        window = Window(page)
        for sender in range(8):  # as many turns as may run at once
            telegram.say("make it", sender=7 + sender)
        telegram.wait_until(lambda: len(telegram.texts()) == 8)
        page.say("make it")
        asked = window.wait("ask")
        assert asked["session"] == "page" and "made" in asked["text"]
        assert len(of_kind("ask", window.events)) == 1
        assert page.answer(asked, "a") == 204 and "Told" in window.wait("say")["content"]
        telegram.say("make it")  # "always" was said on the page, not here
        telegram.wait_until(lambda: len(telegram.texts()) == 9)
        assert all("nobody can be asked here" in text for text in telegram.texts())
        assert len(list(folder.rglob("made"))) == 1


def test_every_window_shows_the_questions_of_all_sessions_until_one_of_them_answers(open_page):
    page = open_page("--provider", "human")
    here, there = Window(page), Window(page, "work")
    page.say("hi")
    asked = here.wait("ask")
    assert there.wait("ask")["id"] == asked["id"] and asked["session"] == "page"
    assert page.answer(asked, "Hello.") == 204 and page.answer(asked, "Too late.") == 400
    there.wait("asked", id=asked["id"])  # it is taken away
    here.wait("say", content="Hello.")

    page.say("/new", number="2")  # what is said before goes into the memory
    asked = there.wait("ask", session="memory")
    assert "Hello." in asked["messages"][-1]["content"]
    saved = {"history_entry": "The user said hi.", "memory_update": "- says hi"}
    assert page.answer(asked, f"save_memory {json.dumps(saved)}") == 204
    answer = there.wait("answer", who="memory")["answer"]
    assert answer["tool_calls"][0]["arguments"] == saved

    page.say("remind me to stretch", number="3")
    at = (datetime.now() + timedelta(seconds=3)).isoformat(timespec="seconds")
    job = json.dumps({"action": "add", "message": "stretch", "at": at})
    page.answer(there.wait("ask", session="page"), f"cron {job}")
    asked = there.wait("ask", session="page")
    assert "Added job " in str(asked["messages"]) and "No gateway" not in str(asked["messages"])
    page.answer(asked, "I will.")
    asked = there.wait("ask")
    assert asked["session"].startswith("cron-") and "stretch" in str(asked["messages"][-1])
    page.answer(asked, "Stretch!")
    here.wait("say", content="Stretch!")


def marks(folder: Path, chat: str = "page") -> str:
    """The lines of a session's journal that are no messages."""
    file = folder / "sessions" / f"web%3A{chat}.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return "".join(line for line in lines if '"mark"' in line and line.endswith("\n"))


@pytest.mark.long
def test_a_message_that_cannot_be_stored_yet_waits_and_runs_once_however_often_it_is_sent(
    open_page,
):
    inbox = workspace() / "sessions" / "web%3Apage.inbox"
    with LLM(["first", "second"]):
        page = open_page()
        window = Window(page)
        inbox.mkdir(parents=True)  # no line can be written, as on a full disk
        message = json.dumps({"chat": "page", "text": "do it", "id": "7"})
        for _ in range(2):
            status, _, text = page.request("POST", "/say", message)
            assert status == 202 and text.startswith("waiting: the disk is full")
        inbox.rmdir()
        window.wait("say", content="first")
        assert page.say("and now?", number="8") == 204
        window.wait("say", content="second")
        window.close()
    assert said_by("user", "web%3Apage") == ["do it", "and now?"]


def test_a_question_is_answered_with_no_if_no_window_is_open(open_page, folder):
    human = open_page("--provider", "human", "--workspace", str(folder / "other"))
    human.say("anyone?")
    with LLM(touches) as server:
        page = open_page("--approve")
        window = Window(page)
        page.say("make it")
        window.wait("ask")
        window.close()  # a question that waits ends, too
        page.post("/step", chat="steps", on=True)
        page.say("make it", chat="steps", number="2")
        wait_until(lambda: "open a window" in marks(folder / "other"))
        wait_until(lambda: '"ended"' in marks(workspace(), "steps"))
        wait_until(lambda: '"delivered"' in marks(workspace()))
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
    assert page.say("hi", "../my session\r\n\r\nx") == 204
    assert page.events("say", "..-my-session-x")[0]["chats"] == ["..-my-session-x"]
    with socket.create_connection(("127.0.0.1", page.port)) as window:
        window.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        host = f"Host: 127.0.0.1:{page.port}\r\nCookie: {page.cookie}"
        window.sendall(f"GET /events?page&300 HTTP/1.1\r\n{host}\r\n\r\n".encode())
        window.recv(100)  # then it is reset, not closed
    assert page.say("hi", number="2") == 204 and page.events("say")
    assert "Traceback" not in (folder / "stderr").read_text()


def test_keys_are_in_nothing_that_a_window_is_sent(open_page):
    page = open_page()
    page.say("my key is sk-abcdefghijklmnopqrst")
    sent = page.events("say") + page.events("say")
    page.post("/step", chat="steps", on=True)
    page.say("my key is sk-abcdefghijklmnopqrst", chat="steps")
    assert "abcdefghijklmnop" not in json.dumps(sent + page.events("ask", chat="steps"))


def test_a_window_gets_each_request_and_answer_and_what_the_endpoint_said_in_between(
    open_page, folder
):
    slow_down = Failure(503, {"error": {"message": "slow down"}}, {"Retry-After": "0.01"})
    no_temperature = error(400, "Unsupported parameter: 'temperature' is not supported.")
    with LLM([slow_down, no_temperature, call("read_file", path="a.txt"), "It says hello."]):
        page = open_page("--trace", "run.jsonl")
        assert page.say("read a.txt") == 204
        events = page.events("say")
        assert page.say("read a.txt") == 204  # the same id: taken once
        again = page.events("say")  # a reload: the same, and the journal before it
    first, second = of_kind("request", events)
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert (first["sent"], second["sent"]) == ([1, 2], [1, 2, 3, 4])  # each message is sent once
    assert [message["role"] for message in second["messages"]] == ["assistant", "tool"]
    answer = of_kind("answer", events)[0]["answer"]
    assert answer["tool_calls"][0]["arguments"] == {"path": "a.txt"}
    assert of_kind("result", events)[0]["text"].startswith("1| hello")
    told = of_kind("retry", events)
    assert "slow down" in told[0]["error"] and "Unsupported parameter" in told[1]["error"]
    assert told[1]["changed"] == {"temperature": None}
    assert of_kind("retry", lines_of(folder / "run.jsonl")) == told
    lines = [json.loads(line) for each in of_kind("lines", again) for line in each["lines"]]
    roles = [line["role"] for line in lines if "n" in line]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert of_kind("request", again) == [first, second]


def test_a_trace_is_shown_as_a_page_that_needs_no_server(folder):
    (folder / "a.txt").write_text("hello <script>document.title = 'owned'</script> %NONCE% %RUN%\n")
    nanobot("--offline", "--trace", "run.jsonl", "-m", "read a.txt")
    status, _, err = nanobot("trace", "run.jsonl", "--html", "run.html")
    assert status == 0 and "prompts" in err
    html = (folder / "run.html").read_text()
    assert "<script>document.title" not in html and html.count("</script>") == 2
    assert re.findall(r"(?:src|href)=\S+", html) == ['href="/runs"']  # nothing of the network
    run = json.loads(re.search('id="run" nonce="%NONCE%">(.*)</script>', html)[1])
    messages = [event["messages"] for event in run["events"] if event["kind"] == "request"]
    assert "</script> %NONCE% %RUN%" in messages[1][-1]["content"]


@needs_terminal
def test_at_the_terminal_a_step_waits_for_enter_and_a_call_changed_into_nonsense_does_not_run(
    folder,
):
    terminal = prompt("--offline", "--step")
    terminal.say("read a.txt", "Enter sends them")
    terminal.say("", "Enter runs it")
    terminal.say(
        "b.txt", "was not run: its arguments are not", "Enter sends them"
    )  # no JSON object
    terminal.answered("")
    terminal.close()


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
    second.click("New session")
    second.wait("byId('sessions').options.length === 2")
    assert answers(second) == 0 and second.run("location.href") != again


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
def test_a_window_shows_and_answers_what_other_sessions_and_the_memory_ask(
    browser, open_page, own_home
):
    page = open_page("--provider", "human", BROWSER="true")
    file = own_home / "nanobot-page.html"
    wait_until(lambda: file.exists() and "url=" in file.read_text())
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
    tab.run("""(chooser => {
        chooser.value = 'read_file';
        chooser.dispatchEvent(new Event('change'));
        const path = document.querySelector('.question label textarea');
        path.value = 'a.txt';
        path.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, cancelable: true}));
    })(document.querySelector('.question select'))""")
    tab.click("Answer it here")
    tab.wait(f"{question}.includes('1| hello')")
    tab.run("document.querySelector('.question textarea').value = 'It says hello.'")
    tab.click("Answer")
    tab.wait("!document.querySelector('.question')")
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


def write_lines(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def year_of_messages(count: int) -> None:
    """The journal of a session on the page, as a year leaves it."""
    sessions = workspace() / "sessions"
    sessions.mkdir(parents=True)
    rows = [{"mark": "session", "key": "web:year", "created_at": "2026-01-01T10:00:00+0000"}]
    for n in range(1, count):
        role = "user" if n % 2 else "assistant"
        rows.append({"n": n, "role": role, "content": f"number {n} " * 30})
    rows.append({"mark": "delivered", "upto": count - 1})
    rows.append({"mark": "saved", "upto": count - 9, "summary": "They counted."})
    write_lines(sessions / "web%3Ayear.jsonl", rows)


@pytest.mark.slow
def test_a_year_of_one_session_opens_in_a_second_and_shows_older_lines_on_request(
    browser, open_page
):
    year_of_messages(9_001)
    page = open_page()
    tab = opened(browser, page.address())  # after a start: the session that was used last
    tab.wait("document.querySelectorAll('.said').length >= 290 && chat === 'year'")
    began = time.monotonic()
    tab.do("Page.reload")
    tab.wait("typeof RECORDED !== 'undefined' && byId('chat').textContent.includes('number 9000 ')")
    assert time.monotonic() - began < 5  # 1 s on an idle machine
    assert tab.run("byId('chat').textContent.includes('number 8699 ')") is False
    tab.run("byId('chat').querySelector('.older').click()")
    tab.wait("document.querySelectorAll('.said').length >= 890")
    tab.say("what is 15% of 240")
    tab.wait("[...document.querySelectorAll('.said.agent')].at(-1).textContent.includes('36')")


@pytest.mark.long
def test_silent_connections_do_not_stop_the_page_and_the_agent_keeps_its_file_descriptors(
    open_page,
):
    page = open_page()
    assert page.say("hi") == 204
    silent = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(170)]
    opened_files = Path(f"/proc/{page.process.pid}/fd")
    if opened_files.exists():  # `ulimit -n` is 256 on macOS, for this test, too
        wait_until(lambda: len(list(opened_files.iterdir())) <= 150, 10)

    def is_heard() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return page.say("read a.txt", number="2") == 204

    wait_until(is_heard)
    assert "hello" in of_kind("result", page.events("result"))[0]["text"]
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
    tab.say("create b.txt with x")
    tab.wait("byId('chat').textContent.includes('Wrote')")
    tab.say("/undo")
    told = "[...document.querySelectorAll('.said')].map((each) => each.textContent).slice(-2)"
    tab.wait(f"{told}.join().includes('cannot be undone')")
    assert tab.run("byId('chat').textContent").count("Undo of") == 1
    assert tab.run(told)[0] == "You/undo"  # above its answer
    tab.say("/new")
    tab.wait("byId('chat').textContent.includes('no longer sent')")
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
    tab = opened(browser, open_page().address(), width=width)
    tab.say("read long.txt")
    tab.wait("document.querySelectorAll('.said.agent').length === 1")
    tab.run(
        "setState('No connection: the program has ended or starts again. A new start prints a new address.')"
    )
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("byId('write').getBoundingClientRect().bottom <= innerHeight")


STRANGE = "</script><img src=x onerror=\"document.title='owned'\">"


def event(kind: str, run: str = "r1", who: str = "turn", **fields) -> dict:
    return {"time": 1.0, "run": run, "who": who, "key": "cli:a", "kind": kind, **fields}


def asks(text: str, *whose: str) -> dict:
    said = [{"role": "system", "content": STRANGE}, {"role": "user", "content": text}]
    sizes = {"sent": [1, 2], "tokens": [3, 4], "messages": said}
    return event("request", *whose, model=STRANGE, healed=[STRANGE], **sizes)


def answers_with(*whose: str, content: str = "", calls=()) -> dict:
    answer = {"content": content, "error": None, "tool_calls": [*calls], "usage": {}}
    return event("answer", *whose, seconds=1, answer=answer | {"finish_reason": "stop"})


@pytest.mark.slow
def test_the_file_of_a_stranger_is_shown_as_text_with_a_card_for_each_run(browser, folder):
    """A helper speaks while the turn waits; one event has odd fields that only a page reads."""
    calls = [{"id": "c1", "name": STRANGE, "arguments": {"x": STRANGE}}]
    events = [
        asks("from Ada"),
        event("retry", text=STRANGE, error=STRANGE, changed={"stop": None}),
        answers_with(calls=calls),
        event("call", id="c1", name=STRANGE, arguments={"x": "changed"}),
        asks("for the helper", "r2", "helper"),
        answers_with("r2", "helper", content="helped"),
        event("result", id="c1", text=STRANGE, is_error=True, outcome="not run", seconds=0.5),
        event("request", model="m", sent=[1, 2, 9], tokens=[1], messages=[], tools=7),
        answers_with(calls=[None]),
        answers_with(content=STRANGE),
        event("journal", who="session", line={"n": 1, "role": "assistant", "content": STRANGE}),
        event("journal", who="session", line={"mark": "ended", "why": STRANGE}),
    ]
    write_lines(folder / "run.jsonl", events)
    nanobot("trace", "run.jsonl", "--html", "run.html")
    tab = opened(browser, (folder / "run.html").as_uri())
    assert tab.run("document.title") == "nanobot behind glass" and answers(tab) == 1
    assert tab.run("document.querySelectorAll('img').length") == 0
    cards = tab.run("[...document.querySelectorAll('article')].map((card) => card.innerText)")
    assert "Helper" in cards[1] and "helped" in cards[1] and "✗" not in cards[1]
    for words in ("✗ not run", "arguments that ran", '"stop":null'):
        assert words in cards[0]
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
        status, out, err = nanobot(*command, file.stem)
        assert status == 0 and out.strip(), err


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
    choose = "byId('run-list').value = '{}'; byId('run-list').dispatchEvent(new Event('change'))"
    to_the_end = "while (!byId('next').disabled) byId('next').click()"
    names = tab.run("Object.keys(RUN.runs)")
    assert sorted(names) == sorted(file.stem for file in SHIPPED)
    for name in names:
        tab.run(choose.format(name))
        assert "Who answered: " in tab.run("byId('label').textContent")
        first = tab.run("document.querySelector('main').textContent")
        tab.run(to_the_end)
        shown = tab.run("document.querySelector('main').textContent")
        assert "Answer" in shown and "cannot be shown" not in shown and "not run yet" not in shown
        tab.run("while (!byId('back').disabled) byId('back').click()")
        assert tab.run("document.querySelector('main').textContent") == first
    tab.run(choose.format("two-tools"))
    stations = ["you"]
    while tab.run("!byId('next').disabled"):
        tab.click("Next")
        stations.append(tab.run("document.querySelector('#loop .lit').dataset.station"))
    step = ["request", "model", "call", "tool", "tool"]
    assert stations == ["you", *step, *step, "request", "model", "answer"]
    tab.click("Start")
    tab.click("Play")
    tab.wait("document.querySelector('#loop .lit').dataset.station === 'model'")
    odd = [asks(STRANGE), event("label", text=STRANGE), event("answer", answer=STRANGE)]
    write_lines(folder / "own.jsonl", odd)
    (folder / "broken.jsonl").write_text("{oops")
    root = tab.do("DOM.getDocument")["root"]["nodeId"]
    field = tab.do("DOM.querySelector", nodeId=root, selector="#own-run")["nodeId"]
    tab.do("DOM.setFileInputFiles", nodeId=field, files=[str(folder / "own.jsonl")])
    tab.wait("byId('chat').textContent.includes('<img')")
    tab.run(to_the_end)
    assert tab.run("document.title") == "nanobot behind glass"
    assert tab.run("document.querySelectorAll('img').length") == 0
    tab.do("DOM.setFileInputFiles", nodeId=field, files=[str(folder / "broken.jsonl")])
    tab.wait("byId('label').textContent.includes('is not a recorded run')")
