"""The program as a user meets it: real processes, a real endpoint, real signals, a real terminal."""

import asyncio
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import nanobot as program
from channels import JobStore
from fake_llm import Failure, FakeLLM, Hang, Reply, call, calls
from fake_telegram import FakeTelegram
from memory import SessionManager, locked
from test_providers import check_grammar as is_lawful

ROOT = Path(__file__).parent.parent
PROGRAM = [sys.executable, str(ROOT / "nanobot.py")]
FULL = bool(os.environ.get("NANOBOT_TEST_FULL"))
LONG = 60  # seconds that nothing takes, also on a machine with much else to do


def surroundings(server: FakeLLM | None) -> dict[str, str]:
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    if server:
        environ |= {"OPENAI_BASE_URL": server.base_url, "NANOBOT_MODEL": "test-model"}
        environ["OPENAI_API_KEY"] = "sk-test"
    return environ


def start(
    *arguments: str, server: FakeLLM | None = None, extra=None, program=PROGRAM, **options
) -> subprocess.Popen:  # fmt: skip
    environ = surroundings(server) | (extra or {})
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    options |= {"encoding": "utf-8", "errors": "surrogateescape"}
    return subprocess.Popen([*program, *arguments], env=environ, **options)


def nanobot(*arguments: str, server: FakeLLM | None = None, stdin: str = "", cwd: Path | None = None):
    """Run the program to its end, in a process of its own: (exit status, stdout, stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_bytes(stdin if isinstance(stdin, bytes) else os.fsencode(stdin))
        work = (arguments, surroundings(server), str(cwd or Path.cwd()), files)
        process = FORKS.Process(target=run_main, args=work)
        process.start()
        process.join(LONG)
        assert process.exitcode is not None, f"nanobot {arguments} does not end"
        return process.exitcode, *(os.fsdecode(file.read_bytes()) for file in files[1:])


# Each process is forked from one that has loaded the SDK: to load it anew takes longer than most tests.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["nanobot", "openai", "test_command_line"])


def run_main(arguments, environ, folder, files) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for number, (file, mode) in enumerate(zip(files, ("r", "w", "w"), strict=True)):
        with open(file, mode) as opened:
            os.dup2(opened.fileno(), number)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.exit(program.main(list(arguments)))


def journal(home: Path, key: str = "cli%3Adirect") -> list[dict]:
    path = home / ".nanobot" / "workspace" / "sessions" / f"{key}.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [record for record in records if "role" in record]


def roles(home: Path) -> list[str]:
    return [message["role"] for message in journal(home)]


# ---- Asking once ----


def test_without_a_key_the_offline_model_does_a_real_job(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("hello there\n", encoding="utf-8")
    status, out, err = nanobot("agent", "-m", "list the files here and read a.txt", cwd=tmp_path)
    assert status == 0
    assert out.startswith("[offline model")
    assert "hello there" in out
    assert "OPENAI_API_KEY" in err
    assert 'read_file("a.txt")' in err


def test_a_trace_is_replayed_without_tools_even_if_a_key_was_left_out_of_it(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("hello there\n", encoding="utf-8")
    trace = str(tmp_path / "trace.jsonl")
    question = "read a.txt and remember that api_key = abcdefghij"
    _, out, _ = nanobot("agent", "-m", question, "--trace", trace, cwd=tmp_path)
    (tmp_path / "a.txt").unlink()
    status, again, _ = nanobot("replay", trace)
    assert "hello there" in out and "api_key = abcdefghij" in out
    assert (status, again) == (0, out.replace("abcdefghij", "[key]"))


def test_what_the_user_did_not_approve_the_offline_model_tells_as_that(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("hello\n", encoding="utf-8")
    status, out, err = nanobot("--offline", "--approve", "-m", "please delete a.txt", cwd=tmp_path)
    assert (status, "The user did not approve this call." in out) == (0, True), err
    assert out.endswith('[offline rule "delete files", templates/offline/rules.md]\n')
    assert (tmp_path / "a.txt").exists()


def test_no_subcommand_means_agent_and_offline_can_be_asked_for(own_home):
    status, out, err = nanobot("--offline", "-m", "tell me a joke")
    assert status == 0
    assert "OPENAI_API_KEY" not in err
    assert "I know no rule" in out


@pytest.mark.parametrize("flags", [[], ["--no-stream"]][: 2 if FULL else 1])
def test_forty_tool_calls_in_a_row_and_every_message_journalled_once(own_home, tmp_path, flags):
    (tmp_path / "a.txt").write_text("hello\n", encoding="utf-8")
    script = [call("read_file", path="a.txt", limit=n + 1) for n in range(39)] + [call("list_dir")]
    with FakeLLM([*script, "all of it is read"]) as server:
        (own_home / "config.json").write_text('{"agents": {"defaults": {"maxToolIterations": 60}}}')
        config = ["--config", str(own_home / "config.json")]
        status, out, _ = nanobot("agent", "-m", "read", *config, *flags, server=server, cwd=tmp_path)
        assert [body.get("stream", False) for body in server.bodies] == [not flags] * 41
    assert (status, out) == (0, "all of it is read\n")
    lines = journal(own_home)
    assert [line["role"] for line in lines] == ["user", *["assistant", "tool"] * 40, "assistant"]
    ids = [line["tool_call_id"] for line in lines if line["role"] == "tool"]
    assert len(set(ids)) == 40


def test_every_tool_does_its_part_of_a_job(own_home, tmp_path):
    notebook = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook))
    settings = own_home / "settings.json"
    settings.write_text('{"tools": {"ssrfWhitelist": ["127.0.0.0/8"]}}')
    with FakeLLM(lambda body: script.pop(0)) as server:
        script = [
            calls(call("read_file", path="n.ipynb"),
                  call("write_file", path="notes/a.txt", content="one\ntwo\n")),
            call("edit_file", path="notes/a.txt", old_text="two", new_text="three"),
            calls(call("read_file", path="notes/a.txt"), call("list_dir", path="notes"),
                  call("glob", pattern="*.txt"), call("grep", pattern="thr", output_mode="content")),
            call("notebook_edit", path="n.ipynb", cell=0, source="print(1)", mode="insert"),
            calls(call("exec", command="wc -l notes/a.txt"),
                  call("web_fetch", url=f"{server.base_url}/models")),
            "All of it is done.",
        ]  # fmt: skip
        status, out, _ = nanobot("-m", "go", "--config", str(settings), server=server, cwd=tmp_path)
        messages = server.bodies[-1]["messages"]
    assert (status, out) == (0, "All of it is done.\n")
    asked = [each for message in messages for each in message.get("tool_calls", [])]
    names = {each["id"]: each["function"]["name"] for each in asked}
    results = {names[each["tool_call_id"]]: each["content"] for each in messages if each["role"] == "tool"}
    expected = {
        "write_file": "Wrote 8 characters", "edit_file": "+three", "read_file": "2| three",
        "list_dir": "a.txt  10 bytes", "glob": "notes/a.txt", "grep": "notes/a.txt:2: three",
        "notebook_edit": "print(1)", "exec": "2 notes/a.txt\nExit code: 0", "web_fetch": "test-model",
    }  # fmt: skip
    assert set(results) == set(expected)
    assert all(text in results[name] for name, text in expected.items()), results


def test_only_the_answer_goes_to_stdout(own_home, tmp_path):
    script = [calls(call("list_dir"), content="Let me look."), "Here it is."]
    with FakeLLM(script) as server:
        status, out, err = nanobot("-m", "look", server=server, cwd=tmp_path)
    assert (status, out) == (0, "Here it is.\n")
    assert "Let me look." in err
    assert "list_dir()" in err and "INFO" not in err
    assert re.search(r"^2 requests · [\d,]+ in · [\d,]+ out · context [\d,]+ of 65,536$", err, re.M)


@pytest.mark.parametrize("setting", ["sendProgress", "sendToolHints"])
def test_what_stands_beside_the_answer_can_be_switched_off(own_home, setting):
    settings = own_home / "settings.json"
    settings.write_text(json.dumps({"channels": {setting: False}}))
    with FakeLLM([calls(call("list_dir"), content="Let me look."), "Here it is."]) as server:
        _, _, err = nanobot("-m", "look", "--config", str(settings), server=server)
    assert ("Let me look." in err) is (setting != "sendProgress")
    assert ("list_dir()" in err) is (setting != "sendToolHints")


def test_the_message_may_come_from_a_pipe_alone_or_beside_one(own_home):
    with FakeLLM(["one", "two"]) as server:
        assert nanobot("agent", server=server, stdin="from a pipe")[1] == "one\n"
        assert nanobot("agent", "-m", "summarise this", server=server, stdin="a long text")[1] == "two\n"
        asked = [body["messages"][-1]["content"] for body in server.bodies]
    assert asked[0].endswith("from a pipe")
    assert asked[1].endswith("summarise this\n\na long text")


def test_bytes_from_a_pipe_that_are_no_text_do_no_harm(own_home):
    with FakeLLM(["fine"]) as server:
        process = start("-m", "look", server=server, stdin=subprocess.PIPE)
        process.stdin.buffer.write(b"caf\xe9 \xff")
        assert process.communicate(timeout=LONG)[0] == "fine\n"
        assert server.bodies[0]["messages"][-1]["content"].endswith("look\n\ncaf\ufffd \ufffd")


@pytest.mark.skipif(os.name != "posix", reason="a closed descriptor is a POSIX thing")
@pytest.mark.parametrize("flags", [["-m", "x"], ["-m", "x", "--approve"], []])
def test_standard_input_may_be_closed(own_home, flags):
    process = start("--offline", *flags, preexec_fn=lambda: os.close(0))
    out, err = process.communicate(timeout=LONG)
    assert "Traceback" not in err
    assert process.returncode == (0 if flags else 2)


def test_an_output_that_knows_few_letters_gets_the_others_replaced(own_home):
    with FakeLLM(["naïve Γειά"]) as server:
        environ = {"PYTHONIOENCODING": "latin-1"}
        process = start("-m", "x", server=server, extra=environ)
        out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out.encode("utf-8", "surrogateescape")) == (0, b"na\xefve ????\n"), err


def test_no_message_at_all_is_said(own_home):
    status, out, err = nanobot("--offline")
    assert (status, out) == (2, "")
    assert "-m TEXT" in err


def test_a_word_that_is_no_command_is_explained(own_home):
    status, out, err = nanobot("hello")
    assert (status, out) == (2, "")
    assert "behind -m" in err


def test_sessions_are_apart_and_remembered(own_home):
    with FakeLLM(["one", "two", "three"]) as server:
        nanobot("-m", "first", server=server)
        nanobot("-m", "second", "-s", "work", server=server)
        nanobot("-m", "third", server=server)
        sizes = [len(body["messages"]) for body in server.bodies]
    assert sizes == [2, 2, 4]
    status, out, _ = nanobot("sessions")
    assert status == 0
    assert "cli:work  2 messages" in out
    status, out, _ = nanobot("sessions", "show", "cli:work")
    assert "user: second" in out
    assert "assistant: two" in out


def test_escape_sequences_from_a_model_do_not_reach_the_terminal_but_a_file(own_home, needs_terminal):
    answer = "red \x1b[31malert\x1b[0m \u202egnp.exe"
    with FakeLLM([answer, answer]) as server:
        _, out, _ = nanobot("-m", "x", server=server)
        assert out == f"{answer}\n"
        terminal = Terminal("-m", "x", server=server)
        terminal.expect("red \\x1b[31malert\\x1b[0m \\u202egnp.exe")
        assert terminal.close() == 0


def test_nothing_that_is_shown_reaches_the_terminal_raw(own_home, tmp_path):
    """Answer, hints, text beside calls, results, logs, errors, history and prompt: all in one life."""
    evil = "\x1b]0;owned\x07\u202e\u200b\U000e0041\x9b2J\x7f"
    (tmp_path / evil).write_text(evil, encoding="utf-8")
    workspace = own_home / ".nanobot" / "workspace"
    (workspace / "skills" / evil).mkdir(parents=True)
    (workspace / "skills" / evil / "SKILL.md").write_text("---\nmetadata: {\n---\n")  # a warning names it
    (workspace / "SOUL.md").write_text(evil, encoding="utf-8")
    beside = Reply(evil, [call("read_file", path=evil), call("exec", command=f"echo '{evil}'")], "tool_calls")
    failing = call("exec", command=f"{evil}\0")
    shown = ""
    with FakeLLM([beside, failing, evil, Failure(400, {"error": {"message": evil}})]) as server:
        for flags in (["-m", evil, "--logs"], ["-m", "x", "-s", evil]):
            shown += nanobot(*flags, server=server, cwd=tmp_path)[2]  # the answer goes into a pipe as it is
        others = [["prompt", evil], ["sessions"], ["sessions", "show", "cli:direct"], ["onboard"]]
        for flags in (["status", "--model", evil], *others):
            shown += "".join(nanobot(*flags, server=server, cwd=tmp_path)[1:])
    assert re.search("^INFO nanobot: iteration 1: tool_calls", shown, re.M)  # --logs
    assert shown.count("\\x1b]0;owned\\x07\\u202e\\u200b\\U000e0041") > 10
    assert not set(evil) - set("]0;ownedJ2") & set(shown)


def test_without_a_terminal_approval_is_no(own_home, tmp_path):
    with FakeLLM([call("write_file", path="a.txt", content="x"), "I could not"]) as server:
        status, out, _ = nanobot("-m", "write", "--approve", server=server, cwd=tmp_path)
        told = server.bodies[1]["messages"][-1]["content"]
    assert (status, out) == (0, "I could not\n")
    assert "did not approve" in told
    assert not (tmp_path / "a.txt").exists()


# ---- When something is wrong ----


def fails(*arguments: str, server: FakeLLM | None = None, status: int = 1) -> str:
    """The program fails with cause and fix on stderr: no traceback, nothing on stdout."""
    code, out, err = nanobot(*arguments, server=server)
    assert code == status, err
    assert out == ""
    assert "Traceback" not in err
    return err


def test_a_wrong_key(own_home):
    with FakeLLM([], required_key="sk-right") as server:
        err = fails("-m", "x", server=server)
    assert "refuses the key" in err
    assert "sk-test" not in err


def test_an_address_that_answers_html(own_home):
    page = Failure(200, "<html><body>Welcome to the hotel WLAN</body></html>", content_type="text/html")
    with FakeLLM([page]) as server:
        err = fails("-m", "x", server=server)
    assert "Welcome to the hotel WLAN" in err
    assert "/v1" in err


def test_an_unknown_model_names_those_that_there_are(own_home):
    with FakeLLM([], known_models=["small", "large"]) as server:
        err = fails("-m", "x", "--model", "huge", server=server)
    assert "huge" in err
    assert "small, large" in err


def test_no_model_named_and_none_to_guess(own_home):
    with FakeLLM([], known_models=["small"]) as server:
        err = fails("-m", "x", "--base-url", server.base_url)
    assert "no model is named" in err
    assert "small" in err


def test_a_workspace_that_cannot_be_written(own_home):
    (own_home / "file").write_text("in the way")
    err = fails("--offline", "-m", "x", "--workspace", str(own_home / "file" / "ws"))
    assert "--workspace" in err


def test_a_broken_settings_file(own_home):
    path = own_home / "config.json"
    path.write_text('{"agents": {"defaults": {"maxTokens": "many"}}}')
    err = fails("--offline", "-m", "x", "--config", str(path))
    assert 'agents.defaults.maxTokens: expected integer, got "many"' in err


def test_a_settings_file_that_is_not_there(own_home):
    assert "nowhere.json" in fails("--offline", "-m", "x", "--config", "nowhere.json")


def test_a_wrong_flag_is_a_usage_error(own_home):
    assert "usage:" in fails("agent", "--no-such-flag", status=2)


def test_a_file_that_is_missing_is_told_to_the_model_and_the_turn_goes_on(own_home, tmp_path):
    with FakeLLM([call("read_file", path="nope.txt"), "it is not there"]) as server:
        status, out, _ = nanobot("-m", "x", server=server, cwd=tmp_path)
        assert "No such file" in server.bodies[1]["messages"][-1]["content"]
    assert (status, out) == (0, "it is not there\n")


def test_a_settings_file_that_is_a_folder(own_home):
    assert "Is a directory" in fails("--offline", "-m", "x", "--config", str(own_home))


def test_a_home_of_nobody(own_home):
    assert "no-such-user" in fails("--offline", "-m", "x", "--config", "~no-such-user/x")


def test_a_folder_where_a_skill_should_be_stops_nothing(own_home):
    nanobot("onboard")
    skills = own_home / ".nanobot" / "workspace" / "skills"
    (skills / "odd" / "SKILL.md").mkdir(parents=True)
    (skills / "mem").mkdir()
    (skills / "mem" / "SKILL.md").symlink_to("/proc/self/mem")
    status, _, err = nanobot("--offline", "-m", "x")
    lines = [err.count(f"{name}/SKILL.md is left out") for name in ("odd", "mem")]
    assert (status, lines) == (0, [1, 1]), err
    rows = nanobot("status", "--offline")[1].splitlines()
    assert [row.split()[2] for row in rows if "broken" in row] == ["mem", "odd"]
    assert "skills/odd" not in nanobot("prompt", "--offline")[1]


def test_a_disk_that_is_full_in_the_middle_of_a_turn(own_home, tmp_path):
    resource = pytest.importorskip("resource", reason="limits on files are a POSIX thing")

    def full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))

    (tmp_path / "a.txt").write_text("x" * 9_000)
    with FakeLLM([call("read_file", path="a.txt"), "still here"]) as server:
        process = start("-m", "x", server=server, cwd=tmp_path, preexec_fn=full_disk)
        out, err = process.communicate(timeout=LONG)
        assert (process.returncode, out, len(server.bodies)) == (1, "", 1)
        assert "File too large" in err
        assert "Traceback" not in err
        kept = [line["role"] for line in journal_whatever(own_home) if "role" in line]
        assert kept == ["user", "assistant"]
        assert nanobot("-m", "/continue", server=server)[1] == "still here\n"
        assert server.bodies[1]["messages"][-1]["content"] == "[interrupted before it finished]"


def test_a_session_that_is_in_use_says_so(own_home):
    second_has_ended = threading.Event()

    def slow(body: dict) -> str:
        assert second_has_ended.wait(LONG)
        return "slow"

    with FakeLLM(slow) as server:
        first = start("-m", "one", server=server)
        wait_until(lambda: server.bodies)
        err = fails("-m", "two", server=server)
        second_has_ended.set()
        assert "in use by another program" in err and len(server.bodies) == 1
        assert first.communicate(timeout=LONG)[0] == "slow\n"


# ---- Interruptions ----


def wait_until(condition, seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_ctrl_c_stops_with_130_and_leaves_a_session_that_goes_on(own_home):
    with FakeLLM([Hang(30), "hello again"]) as server:
        process = start("-m", "one", server=server)
        wait_until(lambda: server.bodies)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONG)
        assert process.returncode == 130
        assert "Traceback" not in err
        assert "/continue" in err
        assert nanobot("-m", "two", server=server)[1] == "hello again\n"
        sent = server.bodies[1]["messages"][1:]
    assert [message["role"] for message in sent] == ["user"]
    one, two = sent[0]["content"].split("[the message above was not answered: it was stopped]")
    assert one.strip().endswith("one") and two.endswith("two")


BUSY = {"error": {"message": "slow down"}}


def test_a_wait_is_said_on_stderr_and_the_answer_alone_on_stdout(own_home):
    busy = [Failure(429, BUSY, {"Retry-After": "0.01"}), Failure(503, BUSY, {"Retry-After": "0.01"})]
    with FakeLLM([*busy, "ok"]) as server:
        status, out, err = nanobot("-m", "x", server=server)
    assert (status, out) == (0, "ok\n")
    assert err.count("slow down; asking again in 0 s") == 2


def test_ctrl_c_during_a_wait_stops_at_once(own_home):
    with FakeLLM([Failure(429, BUSY, {"Retry-After": "60"}), "hello again"]) as server:
        process = start("-m", "one", server=server)
        assert "asking again in 60 s" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG)
        assert process.returncode == 130
        assert nanobot("-m", "/continue", server=server)[1] == "hello again\n"
    assert roles(own_home) == ["user", "assistant"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"][: 3 if FULL else 1])
def test_a_signal_kills_the_command_that_runs(own_home, tmp_path, name):
    with FakeLLM([call("exec", command="sleep 60 & echo $! > pid; wait"), "never"]) as server:
        process = start("-m", "one", server=server, cwd=tmp_path)
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=LONG)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists() or is_zombie(child))


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_kill_9_loses_no_message_and_the_next_start_is_lawful(own_home, tmp_path):
    """Killed after some requests or others: what the endpoint was sent must be in the journal, once."""
    rounds = 25 if FULL else 2
    (tmp_path / "a.txt").write_text("hello\n", encoding="utf-8")
    with FakeLLM(lambda body: call("read_file", path="a.txt", limit=len(body["messages"]))) as server:
        for number in range(rounds):
            before = len(server.bodies)
            process = start("-m", f"message {number}", server=server, cwd=tmp_path)
            wait_until(lambda before=before, number=number: len(server.bodies) >= before + 1 + number * 3 % 7)
            process.kill()
            process.communicate()
        sent = [body for body in server.bodies if body][-1]["messages"]  # the kill may have cut the last one
    lines = [line for line in journal_whatever(own_home) if line.get("role")]
    for number in range(rounds):
        assert sum(line["content"] == f"message {number}" for line in lines) == 1
    results = [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    kept = [line["tool_call_id"] for line in lines if line["role"] == "tool"]
    shown = [each for each in results if each in kept]
    assert shown == [each for each in kept if each in results]
    assert len(kept) == len(set(kept))
    with FakeLLM(["still here"]) as server:
        assert nanobot("-m", "and now?", server=server)[:2] == (0, "still here\n")
        check_grammar(server.bodies[0]["messages"])


def journal_whatever(home: Path, key: str = "cli%3Adirect") -> list[dict]:
    path = home / ".nanobot" / "workspace" / "sessions" / f"{key}.jsonl"
    lines = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # the last may be torn
        lines.append(json.loads(line))
    return lines


def check_grammar(messages: list[dict]) -> None:
    """Each call answered once and directly behind it; user and assistant take turns."""
    assert [message["role"] for message in messages[:2]] == ["system", "user"]
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
            continue
        assert waiting == []
        waiting = [each["id"] for each in message.get("tool_calls") or []]
    assert waiting == []
    assert messages[-1]["role"] == "user"


# ---- MCP servers ----


def settings_with_servers(home: Path, **servers: dict) -> None:
    (home / ".nanobot").mkdir()
    settings = {"tools": {"mcpServers": servers}}
    (home / ".nanobot" / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def mcp_server(*arguments: str, **environ: str) -> dict:
    pytest.importorskip("mcp", reason="the MCP SDK is missing: pip install 'mcp>=2'")
    script = str(ROOT / "tests" / "mcp_server.py")
    return {"command": sys.executable, "args": [script, *arguments], "env": environ}


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or is_zombie(pid)


needs_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")


@needs_proc
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", None][: 3 if FULL else 1])
def test_no_mcp_server_outlives_the_program(own_home, tmp_path, name):
    files = {"PID_FILE": f"{tmp_path}/pid", "WAITING_FILE": f"{tmp_path}/waiting"}
    settings_with_servers(own_home, test=mcp_server(**files))
    with FakeLLM([call("mcp_test_wait", seconds=600 if name else 0), "done"]) as server:
        process = start("-m", "one", server=server, cwd=tmp_path)
        if name:
            wait_until((tmp_path / "waiting").exists)
            process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out) == ((130, "") if name else (0, "done\n"))
    assert "no business on the terminal" not in err
    server_id = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_gone(server_id))  # it was killed; the system takes its time to bury it


@needs_proc
@pytest.mark.skipif(not FULL, reason="takes seconds: only with NANOBOT_TEST_FULL=1")
def test_ctrl_c_ends_an_mcp_server_that_is_still_starting_and_does_not_listen(own_home, tmp_path):
    settings_with_servers(own_home, deaf=mcp_server("deaf", PID_FILE=f"{tmp_path}/pid"))
    process = start("--offline", "-m", "one")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)  # impatient: it must not be left behind all the same
    assert process.wait(timeout=LONG) == 130
    process.communicate()
    assert is_gone(int((tmp_path / "pid").read_text()))


@needs_proc
def test_a_loop_that_is_closed_leaves_no_server_behind(own_home, tmp_path):
    pytest.importorskip("mcp", reason="the MCP SDK is missing: pip install 'mcp>=2'")
    file = tmp_path / "pid"
    mute = program.MCPSettings("sh", ["-c", f"echo $$ > {file}; exec cat > /dev/null"])
    config = program.Config()
    config.defaults.provider, config.tools.mcp_servers = "offline", {"mute": mute}

    async def open_and_close():
        loop = program.AgentLoop(config)
        await loop.mcp.connect(0.01)  # it goes on without it
        while not (file.exists() and file.read_text().strip()):
            await asyncio.sleep(0.001)
        await loop.close()
        wait_until(lambda: is_gone(int(file.read_text())), 20)

    asyncio.run(open_and_close())


def test_status_and_prompt_show_servers_and_a_pasted_key_is_no_error(own_home):
    good = mcp_server() | {"autoApprove": []}
    settings_with_servers(own_home, good=good, bad={"command": "no-such-program"})
    prompt, status = start("prompt"), start("status")
    out, err = status.communicate(timeout=LONG)
    assert status.returncode == 1
    assert re.search("^ok  mcp good +connected$", out, re.MULTILINE)
    assert re.search("^BAD mcp bad .*no-such-program.*Check tools.mcpServers.bad", out, re.MULTILINE)
    assert "tools.mcpServers.good.autoApprove: unknown key" in err
    assert '"mcp_good_echo"' in prompt.communicate(timeout=LONG)[0]


# ---- The prompt, on a real terminal ----


class Terminal:
    """The program on a pseudo-terminal: what a person would see and type."""

    def __init__(self, *arguments: str, server: FakeLLM | None = None, cwd: Path | None = None):
        import fcntl
        import pty
        import termios

        def take_terminal() -> None:  # it becomes the one whose Ctrl-C reaches the program
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.screen, inner = pty.openpty()
        streams = {"stdin": inner, "stdout": inner, "stderr": inner, "start_new_session": True}
        self.process = start(*arguments, server=server, cwd=cwd, preexec_fn=take_terminal, **streams)
        os.close(inner)
        self.text = self.everything = ""

    def expect(self, words: str, seconds: float = LONG) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} is not in {self.text!r}"
            if select.select([self.screen], [], [], 0.1)[0]:
                new = os.read(self.screen, 65_536).decode("utf-8", errors="replace")
                self.text, self.everything = self.text + new, self.everything + new
        self.text = self.text.split(words, 1)[1]

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def is_waiting(self) -> bool:
        """Does the program wait for the keyboard? That it has printed a prompt comes a little earlier."""
        where = Path(f"/proc/{self.process.pid}/wchan")  # of the main thread: in which call it sleeps
        return not where.exists() or bool(re.search("select|poll_|tty", where.read_text()))

    def close(self) -> int:
        try:
            return self.process.wait(timeout=LONG)
        finally:
            self.process.kill()
            os.close(self.screen)


@pytest.fixture
def needs_terminal():
    pytest.importorskip("pty", reason="pseudo-terminals are a POSIX thing")


def test_a_conversation_at_the_prompt(own_home, needs_terminal):
    with FakeLLM(["Hello, human.", "Good-bye."]) as server:
        terminal = Terminal(server=server)
        terminal.expect("It talks to the model test-model.")
        terminal.expect("> ")
        terminal.type("hi\n")
        terminal.expect("Hello, human.")
        terminal.expect("· context ")
        terminal.expect("> ")
        terminal.type("/status\n")
        terminal.expect("model test-model")
        terminal.expect("> ")
        terminal.type("bye\n")
        terminal.expect("Good-bye.")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.close() == 0


def test_a_reminder_comes_to_the_prompt_while_no_gateway_runs(own_home, needs_terminal):
    """What came while nobody was there is told at the start; what comes now, above the prompt."""

    def script(body):
        found = re.findall(r"<[\w.]+>", str(body["messages"][-1]["content"]))
        return f"Remember {found[-1]}!" if found else "Hello."

    inbox = SessionManager(own_home / ".nanobot" / "workspace").inbox("cli:direct")
    inbox.append({"id": "j@1", "kind": "report", "sender": "job", "content": "Water the plants."})
    with FakeLLM(script) as server, FakeTelegram() as telegram:
        terminal = Terminal(server=server)
        terminal.expect("While you were away:")
        terminal.expect("Water the plants.")
        terminal.expect("> ")
        write_reminders(own_home, "telegram:7", ["for.telegram"])
        write_reminders(own_home, "cli:direct", ["one"])
        terminal.type("half a li")
        terminal.expect("Remember <one>!")
        terminal.expect("> half a li")
        terminal.type("\b" * 20 + "hi\n")
        terminal.expect("Hello.")
        terminal.expect("> ")
        gateway = Gateway(own_home, telegram, server)
        telegram.wait_until(lambda: "Remember &lt;for.telegram&gt;!" in telegram.texts(7))
        write_reminders(own_home, "cli:direct", ["two"])  # the gateway runs it, the prompt shows it
        terminal.expect("Remember <two>!")
        gateway.end()
        terminal.type("\x04")
        assert terminal.close() == 0
        terminal = Terminal(server=server)
        terminal.expect("> ")
        assert "Remember" not in terminal.everything and "away" not in terminal.everything
        terminal.type("\x04")
        assert terminal.close() == 0
    said = [line["content"] for line in journal(own_home) if line.get("role") == "assistant"]
    assert said == ["Water the plants.", "Remember <one>!", "Hello.", "Remember <two>!"]


def test_ctrl_c_at_the_prompt_stops_the_turn_and_the_talk_goes_on(own_home, needs_terminal):
    with FakeLLM([Hang(30), "Here again."]) as server:
        terminal = Terminal(server=server)
        terminal.expect("> ")
        terminal.type("one\n")
        wait_until(lambda: server.bodies)
        terminal.type("\x03")
        terminal.expect("stopped")
        terminal.expect("> ")
        terminal.type("two\n")
        terminal.expect("Here again.")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.close() == 0


def test_approval_on_a_terminal_shows_the_escaped_command_and_obeys(own_home, needs_terminal, tmp_path):
    target = tmp_path / "made"
    touch = call("exec", command=f"touch {target}; echo '\x1b[2J'")
    script = [touch, "done", call("exec", command="true"), "no"]
    with FakeLLM(script) as server:
        terminal = Terminal("--approve", server=server)
        terminal.expect("> ")
        terminal.type("make it\n")
        terminal.expect("\\x1b[2J")
        terminal.expect("[y/n/always]")
        assert not target.exists()
        terminal.type("y\n")
        terminal.expect("done")
        assert target.exists()
        terminal.expect("> ")
        terminal.type("again\n")
        terminal.expect("[y/n/always]")
        terminal.type("n\n")
        terminal.expect("· context ")
        terminal.expect("> ")
        assert "did not approve" in server.bodies[3]["messages"][-1]["content"]
        terminal.type("\x04")
        assert terminal.close() == 0


def test_what_was_typed_before_the_question_does_not_approve(own_home, needs_terminal, tmp_path):
    target = tmp_path / "made"
    is_typed = threading.Event()

    def after_typing(body: dict):
        assert is_typed.wait(LONG)
        return next(script)

    script = iter([call("exec", command=f"touch {target}"), "I may not."])
    with FakeLLM(after_typing) as server:
        terminal = Terminal("--approve", server=server)
        terminal.expect("> ")
        terminal.type("make it\n")
        wait_until(lambda: len(server.bodies) == 1)
        terminal.type("yes\n")
        is_typed.set()
        terminal.expect("[y/n/always]")
        terminal.type("n\n")
        terminal.expect("I may not.")
        terminal.expect("> ")
        assert not target.exists()
        terminal.type("\x04")
        assert terminal.close() == 0


# ---- A trace, and the same turn again ----


def trace_of(path: Path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("flags", [[], ["--no-stream"]][: 2 if FULL else 1])
def test_a_trace_is_replayed_without_network_and_without_running_anything(own_home, tmp_path, flags):
    (tmp_path / "a.txt").write_text("hello\n", encoding="utf-8")
    ran = calls(call("exec", command="echo ran >> ran.txt"), content="Let me see.")
    script = [ran, [call("read_file", path="a.txt"), call("read_file", path="gone.txt")], "It says Γειά."]
    with FakeLLM(script) as server:
        first = nanobot("-m", "do it", "--trace", "t.jsonl", *flags, server=server, cwd=tmp_path)
    assert first[:2] == (0, "It says Γειά.\n")
    trace = tmp_path / "t.jsonl"
    assert trace.stat().st_mode & 0o777 == 0o600
    assert [len(record["answer"]["tool_calls"]) for record in trace_of(trace)] == [1, 2, 0]
    assert all(record["model"] == "test-model" and record["seconds"] >= 0 for record in trace_of(trace))
    (tmp_path / "a.txt").unlink()
    (tmp_path / "ran.txt").unlink()
    status, out, err = nanobot("replay", "t.jsonl", cwd=tmp_path)
    assert (status, out) == (0, "It says Γειά.\n"), err
    assert err == "".join(line for line in first[2].splitlines(True) if "· context " not in line)
    assert not (tmp_path / "ran.txt").exists()


def test_the_offline_model_can_be_traced_and_replayed(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("hello\n", encoding="utf-8")
    first = nanobot("--offline", "-m", "read a.txt", "--trace", "t.jsonl", cwd=tmp_path)
    assert "hello" in first[1]
    assert nanobot("replay", "t.jsonl", cwd=tmp_path)[:2] == first[:2]


def test_turns_add_up_in_one_trace_and_are_replayed_one_after_the_other(own_home, tmp_path):
    """A history, a call that was denied, an endpoint that failed and a turn that was stopped are in it."""
    script = ["before the trace", call("exec", command="touch made"), "I may not.",
              Failure(400, {"error": "no"}), Hang(30), call("list_dir"), "All done."]  # fmt: skip
    trace = ["--trace", str(tmp_path / "t.jsonl")]
    with FakeLLM(script) as server:
        nanobot("-m", "zero", server=server)
        assert nanobot("-m", "one", "--approve", *trace, server=server, cwd=tmp_path)[1] == "I may not.\n"
        assert nanobot("-m", "two", *trace, server=server)[0] == 1
        process = start("-m", "three", *trace, server=server)
        wait_until(lambda: len(server.bodies) == 5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG)
        assert nanobot("-m", "four", *trace, server=server, cwd=tmp_path)[1] == "All done.\n"
    records = trace_of(tmp_path / "t.jsonl")
    assert [(record["answer"] or {}).get("finish_reason") for record in records] == [
        "tool_calls", "stop", "error", None, "tool_calls", "stop",
    ]  # fmt: skip
    status, out, err = nanobot("replay", "t.jsonl", cwd=tmp_path)
    assert (status, out) == (1, "I may not.\nAll done.\n"), err
    assert "HTTP 400: no" in err
    assert "cancelled" in err
    assert not (tmp_path / "made").exists()


def test_a_replay_stops_where_the_trace_was_changed_and_shows_the_difference(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("hello\n", encoding="utf-8")
    with FakeLLM([call("read_file", path="a.txt"), "It says hello."]) as server:
        nanobot("-m", "read", "--trace", "t.jsonl", server=server, cwd=tmp_path)
    trace = tmp_path / "t.jsonl"
    first, second = trace_of(trace)
    first["answer"]["tool_calls"][0]["arguments"]["path"] = "b.txt\x1b[2J"
    trace.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    status, out, err = nanobot("replay", "t.jsonl", cwd=tmp_path)
    assert (status, out) == (1, "")
    assert "not the recorded one" in err
    assert re.search(r'^-.*"arguments": .*a\.txt', err, re.MULTILINE)
    assert re.search(r'^\+.*"arguments": .*b\.txt', err, re.MULTILINE)
    assert "\x1b" not in err
    assert len(err.splitlines()) < 50


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "line 1: this is no record of a trace"),
        (b"once upon a time\n", "line 1: this is no record of a trace"),
        (b'{"messages": []}\n', "line 1: this is no record of a trace"),
        (b'{"messages": [5], "tools": [], "options": {}, "answer": null}\n', "line 1: this is no record"),
        (b'{"messages": [], "tools": [], "options": {}, "answer": {"\\u001b[2J": 1}}\n', "line 1: this"),
        (b"[" * 100_000, "line 1: this is no record of a trace"),
        (b"\xff", "t.jsonl, line 1: this is no record"),
    ],
)
def test_what_is_no_trace_is_an_error_that_says_how_to_make_one(own_home, tmp_path, content, said):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    err = fails("replay", str(path))
    assert said in err
    assert "nanobot agent --trace FILE" in err


def test_a_trace_that_cannot_be_written_is_said_before_the_model_is_asked(own_home, tmp_path):
    with FakeLLM(["never"]) as server:
        assert "No such file" in fails("-m", "x", "--trace", str(tmp_path / "no" / "t.jsonl"), server=server)
        assert server.requests == []


KEY = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789"


def test_no_key_is_in_a_trace_wherever_it_came_from(own_home, tmp_path, monkeypatch):
    """The endpoint repeats it, the model reads and writes it, a command prints it at the start of a line."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    lines = [f"OPENAI_API_KEY={KEY}", "OTHER_API_KEY", "ANOTHER_API_KEY", f"gsk_{KEY[3:]}", KEY, f"\t{KEY}"]
    (tmp_path / "env").write_text("\n".join(lines))
    script = [call("read_file", path="env"), call("exec", command=f"cat env; echo {KEY}"),
              f"Your key is {KEY}.", Failure(401, {"error": {"message": f"Wrong key {KEY}"}})]  # fmt: skip
    with FakeLLM(script) as server:
        where = ["--base-url", server.base_url, "--model", "m", "--trace", "t.jsonl"]
        assert nanobot("-m", f"my key: {KEY}", *where, cwd=tmp_path)[0] == 0
        assert nanobot("-m", "again", *where, cwd=tmp_path)[0] == 1
    assert len(trace_of(tmp_path / "t.jsonl")) == 4
    text = (tmp_path / "t.jsonl").read_text(encoding="utf-8")
    assert KEY[3:] not in text
    assert "[key]" in text
    status, out, err = nanobot("replay", "t.jsonl", cwd=tmp_path)
    assert (status, out) == (1, "Your key is [key].\n"), err


