"""The page that shows an agent at work: over HTTP as any program may ask, and in a real browser."""

import http.client
import json
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from fake_llm import FakeLLM, Failure, error
from test_command_line import Terminal, journal, needs_terminal

ROOT = Path(__file__).parent.parent
NANOBOT = [sys.executable, str(ROOT / "nanobot.py")]


class Page:
    """`nanobot web` as a process, and what a browser would do with its address."""

    def __init__(self, folder: Path, *flags: str):
        command = [*NANOBOT, "web", "--port", "0", "--no-open", *flags]
        with open(folder / "stderr", "w") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=err, text=True
            )
        self.address = re.search(r"http://\S+", self.process.stdout.readline())[0]
        self.port = int(re.search(r":(\d+)/", self.address)[1])
        self.token = self.address.partition("token=")[2]

    def request(self, method: str, path: str, body: str | None = None, **headers: str):
        """(status, headers, text). The cookie of the token is sent unless `Cookie` is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {
            "Cookie": f"nanobot_{self.port}={self.token}",
            "Content-Type": "application/json",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text

    def say(self, text: str, chat: str = "page", number: str = "1"):
        return self.request("POST", "/say", json.dumps({"chat": chat, "text": text, "id": number}))

    def events(self, until: str, chat: str = "page") -> list[dict]:
        """What a window is sent, up to the first event of that kind."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(
            "GET", f"/events?chat={chat}", headers={"Cookie": f"nanobot_{self.port}={self.token}"}
        )
        answer = connection.getresponse()
        found = []
        while not found or found[-1]["kind"] != until:
            line = answer.readline().decode()
            assert line, "the stream has ended"
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
        connection.close()
        return found

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(15)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "work"
    place.mkdir()
    (place / "a.txt").write_text("hello <script>document.title = 'owned'</script>\n")
    return place


@pytest.fixture
def open_page(folder):
    pages = []

    def start(*flags: str) -> Page:
        pages.append(Page(folder, *(flags or ("--offline",))))
        return pages[-1]

    yield start
    for page in pages:
        assert page.end() == 0


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
            ("GET", "/events?chat=page"),
            ("GET", "/x"),
            ("POST", "/say"),
        ]:
            assert page.request(method, path, body, **headers)[0] == 403, (who, path)
    assert page.request("GET", "/?token=wrong", Cookie="")[0] == 403
    status, headers, _ = page.request("GET", f"/?token={page.token}", Cookie="")
    assert (status, headers["Location"]) == (303, "/")
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
    tossed = (
        f"nanobot_{page.port}=x; nanobot_{page.port}={page.token}"  # by another port of this host
    )
    assert page.request("GET", "/", Cookie=tossed)[0] == 200


def test_no_name_leads_out_of_the_sessions_and_a_window_that_breaks_off_is_no_traceback(
    open_page, folder
):
    page = open_page()
    assert page.say("hi", "../my session\r\n\r\nx")[0] == 204
    assert page.events("say", "..-my-session-x")[0]["chats"] == ["..-my-session-x"]
    with socket.create_connection(("127.0.0.1", page.port)) as window:
        window.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        cookie = f"Cookie: nanobot_{page.port}={page.token}"
        window.sendall(
            f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n{cookie}\r\n\r\n".encode()
        )
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
    assert second["same"] == 2  # each message is sent once
    assert [message["role"] for message in second["messages"]] == ["assistant", "tool"]
    call = next(event for event in events if event["kind"] == "answer")["answer"]["tool_calls"][0]
    assert call["name"] == "read_file" and call["arguments"] == {"path": "a.txt"}
    assert next(event for event in events if event["kind"] == "result")["text"].startswith(
        "1| hello"
    )
    again = page.events("say")  # a reload: the same from the beginning, and the journal before it
    lines = [
        json.loads(line) for event in again if event["kind"] == "journal" for line in event["lines"]
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
        told = [
            event["text"] for event in page.events("say", chat="work") if event["kind"] == "retry"
        ]
    assert any("slow down" in text for text in told) and any(
        "Unsupported parameter" in text for text in told
    )
    assert [
        json.loads(line)["outcome"] for line in (folder / "run.jsonl").read_text().splitlines()
    ] == ["retried", "healed", "answered"]


def test_a_trace_is_shown_as_text_and_as_a_page_that_needs_no_server(folder):
    def nanobot(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*NANOBOT, *words], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )

    (folder / "a.txt").write_text("hello <script>document.title = 'owned'</script> %NONCE% %RUN%\n")
    nanobot("agent", "--offline", "--trace", "run.jsonl", "-m", "read a.txt")
    shown = nanobot("trace", "run.jsonl").stdout
    for words in ("request 1 to offline", 'read_file {"path": "a.txt"}', "1| hello", "request 2"):
        assert words in shown
    done = nanobot("trace", "run.jsonl", "--html", "run.html")
    assert "prompts" in done.stderr and done.returncode == 0
    html = (folder / "run.html").read_text()
    assert "<script>document.title" not in html and html.count("</script>") == 2
    assert not re.search(r"(src|href)=", html)
    run = json.loads(re.search('id="run" nonce="[0-9a-f]+">(.*)</script>', html)[1])
    assert "</script> %NONCE% %RUN%" in run["records"][1]["messages"][-1]["content"]
    missing = nanobot("trace", "nothing.jsonl")
    assert missing.returncode == 1 and "nanobot agent --trace" in missing.stderr


