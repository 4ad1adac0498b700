"""How fast is it? Ratios against a bare tool loop on the official SDK, measured side by side in one run.

    python tests/bench.py            all of it, about three minutes
    python tests/bench.py calls      only what has `calls` in its name

A stub endpoint, another process, asks for tool calls until it has enough of them, then it answers. Each
contestant runs in a process of its own; runs alternate, and the median counts. Nothing here is a test: a
busy machine may not make the suite fail.
"""

import asyncio
import json
import logging
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
ROUNDS = 5


# ---- The stub endpoint ----


def streamed_answer() -> bytes:
    """A text in three events."""
    deltas = [{"role": "assistant", "content": "do"}, {"content": "ne"}, {}]
    events = b""
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        events += b"data: " + json.dumps(chunk | {"choices": [choice]}).encode() + b"\n\n"
    events += b"data: [DONE]\n\n"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(events)}\r\n\r\n"
    return head.encode() + events


def answer(calls_wanted: int, served: int) -> bytes:
    """A tool call while there are fewer results than wanted, then a text; as a whole HTTP response."""
    function = {"name": "look", "arguments": json.dumps({"n": served})}
    call = {"id": f"call_{served}", "type": "function", "function": function}
    last = served >= calls_wanted
    said = {"content": "done"} if last else {"content": None, "tool_calls": [call]}
    message = {"role": "assistant", **said}
    choice = {"index": 0, "message": message, "finish_reason": "stop" if last else "tool_calls"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    data = json.dumps(body | {"usage": usage}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def serve() -> None:
    """A conversation at `/N/v1/chat/completions` gets N tool calls; its results say how far it is."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
                body = await reader.readexactly(length)
                wanted = int(head.split(b"/", 2)[1])
                is_streamed = re.search(rb'"stream": ?true', body)
                whole = answer(wanted, body.count(b'"tool_call_id"'))
                writer.write(streamed_answer() if is_streamed else whole)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---- The contestants: each prints its milliseconds as JSON ----


def report(**figures: float) -> None:
    print(json.dumps(figures))


def filler(count: int) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"message {n}: " + "some words " * 10} for n in range(count)]


def bare(base_url: str, history: int = 0) -> None:
    """The loop that everybody writes first."""
    from openai import OpenAI

    client = OpenAI(api_key="none", base_url=base_url)
    messages = [*filler(history), {"role": "user", "content": "Look around."}]
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    function = {"name": "look", "description": "Look.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    start = time.perf_counter()
    while True:
        message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            seen = f"saw {json.loads(call.function.arguments)['n']}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
    report(ms=(time.perf_counter() - start) * 1e3)


def kit_loop(base_url: str, workspace: str, history: int = 0):
    """The kit as a program would use it, with one tool: journal, hooks and all."""
    import nanobot
    from tools import ToolRegistry, tool

    @tool(read_only=True)
    async def look(n: int) -> str:
        """Look."""
        return f"saw {n}"

    config = nanobot.load_config(environ={"OPENAI_BASE_URL": base_url, "NANOBOT_MODEL": "m"})
    config.defaults.workspace, config.defaults.max_tool_iterations = workspace, 1_000
    if history:  # all of it is to be sent
        config.defaults.context_window_tokens = config.defaults.memory_window = 10_000_000
    loop = nanobot.AgentLoop(config)
    loop.tools, loop.config.streaming = ToolRegistry([look]), False
    return loop


def kit(base_url: str, history: int = 0) -> None:
    import nanobot

    workspace = tempfile.mkdtemp()
    loop = kit_loop(base_url, workspace)
    if history:
        loop.sessions.get("cli:direct").append(*filler(history))
        loop = kit_loop(base_url, workspace, history)
    loop.provider.warm_up()
    marks = []

    class Clock(nanobot.AgentHook):
        async def after_iteration(self, context: nanobot.AgentHookContext) -> None:
            marks.append(time.perf_counter())

    loop.hooks.append(Clock())
    start = time.perf_counter()
    asyncio.run(loop.process_direct("Look around."))
    steps = [late - early for early, late in zip(marks, marks[1:], strict=False)]
    tail = statistics.median(steps[-10:]) / statistics.median(steps[5:15]) if len(steps) > 20 else 1
    report(ms=(time.perf_counter() - start) * 1e3, tail=tail)


def per_request(messages: list[dict], ask: Callable[[], str], wanted: int) -> None:
    """CPU time of this process, the median over a conversation that goes on and keeps its length."""
    times = []
    for _ in range(wanted):
        start = time.process_time()
        said = ask()
        times.append((time.process_time() - start) * 1e3)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
        del messages[:2]
    report(ms=statistics.median(times[1:]))  # the first one opens the connection


def kit_requests(base_url: str, history: int, wanted: int) -> None:
    from providers import ROWS, Endpoint, OpenAIProvider

    provider = OpenAIProvider(Endpoint(ROWS["custom"], "none", base_url, "m"))
    provider.warm_up()
    messages = [*filler(history), {"role": "user", "content": "Hello."}]
    with asyncio.Runner() as runner:
        per_request(messages, lambda: runner.run(provider.chat(messages)).content, wanted)


def sdk_requests(base_url: str, history: int, wanted: int) -> None:
    from openai import OpenAI

    create = OpenAI(api_key="none", base_url=base_url).chat.completions.create
    messages = [*filler(history), {"role": "user", "content": "Hello."}]
    per_request(messages, lambda: create(model="m", messages=messages).choices[0].message.content, wanted)


def socket_requests(base_url: str, history: int, wanted: int) -> None:
    """What it costs to say the same with nothing but the standard library."""
    from http.client import HTTPConnection
    from urllib.parse import urlsplit

    place = urlsplit(base_url)
    connection = HTTPConnection(place.netloc)
    messages = [*filler(history), {"role": "user", "content": "Hello."}]

    def ask() -> str:
        body = json.dumps({"model": "m", "messages": messages}).encode()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"{place.path}/chat/completions", body, headers)
        return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]

    per_request(messages, ask, wanted)


def bare_side_by_side(base_url: str) -> None:
    """50 conversations of 10 calls on the SDK's asynchronous client."""
    from openai import AsyncOpenAI

    async def one() -> None:
        messages = [{"role": "user", "content": "Look around."}]
        for _ in range(11):
            reply = await client.chat.completions.create(model="m", messages=messages)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "saw it"})

    async def everyone() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(50)))
        return (time.perf_counter() - start) * 1e3

    client = AsyncOpenAI(api_key="none", base_url=base_url)
    report(ms=asyncio.run(everyone()))