# ---- You are the model ----


def test_a_person_can_be_the_model(own_home, needs_terminal, tmp_path):
    (tmp_path / "a.txt").write_text("\x1b[31mred\u202e", encoding="utf-8")
    terminal = Terminal("--provider", "human", cwd=tmp_path)
    terminal.expect("> ")
    terminal.type("what is in a.txt?\n")
    for seen in ("---- system ----", "You are nanobot", "---- user ----", "what is in a.txt?",
                 "---- tools ----", '{"name": "read_file"', "Read a text",
                 "model> "):  # fmt: skip
        terminal.expect(seen)
    wrong = ['read_file {"path": "a.txt", "colour": 1}', 'read_file {"path": ', "read_file"]
    complaints = ["colour", "not whole JSON", "path"]
    for line, complaint in zip(wrong, complaints, strict=True):
        terminal.type(f"{line}\n")
        terminal.expect(complaint)
        terminal.expect("model> ")
    terminal.type('read_file {"path": "a.txt"}\n')
    before = len(terminal.everything)
    terminal.expect('<tool_call>{"name": "read_file", "arguments": {"path": "a.txt"}}</tool_call>')
    terminal.expect("---- tool ----")
    terminal.expect("\\x1b[31mred\\u202e")
    terminal.expect("model> ")
    terminal.type("It is red.\n")
    terminal.expect("> ")
    terminal.type("thank you\n")
    terminal.expect("thank you")
    terminal.expect("model> ")
    assert "---- system ----" not in terminal.everything[before:]
    assert terminal.everything[before:].count("what is in a.txt?") == 0
    terminal.type("You are welcome.\n")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    lines = journal(own_home)
    calls_made = ["assistant", "tool"] * 4  # those with wrong arguments failed as a model's would
    assert [line["role"] for line in lines] == ["user", *calls_made, "assistant", "user", "assistant"]
    assert lines[-1]["content"] == "You are welcome."