@needs_terminal
def test_at_the_terminal_a_step_waits_for_enter_and_a_call_runs_as_it_was_changed(own_home, folder):
    (folder / "b.txt").write_text("this is b\n")
    terminal = Terminal("--offline", "--step", cwd=folder)
    terminal.expect("> ")
    terminal.say("read a.txt", "Enter sends them")
    terminal.say("what?", "Enter sends them")  # neither Enter nor stop: asked again
    terminal.say("", "Enter runs it")
    terminal.say("b.txt", "Enter runs it")  # no JSON object: asked again
    terminal.say('{"path": "b.txt"}', "this is b", "Enter sends them")
    terminal.say("", "this is b")
    terminal.expect("> ")
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
    tab = opened(browser, page.address)
    assert "token" not in tab.run("location.href")
    tab.say("read a.txt")
    tab.wait("document.querySelectorAll('.said.agent').length === 1")
    assert tab.run("document.title") == "nanobot behind glass"
    assert "hello <script>" in tab.run("byId('requests').textContent")
    assert tab.run("document.querySelectorAll('article').length") == 2
    second = opened(browser, page.address)  # another window, and a reload
    second.wait("document.querySelectorAll('.said.agent').length === 1")
    second.say("what time is it?")
    tab.wait("document.querySelectorAll('.said.agent').length === 2")
    tab.do("Page.reload")
    tab.wait(
        "typeof RECORDED !== 'undefined' && document.querySelectorAll('.said.agent').length === 2"
    )
    tab.click("Journal")
    assert '"role": "user"' in tab.run("byId('journal').textContent")


@pytest.mark.slow
def test_calls_are_approved_changed_skipped_and_stopped_in_the_page(browser, open_page, folder):
    tab = opened(browser, open_page("--offline", "--approve").address)
    tab.say("run echo one > one.txt")
    tab.click("Refuse")
    tab.wait("document.querySelectorAll('.said.agent').length === 1")
    tab.say("run echo two > two.txt")
    tab.click("Run it")
    tab.wait("document.querySelectorAll('.said.agent').length === 2")
    assert [path.name for path in folder.glob("*.txt")] and not (folder / "one.txt").exists()
    assert (folder / "two.txt").read_text() == "two\n"
    tab.run("byId('step').click()")
    tab.click("Journal")
    tab.say("read a.txt")
    tab.wait("byId('chat').textContent.includes('Request 5 is on the right.')")
    seen = "(box => box.bottom > box.top && box.top >= 0 && box.bottom <= innerHeight)(last.element.getBoundingClientRect())"
    tab.wait(seen)
    tab.do("Page.reload")
    tab.wait(f"typeof RECORDED !== 'undefined' && last && requests === 5 && {seen}")
    tab.click("Send it")
    tab.wait("Boolean(document.querySelector('.question textarea'))")
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
    assert "two.txt" in tab.run(
        "byId('journal').lastChild.previousSibling.textContent + byId('journal').textContent"
    )
    tab.say("read a.txt")
    tab.click("Stop the turn")
    tab.wait("byId('chat').textContent.includes('The turn ended')")


@pytest.mark.slow
def test_a_person_is_the_model_in_the_page(browser, open_page):
    tab = opened(browser, open_page("--provider", "human").address)
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
def test_a_long_session_stays_responsive_and_a_reminder_appears(browser, open_page):
    page = open_page()
    tab = opened(browser, page.address)
    tab.say("remind me in 1 second to drink water")
    for number in range(200):
        assert page.say("hello", number=f"n{number}")[0] == 204
    tab.wait(
        "byId('chat').textContent.includes('drink water') && document.querySelectorAll('.said.user').length > 100",
        120,
    )
    began = time.monotonic()
    tab.run("selectTab('tab-journal')")
    tab.run("document.body.getBoundingClientRect().height")
    assert time.monotonic() - began < 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1024, 1280, 1920])
def test_no_width_scrolls_sideways_and_a_long_header_leaves_the_message_box_in_view(
    browser, open_page, folder, width
):
    (folder / "long.txt").write_text("x" * 3_000)
    tab = opened(browser, open_page().address, width=width, scheme="dark")
    tab.say("read long.txt")
    tab.wait("document.querySelectorAll('.said.agent').length === 1")
    tab.run(
        "setState(false, 'No connection: the program has ended or starts again. A new start prints a new address.')"
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
    shown = opened(browser, (folder / "run.html").as_uri()).run("document.body.innerText")
    assert "✓" not in shown and "window" not in shown and "The program\nYou sent nothing" in shown
    for words in ("(nothing: no text, no call)", "new (nothing)", "no tools"):
        assert words in shown


@pytest.mark.parametrize(
    "name", [file.stem for file in sorted((ROOT / "templates" / "traces").glob("*.jsonl"))]
)
def test_a_run_that_is_shipped_is_shown_and_replayed_by_its_name(folder, name):
    for command in ("trace", "replay"):
        done = subprocess.run(
            [*NANOBOT, command, name], cwd=folder, capture_output=True, encoding="utf-8"
        )
        assert (done.returncode, "differs from the recorded request" in done.stderr) == (
            0,
            False,
        ) and done.stdout.strip(), done.stderr
    assert name in (ROOT / "NOTES.md").read_text(encoding="utf-8")