def kit_side_by_side(base_url: str) -> None:
    async def everyone() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(loop.process_direct("Look around.", f"cli:{n}") for n in range(50)))
        return (time.perf_counter() - start) * 1e3

    loop = kit_loop(base_url, tempfile.mkdtemp())
    loop.provider.warm_up()
    report(ms=asyncio.run(everyone()))


def long_session(turns: int) -> None:
    """CPU time of turns 100 to 200 and of the last 100, of a session with a call in each turn.

    The model is in this process and has its answers ready; it keeps memory, too.
    """
    import nanobot
    from providers import LLMProvider, LLMResponse, ToolCallRequest
    from tools import ToolRegistry, tool

    @tool(read_only=True)
    def look(n: int) -> str:
        """Look."""
        return f"saw {n} " + "and more " * (500 if n % 7 == 0 else 30)

    class Model(LLMProvider):
        model = "m"

        async def answer(self, request) -> LLMResponse:
            names = [tool["function"]["name"] for tool in request.tools]
            if "save_memory" in names:
                update = request.messages[1]["content"].partition("# Conversation")[0]
                saved = {"history_entry": "They looked around.", "memory_update": update[13:].strip()}
                return LLMResponse(None, [ToolCallRequest("c", "save_memory", saved)], "tool_calls")
            if request.messages[-1]["role"] == "tool" or not names:
                return LLMResponse("There is nothing.")
            call = ToolCallRequest(f"c{len(times)}", "look", {"n": len(times)})
            return LLMResponse(None, [call], "tool_calls")

    config = nanobot.load_config(environ={})
    config.defaults.workspace = tempfile.mkdtemp()
    loop = nanobot.AgentLoop(config, Model())
    loop.tools, loop.config.streaming, times = ToolRegistry([look]), False, []

    async def talk() -> None:
        for n in range(turns):
            start = time.process_time()
            await loop.process_direct(f"Look at number {n}.")
            times.append((time.process_time() - start) * 1e3)

    asyncio.run(talk())
    early, late = sum(times[100:200]) / 100, sum(times[-100:]) / 100
    report(ms=late, early=early)


def make_long_journal(workspace: str, turns: int) -> None:
    from memory import SessionManager

    session = SessionManager(Path(workspace)).get("cli:direct")
    for n in range(turns):
        function = {"name": "look", "arguments": json.dumps({"n": n})}
        calls = [{"id": f"c{n}", "type": "function", "function": function}]
        session.append(
            {"role": "user", "content": f"Look at number {n}."},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{n}", "name": "look", "content": "saw it " * 40},
            {"role": "assistant", "content": "There is nothing. " * 5},
            sync=False,
        )