@pytest.mark.parametrize("keys", ["\x04", "\x03"][: 2 if FULL else 1])
def test_a_person_who_leaves_in_mid_turn_leaves_a_session_that_goes_on(own_home, needs_terminal, keys):
    terminal = Terminal("--provider", "human")
    terminal.expect("> ")
    terminal.type("one\n")
    terminal.expect("model> ")
    terminal.type("list_dir {}\n")
    terminal.expect("---- tool ----")
    terminal.expect("model> ")
    wait_until(terminal.is_waiting)
    terminal.type(keys)
    terminal.expect("/continue")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    with FakeLLM(["went on"]) as server:
        assert nanobot("-m", "/continue", server=server)[1] == "went on\n"
        sent = [each["role"] for each in server.bodies[0]["messages"]]
    assert sent == ["system", "user", "assistant", "tool"]
    assert roles(own_home) == ["user", "assistant", "tool", "assistant"]


def test_a_person_without_a_terminal_cannot_be_the_model(own_home):
    assert "terminal" in fails("--provider", "human", "-m", "x")


# ---- The other commands ----


def test_onboard_writes_settings_and_workspace_and_touches_nothing_twice(own_home):
    status, out, _ = nanobot("onboard")
    path = own_home / ".nanobot" / "config.json"
    assert status == 0
    assert str(path) in out
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text('{"agents": {"defaults": {"model": "mine"}}}')
    assert nanobot("onboard")[0] == 0
    assert "mine" in path.read_text()


