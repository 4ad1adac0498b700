"""How fast is it? The figures of DESIGN 9: ratios to a bare tool loop on the official SDK in the same run.

    python tests/bench.py            all of it, about four minutes
    python tests/bench.py calls      only what has `calls` in its name

A stub endpoint, another process, asks for tool calls until it has enough of them, then it answers. Each
contestant runs in a process of its own; runs alternate, and the median counts.
"""

import asyncio
import json
import re
import resource
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
    data = json.dumps({"id": "x", "created": 1, "model": "m", "choices": [choice]})
    if is_streamed:
        data = f"data: {data}\n\ndata: [DONE]\n\n"
    mime = "text/event-stream" if is_streamed else "application/json"
    return f"HTTP/1.1 200 OK\r\nContent-Type: {mime}\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode()


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


# ---- The contestants: each runs in a fresh process and gives its figures ----


def peak() -> float:
    """Megabytes that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def since(start: float) -> float:
    """Milliseconds."""
    return (time.perf_counter() - start) * 1e3


PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTION = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
QUESTION = {"role": "user", "content": "Look around."}
ASK = {"model": "m", "tools": [{"type": "function", "function": FUNCTION}]}


def called(messages: list[dict], message) -> bool:
    """The loop that everybody writes first: the middle of it. Was anything called?"""
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        seen = f"saw {json.loads(call.function.arguments)['n']}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
    return bool(message.tool_calls)


def bare(base_url: str, sessions: int = 0) -> float:
    """Without the kit: one conversation, or so many side by side on the asynchronous client."""
    from openai import AsyncOpenAI, OpenAI

    async def one() -> None:
        messages = [QUESTION]
        while called(messages, (await create(messages=messages, **ASK)).choices[0].message):
            pass

    async def everyone() -> None:
        await asyncio.gather(*(one() for _ in range(sessions)))

    client = (AsyncOpenAI if sessions else OpenAI)(api_key="none", base_url=base_url)
    create = client.chat.completions.create
    start, messages = time.perf_counter(), [QUESTION]
    if sessions:
        asyncio.run(everyone())
    while not sessions and called(messages, create(messages=messages, **ASK).choices[0].message):
        pass
    return since(start)


def loop_with(*tools, provider=None, **environ: str):
    """The kit as a program would use it: a loop with a workspace of its own, not streaming."""
    import nanobot
    from tools import ToolRegistry

    config = nanobot.load_config(environ={**environ, "NANOBOT_WORKSPACE": tempfile.mkdtemp()})
    config.defaults.max_tool_iterations = 1_000
    loop = nanobot.AgentLoop(config, provider)
    loop.program.streaming = False
    loop.tools = ToolRegistry(tools) if tools else loop.tools
    return loop


def kit(base_url: str, sessions: int = 1) -> float:
    """With one tool; journal, hooks and all."""
    from tools import tool

    @tool(read_only=True)
    async def look(n: int) -> str:
        """Look."""
        return f"saw {n}"

    async def everyone() -> None:
        await asyncio.gather(
            *(loop.process_direct("Look around.", f"cli:{n}") for n in range(sessions))
        )

    loop = loop_with(look, OPENAI_BASE_URL=base_url, NANOBOT_MODEL="m")
    loop.provider.warm_up()
    start = time.perf_counter()
    asyncio.run(everyone())
    return since(start)


def long_session(turns: int) -> float:
    """CPU time of the last 100 turns by that of turns 100 to 200; each has a call, and the memory is kept, too."""
    import test_memory

    async def talk() -> None:
        for n in range(turns):
            start = time.process_time()
            await loop.process_direct(f"question {n}", "cli:bench")
            times.append(time.process_time() - start)
            loop.provider.asked, loop.provider.saves = [], []

    loop, times = test_memory.talkative_loop(Path(tempfile.mkdtemp())), []
    asyncio.run(talk())
    return sum(times[-100:]) / sum(times[100:200])


def many_chats(messages: int) -> float:
    """300 chats, the next message when the last is answered: one loop; the megabytes that it needs."""
    import chats

    async def slow(request):
        model.asked.clear()
        await asyncio.sleep(0.01)
        return f"to {request.messages[-1]['content'].split()[-1]}"

    class Phone(chats.Desk):
        async def send(self, message):
            if message.kind == "final":
                answers[message.chat_id].put_nowait(message.content)

    async def talk(chat):
        for number in range(messages):
            await gateway.say(f"m{number}", chat)
            assert await answers[chat].get() == f"to m{number}", "every message once and in order"

    async def everyone():
        async with gateway:
            await asyncio.gather(*map(talk, answers))

    model, answers = chats.Model(slow), {str(n): asyncio.Queue() for n in range(300)}
    gateway = chats.Chats(loop_with(provider=model), Phone())
    asyncio.run(everyone())
    assert all(queue.empty() for queue in answers.values())
    return peak()


def ten_blocking_tools() -> float:
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
    return since(start)


def search(folder: str, pattern: str) -> float:
    from tools import Turn, grep

    start = time.perf_counter()
    asyncio.run(grep.execute(pattern, turn=Turn(Path(folder), Path(folder))))
    return since(start)


def one_answer(base_url: str) -> float:
    import nanobot

    nanobot.main(["-m", "hi", "--model", "m", "--base-url", base_url])
    return peak()


# ---- The race ----

HOME = tempfile.mkdtemp()
START = f"import sys; sys.path[:0] = [{str(HERE.parent)!r}, {str(HERE.parent.parent)!r}]\n"
PLAIN = """import sys; from openai import OpenAI
client = OpenAI(api_key="none", base_url=sys.argv[-1])
answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
print(answer.choices[0].message.content)"""


def python(code: str, *arguments: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", code, *arguments]
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, env={"HOME": HOME, "PATH": "/usr/bin:/bin"}, **streams)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def inside(name: str, *arguments: object) -> float | list[float]:
    """The figures of one contestant."""
    code = f"{START}import bench, json; print(json.dumps(bench.{name}(*{arguments!r})))"
    return json.loads(python(code).splitlines()[-1])


def race(ours, theirs, rounds: int = ROUNDS) -> float:
    """Both in turn; each gives the milliseconds that it took."""
    mine, other = zip(*((ours(), theirs()) for _ in range(rounds)), strict=True)
    print(f"{statistics.median(mine):,.0f} / {statistics.median(other):,.0f} ms")
    return statistics.median(mine) / statistics.median(other)


def cold_start(root: str) -> float:
    def whole(code: str) -> float:
        start = time.perf_counter()
        python(code, "-m", "hi", "--model", "m", "--base-url", f"{root}/0/v1")
        return since(start)

    program = f"{START}from nanobot import main; sys.exit(main())"  # what the installed script does
    return race(lambda: whole(program), lambda: whole(PLAIN), 2 * ROUNDS)


def calls(root: str, calls: int, *sessions: int) -> float:
    url = f"{root}/{calls}/v1"
    return race(lambda: inside("kit", url, *sessions), lambda: inside("bare", url, *sessions))


def grep(pattern: str) -> float:
    """In 187 MB that look like source text; one file in a thousand has what is searched for."""
    text = "".join(
        f"    return value if {number} else default  # as it was\n" for number in range(200)
    )
    with tempfile.TemporaryDirectory() as tree:
        for number in range(20_000):
            folder = Path(tree, f"p{number % 20}", f"m{number % 400}")
            folder.mkdir(parents=True, exist_ok=True)
            found = "def needle():\n" if number % 1_000 == 0 else ""
            Path(folder, f"f{number}.py").write_text(f"{number}\n{text}{found}")
        return statistics.median(inside("search", tree, pattern) for _ in range(ROUNDS))


def figures(root: str) -> list[tuple]:
    """Name, unit, aim, and how it is measured."""
    return [
        ("cold start", "x", 0.85, lambda: cold_start(root)),
        ("50 calls", "x", 0.5, lambda: calls(root, 50)),
        ("200 calls", "x", 0.2, lambda: calls(root, 200)),
        ("50 sessions of 10 calls", "x", 0.75, lambda: calls(root, 10, 50)),
        ("ten parallel tools of 0.2 s", "ms", 250, lambda: inside("ten_blocking_tools")),
        ("last turns of 2,000 / early ones", "x", 1.5, lambda: inside("long_session", 2_000)),
        ("memory of one answer", "MB", 60, lambda: inside("one_answer", f"{root}/0/v1")),
        ("grep needle in 20,000 files", "ms", 3_000, lambda: grep("needle")),
        (r"grep \bneedle\b|nothing", "ms", 3_000, lambda: grep(r"\bneedle\b|nothing")),
        (
            "chats: memory, 50 messages - 5",
            "MB",
            20,
            lambda: inside("many_chats", 50) - inside("many_chats", 5),
        ),
    ]


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    code = f"{START}import asyncio, bench; asyncio.run(bench.serve())"
    stub = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8")
    try:
        root = f"http://127.0.0.1:{int(stub.stdout.readline())}"
        for name, unit, aim, measure in figures(root):
            if wanted in name:
                print(f"{name:40}{measure():9.2f} {unit:3} (aim: {aim:,})", flush=True)
    finally:
        stub.kill()


if __name__ == "__main__":
    main()