def reopening(workspace: str) -> None:
    from memory import SessionManager

    start = time.perf_counter()
    SessionManager(Path(workspace)).get("cli:direct").history()
    report(ms=(time.perf_counter() - start) * 1e3)


def many_chats(messages: int) -> None:
    """300 chats, the next message when the last is answered: one loop, 50 ms a request."""
    import resource

    import channels
    import nanobot
    from providers import LLMProvider, LLMResponse

    class Slow(LLMProvider):
        async def answer(self, request):
            await asyncio.sleep(0.05)
            return LLMResponse(f"to {request.messages[-1]['content'].split()[-1]}")

    class Phone(channels.Channel):
        name = "phone"

        def __init__(self):
            super().__init__(["*"])
            self.answers = {}

        async def send(self, message):
            if message.kind == "final":
                self.answers[message.chat_id].put_nowait(message.content)

    async def talk(bus, phone, chat):
        answers = phone.answers[chat] = asyncio.Queue()
        for number in range(messages):
            message = channels.InboundMessage("phone", "7", chat, f"m{number}", message_id=f"{number}")
            await bus.publish(message)
            assert await answers.get() == f"to m{number}", "every message once and in order"

    async def everyone():
        config = nanobot.Config()
        config.defaults.workspace = tempfile.mkdtemp()
        loop, bus, phone = nanobot.AgentLoop(config, Slow()), channels.MessageBus(), Phone()
        bus.open(phone)
        serving = asyncio.create_task(loop.run(bus))
        start = time.perf_counter()
        await asyncio.gather(*(talk(bus, phone, str(chat)) for chat in range(300)))
        wall = (time.perf_counter() - start) * 1e3
        serving.cancel()
        assert all(answers.empty() for answers in phone.answers.values())
        return wall

    ms = asyncio.run(everyone())
    report(ms=ms, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def one_blocked_one_flooded() -> None:
    """A chat that blocked the bot, one that is told to wait, and a healthy one: ms of its 20 answers."""
    import channels
    from fake_telegram import FakeTelegram, Refusal

    async def answers(server, others):
        bus, arrived = channels.MessageBus(), asyncio.Semaphore(0)
        bus.open(channels.Telegram(server.token, ["*"], api_base=server.base_url))
        start = time.perf_counter()
        for number in range(20):
            for chat in others:
                bus.send(channels.OutboundMessage("telegram", chat, f"{number}"))
            bus.send(channels.OutboundMessage("telegram", "7", f"{number}", on_delivered=arrived.release))
        for _ in range(20):
            await arrived.acquire()
        ms = (time.perf_counter() - start) * 1e3
        await bus.close(0)
        return ms

    def measure(*others):
        with FakeTelegram() as server:
            server.chats["8"] = Refusal(403, "Forbidden: bot was blocked by the user")
            server.chats["9"] = Refusal(429, "Too Many Requests", {"retry_after": 3})
            return asyncio.run(answers(server, others))

    logging.disable()
    report(alone=measure(), beside=measure("8", "9"))


def ten_blocking_tools() -> None:
    from nanobot import AgentRunner, AgentRunSpec
    from providers import ScriptedProvider, ToolCallRequest
    from tools import ToolRegistry, tool

    @tool(read_only=True)
    def nap() -> str:
        """Sleep."""
        time.sleep(0.2)
        return "slept"

    provider = ScriptedProvider([[ToolCallRequest(f"c{n}", "nap") for n in range(10)], "done"])
    spec = AgentRunSpec([{"role": "user", "content": "nap"}], ToolRegistry([nap]))
    start = time.perf_counter()
    asyncio.run(AgentRunner(provider).run(spec))
    report(ms=(time.perf_counter() - start) * 1e3)


def search(folder: str, pattern: str) -> None:
    from tools import Turn, grep

    turn = Turn(Path(folder), Path(folder))
    start = time.perf_counter()
    asyncio.run(grep.execute(pattern, turn=turn))
    report(ms=(time.perf_counter() - start) * 1e3)


def make_tree(folder: str, files: int = 20_000, size: int = 9_350) -> None:
    """187 MB that look like source text; one file in a thousand has what is searched for."""
    line = "    return value if {} else default  # as it was\n"
    filler = "".join(line.format(number) for number in range(1_000)).encode()
    for number in range(files):
        if number % 50 == 0:
            inside = Path(folder, f"p{number % 20}", f"m{number // 50}")
            inside.mkdir(parents=True)
        start = number * 37 % (len(filler) - size)
        found = b"def needle():\n" if number % 1_000 == 0 else b""
        Path(inside, f"f{number}.py").write_bytes(filler[start : start + size] + b"\n" + found)


# ---- The race ----


class Race:
    def __init__(self, port: int):
        self.root = f"http://127.0.0.1:{port}"

    def url(self, calls: int) -> str:
        return f"{self.root}/{calls}/v1"

    def inside(self, name: str, *arguments: object) -> dict:
        """One contestant in a fresh process; its own figures."""
        here = str(HERE.parent)
        code = f"import sys; sys.path[:0] = [{here!r}]; import bench; bench.{name}(*{arguments!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    def whole(self, *command: str) -> float:
        """Wall milliseconds of a whole process."""
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL, env=environment())
        return (time.perf_counter() - start) * 1e3

    def first_character(self, *command: str) -> float:
        """Wall milliseconds until a process prints something."""
        start = time.perf_counter()
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env=environment(), **streams) as process:
            process.stdout.read(1)
            took = (time.perf_counter() - start) * 1e3
            process.communicate()
        return took

    def show(self, name: str, ours: list[float], theirs: list[float], goal: float) -> None:
        mine, other = statistics.median(ours), statistics.median(theirs)
        print(f"{name:40}{mine:9.1f} ms {other:9.1f} ms   {mine / other:5.2f}x  (aim: {goal}x)", flush=True)


def environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "VIRTUAL_ENV") if name in os.environ}
    return {**kept, "HOME": HOME}


NANOBOT = (sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE.parent.parent)!r})\n"
           "from nanobot import main; sys.exit(main())")  # what the installed script does  # fmt: skip


def medians(pairs: list[tuple[dict, dict]]) -> tuple[list[float], list[float]]:
    return [ours["ms"] for ours, _ in pairs], [theirs["ms"] for _, theirs in pairs]


def race_help(race: Race) -> None:
    pairs = [
        (race.whole(*NANOBOT, "--help"),
         race.whole(sys.executable, "-c", "import argparse, asyncio"))
        for _ in range(3 * ROUNDS)
    ]  # fmt: skip
    race.show("help against two imports", *zip(*pairs, strict=True), 1.5)


def race_cold_start(race: Race) -> None:
    plain = (
        "import sys; from openai import OpenAI; client = OpenAI(api_key='none', base_url=sys.argv[1]); "
        "print(client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])"
        ".choices[0].message.content)"
    )
    pairs = [
        (race.whole(*NANOBOT, "agent", "-m", "hi", "--model", "m", "--base-url", race.url(0)),
         race.whole(sys.executable, "-c", plain, race.url(0)))
        for _ in range(2 * ROUNDS)
    ]  # fmt: skip
    race.show("cold start to the first answer", *zip(*pairs, strict=True), 0.85)


def race_first_character(race: Race) -> None:
    plain = (
        "import sys; from openai import OpenAI; client = OpenAI(api_key='none', base_url=sys.argv[1])\n"
        "for chunk in client.chat.completions.create(model='m', stream=True, "
        "messages=[{'role': 'user', 'content': 'hi'}]):\n"
        "    print(chunk.choices[0].delta.content or '', end='', flush=True)"
    )
    pairs = [
        (race.first_character(*NANOBOT, "agent", "-m", "hi", "--model", "m", "--base-url", race.url(0)),
         race.first_character(sys.executable, "-c", plain, race.url(0)))
        for _ in range(2 * ROUNDS)
    ]  # fmt: skip
    race.show("first character of a cold answer", *zip(*pairs, strict=True), 0.95)


def race_calls(race: Race) -> None:
    for calls, goal in ((50, 0.42), (200, 0.12)):
        pairs = [
            (race.inside("kit", race.url(calls)), race.inside("bare", race.url(calls))) for _ in range(ROUNDS)
        ]
        race.show(f"{calls} tool calls in a turn", *medians(pairs), goal)
        tail = statistics.median(ours["tail"] for ours, _ in pairs)
        print(f"{'':40}the last calls take {tail:.2f}x the first ones (aim: 2x)")