def test_status_checks_each_part(own_home):
    status, out, _ = nanobot("status")
    assert status == 0
    assert "offline" in out
    with FakeLLM([], known_models=["test-model"]) as server:
        status, out, _ = nanobot("status", server=server)
        assert status == 0
        assert server.base_url in out
    status, out, _ = nanobot("status", server=server)
    assert status == 1
    assert "BAD model" in out
    assert "Cannot reach" in out


@pytest.mark.parametrize("sandbox", ["", "bwrap"])
def test_the_setting_of_a_sandbox_reaches_status_and_exec(own_home, tmp_path, sandbox):
    """Where bwrap does not run the command must not run, either: this holds on every machine."""
    (tmp_path / "project").mkdir()
    (own_home / "out.txt").write_text("gold")
    settings = own_home / ".nanobot" / "config.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps({"tools": {"exec": {"sandbox": sandbox}}}))
    status, out, _ = nanobot("status")
    assert re.search(r"^(ok|BAD) +sandbox +(off|bwrap)", out, re.MULTILINE)[2] == (sandbox or "off")
    assert status == int("BAD" in out)
    with FakeLLM([call("exec", command=f"cat {own_home}/out.txt"), "done"]) as server:
        assert nanobot("-m", "x", server=server, cwd=tmp_path / "project")[1] == "done\n"
        result = server.bodies[1]["messages"][-1]["content"]
    assert ("gold" in result) == (not sandbox)


