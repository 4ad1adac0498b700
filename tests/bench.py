"""How fast is it? The figures of DESIGN 9: ratios to a bare tool loop on the official SDK in the same run.

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
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
ROUNDS = 5


# ---- The stub endpoint ----


def answer(calls_wanted: int, served: int, is_streamed: bool) -> bytes:
    """A tool call while there are fewer results than wanted, then a text; as a whole HTTP response."""
    function = {"name": "look", "arguments": json.dumps({"n": served})}
    call = {"index": 0, "id": f"call_{served}", "type": "function", "function": function}
    is_last = served >= calls_wanted
    said = {"content": "done"} if is_last else {"content": None, "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "stop" if is_last else "tool_calls"}
    choice["delta" if is_streamed else "message"] = {"role": "assistant", **said}
    kind = "chat.completion.chunk" if is_streamed else "chat.completion"
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    body = {"id": "x", "object": kind, "created": 1, "model": "m", "choices": [choice], "usage": usage}
    data = json.dumps(body).encode()
    if is_streamed:
        data = b"data: " + data + b"\n\ndata: [DONE]\n\n"
    mime = "text/event-stream" if is_streamed else "application/json"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {mime}\r\nContent-Length: {len(data)}\r\n\r\n"
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
                is_streamed = bool(re.search(rb'"stream": ?true', body))
                writer.write(answer(wanted, body.count(b'"tool_call_id"'), is_streamed))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---- The contestants: each prints its figures as JSON ----


def report(**figures: float) -> None:
    print(json.dumps(figures))


def since(start: float) -> float:
    """Milliseconds."""
    return (time.perf_counter() - start) * 1e3


PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTION = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
ASK = {"model": "m", "tools": [{"type": "function", "function": FUNCTION}]}


def called(messages: list[dict], message) -> bool:
    """The loop that everybody writes first: the middle of it. Was anything called?"""
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        seen = f"saw {json.loads(call.function.arguments)['n']}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
    return bool(message.tool_calls)


def bare(base_url: str) -> None:
    from openai import OpenAI

    create = OpenAI(api_key="none", base_url=base_url).chat.completions.create
    messages = [{"role": "user", "content": "Look around."}]
    start = time.perf_counter()
    while called(messages, create(messages=messages, **ASK).choices[0].message):
        pass
    report(ms=since(start))


def bare_side_by_side(base_url: str) -> None:
    from openai import AsyncOpenAI

    async def one() -> None:
        messages = [{"role": "user", "content": "Look around."}]
        while called(messages, (await create(messages=messages, **ASK)).choices[0].message):
            pass

    async def everyone() -> None:
        await asyncio.gather(*(one() for _ in range(50)))

    create = AsyncOpenAI(api_key="none", base_url=base_url).chat.completions.create
    start = time.perf_counter()
    asyncio.run(everyone())
    report(ms=since(start))


def kit(base_url: str, sessions: int = 1) -> None:
    """The kit as a program would use it, with one tool: journal, hooks and all."""
    import nanobot
    from tools import ToolRegistry, tool

    @tool(read_only=True)
    async def look(n: int) -> str:
        """Look."""
        return f"saw {n}"

    async def everyone() -> None:
        await asyncio.gather(*(loop.process_direct("Look around.", f"cli:{n}") for n in range(sessions)))

    config = nanobot.load_config(environ={"OPENAI_BASE_URL": base_url, "NANOBOT_MODEL": "m"})
    config.defaults.workspace, config.defaults.max_tool_iterations = tempfile.mkdtemp(), 1_000
    loop = nanobot.AgentLoop(config)
    loop.tools, loop.config.streaming = ToolRegistry([look]), False
    loop.provider.warm_up()
    start = time.perf_counter()
    asyncio.run(everyone())
    report(ms=since(start))


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
                saved = {"history_entry": "They looked around.", "memory_update": ""}
                return LLMResponse(None, [ToolCallRequest("c", "save_memory", saved)], "tool_calls")
            if request.messages[-1]["role"] == "tool" or not names:
                return LLMResponse("There is nothing.")
            call = ToolCallRequest(f"c{len(times)}", "look", {"n": len(times)})
            return LLMResponse(None, [call], "tool_calls")

    async def talk() -> None:
        for n in range(turns):
            start = time.process_time()
            await loop.process_direct(f"Look at number {n}.")
            times.append((time.process_time() - start) * 1e3)

    config = nanobot.load_config(environ={})
    config.defaults.workspace = tempfile.mkdtemp()
    loop = nanobot.AgentLoop(config, Model())
    loop.tools, loop.config.streaming, times = ToolRegistry([look]), False, []
    asyncio.run(talk())
    report(ms=sum(times[-100:]) / 100, early=sum(times[100:200]) / 100)


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
        wall = since(start)
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
        ms = since(start)
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
    report(ms=since(start))


def search(folder: str, pattern: str) -> None:
    from tools import Turn, grep

    turn = Turn(Path(folder), Path(folder))
    start = time.perf_counter()
    asyncio.run(grep.execute(pattern, turn=turn))
    report(ms=since(start))


def small_question() -> None:
    """Bytes of a question with all tools and the first files of a workspace, as they are sent."""
    import nanobot
    from fake_llm import FakeLLM

    with FakeLLM(["Hello."]) as server:
        environ = {"OPENAI_BASE_URL": server.base_url, "NANOBOT_MODEL": "m"}
        config = nanobot.load_config(environ=environ | {"NANOBOT_WORKSPACE": tempfile.mkdtemp()})
        asyncio.run(nanobot.AgentLoop(config).process_direct("Hello."))
        report(bytes=len(server.requests[-1].raw))


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

HOME = tempfile.mkdtemp()
NANOBOT = (sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE.parent.parent)!r})\n"
           "from nanobot import main; sys.exit(main())")  # what the installed script does  # fmt: skip


def run(*command: str) -> subprocess.CompletedProcess:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "VIRTUAL_ENV") if name in os.environ}
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, env={**kept, "HOME": HOME}, **streams)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done


def whole(*command: str) -> float:
    """Wall milliseconds of a whole process."""
    start = time.perf_counter()
    run(*command)
    return since(start)


def inside(name: str, *arguments: object) -> dict:
    """The figures of one contestant in a fresh process."""
    code = f"import sys; sys.path[:0] = [{str(HERE.parent)!r}]; import bench; bench.{name}(*{arguments!r})"
    return json.loads(run(sys.executable, "-c", code).stdout.splitlines()[-1])


def show(name: str, ours: list[float], theirs: list[float], goal: float) -> None:
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(f"{name:40}{mine:9.1f} ms {other:9.1f} ms   {mine / other:5.2f}x  (aim: {goal}x)", flush=True)


def show_one(name: str, figure: float, unit: str, aim: str) -> None:
    print(f"{name:40}{figure:9.1f} {unit}  (aim: {aim} {unit})", flush=True)


def race_cold_start(root: str) -> None:
    plain = (
        "import sys; from openai import OpenAI; client = OpenAI(api_key='none', base_url=sys.argv[1]); "
        "print(client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])"
        ".choices[0].message.content)"
    )
    ours, theirs = [], []
    for _ in range(2 * ROUNDS):
        ours.append(whole(*NANOBOT, "-m", "hi", "--model", "m", "--base-url", f"{root}/0/v1"))
        theirs.append(whole(sys.executable, "-c", plain, f"{root}/0/v1"))
    show("cold start to the first answer", ours, theirs, 0.85)


def race_calls(root: str) -> None:
    cases = [("50 calls in a turn", 50, 1, "bare", 0.5), ("200 calls in a turn", 200, 1, "bare", 0.2),
             ("50 sessions of 10 calls", 10, 50, "bare_side_by_side", 0.75)]  # fmt: skip
    for name, calls, sessions, rival, goal in cases:
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(inside("kit", f"{root}/{calls}/v1", sessions)["ms"])
            theirs.append(inside(rival, f"{root}/{calls}/v1")["ms"])
        show(name, ours, theirs, goal)


def race_parallel_tools(root: str) -> None:
    best = min(inside("ten_blocking_tools")["ms"] for _ in range(ROUNDS))
    show_one("ten tools of 0.2 s, side by side", best, "ms", "250")


def race_long_session(root: str) -> None:
    rounds = [inside("long_session", 2_000) for _ in range(3)]
    late, early = ([figures[name] for figures in rounds] for name in ("ms", "early"))
    show("CPU of turns 1,900-2,000 / 100-200", late, early, 1.3)


def race_memory(root: str) -> None:
    measured = NANOBOT[2].replace("sys.exit(main())", "main(); import resource") + (
        "\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = run(sys.executable, "-c", measured, "-m", "hi", "--model", "m", "--base-url", f"{root}/0/v1")
    show_one("peak memory of one answer", int(done.stdout.split()[-1]) / 1024, "MB", "60")


def race_body(root: str) -> None:
    show_one("body of a small question", inside("small_question")["bytes"] / 1e3, "kB", "10")


def race_grep(root: str) -> None:
    with tempfile.TemporaryDirectory() as tree:
        make_tree(tree)
        for pattern in ("needle", r"def\s+needle", r"\bneedle\b|nothing"):
            times = [inside("search", tree, pattern)["ms"] for _ in range(ROUNDS)]
            show_one(f"grep {pattern} in 20,000 files", statistics.median(times), "ms", "1,000")


def race_chats(root: str) -> None:
    few, many = inside("many_chats", 5), inside("many_chats", 50)
    ideal = 300 * 50 * 50 / 8  # eight turns at once, 50 ms a request
    show("300 chats of 50 messages / ideal", [many["ms"]], [ideal], 1.5)
    show_one("peak memory above 300 chats of 5", many["peak"] - few["peak"], "MB", "20")
    figures = inside("one_blocked_one_flooded")
    beside = figures["beside"], figures["alone"]
    show("beside a blocked and a flooded chat", [beside[0]], [beside[1]], 2)


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    stub = subprocess.Popen([sys.executable, str(HERE), "--stub"], stdout=subprocess.PIPE, text=True)
    try:
        root = f"http://127.0.0.1:{int(stub.stdout.readline())}"
        for name, race in globals().items():
            if name.startswith("race_") and wanted in name:
                race(root)
    finally:
        stub.kill()


if __name__ == "__main__":
    if sys.argv[1:] == ["--stub"]:
        asyncio.run(serve())
    else:
        main()