def race_requests(race: Race) -> None:
    url = race.url(0)
    for messages, wanted, goal in ((10, 41, 1.1), (1_000, 11, 0.1), (5_000, 5, 0.05)):
        names = ("kit_requests", "sdk_requests", "socket_requests")
        rounds = [[race.inside(name, url, messages, wanted)["ms"] for name in names] for _ in range(ROUNDS)]
        ours, theirs, least = zip(*rounds, strict=True)
        race.show(f"CPU of a request, {messages:,} messages", ours, theirs, goal)
        bare = statistics.median(least)
        print(f"{'':34}on a bare socket {bare:.2f} ms, {bare / statistics.median(theirs):.2f}x")


def race_history(race: Race) -> None:
    url = race.url(0)
    pairs = [(race.inside("kit", url, 5_000), race.inside("bare", url, 5_000)) for _ in range(ROUNDS)]
    race.show("a turn on 5,000 messages", *medians(pairs), 0.25)


def race_long_session(race: Race) -> None:
    rounds = [race.inside("long_session", 2_000) for _ in range(3)]
    late, early = ([figures[name] for figures in rounds] for name in ("ms", "early"))
    race.show("CPU of turns 1,900-2,000 / 100-200", late, early, 1.3)


def race_reopening(race: Race) -> None:
    with tempfile.TemporaryDirectory() as workspace:
        make_long_journal(workspace, 2_000)
        times = [race.inside("reopening", workspace)["ms"] for _ in range(ROUNDS)]
    print(f"{'reopening a session of 2,000 turns':40}{statistics.median(times):9.1f} ms  (aim: 60 ms)")


def race_sessions(race: Race) -> None:
    url = race.url(10)
    pairs = [
        (race.inside("kit_side_by_side", url), race.inside("bare_side_by_side", url)) for _ in range(ROUNDS)
    ]
    race.show("50 sessions of 10 calls", *medians(pairs), 0.7)


def race_chats(race: Race) -> None:
    few, many = race.inside("many_chats", 5), race.inside("many_chats", 50)
    race.show("300 chats of 50 messages", [many["ms"]], [15_000 * 50 / 8], 1.5)
    grown = many["peak"] - few["peak"]
    print(f"{'':34}peak memory {grown:.1f} MB above that of 300 chats of 5 messages (aim: 20)")


def race_outboxes(race: Race) -> None:
    figures = race.inside("one_blocked_one_flooded")
    text = f"{figures['beside']:.0f} ms beside a blocked and a flooded chat, alone {figures['alone']:.0f} ms"
    print(f"{'20 answers of a healthy chat':34}{text}")


def race_parallel_tools(race: Race) -> None:
    best = min(race.inside("ten_blocking_tools")["ms"] for _ in range(ROUNDS))
    print(f"{'ten tools of 0.2 s, side by side':40}{best:9.1f} ms  (aim: 250 ms)")


def race_grep(race: Race) -> None:
    """The tool in a running agent against a whole rg on one core; both read the whole tree."""
    if not shutil.which("rg"):
        print("grep: skipped, there is no rg to race with")
        return
    with tempfile.TemporaryDirectory() as tree:
        make_tree(tree)
        for pattern in ("needle", r"def\s+needle", r"\bneedle\b|nothing"):
            rounds = [
                (race.inside("search", tree, pattern)["ms"],
                 race.whole("rg", "-j1", "-l", pattern, tree), race.whole("rg", "-l", pattern, tree))
                for _ in range(2 * ROUNDS)
            ]  # fmt: skip
            ours, theirs, all_cores = zip(*rounds, strict=True)
            race.show(f"grep {pattern} in 20,000 files", ours, theirs, 2)
            quick = statistics.median(all_cores)
            print(f"{'':34}rg on all cores {quick:.0f} ms, {statistics.median(ours) / quick:.1f}x")


def race_memory(race: Race) -> None:
    code = NANOBOT[2].replace("sys.exit(main())", "main(); import resource") + (
        "\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "-m", "hi", "--model", "m", "--base-url", race.url(0)]
    empty = subprocess.DEVNULL
    done = subprocess.run(command, capture_output=True, text=True, stdin=empty, env=environment())
    print(f"{'peak memory of one answer':40}{int(done.stderr.split()[-1]) / 1024:9.1f} MB  (aim: 60 MB)")


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    stub = subprocess.Popen([sys.executable, str(HERE), "--stub"], stdout=subprocess.PIPE, text=True)
    try:
        race = Race(int(stub.stdout.readline()))
        for name, run in globals().items():
            if name.startswith("race_") and wanted in name:
                run(race)
    finally:
        stub.kill()


HOME = tempfile.mkdtemp()

if __name__ == "__main__":
    if sys.argv[1:] == ["--stub"]:
        asyncio.run(serve())
    else:
        main()