def test_prompt_prints_what_is_sent(own_home):
    with FakeLLM(["ok"]) as server:
        _, out, _ = nanobot("prompt", "What is in a.txt?")
        nanobot("-m", "What is in a.txt?", server=server)
        system = server.bodies[0]["messages"][0]["content"]
    printed = re.split(r"\n*==== .+ \(~[\d,]+ tokens\) ====\n", out)[1:]
    assert system.split("\n\n---\n\n") == printed[:-2]
    assert "What is in a.txt?\n\nIn all: context " in printed[-1]
    assert '"content": "ok"' in nanobot("prompt", "and now?")[1]


def test_prompt_and_status_show_the_governed_request_and_say_in_numbers_what_is_left_out(own_home):
    """With room for all: what is printed is what is sent, to the message. With a window of 6,000
    tokens: the sum fits, and what does not is told in numbers."""
    narrow = own_home / "settings.json"
    narrow.write_text('{"agents": {"defaults": {"contextWindowTokens": 6000, "maxTokens": 1000}}}')
    flags = ["--config", str(narrow)]
    with FakeLLM(lambda body: "word " * 400) as server:
        for n in range(6):
            nanobot("-m", f"question {n}", server=server)
        _, whole, _ = nanobot("prompt", "question 6", server=server)
        _, out, _ = nanobot("prompt", "question 6", *flags, server=server)
        _, status, _ = nanobot("-m", "/status", *flags, server=server)
        nanobot("-m", "question 6", server=server)
        sent = server.bodies[-1]["messages"]
        _, _, err = nanobot("-m", "question 7", *flags, server=server)
        in_all = json.dumps(server.bodies[-1])
    history = re.search(r"==== History .*?====\n(.*?)\n\n====", whole, re.S)[1].split("\n")
    assert [json.loads(line)["content"] for line in history] == [each["content"] for each in sent[1:-1]]
    assert int(re.search(r"^(\d) turns left out \(~[\d,]+ tokens\)$", out, re.M)[1]) > 0
    for text, pattern in ((out, "In all: context "), (status, "context "), (err, ".* context ")):
        used = re.search(rf"^{pattern}([\d,]+) of 6,000$", text, re.M)[1]
        assert 1_000 < int(used.replace(",", "")) < 6_000
    assert len(in_all) < 6_000 * 5


def test_an_agent_takes_its_message_as_a_word_too(own_home):
    with FakeLLM(["hello"]) as server:
        assert nanobot("agent", "say hello", server=server)[:2] == (0, "hello\n")
        assert server.bodies[0]["messages"][-1]["content"].endswith("say hello")
    status, _, err = nanobot("agent", "one", "-m", "two")
    assert status == 2 and "not allowed with" in err


def test_sessions_show_takes_the_name_that_s_takes(own_home):
    with FakeLLM(["one"]) as server:
        nanobot("-m", "first", "-s", "work", server=server)
    for name in ("work", "cli:work"):
        assert "user: first" in nanobot("sessions", "show", name)[1]


def test_no_one_to_ask_is_said_before_the_turn_and_a_second_trace_says_that_it_appends(own_home, tmp_path):
    with FakeLLM(["one", "two"]) as server:
        flags = ["--trace", str(tmp_path / "t.jsonl"), "--approve"]
        first = nanobot("-m", "x", *flags, server=server)[2]
        second = nanobot("-m", "x", *flags, server=server)[2]
    assert first.count("nobody can be asked") == second.count("nobody can be asked") == 1
    assert ("goes behind it" in first, "goes behind it" in second) == (False, True)
    assert "others may read" not in first + second


def test_a_trace_that_others_may_read_keeps_its_mode_and_the_user_learns_of_it(run_here, tmp_path):
    trace = tmp_path / "t.jsonl"
    ask = ("--offline", "-m", "x", "--trace")
    for mode, is_said in ((0o600, False), (0o644, True), (0o640, True), (0o620, False)):
        trace.touch()
        trace.chmod(mode)
        err = run_here(*ask, str(trace))[2]
        told = f"nanobot: others may read {trace}. To be the only one: chmod 600 {trace}\n"
        assert (told in err, trace.stat().st_mode & 0o777) == (is_said, mode)
    assert "others may read" not in run_here(*ask, "/dev/null")[2], "it keeps nothing"


@pytest.mark.parametrize("replies", [["", "", ""], [call("list_dir")] * 9])
def test_no_answer_and_the_limit_of_steps_are_told_apart_from_success(own_home, replies):
    settings = own_home / "settings.json"
    settings.write_text('{"agents": {"defaults": {"maxToolIterations": 4}}}')
    with FakeLLM(replies) as server:
        status, _, err = nanobot("-m", "x", "--config", str(settings), server=server)
    if replies[0] == "":
        assert status == 1 and "There is no answer" in err
    else:
        assert status == 0 and "limit of steps" in err


def test_servers_pasted_at_the_top_of_the_settings_are_read(own_home):
    settings = own_home / "settings.json"
    settings.write_text('{"mcpServers": {"gone": {"command": "no-such-program-here"}}}')
    status, out, err = nanobot("status", "--offline", "--config", str(settings))
    place = "its place here is tools.mcpServers"
    assert re.search(f"^WARNING nanobot: mcpServers stands at the top of .*{place}$", err, re.M)
    assert status == 1 and re.search(r"^BAD mcp gone", out, re.M)


def test_status_says_that_a_workspace_cannot_be_written(own_home, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    nanobot("onboard")
    (own_home / ".nanobot" / "workspace").chmod(0o500)
    status, out, _ = nanobot("status", "--offline")
    assert status == 1 and "--workspace" in out


def test_sessions_show_of_a_stranger_is_an_error(own_home):
    err = fails("sessions", "show", "cli:nobody")
    assert "nanobot sessions" in err


def test_odd_lines_of_a_journal_are_shown_too(own_home):
    nanobot("--offline", "-m", "x")
    odd_calls = [{"function": {"name": "f", "arguments": {}}}]
    odd = [{"role": "user", "content": [{"type": "text", "text": "in blocks"}], "timestamp": "5"},
           {"role": "assistant", "content": None, "tool_calls": None},
           {"role": "assistant", "tool_calls": odd_calls},
           {"role": "\x1b[2J", "content": "7"}]  # fmt: skip
    path = own_home / ".nanobot" / "workspace" / "sessions" / "cli%3Adirect.jsonl"
    path.write_text(path.read_text() + "[]\n" + "".join(json.dumps(line) + "\n" for line in odd))
    status, out, err = nanobot("sessions", "show", "cli:direct")
    assert (status, "Traceback" in err, "\x1b" in out) == (0, False, False), err
    assert "in blocks" in out
    assert "calls f({})" in out
    assert "\\x1b[2J: 7" in out


def test_onboard_puts_a_named_file_and_a_named_workspace_where_they_are_wanted(own_home):
    file, workspace = own_home / "c.json", own_home / "w"
    assert nanobot("onboard", "--config", str(file), "--workspace", str(workspace))[0] == 0
    assert file.exists()
    assert (workspace / "SOUL.md").exists()
    assert not (own_home / ".nanobot").exists()


def test_each_command_takes_the_flags_of_the_settings(own_home, monkeypatch):
    monkeypatch.setenv("NANOBOT_MODEL", "no-key-for-this-one")
    for command in ("prompt", "status", "sessions", "onboard"):
        assert nanobot(command, "--offline")[0] == 0


def test_help_and_version(own_home):
    status, out, _ = nanobot("--help")
    assert status == 0
    assert "agent" in out
    assert nanobot("--version")[1].startswith("nanobot ")


@needs_proc
def test_a_polite_kill_ends_a_conversation_that_waits(own_home, needs_terminal):
    with FakeLLM([]) as server:
        terminal = Terminal(server=server)
        terminal.expect("> ")
        wait_until(terminal.is_waiting)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.close() == 130


def test_a_terminal_shows_why_an_answer_stops_half_way(own_home, needs_terminal):
    script = [Reply("half of it", finish_reason="length"), Failure(400, {"error": {"message": "boom"}})]
    with FakeLLM(script) as server:
        terminal = Terminal("-m", "x", server=server)
        terminal.expect("half of it")
        terminal.expect("boom")
        assert terminal.close() == 1


# ---- The other commands, in this process ----


@pytest.fixture
def run_here(capsys, monkeypatch):
    """`run_here("status", "--offline")` gives exit status, stdout and stderr, without a new process."""
    names = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in names}
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        capsys.readouterr()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as typed:
            typed.write(stdin)
            typed.seek(0)
            monkeypatch.setattr(sys, "stdin", typed)
            try:
                status = program.main(list(arguments))
            except SystemExit as end:
                status = end.code
        return status, *capsys.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


OF_ALL = [
    "--config FILE ", "~/.nanobot/config.json", "--workspace DIR ", "its home; ~/.nanobot/workspace",
    "--model NAME", "--base-url URL ", "an endpoint; mostly ends in /v1", "--provider NAME | --offline",
    "openai, openrouter, anthropic, ", ", custom, offline, human (you)", "--logs ",
    "show what happens inside, on stderr", "-h, --help",
]  # fmt: skip
HELP = {
    "agent": ["[TEXT]", "ask this and leave", "--message TEXT", "the same", "--approve ",
              "ask before tools write or execute", "--no-stream ", "do not stream requests", "--trace FILE ",
              "write down each request", "--session NAME"],
    "replay": ["[--logs] FILE"],
    "prompt": ["[TEXT]|[text]", "--session NAME"],
    "sessions": ["[{show}] [KEY]"],
    "gateway": ["--verbose ", "log more than events"],
    "cron": ["[{list,remove}] [ID]"],
    "onboard": [],
    "status": [],
}  # fmt: skip


@pytest.mark.parametrize("command", HELP)
def test_each_command_explains_its_flags(run_here, command):
    status, out, _ = run_here(command, "--help")
    assert (status, out.split()[:3]) == (0, ["usage:", "nanobot", command])
    for words in [*OF_ALL, *HELP[command]]:
        assert any(choice in out for choice in words.split("|") if choice) or words in out, words


def test_the_program_explains_its_commands(run_here):
    status, out, _ = run_here("--help")
    assert status == 0 and "A personal AI agent. No command: agent." in out
    explained = {
        "agent": "ask, or talk at a prompt", "replay": "run a trace again: no network",
        "prompt": "print what would be sent", "sessions": "list, or `show KEY`",
        "gateway": "serve channels and cron", "cron": "list what is planned; remove ID",
        "onboard": "write settings and workspace", "status": "check each part",
    }  # fmt: skip
    lines = [line.split(maxsplit=1) for line in out.split("COMMAND", 2)[2].split("\n") if line.strip()]
    assert {line[0]: line[1].strip() for line in lines if line[0] in explained} == explained
    assert run_here("--version")[:2] == (0, "nanobot 0.1.0\n")
    assert run_here("-h")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hello"], "no command 'hello', there are agent, prompt, sessions, onboard, status, gateway, "),
        (["hello"], "cron, replay; a message goes behind -m"),
        ([], "there is no message: give one with -m TEXT, or on standard input"),
        (["agent"], "nanobot: there is no message"),
        (["--offline", "-m", " "], "there is no message"),
        (["agent", "--app"], "unrecognized arguments: --app"),
        (["cron", "add"], "invalid choice: 'add'"),
        (["sessions", "hide"], "invalid choice: 'hide'"),
        (["status", "--offline", "--provider", "human"], "not allowed with argument"),
        (["agent", "one", "-m", "two"], "not allowed with argument"),
        (["replay"], "the following arguments are required: FILE"),
    ],
)
def test_wrong_usage_is_explained_with_status_2(run_here, arguments, said):
    status, out, err = run_here(*arguments)
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sessions", "show", "x"], "There is no session 'cli:x'. `nanobot sessions` lists them."),
        (["status", "--config", "gone.json"], "gone.json: No such file or directory. Try `nanobot onboard`."),
        (["status", "--provider", "opnai"], "There is no provider 'opnai'. There are: openai, "),
        (["status", "--model", "gpt"], "There is no key and no base URL for the model gpt."),
        (["replay", "gone.jsonl"], "Make a trace with: nanobot agent --trace FILE"),
        (["--offline", "-m", "x", "--trace", "no/t.jsonl"], "Mend it and ask again; the journal keeps wh"),
        (["status", "--workspace", "/dev/null/x"], "Choose another with --workspace."),
        (["--provider", "human", "-m", "x"], "nanobot: To be the model you need a terminal."),
    ],
)
def test_what_cannot_be_done_is_said_with_status_1(run_here, arguments, said):
    status, out, err = run_here(*arguments)
    assert (status, out, "Traceback" in err) == (1, "", False)
    assert "nanobot: " in err and said in err


def test_status_has_a_row_for_each_part(run_here, own_home):
    status, out, _ = run_here("status")
    assert status == 0
    rows = out.splitlines()
    assert rows[:5] == [
        "ok  settings              the defaults; `nanobot onboard` writes a file",
        f"ok  workspace             {own_home}/.nanobot/workspace",
        "ok  model                 offline: "
        "fixed rules; set OPENAI_API_KEY or OPENAI_BASE_URL for a real one",
        f"ok  bash                  {shutil.which('bash')}",
        "ok  sandbox               off: a command can do what you can",
    ]
    assert rows[5:7] == [
        "--  telegram              off: put a token into channels.telegram.token",
        "ok  cron                  0 jobs, heartbeat every 1,800 s",
    ]
    skills = {row[4:26].strip(): (row[:2], row[26:]) for row in rows[7:]}
    has_curl = bool(shutil.which("curl"))
    assert skills["skill weather"] == (("ok", "ready") if has_curl else ("--", "needs program curl"))
    assert all(name.startswith("skill ") and mark in ("ok", "--") for name, (mark, _) in skills.items())
    run_here("onboard")
    assert run_here("status")[1].startswith(f"ok  settings              {own_home}/.nanobot/config.json\n")


def test_status_says_what_is_missing_or_broken(run_here, own_home, monkeypatch):
    workspace = own_home / ".nanobot" / "workspace"
    run_here("onboard")
    (workspace / f".probe-{os.getpid()}").mkdir()
    (workspace / "skills" / "odd" / "SKILL.md").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(own_home))
    status, out, _ = run_here("status", "--provider", "human")
    assert status == 1
    cannot = "it cannot be written (Is a directory). Choose another with --workspace."
    assert f"BAD workspace             {workspace}: {cannot}\n" in out
    assert "ok  model                 human: it is you\n" in out
    assert "--  bash                  exec cannot run; install bash\n" in out
    assert "--  skill odd             broken, left out: " in out
    assert re.search(r"^--  skill github +needs program gh$", out, re.M)


def test_status_tells_what_a_gateway_would_serve_and_never_the_token(run_here, own_home):
    run_here("onboard")
    settings = own_home / ".nanobot" / "config.json"
    jobs = own_home / ".nanobot" / "workspace" / "cron" / "jobs.json"
    jobs.parent.mkdir()

    def rows_with(telegram: dict, heartbeat: dict, content: str) -> list[str]:
        settings.write_text(json.dumps({"channels": {"telegram": {"token": "1:secret"} | telegram},
                                        "gateway": {"heartbeat": heartbeat}}))  # fmt: skip
        jobs.write_text(content)
        status, out, err = run_here("status", "--offline")
        assert "secret" not in out + err and status == int("BAD" in out)
        return [row for row in out.splitlines() if row[4:12] in ("telegram", "cron    ")]

    assert rows_with({"allowFrom": [7, "8"]}, {"intervalS": 60}, '{"jobs": [{"id": "a"}]}') == [
        "ok  telegram              a token is set, allowed: 7, 8",
        "ok  cron                  1 job, heartbeat every 60 s",
    ]
    assert rows_with({"allowFrom": ["*"]}, {"enabled": False}, '{"jobs": [{}, {}]}') == [
        "ok  telegram              a token is set, allowed: *",
        "ok  cron                  2 jobs, heartbeat off",
    ]
    nobody, damaged = rows_with({}, {}, '{"jobs": 7}')
    fix = "put user ids into channels.telegram.allowFrom"
    assert nobody == f"BAD telegram              a token is set, allowed: nobody: {fix}"
    problem = "jobs.json cannot be read (it holds no list of jobs). Mend it, or delete it."
    assert damaged == f"BAD cron                  0 jobs, heartbeat every 1,800 s: {problem}"


def test_status_names_the_model_and_where_it_is(run_here, monkeypatch):
    monkeypatch.setenv("NANOBOT_MODEL", "other")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with FakeLLM([], known_models=["m"]) as server:
        flags = ["--model", "m", "--base-url", server.base_url]
        status, out, _ = run_here("status", *flags)
        assert status == 0 and f"ok  model                 m at {server.base_url} (local)\n" in out
        status, out, _ = run_here("status", "--base-url", server.base_url)
        assert status == 1 and f"BAD model                 other at {server.base_url} (local): " in out
        monkeypatch.delenv("NANOBOT_MODEL")
        status, out, _ = run_here("status", "--base-url", server.base_url)
        assert status == 1 and "BAD model                 no model named at " in out


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(run_here, own_home, monkeypatch):
    named = own_home / "c.json"
    named.write_text(json.dumps({"agents": {"defaults": {"workspace": str(own_home / "file")}}}))
    flags = ["status", "--offline", "--config", str(named)]
    assert f"workspace             {own_home}/file\n" in run_here(*flags)[1]
    monkeypatch.setenv("NANOBOT_WORKSPACE", str(own_home / "variable"))
    assert f"workspace             {own_home}/variable\n" in run_here(*flags)[1]
    out = run_here(*flags, "--workspace", str(own_home / "flag"))[1]
    assert f"workspace             {own_home}/flag\n" in out
    named.write_text('{"agents": {"defaults": {"provider": "human"}}}')
    assert "human: it is you" in run_here("status", "--config", str(named))[1]
    assert "offline: fixed rules" in run_here(*flags)[1]


def test_onboard_says_where_everything_is_and_keys_are_private(run_here, own_home):
    status, out, _ = run_here("onboard")
    file = own_home / ".nanobot" / "config.json"
    assert (status, out.splitlines()) == (0, [
        f"Settings: {file}", f"Workspace: {own_home}/.nanobot/workspace",
        "Next: put a key into the settings, or export OPENAI_API_KEY; then try `nanobot status`.",
    ])  # fmt: skip
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert json.loads(file.read_text())["agents"]["defaults"]["maxTokens"] == 8_192
    assert file.read_text().endswith("}\n")


def test_prompt_prints_each_part_with_its_size_and_the_sum(run_here, own_home):
    run_here("--offline", "-m", "Größe?")
    status, out, _ = run_here("prompt", "--offline")
    titles = re.findall(r"^==== (.+) \(~([\d,]+) tokens\) ====$", out, re.M)
    assert status == 0
    names = ["identity", "Active Skills", "Skills", "Tools", "History", "User"]
    assert [name for name, _ in titles] == names
    assert all(1 < int(size.replace(",", "")) < 10_000 for _, size in titles)
    parts = dict(zip(names, re.split(r"^====.*====$", out, flags=re.M)[1:], strict=True))
    history = [json.loads(line) for line in parts["History"].split("\n") if line]
    assert [line["role"] for line in history] == ["user", "assistant"] and "Größe?" in parts["History"]
    tools = [json.loads(line)["function"]["name"] for line in parts["Tools"].split("\n") if line]
    assert "read_file" in tools and "cron" in tools
    assert "[/Runtime Context]\n\nHello!\n\nIn all: context " in parts["User"]
    assert re.search(r"^In all: context [\d,]+ of 65,536$", out, re.M)
    assert "==== History" not in run_here("prompt", "--offline", "hi", "-s", "work")[1]


def test_sessions_are_listed_with_their_messages_and_shown_by_name(run_here, own_home):
    assert run_here("sessions")[:2] == (0, "")
    for name in ("work", "telegram:7"):
        run_here("--offline", "-m", "tell me a joke", "-s", name)
    path = own_home / ".nanobot" / "workspace" / "sessions" / "cli%3Awork.jsonl"
    path.write_text(path.read_text() + "torn\n")
    status, out, _ = run_here("sessions")
    assert (status, sorted(out.splitlines())) == (0, ["cli:work  2 messages", "telegram:7  2 messages"])
    for name in ("work", "cli:work", "telegram:7"):
        status, out, _ = run_here("sessions", "show", name)
        assert status == 0 and "user: tell me a joke\n" in out and len(out.splitlines()) >= 2
    assert run_here("sessions", "show", "7")[0] == 1


def test_a_job_is_removed_by_its_id(run_here, own_home):
    write_reminders(own_home, "cli:direct", ["r1", "r2"])
    assert run_here("cron", "remove", "r1")[:2] == (0, f"Removed job r1.\n{program.NOBODY_RUNS_JOBS}\n")
    status, out, err = run_here("cron", "remove", "r1")
    assert (status, out) == (1, "") and "There is no job 'r1'. There are: r2." in err


def test_what_is_planned_is_listed_and_that_no_gateway_runs(run_here, own_home):
    status, out, _ = run_here("cron")
    never = f"{program.NOBODY_RUNS_JOBS}\n"
    assert (status, out) == (0, f"There are no jobs.\n{never}")
    with program.one_gateway(own_home / ".nanobot" / "workspace"):
        assert run_here("cron", "list")[:2] == (0, "There are no jobs.\n")


@pytest.mark.parametrize(
    ("replies", "status", "shown", "noted"),
    [
        (["hello"], 0, "hello\n", "\n1 request · "),
        ([call("list_dir"), "hello"], 0, "hello\n", "\n2 requests · "),
        (["", "", ""], 1, "There is no answer: the model sent nothing of use. Ask in other words.\n",
         "\nnanobot: There is no answer: the model sent nothing of use."),
        ([Failure(400, {"error": {"message": "boom"}})], 1, "", "/v1 failed: HTTP 400: boom\n"),
        ([call("nothing_like_it")] * 5, 1, None, "\nnanobot: nothing_like_it failed: "),
    ],
)  # fmt: skip
def test_one_message_to_its_answer(run_here, replies, status, shown, noted):
    with FakeLLM(replies) as server:
        outcome = run_here("-m", "x", "--base-url", server.base_url, "--model", "m")
    assert outcome[0] == status
    assert outcome[1] == shown if shown is not None else outcome[1].startswith("I had to stop: ")
    assert noted in f"\n{outcome[2]}"
    line = r"^\d requests? · ~?[\d,]+ in · ~?[\d,]+ out · context [\d,]+ of 65,536$"
    assert re.search(line, outcome[2], re.M)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("replies", "shown", "noted"),
    [
        (["", "", ""], "There is no answer: ", ""),
        (["hello"], "hello", ""),
        ([Failure(400, {"error": {"message": "boom"}})], "", "failed: HTTP 400: boom"),
        ([Reply("half", finish_reason="length"), Failure(400, {"error": "boom"})], "half", "boom"),
        ([call("nothing_like_it")] * 5, "I had to stop: nothing_like_it failed: ", ""),
    ],
)
def test_why_there_is_no_answer_is_on_a_terminal_once(own_home, replies, shown, noted):
    terminal = program.CLI(Screen(), io.StringIO())
    with FakeLLM(replies) as server, program.BackgroundLoop() as background:
        config = program.load_config(None, {"OPENAI_BASE_URL": server.base_url, "NANOBOT_MODEL": "m"})
        loop = program.AgentLoop(config)
        status = program.one_turn(loop, terminal, background, "cli:direct", "x")
        background.complete(loop.close())
    err = terminal.err.getvalue()
    assert status == (replies != ["hello"])
    assert terminal.out.getvalue().startswith(shown) and bool(shown) == bool(terminal.out.getvalue())
    assert noted in err and ("nanobot: " in err) is bool(noted)


def test_the_limit_of_steps_is_no_failure_and_is_said(run_here, own_home):
    (own_home / "c.json").write_text('{"agents": {"defaults": {"maxToolIterations": 1}}}')
    flags = ["--config", str(own_home / "c.json"), "--model", "m"]
    with FakeLLM([call("list_dir"), "so far"]) as server:
        status, out, err = run_here("-m", "x", *flags, "--base-url", server.base_url)
    assert (status, out) == (0, "so far\n")
    assert "nanobot: the limit of steps (maxToolIterations) is reached; ask it to go on\n" in err


def test_a_command_is_no_request(run_here):
    status, out, err = run_here("--offline", "-m", "/stop")
    assert (status, out, err) == (0, "Nothing runs here.\n", "")


def test_who_has_no_model_is_told_how_to_get_one_but_not_who_wants_none(run_here):
    said = "To connect a real one: export OPENAI_API_KEY=… (or OPENAI_BASE_URL="
    assert said in run_here("-m", "tell me a joke")[2]
    assert said not in run_here("-m", "tell me a joke", "--offline")[2]


def test_a_large_text_from_a_pipe_is_put_into_a_file_that_only_its_owner_may_read(run_here, own_home):
    status, _, _ = run_here("--offline", "-m", "read it", stdin="word " * 60_000)
    (file,) = (own_home / ".nanobot" / "workspace" / ".nanobot" / "piped").iterdir()
    assert status == 0 and file.read_text() == "word " * 60_000


@pytest.mark.parametrize(
    ("message", "piped", "text"),
    [(None, "", ""), (" a\n", "", "a"), (None, "b", "b"), ("a", "b", "a\n\nb"), (" ", "b", "b"),
     ("caf\udce9", "", "caf\ufffd")],
)  # fmt: skip
def test_a_message_and_what_was_piped_are_one_text(message, piped, text):
    assert program.join_message(message, piped) == text


def test_a_newcomer_is_welcomed_and_whoever_comes_back_more_briefly(own_home):
    config = program.Config()
    config.defaults.provider = "offline"
    loop, terminal = program.AgentLoop(config), program.CLI(io.StringIO(), io.StringIO())
    program.greet(terminal, loop)
    first = terminal.err.getvalue()
    assert "nanobot 0.1.0 is an agent: it answers, and " in first and f"Its home is {own_home}/" in first
    assert "It talks to the model offline.\n" in first and "Try: list the files here." in first
    program.prompt_history(loop).parent.mkdir()
    program.prompt_history(loop).touch()
    program.greet(terminal, loop)
    again = terminal.err.getvalue().removeprefix(first)
    assert again == "nanobot 0.1.0, model offline. /help lists commands, Ctrl-D leaves.\n"


def test_a_fault_of_the_program_shows_its_traceback_harmless_to_the_terminal(run_here, capsys):
    run_here("sessions")
    assert sys.excepthook is program.show_bug
    try:
        raise RuntimeError("\x1b[2J of ours")
    except RuntimeError as fault:
        sys.excepthook(type(fault), fault, fault.__traceback__)
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert "RuntimeError: \\x1b[2J of ours\n" in err


def test_a_reader_who_has_enough_is_no_fault(own_home):
    reading, writing = os.pipe()
    os.close(reading)
    process = start("prompt", "--offline", stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=LONG)[1] == "" and process.returncode == 1


# ---- The gateway ----


class Gateway:
    """`nanobot gateway` as a process of its own; its log is in a file."""

    def __init__(self, home: Path, telegram: FakeTelegram, server: FakeLLM, *flags: str,
                 program=PROGRAM, **settings):  # fmt: skip
        config = {"channels": {"telegram": {"token": telegram.token, "allowFrom": [7, *range(100, 120)],
                                            "apiBase": telegram.base_url} | settings}}  # fmt: skip
        (home / ".nanobot").mkdir(exist_ok=True)
        (home / ".nanobot" / "config.json").write_text(json.dumps(config))
        self.log = home / "gateway.log"
        with open(self.log, "a") as log:
            self.process = start("gateway", *flags, server=server, stderr=log, program=program,
                                 preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))  # fmt: skip

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.log.read_text() or self.process.poll() is not None, 30)
        assert text in self.log.read_text()

    def end(self) -> float:
        before = time.monotonic()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the test fails, and ends
            self.process.wait(20)
        self.process.kill()
        return time.monotonic() - before


def test_a_gateway_answers_lets_others_look_survives_its_terminal_and_ends_in_order(own_home):
    def script(body):
        text = str(body["messages"][-1]["content"])
        return Hang(60) if text.endswith("wait") else f"to {text.split()[-1]}"

    with FakeTelegram() as telegram, FakeLLM(script) as server:
        gateway = Gateway(own_home, telegram, server)
        telegram.say("hello")
        telegram.wait_until(lambda: telegram.texts() == ["to hello"])
        gateway.process.send_signal(signal.SIGHUP)
        status, _, err = nanobot("gateway", server=server)
        assert status == 1 and "A gateway serves" in err
        status, out, _ = nanobot("cron", server=server)
        assert (status, "dream" in out, "No gateway runs" in out) == (0, True, False)
        assert nanobot("status", server=server)[0] == 0
        telegram.say("wait")
        wait_until(lambda: str(server.bodies[-1]["messages"][-1]["content"]).endswith("wait"), 30)
        assert gateway.end() < 10
        assert [line["content"] for line in journal(own_home, "telegram%3A7") if "role" in line] == [
            "hello", "to hello", "wait"]  # fmt: skip
        assert gateway.process.returncode == 0
        log = gateway.log.read_text()
        assert telegram.token not in log and "Traceback" not in log
        events = [line for line in log.splitlines() if "telegram:7" in line]
        assert len(events) == 3, "one line an event: two came in, one was answered"
        stamp = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO nanobot.gateway: "
        assert re.search(f"{stamp}serving telegram, cron$", log, re.M)
        assert re.search(f"{stamp}telegram:7: completed, 1 request$", log, re.M)
        assert re.search(f"{stamp}ended$", log, re.M) and "iteration 1" not in log
        home = f"{own_home}/.nanobot/workspace"
        assert f"files are in {home}: a.txt means" in server.bodies[0]["messages"][0]["content"]
    with FakeTelegram() as telegram, FakeLLM(["at last"]) as server:
        gateway = Gateway(own_home, telegram, server, "--verbose")
        telegram.wait_until(lambda: telegram.texts() == ["at last"])
        gateway.wait_for("iteration 1")
        gateway.end()


WITH_A_STUBBORN_TOOL = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
import nanobot, tools

@tools.tool
async def stay() -> str:
    "Stay, whatever happens."
    while True:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            pass

tools.FILE_TOOLS.append(stay)
sys.exit(nanobot.main())
"""


def test_a_tool_that_catches_every_cancellation_does_not_keep_a_gateway_from_its_end(own_home):
    with FakeTelegram() as telegram, FakeLLM([call("stay")]) as server:
        gateway = Gateway(own_home, telegram, server, program=[sys.executable, "-c", WITH_A_STUBBORN_TOOL])
        telegram.say("stay")
        telegram.wait_until(lambda: telegram.texts() == ["stay()"])
        assert gateway.end() < 10
    assert gateway.process.returncode == 0
    *_, line, last = gateway.log.read_text().splitlines()
    assert line.endswith("left behind, as it does not end: telegram:7; the journal keeps what it has")
    assert last.endswith("INFO nanobot.gateway: ended"), "and nothing else is told"
    assert [line["role"] for line in journal(own_home, "telegram%3A7") if "role" in line] == [
        "user", "assistant"]  # fmt: skip


def test_a_wrong_token_is_said_plainly_and_cron_goes_on(own_home):
    with FakeTelegram() as telegram, FakeLLM([]) as server:
        gateway = Gateway(own_home, telegram, server, token="1:wrong")
        gateway.wait_for("Telegram does not know this bot token")
        assert gateway.process.poll() is None and "1:wrong" not in gateway.log.read_text()
        gateway.end()


def write_reminders(home: Path, chat: str, names: list[str]) -> None:
    """Reminders that are due at once, beside what stands in jobs.json."""
    moment = datetime.now(UTC).isoformat()
    rows = [{"id": name, "message": f"<{name}>", "at": moment, "channel": chat.split(":")[0],
             "chat_id": chat.split(":")[1], "since": "2026-01-01T00:00:00Z"} for name in names]  # fmt: skip
    store = JobStore(home / ".nanobot" / "workspace" / "cron" / "jobs.json", locked)
    store.change(lambda old: [*old, *rows])


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_of_a_gateway_under_load_loses_nothing_and_doubles_nothing(own_home, rounds):
    """Killed at random moments; each chat gets an answer for each message, and each reminder."""
    dice, chats = random.Random(5), range(100, 106)

    def script(body):
        last = str(body["messages"][-1]["content"])
        is_task = body["messages"][-1]["role"] == "user" and dice.random() < 0.5
        users = [each["content"] for each in body["messages"] if each["role"] == "user"]
        if is_task and last:
            return Reply(None, [call("list_dir", path=".")], "tool_calls", delay=0.02)
        return Reply(" ".join(re.findall(r"<[\d.r]+>", str(users))), delay=0.02)

    with FakeTelegram() as telegram, FakeLLM(script) as server:
        for number in range(rounds):
            write_reminders(own_home, "telegram:100", [f"r{number}.{n}" for n in range(3)])
            gateway = Gateway(own_home, telegram, server)
            for chat in chats:
                for count in range(3):
                    telegram.say(f"<{chat}.{3 * number + count}>", sender=chat)
            served = len(server.bodies) + dice.randint(0, 15)
            wait_until(lambda served=served: len(server.bodies) > served, 30)
            gateway.process.kill()
            gateway.process.wait()
        gateway = Gateway(own_home, telegram, server)
        expected = [(chat, f"{chat}.{n}") for chat in chats for n in range(3 * rounds)]
        expected += [(100, f"r{number}.{n}") for number in range(rounds) for n in range(3)]
        telegram.wait_until(
            lambda: all(f"{name}&gt;" in " ".join(telegram.texts(chat)) for chat, name in expected)
        )
        gateway.end()
        for body in filter(None, server.bodies):
            is_lawful(body["messages"])
    for chat in chats:
        lines = [line for line in journal_whatever(own_home, f"telegram%3A{chat}") if line.get("role")]
        asked = [line["content"] for line in lines if line["role"] == "user"]
        assert sorted(asked) == sorted(f"<{chat}.{number}>" for number in range(3 * rounds))
        told = [line["content"] for line in lines if "@" in line.get("id", "")]
        reminders = [f"<r{number}.{n}>" for number in range(rounds) for n in range(3)]
        assert sorted(told) == sorted(reminders if chat == 100 else [])


def test_a_one_shot_waits_for_its_helpers_and_tells_what_they_found(own_home):
    def script(body):
        *_, last = body["messages"]
        if body["messages"][0]["content"].startswith("You are a helper"):
            return Reply("gold", delay=0.1)
        if "gold" in str(last["content"]):
            return "It found gold."
        return call("spawn", task="dig") if last["role"] == "user" else "A helper digs."

    with FakeLLM(script) as server:
        assert nanobot("-m", "dig", server=server)[:2] == (0, "A helper digs.\nIt found gold.\n")


def test_ctrl_c_ends_the_helpers_of_a_one_shot_too(own_home):
    def script(body):
        if body["messages"][0]["content"].startswith("You are a helper"):
            return Hang(60)
        return call("spawn", task="dig") if body["messages"][-1]["role"] == "user" else "A helper digs."

    with FakeLLM(script) as server:
        process = start("-m", "dig", server=server)
        wait_until(lambda: len(server.bodies) == 3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130
