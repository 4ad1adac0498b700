"""The model's room: which endpoint is asked, what it is sent, and what is made of whatever it answers.

Everything goes through the real SDK to `FakeLLM`, a server on loopback; the offline model goes through the
real runner with the real tools.
"""

import asyncio
import copy
import gc
import json
import os
import random
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from fake_llm import Failure, FakeLLM, Hang, Raw, Reply, call, calls, error

import providers
from nanobot import AgentRunner, AgentRunSpec
from providers import (
    ROWS,
    Endpoint,
    HumanProvider,
    LLMRequest,
    LLMResponse,
    OfflineProvider,
    OpenAIProvider,
    ScriptedProvider,
    ThinkFilter,
    ToolCallRequest,
    choose_endpoint,
    legal,
    parse_arguments,
)
from tools import FILE_TOOLS, Exec, ToolRegistry, Turn, Web, WebFetch, WebSearch

SYSTEM = {"role": "system", "content": "You are a test."}
HELLO = [SYSTEM, {"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "read_file", "description": "Read.", "parameters": {}}}


def made(server, row="custom", key="sk-test-key-123456", **more):
    times = {name: more.pop(name) for name in ("request_timeout", "idle_timeout") if name in more}
    end = Endpoint(ROWS[row], key, server.base_url, more.pop("model", "test-model"), **more)
    return OpenAIProvider(end, pace=0.0, **times)


def ask(provider, messages=HELLO, tools=None, stream=False, **options):
    """The answer, and the pieces that were shown on the way."""
    shown = []

    async def on_delta(piece):
        shown.append(piece)

    answer = asyncio.run(provider.chat(messages, tools, on_delta=on_delta if stream else None, **options))
    return answer, shown


def reply_to(line, stream=False, row="custom", **options):
    with FakeLLM(lambda body: line) as server:  # the same answer, however often it is asked
        return ask(made(server, row), stream=stream, **options)


def sse(*chunks, done=True):
    """A stream of exactly these chunks; a text is sent as it is."""
    lines = [
        each if isinstance(each, str) else f"data: {json.dumps(each, ensure_ascii=False)}\n\n"
        for each in chunks
    ]
    return Raw("".join([*lines, "data: [DONE]\n\n" * done]).encode())


def delta(finish=None, **part):
    return {"choices": [{"index": 0, "delta": part, "finish_reason": finish}]}


def piece(finish=None, name=None, arguments=None, **more):
    """A chunk with a part of one tool call."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return delta(finish, tool_calls=[{**more, "function": function}])


def whole(message, finish="stop", **more):
    return Failure(200, {"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more})


# ---- Which endpoint ----


def settings(**rows):
    """`openai="sk-1"` is a key, `ollama="http://…"` an address, "key http://…" both."""
    found = {}
    for name, text in rows.items():
        words = text.split()
        base = next((word for word in words if word.startswith("http")), "")
        found[name] = Endpoint(ROWS[name], next((word for word in words if word != base), ""), base)
    return found


CHOICES = {
    "a named provider wins over every clue": (
        settings(openai="sk-1", openrouter="sk-or-1"), {"provider": "openai", "model": "x/y"},
        ("openai", "sk-1", "https://api.openai.com/v1", "x/y")),
    "a base URL wins over the row's address": (
        settings(openai="sk-1"), {"provider": "openai", "base_url": "http://127.0.0.1:9/v1"},
        ("openai", "sk-1", "http://127.0.0.1:9/v1", "gpt-5-mini")),
    "a base URL wins over the address in the settings": (
        settings(ollama="http://far:11434/v1"), {"base_url": "http://near:11434/v1", "model": "m"},
        ("ollama", "", "http://near:11434/v1", "m")),
    "the general key goes to an address that was given and is nobody's": (
        settings(openai="sk-1"), {"base_url": "http://localhost:8000/v1", "model": "m"},
        ("vllm", "sk-1", "http://localhost:8000/v1", "m")),
    "a base URL in the world is a custom endpoint": (
        settings(openai="sk-1"), {"base_url": "https://models.example/v1", "model": "gpt-5"},
        ("custom", "sk-1", "https://models.example/v1", "gpt-5")),
    "a key's prefix says whose it is": (
        settings(openai="sk-or-1"), {"model": "gpt-5"},
        ("openrouter", "sk-or-1", "https://openrouter.ai/api/v1", "gpt-5")),
    "a keyword in the base URL says which row": (
        settings(openrouter="sk-or-1", openai="sk-1"), {"base_url": "https://openrouter.ai/api/v1"},
        ("openrouter", "sk-or-1", "https://openrouter.ai/api/v1", "openrouter/auto")),
    "a maker before the model": (
        settings(openai="sk-1"), {"model": "ollama/llama3:8b"},
        ("ollama", "", "http://localhost:11434/v1", "llama3:8b")),
    "a gateway's own model keeps its whole name": (
        settings(openrouter="sk-or-1"), {"model": "openrouter/auto"},
        ("openrouter", "sk-or-1", "https://openrouter.ai/api/v1", "openrouter/auto")),
    "a gateway's name before maker and model is taken off": (
        settings(openrouter="sk-or-1"), {"model": "openrouter/openai/gpt-5"},
        ("openrouter", "sk-or-1", "https://openrouter.ai/api/v1", "openai/gpt-5")),
    "a model's name with its maker's key wins over a local server": (
        settings(openai="sk-1", ollama="http://localhost:11434/v1"), {"model": "gpt-5"},
        ("openai", "sk-1", "https://api.openai.com/v1", "gpt-5")),
    "a local server that is configured wins over any key": (
        settings(openai="sk-1", ollama="http://box:11434/v1"), {"model": "llama3"},
        ("ollama", "", "http://box:11434/v1", "llama3")),
    "a gateway wins over any other key": (
        settings(openai="sk-1", openrouter="own-key"), {"model": "meta/llama"},
        ("openrouter", "own-key", "https://openrouter.ai/api/v1", "meta/llama")),
    "any key is better than none": (
        settings(openai="sk-1"), {"model": "unheard-of"},
        ("openai", "sk-1", "https://api.openai.com/v1", "unheard-of")),
    "no model named means the row's own": (
        settings(openai="sk-1"), {}, ("openai", "sk-1", "https://api.openai.com/v1", "gpt-5-mini")),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_the_endpoint_is_chosen_in_the_order_of_the_clues(name):
    known, wanted, expected = CHOICES[name]
    end = choose_endpoint(known, **wanted)
    assert (end.spec.name, end.api_key, end.api_base, end.model) == expected


FOREIGN_HOSTS = {
    "the general key is not for a row with a host of its own": (
        settings(openai="sk-1"), {"provider": "ollama", "model": "m"}),
    "nor for a custom endpoint that has settings of its own": (
        settings(openai="sk-1", custom="http://models.example/v1"), {"provider": "custom", "model": "m"}),
    "OpenAI's key is not for OpenRouter": (settings(openai="sk-1"), {"provider": "openrouter"}),
    "not even where the address is given and the provider named": (
        settings(openai="sk-1"), {"provider": "openai", "base_url": "https://openrouter.ai/api/v1"}),
    "OpenRouter's key is not for OpenAI": (
        settings(openrouter="sk-or-1"), {"provider": "openrouter", "base_url": "https://api.openai.com/v1"}),
    "a look-alike host is not the row's": (
        settings(openrouter="sk-or-1"), {"base_url": "https://openrouter.ai.evil.example/v1", "model": "m"}),
    "nor is a host that ends alike": (
        settings(openrouter="sk-or-1"), {"base_url": "https://notopenrouter.ai/v1", "model": "m"}),
    "nor one that has the name in its path": (
        settings(openrouter="sk-or-1"), {"base_url": "https://evil.example/openrouter.ai", "model": "m"}),
    "nor is a host that only the environment named": (
        settings(openrouter="sk-or-1"), {"provider": "openrouter", "base_url": "http://127.0.0.1:9/v1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN_HOSTS)
def test_a_key_never_goes_to_another_rows_host(name):
    known, wanted = FOREIGN_HOSTS[name]
    assert choose_endpoint(known, **wanted).api_key == ""


def test_without_a_key_and_an_address_there_is_no_endpoint():
    assert choose_endpoint({}, "gpt-5") is None


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"provider": "opnai"}, "There is no provider 'opnai'. There are: openai, openrouter, .*, offline.$"),
        ({"provider": "custom"}, "Provider custom has no address: set its apiBase, or --base-url."),
    ],
)
def test_a_provider_that_cannot_be_used_is_a_clear_error(wanted, said):
    with pytest.raises(ValueError, match=said):
        choose_endpoint(settings(openai="sk-1"), **wanted)


def test_headers_and_body_of_the_settings_come_along():
    own = Endpoint(ROWS["openrouter"], "sk-or-1", extra_headers={"X-Title": "kit"}, extra_body={"top_k": 1})
    end = choose_endpoint({"openrouter": own})
    assert (end.extra_headers, end.extra_body) == ({"X-Title": "kit"}, {"top_k": 1})


def test_each_row_has_an_address_and_the_variable_that_its_provider_documents():
    """A row whose variable is misspelt is never found, and its user meets the offline model."""
    unlike_their_name = {"zhipu": "ZAI", "volcengine": "ARK", "azure": "AZURE_OPENAI"}
    for row in ROWS.values():
        maker = unlike_their_name.get(row.name, row.name.upper())
        assert row.env_key == ("" if row.is_local or row.name == "custom" else f"{maker}_API_KEY")
        needs_an_address = row.name in ("azure", "custom")  # only the user knows it
        assert bool(row.default_api_base) is not needs_an_address


# name: words in names of its models, its key's variable, its address, the model where none is named
TABLE = {
    "openai": ("gpt o1 o3 o4", "OPENAI_API_KEY", "https://api.openai.com/v1", "gpt-5-mini"),
    "openrouter": ("", "OPENROUTER_API_KEY", "https://openrouter.ai/api/v1", "openrouter/auto"),
    "anthropic": ("claude", "ANTHROPIC_API_KEY", "https://api.anthropic.com/v1", ""),
    "deepseek": ("deepseek", "DEEPSEEK_API_KEY", "https://api.deepseek.com/v1", ""),
    "gemini": ("gemini gemma", "GEMINI_API_KEY",
               "https://generativelanguage.googleapis.com/v1beta/openai", ""),
    "groq": ("", "GROQ_API_KEY", "https://api.groq.com/openai/v1", ""),
    "mistral": ("mistral codestral", "MISTRAL_API_KEY", "https://api.mistral.ai/v1", ""),
    "moonshot": ("kimi moonshot", "MOONSHOT_API_KEY", "https://api.moonshot.ai/v1", ""),
    "zhipu": ("glm", "ZAI_API_KEY", "https://open.bigmodel.cn/api/paas/v4", ""),
    "minimax": ("minimax", "MINIMAX_API_KEY", "https://api.minimax.io/v1", ""),
    "dashscope": ("qwen", "DASHSCOPE_API_KEY", "https://dashscope.aliyuncs.com/compatible-mode/v1", ""),
    "siliconflow": ("", "SILICONFLOW_API_KEY", "https://api.siliconflow.cn/v1", ""),
    "aihubmix": ("", "AIHUBMIX_API_KEY", "https://aihubmix.com/v1", ""),
    "volcengine": ("doubao", "ARK_API_KEY", "https://ark.cn-beijing.volces.com/api/v3", ""),
    "xai": ("grok", "XAI_API_KEY", "https://api.x.ai/v1", ""),
    "azure": ("", "AZURE_OPENAI_API_KEY", "https://kit.openai.azure.com/openai/v1", ""),
    "ollama": ("", "", "http://localhost:11434/v1", ""),
    "lmstudio": ("", "", "http://localhost:1234/v1", ""),
    "vllm": ("", "", "http://localhost:8000/v1", ""),
    "llamacpp": ("", "", "http://localhost:8080/v1", ""),
    "local": ("", "", "http://localhost:8000/v1", ""),
    "custom": ("", "", "https://models.example/v1", ""),
}  # fmt: skip


def test_the_rows_of_providers_are_these():
    assert list(ROWS) == list(TABLE)
    assert [row.name for row in ROWS.values()] == list(TABLE)
    local = ["ollama", "lmstudio", "vllm", "llamacpp", "local"]
    assert [name for name, row in ROWS.items() if row.is_local] == local
    gateways = ["openrouter", "siliconflow", "aihubmix"]
    assert [name for name, row in ROWS.items() if row.is_gateway] == gateways
    assert [name for name, row in ROWS.items() if row.supports_prompt_caching] == ["openrouter", "anthropic"]
    assert [name for name, row in ROWS.items() if row.strip_model_prefix] == ["aihubmix"]


@pytest.mark.parametrize("name", TABLE)
def test_a_row_has_its_variable_its_address_and_its_model(name):
    words, variable, address, model = TABLE[name]
    base = "" if name not in ("azure", "custom") else address  # only the user knows it
    end = choose_endpoint({}, provider=name, base_url=base)
    assert (end.spec.name, end.spec.env_key, end.api_base, end.model) == (name, variable, address, model)
    for word in words.split():
        keys = settings(**{"openrouter": "own-key", "groq": "k", name: "its-key"})
        end = choose_endpoint(keys, f"The-{word.upper()}-9")
        assert (end.spec.name, end.api_key, end.api_base) == (name, "its-key", address)


@pytest.mark.parametrize(("key", "name"), [
    ("sk-or-v1-0", "openrouter"), ("sk-ant-0", "anthropic"), ("AIzaSy0", "gemini"), ("gsk_0", "groq"),
    ("xai-0", "xai"), ("sk-proj-0", "openai"), ("0", "openai")])  # fmt: skip
def test_the_general_key_goes_to_the_maker_whose_prefix_it_has(key, name):
    end = choose_endpoint(settings(openai=key), "some-model")
    assert (end.spec.name, end.api_key, end.api_base) == (name, key, TABLE[name][2])


HOSTS = {
    "https://api.openai.com/v1": "openai", "https://eu.api.openai.com/v1": "openai",
    "https://api.moonshot.ai/v1": "moonshot", "https://api.moonshot.cn/v1": "moonshot",
    "https://open.bigmodel.cn/api/paas/v4": "zhipu", "https://api.z.ai/api/paas/v4": "zhipu",
    "https://api.minimax.io/v1": "minimax", "https://api.minimaxi.com/v1": "minimax",
    "https://dashscope.aliyuncs.com/compatible-mode/v1": "dashscope",
    "https://dashscope-intl.aliyuncs.com/compatible-mode/v1": "dashscope",
    "https://api.siliconflow.cn/v1": "siliconflow", "https://api.siliconflow.com/v1": "siliconflow",
    "https://kit.openai.azure.com/openai/v1": "azure", "https://kit.services.ai.azure.com/openai/v1": "azure",
    "http://localhost:11434/v1": "ollama", "http://192.168.0.7:11434/v1": "ollama",
    "http://localhost:1234/v1": "lmstudio", "http://box:1234/v1": "lmstudio",
    "http://localhost:8000/v1": "vllm", "http://localhost:8080/v1": "llamacpp",
    "http://localhost/v1": "local", "http://localhost:9000/v1": "local", "http://0.0.0.0:9000/v1": "local",
    "http://[::1]:9000/v1": "local", "http://127.0.0.1:9000/v1": "local", "http://10.0.0.7/v1": "local",
    "http://192.168.0.7/v1": "local", "http://me:secret@127.0.0.1:9000/v1": "local",
    "http://me:secret@api.openai.com/v1": "openai",
    "http://192.0.2.7/v1": "custom", "http://localhost.example/v1": "custom",
    "http://100.1.1.1/v1": "custom", "http://api.openai.com@evil.example/v1": "custom",
}  # fmt: skip


@pytest.mark.parametrize("base", HOSTS)
def test_an_address_says_whose_it_is(base):
    assert choose_endpoint({}, "m", base_url=base).spec.name == HOSTS[base]


@pytest.mark.parametrize("name", ["openrouter", "siliconflow", "aihubmix"])
def test_a_gateway_with_a_key_wins_over_a_maker_that_does_not_know_the_model(name):
    assert choose_endpoint(settings(**{"openai": "sk-1", name: "its-key"}), "unheard-of").spec.name == name


@pytest.mark.parametrize("name", ["ollama", "lmstudio", "vllm", "llamacpp", "local"])
def test_a_local_server_is_chosen_by_its_name_before_the_model_and_needs_no_key(name):
    end = choose_endpoint(settings(openai="sk-1"), f"{name}/llama3")
    assert (end.spec.name, end.api_key, end.api_base, end.model) == (name, "", TABLE[name][2], "llama3")


def test_a_maker_before_the_model_that_has_no_key_is_not_chosen():
    end = choose_endpoint(settings(openrouter="own-key"), "anthropic/claude")
    assert (end.spec.name, end.model) == ("openrouter", "anthropic/claude")
    end = choose_endpoint(settings(openrouter="own-key", anthropic="its-key"), "anthropic/claude")
    assert (end.spec.name, end.api_key, end.model) == ("anthropic", "its-key", "claude")


@pytest.mark.parametrize(("base", "address"), [
    ("http://localhost:9000", "http://localhost:9000/v1"),
    ("http://localhost:9000/", "http://localhost:9000/v1"),
    ("http://localhost:9000/api", "http://localhost:9000/api"),
    ("https://models.example", "https://models.example")])  # fmt: skip
def test_only_a_local_address_without_a_path_gets_v1(base, address):
    assert choose_endpoint({}, "m", base_url=base).api_base == address


OWN_KEYS = {
    "a row's own key goes to the address of its settings": (
        settings(azure="its-key https://kit.openai.azure.com/v1", openai="sk-1"), {"provider": "azure"},
        "its-key"),
    "and where the same address was given": (
        settings(deepseek="its-key http://10.0.0.7/v1", openai="sk-1"),
        {"provider": "deepseek", "base_url": "http://10.0.0.7/v1"}, "its-key"),
    "but not to a stranger's": (
        settings(deepseek="its-key", openai="sk-1"),
        {"provider": "deepseek", "base_url": "http://10.0.0.7/v1"}, "sk-1"),
    "a row that has no address of its own gives its key to any": (
        settings(custom="its-key", openai="sk-1"),
        {"provider": "custom", "base_url": "https://models.example/v1"}, "its-key"),
    "and so does a local one": (
        settings(ollama="its-key", openai="sk-1"),
        {"provider": "ollama", "base_url": "http://box.example:9/v1"}, "its-key"),
    "a public host gets its own row's key, whatever provider was named": (
        settings(openrouter="own-key", custom="its-key", openai="sk-1"),
        {"provider": "custom", "base_url": "https://openrouter.ai/api/v1"}, "own-key"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_KEYS)
def test_a_rows_own_key_goes_where_it_belongs(name):
    known, wanted, key = OWN_KEYS[name]
    assert choose_endpoint(known, "m", **wanted).api_key == key


def test_a_gateway_that_knows_models_without_their_maker_gets_them_so():
    end = choose_endpoint(settings(aihubmix="sk-1"), "openai/gpt-4o", "aihubmix")
    assert end.model == "gpt-4o"


# ---- What the server receives ----


def test_the_request_has_the_fewest_parameters():
    with FakeLLM(["Hi."]) as server:
        ask(made(server))
        assert server.bodies == [{"model": "test-model", "messages": HELLO}]
        assert len(server.requests[0].raw) < 150
        assert server.requests[0].headers["authorization"] == "Bearer sk-test-key-123456"


def test_a_stream_asks_for_its_usage():
    with FakeLLM(["Hi."]) as server:
        ask(made(server), stream=True)
        assert server.bodies[0] == {
            "model": "test-model", "messages": HELLO, "stream": True,
                "stream_options": {"include_usage": True},
        }  # fmt: skip


@pytest.mark.parametrize(("row", "name"), [("openai", "max_completion_tokens"), ("custom", "max_tokens"),
                                           ("ollama", "max_tokens"), ("openrouter",
                                           "max_tokens")])  # fmt: skip
def test_the_limit_of_the_answer_has_the_rows_name(row, name):
    with FakeLLM(["Hi."]) as server:
        ask(made(server, row), HELLO[1:], max_tokens=100, temperature=None, tool_choice=None)
        assert server.bodies[0] == {"model": "test-model", "messages": HELLO[1:], name: 100}


def test_without_tools_nothing_is_said_about_their_choice():
    """400 "tool_choice is only allowed when tools are specified": the last request of a turn has none."""
    with FakeLLM(["Hi."]) as server:
        ask(made(server), tool_choice="auto")
        assert server.bodies[0] == {"model": "test-model", "messages": HELLO}


def test_options_tools_headers_and_extra_body_arrive_as_given():
    with FakeLLM(["Hi."]) as server:
        provider = made(server, extra_headers={"X-Title": "kit"}, extra_body={"thinking": {"type": "off"}})
        ask(provider, tools=[TOOL], temperature=0.5, tool_choice="auto", model="other")
        expected = {"model": "other", "messages": HELLO, "tools": [TOOL], "temperature": 0.5,
                    "tool_choice": "auto", "thinking": {"type": "off"}}  # fmt: skip
        assert server.bodies[0] == expected
        assert server.requests[0].headers["x-title"] == "kit"


def test_what_is_sent_is_lawful_and_the_callers_messages_stay_as_they_are():
    messages = [{"role": "user", "content": "a", "timestamp": 1}, {"role": "user", "content": "b\ud800c"}]
    before = copy.deepcopy(messages)
    with FakeLLM(["Hi."]) as server:
        assert ask(made(server), messages)[0].content == "Hi."
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "a\n\nb?c"}]
    assert messages == before


def test_keys_and_addresses_of_the_environment_are_not_used_by_a_row_without_a_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    with FakeLLM(["Hi."]) as server:
        assert ask(made(server, "local", key=""))[0].content == "Hi."
        assert b"sk-of-the-environment" not in str(server.requests[0].headers).encode()


def test_a_key_that_was_pasted_with_its_line_end_works():
    with FakeLLM(["Hi."], required_key="sk-test-key-123456") as server:
        assert ask(made(server, key="sk-test-key-123456\n"))[0].content == "Hi."


def test_a_local_endpoint_ignores_the_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with FakeLLM(["Hi."]) as server:
        assert ask(made(server, "local"))[0].content == "Hi."


def test_a_program_that_names_nothing_gets_the_usual_limits_of_time():
    provider = OpenAIProvider(Endpoint(ROWS["custom"], "", "http://127.0.0.1:1/v1", "m"))
    assert (provider.request_timeout, provider.idle_timeout, provider.pace) == (300, 90, 1)
    provider.warm_up()
    client = provider._client
    provider.warm_up()
    assert provider._client is client, "one client is enough"
    assert (client.timeout.connect, client.timeout.read, client.max_retries) == (10, 300, 0)
    assert providers.make_client(provider.endpoint, 2, 10).timeout.connect == 2
    assert client.api_key == "none", "the SDK refuses an empty one"


def test_what_a_program_makes_of_its_own_has_these_defaults():
    assert vars(ToolCallRequest("1", "now")) == {
        "id": "1", "name": "now", "arguments": {}, "error": "", "denied": "", "extra": {}, "approved": False,
        "must_only_read": False}  # fmt: skip
    assert vars(LLMResponse()) == {
        "content": None, "tool_calls": [], "finish_reason": "stop", "usage": {}, "reasoning_content": None,
        "error": None, "extra": {}, "is_overflow": False}  # fmt: skip
    assert vars(Endpoint(ROWS["custom"])) == {
        "spec": ROWS["custom"], "api_key": "", "api_base": "", "model": "", "extra_headers": {},
        "extra_body": {}, "text_tool_calls": "auto"}  # fmt: skip
    assert vars(providers.Failure("why")) == {
        "cause": "why", "text": "", "status": None, "headers": {}, "kind": "", "generation": "", "tries": 0,
        "shown": ""}  # fmt: skip
    assert vars(providers.ProviderSpec("own")) == {
        "name": "own", "keywords": (), "env_key": "", "default_api_base": "", "detect_by_base_keyword": (),
        "detect_by_key_prefix": "\0", "default_model": "", "is_gateway": False, "is_local": False,
        "strip_model_prefix": False, "supports_prompt_caching": False, "max_tokens_field": "max_tokens",
        "model_overrides": {}}  # fmt: skip
    assert (providers.LLMProvider().model, ScriptedProvider([]).model, HumanProvider().model) == (
        "", "scripted", "human")  # fmt: skip
    assert (OfflineProvider().model, providers.ReplayProvider.model) == ("offline", "replay")


def test_an_answer_as_a_message_has_its_calls_and_what_came_with_them():
    asked = ToolCallRequest("1", "read_file", {"path": "ä"}, extra={"extra_content": 7})
    assert LLMResponse("Hi.").to_message() == {"role": "assistant", "content": "Hi."}
    assert LLMResponse("", [asked], extra={"reasoning": "hm"}).to_message() == {
        "role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [
            {"id": "1", "type": "function", "extra_content": 7,
             "function": {"name": "read_file", "arguments": '{"path": "ä"}'}}]}  # fmt: skip
    assert LLMResponse(None, [asked]).has_tool_calls and not LLMResponse("Hi.").has_tool_calls


def test_an_endpoint_in_the_world_is_reached_by_the_proxy_of_the_environment(monkeypatch):
    with FakeLLM([]) as server:
        monkeypatch.setenv("HTTP_PROXY", server.base_url)
        end = Endpoint(ROWS["custom"], "k", "http://models.example/v1", "m")
        assert "Invalid URL" in ask(OpenAIProvider(end, pace=0.0))[0].error
        assert server.requests[0].path == "http://models.example/v1/chat/completions"


OWN_CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIGotZyD6qop17HGEuyMESM98pKX2s7nClHGql6uZyCAf
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBUDCCAQKgAwIBAgIUONbN0P2emcOqg8D7ZBfrYyfuibwwBQYDK2VwMBQxEjAQ
BgNVBAMMCWxvY2FsaG9zdDAgFw0yNjExMjIwMDA4MDVaGA8yMTI2MTAyOTAwMDgw
NVowFDESMBAGA1UEAwwJbG9jYWxob3N0MCowBQYDK2VwAyEAYVfoyaF9YG+8WRJ8
pp4cURsVhSqxe4ecIWigKfiRQSGjZDBiMB0GA1UdDgQWBBTyzNrfphHJP2v8lluB
wh6LJEINGzAfBgNVHSMEGDAWgBTyzNrfphHJP2v8lluBwh6LJEINGzAPBgNVHRMB
Af8EBTADAQH/MA8GA1UdEQQIMAaHBH8AAAEwBQYDK2VwA0EA9FkCrCcU+KrgltHM
JSCgRU7LvHt/qPD9HEernwSqqnRh6MD4p+HoQLWiagRjr/FfuYhhGRQx2RbTy4KE
Y+69Bw==
-----END CERTIFICATE-----
"""


def test_no_key_goes_to_a_server_whose_certificate_nobody_vouches_for(tmp_path):
    (tmp_path / "own.pem").write_text(OWN_CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem")
    with FakeLLM(["Hi."] * 9) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        base = server.base_url.replace("http:", "https:")
        answer, _ = ask(OpenAIProvider(Endpoint(ROWS["custom"], "its-key", base, "m"), pace=0.0))
        assert "Cannot reach" in answer.error and "CERTIFICATE_VERIFY_FAILED" in answer.error
        assert server.requests == []


# ---- Whole answers and streams, good and odd ----


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_arrives_whole(stream):
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    answer, shown = reply_to(Reply("Grüß dich,\n\nWelt ☃.", usage=usage), stream)
    assert answer.content == "Grüß dich,\n\nWelt ☃."
    assert (answer.finish_reason, answer.error, answer.tool_calls) == ("stop", None, [])
    assert answer.usage == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "estimated": False,
    }
    assert "".join(shown) == (answer.content if stream else "")
    assert len(shown) > 1 or not stream


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_arrive_whole_and_in_order(stream):
    line = calls(call("read_file", path="ä.txt"), call("now"), content="Let me look.")
    answer, _ = reply_to(line, stream, tools=[TOOL])
    assert answer.content == "Let me look." and answer.finish_reason == "tool_calls"
    assert [(each.name, each.arguments, each.error) for each in answer.tool_calls] == [
        ("read_file", {"path": "ä.txt"}, ""), ("now", {}, ""),
    ]  # fmt: skip
    assert len({each.id for each in answer.tool_calls}) == 2


ODD_BODIES = {
    "choices null with an error beside": (
        {"choices": None, "error": {"message": "No credits"}},
        "No credits",
    ),
    "an error within a 200": ({"error": {"message": "Overloaded", "code": 529}}, "Overloaded"),
    "an error within a choice": (
        {"choices": [{"message": {"content": ""}, "finish_reason": "error", "error": {"message": "Gone."}}]},
        "Gone",
    ),
    "an error that is only a reason": (
        {"choices": [{"message": {"content": ""}, "finish_reason": "error"}]},
        "sent no answer",
    ),
    "no choices": ({"choices": []}, "sent no answer"),
    "choices null": ({"choices": None}, "sent no answer"),
    "no JSON object": ([1, 2], "does not answer like a model.*/v1"),
    "choices that are texts": ({"choices": ["x"]}, "does not answer like a model.*strange form"),
    "a content that is a number": ({"choices": [{"message": {"content": 5}}]}, "strange form"),
    "broken JSON": ('{"choices": [', "not JSON but: .*choices"),
    "an empty body": ("", "not JSON but: nothing"),
    "a tower of lists": ('{"choices": ' + "[" * 100_000, "recursion"),
    "a text": ("The service is asleep", "not JSON but: The service is asleep.*/v1"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ODD_BODIES)
def test_a_200_that_is_no_answer_is_a_clear_error(name, stream):
    body, said = ODD_BODIES[name]
    answer, shown = reply_to(Failure(200, body), stream)
    assert answer.finish_reason == "error" and shown == []
    assert re.search(said, answer.error)


def test_a_page_of_html_is_shown_by_its_words_and_the_address_is_doubted():
    page = Failure(
        200, "<html><title>Sign in</title><body>Welcome to the hotel</body>", content_type="text/html"
    )
    answer, _ = reply_to(page)
    assert "Sign in Welcome to the hotel" in answer.error and "/v1" in answer.error


def test_an_answer_whose_message_is_null_is_blank_not_a_crash():
    answer, _ = reply_to(Failure(200, {"choices": [{"message": None, "finish_reason": "stop"}]}))
    assert (answer.content, answer.tool_calls, answer.error) == (None, [], None)


def test_a_whole_answer_needs_no_finish_reason():
    answer, _ = reply_to(whole({"content": "Hi."}, finish=None))
    assert (answer.content, answer.error) == ("Hi.", None)


def test_a_server_that_ignores_stream_is_understood_and_shown():
    answer, shown = reply_to(whole({"role": "assistant", "content": "Hi."}), stream=True)
    assert answer.content == "Hi." and shown == ["Hi."]


def test_text_in_one_choice_and_calls_in_another_are_one_answer():
    choices = [{"message": {"content": "Look."}, "finish_reason": "stop"},
               {"message": {"tool_calls": [{"id": "a", **call("now")}]},
                   "finish_reason": "tool_calls"}]  # fmt: skip
    answer, _ = reply_to(Failure(200, {"choices": choices}))
    assert answer.content == "Look." and [each.name for each in answer.tool_calls] == ["now"]


@pytest.mark.parametrize("stream", [False, True])
def test_content_in_blocks_is_joined_and_thoughts_among_them_are_not_shown(stream):
    blocks = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text",
        "text": "Hi."},
              {"type": "text", "text": None}]  # fmt: skip
    line = sse(delta(content=blocks), delta("stop")) if stream else whole({"content": blocks})
    assert reply_to(line, stream)[0].content == "Hi."


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_an_object_are_taken_as_they_are(stream):
    odd = {"id": "a", "function": {"name": "read_file", "arguments": {"path": "a.txt"}}}
    line = (
        sse(delta("tool_calls", tool_calls=[odd])) if stream else whole({"tool_calls": [odd]}, "tool_calls")
    )
    answer, _ = reply_to(line, stream)
    assert [(each.id, each.arguments, each.error) for each in answer.tool_calls] == [
        ("a", {"path": "a.txt"}, "")
    ]


@pytest.mark.parametrize("arguments", ["", "{}"])
def test_two_calls_with_the_same_id_in_a_whole_answer_stay_two(arguments):
    twin = {"id": "same", "function": {"name": "now", "arguments": arguments}}
    answer, _ = reply_to(whole({"tool_calls": [twin, twin]}, "tool_calls"))
    assert [(each.name, each.arguments) for each in answer.tool_calls] == [("now", {}), ("now", {})]
    assert answer.tool_calls[0].id != answer.tool_calls[1].id


def test_comments_event_names_first_chunks_without_choices_and_null_deltas_do_no_harm():
    first = {"choices": [], "prompt_filter_results": [{}]}
    null = {"choices": [{"index": 0, "delta": None, "finish_reason": None}]}
    line = sse(": PROCESSING\n\n", {"id": "x"}, first, "event: message\n", null, delta(content="Hi."),
        delta("stop"),
               {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}})  # fmt: skip
    answer, shown = reply_to(line, stream=True)
    assert (answer.content, shown, answer.usage["prompt_tokens"]) == ("Hi.", ["Hi."], 7)


def test_a_stream_with_windows_line_ends_and_no_space_after_data_is_read():
    body = b'data:{"choices":[{"delta":{"content":"Hi."}}]}\r\n\r\ndata:[DONE]\r\n\r\n'
    answer, _ = reply_to(Raw(body), stream=True)
    assert (answer.content, answer.error) == ("Hi.", None)


def test_a_line_of_data_that_is_blank_only_keeps_the_connection_alive():
    line = sse("data: \n\n", delta(content="Hi."), "data:\n\n", delta("stop"))
    with FakeLLM([line]) as server:
        assert ask(made(server), stream=True)[0].content == "Hi."
        assert len(server.bodies) == 1


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_a_line_separator_within_a_text_does_not_tear_the_stream(odd):
    body = f'data: {{"choices":[{{"delta":{{"content":"a{odd}b"}},"finish_reason":"stop"}}]}}\n\n'
    if odd < " ":
        body = body.replace(odd, f"\\u{ord(odd):04x}")
    answer, _ = reply_to(Raw(body.encode()), stream=True)
    assert answer.content == f"a{odd}b"


def test_letters_that_are_cut_between_two_packets_come_out_whole():
    data = sse(delta(content="Grüße ☃"), delta("stop")).body
    answer, _ = reply_to(Raw(chunks=[data[n : n + 1] for n in range(len(data))]), stream=True)
    assert answer.content == "Grüße ☃"


def test_a_line_of_a_stream_is_shown_when_it_has_ended():
    reader = providers.AnswerReader()
    for data, shown in ((b"", ""), (b'data: {"choices":[{"delta":{"content":"Hi."}}]}', ""), (b"\n", "Hi.")):
        reader.feed(data)
        assert reader.to_show() == shown


def test_a_last_line_without_its_line_end_counts():
    body = 'data: {"choices":[{"delta":{"content":"Hi."},"finish_reason":"stop"}]}'
    assert reply_to(Raw(body.encode()), stream=True)[0].content == "Hi."


ODD_STREAMS = {
    "an error in the middle": (sse(delta(content="Well"), {"error": {"message": "Overloaded"}}),
        "Overloaded"),
    "an error event": (sse('event: error\ndata: {"error": {"message": "Boom"}}\n\n'), "Boom"),
    "an error that is a text": (sse({"error": "Boom"}), "Boom"),
    "garbage": (sse(delta(content="a"), "data: {oops\n\n"), "not JSON but: {oops"),
    "no end": (sse(delta(content="Well"), done=False), "broke off"),
    "a call without an end": (sse(piece(id="a", name="f", arguments='{"a": '), done=False), "broke off"),
    "nothing at all": (Raw(b""), "sent no answer"),
    "only comments": (Raw(b": ping\n\n"), "sent no answer"),
    "a connection that dies": (Raw(chunks=[sse(delta(content="Well"), done=False).body], cut=True), "failed"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_STREAMS)
def test_a_stream_that_fails_is_a_clear_error(name):
    line, said = ODD_STREAMS[name]
    answer, _ = reply_to(line, stream=True)
    assert answer.finish_reason == "error" and said in answer.error


def test_a_stream_may_end_without_a_reason_if_it_says_that_it_is_done():
    assert reply_to(sse(delta(content="Hi.")), stream=True)[0].content == "Hi."


def test_calls_that_are_complete_may_run_though_the_stream_has_no_end():
    answer, _ = reply_to(sse(piece(id="a", name="f", arguments='{"a": 1}'), done=False), stream=True)
    assert answer.error is None and answer.tool_calls[0].arguments == {"a": 1}


ERROR_BODIES = {
    "OpenAI": (error(400, "Unsupported parameter"), "HTTP 400: Unsupported parameter"),
    "Gemini": (Failure(400, [{"error": {"code": 400, "message": "Unknown name"}}]), "HTTP 400: Unknown name"),
    "LM Studio": (Failure(400, {"error": "Invalid tool_choice type"}), "HTTP 400: Invalid tool_choice type"),
    "FastAPI": (Failure(422, {"detail": "Bad body"}), "Bad body"),
    "a page": (Failure(502, "<h1>Bad Gateway</h1>", content_type="text/html"), "HTTP 502"),
    "nothing": (Failure(500, ""), "HTTP 500"),
    "a redirect": (Failure(307, "", {"Location": "http://127.0.0.1:1/"}), "HTTP 307"),
}


@pytest.mark.parametrize("name", ERROR_BODIES)
def test_an_errors_own_words_are_found_wherever_they_stand(name):
    line, said = ERROR_BODIES[name]
    with FakeLLM(lambda body: line) as server:
        answer, _ = ask(made(server))
        assert answer.finish_reason == "error" and said in answer.error
        assert len(server.requests) == (4 if line.status >= 500 else 1)  # the SDK's own retries are off


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_read_as_the_standard_has_them(end, size):
    """Any line end, a byte order mark, data over several lines, and a comment that looks like the end."""
    pretty = json.dumps(delta(content="b"), indent=1).split("\n")
    first, last = json.dumps(delta(content="a")), json.dumps(delta("stop", content="c"))
    lines = ["\ufeffdata: " + first, "", ": [DONE]", "event: message", "id: [DONE]", "",
             *(f"data: {line}" for line in pretty), "", "data: " + last, "", "data: [DONE]", ""]  # fmt: skip
    data = end.join(lines).encode()
    answer, _ = reply_to(Raw(chunks=[data[n : n + size] for n in range(0, len(data), size)]), stream=True)
    assert (answer.content, answer.error) == ("abc", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_text_of_the_answer(stream):
    words = "I cannot help with that."
    pieces = [delta(refusal=words[:9]), delta(refusal=words[9:], content=None), delta("stop")]
    line = sse(*pieces) if stream else whole({"content": None, "refusal": words})
    answer, shown = reply_to(line, stream)
    assert (answer.content, answer.finish_reason) == (words, "stop")
    assert "".join(shown) == (words if stream else "")


@pytest.mark.parametrize(("reason", "meaning"), [
    ("eos", "stop"), ("end_turn", "stop"), ("tool_use", "stop"), ("STOP", "stop"), ("max_tokens", "length"),
    ("length", "length"), ("content_filter", "content_filter"), ("tool_calls", "tool_calls"),
    ("model_length", "length"), ("refusal", "refusal"), ("function_call", "tool_calls")])  # fmt: skip
def test_a_finish_reason_is_told_in_openais_words(reason, meaning):
    whole_call = {"id": "a", **call("now")}
    answer, _ = reply_to(whole({"tool_calls": [whole_call]}, reason))
    assert (answer.finish_reason, answer.tool_calls[0].error) == (meaning, "")


@pytest.mark.parametrize("reason", ["error", "abort", "insufficient_system_resource"])
def test_an_answer_that_the_endpoint_gave_up_is_asked_for_again(reason):
    with FakeLLM([whole({"content": "Half"}, reason), "Whole."]) as server:
        assert ask(made(server))[0].content == "Whole."


# ---- Tool calls in a stream ----

X, Y = '{"x": 1}', '{"y": 2}'
TWO = [("a", {"x": 1}), ("b", {"y": 2})]
CALL_STREAMS = {
    "in pieces, by index": [
        piece(index=0, id="1", type="function", name="a", arguments=""),
        piece(index=1, id="2", name="b", arguments='{"y"'),
        piece(index=0, arguments='{"x":'), piece(index=1, arguments=": 2}"), piece(index=0, arguments=" 1}")],
    "id only in the first chunk, no index": [
        piece(id="1", name="a", arguments='{"x"'), piece(arguments=": 1}"),
        piece(id="2", name="b", arguments='{"y"'), piece(arguments=": 2}")],
    "whole, without an index": [
        piece(id="1", name="a", arguments=X), piece(id="2", name="b", arguments=Y)],
    "whole, every index 0": [
        piece(index=0, id="1", name="a", arguments=X), piece(index=0, id="2", name="b", arguments=Y)],
    "in pieces, every index 0": [
        piece(index=0, id="1", name="a"), piece(index=0, arguments=X),
        piece(index=0, id="2", name="b"), piece(index=0, arguments=Y)],
    "whole, without index and id": [piece(name="a", arguments=X), piece(name="b", arguments=Y)],
    "whole, index 0 and empty ids": [
        piece(index=0, id="", name="a", arguments=X), piece(index=0, id="", name="b", arguments=Y)],
    "the same id twice": [
        piece(index=0, id="1", name="a", arguments=X), piece(index=1, id="1", name="b", arguments=Y)],
    "id and name repeated in every chunk": [
        piece(index=0, id="1", name="a", arguments='{"x"'),
        piece(index=0, id="1", name="a", arguments=": 1}"),
        piece(index=1, id="2", name="b", arguments='{"y"'),
        piece(index=1, id="2", name="b", arguments=": 2}")],
    "a new id in every chunk": [
        piece(index=0, id="1", name="a", arguments='{"x"'), piece(index=0, id="9", arguments=": 1}"),
        piece(index=1, id="2", name="b", arguments='{"y"'), piece(index=1, id="8", arguments=": 2}")],
    "the name repeated in every chunk, without ids": [
        piece(name="a", arguments='{"x": 1'), piece(name="a", arguments="}"),
        piece(name="b", arguments='{"y": 2'), piece(name="b", arguments="}")],
    "the name repeated where the arguments begin, without ids": [
        piece(name="a"), piece(name="a", arguments=X), piece(index=1, name="b"),
        piece(index=1, name="b", arguments=Y)],
    "the name repeated, the id not": [
        piece(index=0, id="1", name="a", arguments='{"x"'), piece(index=0, name="a", arguments=": 1}"),
        piece(index=1, id="2", name="b", arguments=Y)],
    "the name repeated, the id late": [
        piece(index=0, name="a", arguments='{"x"'), piece(index=0, id="1", name="a", arguments=": 1}"),
        piece(index=1, id="2", name="b", arguments=Y)],
    "a name in pieces": [
        piece(index=0, id="1", name="", arguments=""), piece(index=0, name="a"), piece(index=0, arguments=X),
        piece(index=1, id="2", name="b"), piece(index=1, arguments=Y)],
    "both in one chunk": [delta(tool_calls=[
        {"index": 0, "id": "1", "function": {"name": "a", "arguments": '{"x": 1}'}},
        {"index": 1, "id": "2", "function": {"name": "b", "arguments": '{"y": 2}'}}])],
    "objects for arguments": [
        piece(index=0, id="1", name="a", arguments={"x": 1}),
        piece(index=1, id="2", name="b", arguments={"y": 2})],
}  # fmt: skip


@pytest.mark.parametrize("name", CALL_STREAMS)
def test_streamed_calls_are_put_together(name):
    answer, _ = reply_to(sse(*CALL_STREAMS[name], delta("tool_calls")), stream=True)
    assert [(each.name, each.arguments) for each in answer.tool_calls] == TWO
    assert not any(each.error or each.extra for each in answer.tool_calls)
    assert len({each.id for each in answer.tool_calls}) == 2


def test_an_id_that_comes_late_is_the_calls_own():
    pieces = [piece(index=0, name="a"), piece(index=0, id="late", arguments=X), delta("tool_calls")]
    answer, _ = reply_to(sse(*pieces), stream=True)
    assert [(each.id, each.arguments) for each in answer.tool_calls] == [("late", {"x": 1})]


ARGUMENTS = {
    "nothing": ("", "stop", {}, ""),
    "only space": (" \n", "stop", {}, ""),
    "a raw line end in a text": ('{"a": "1\n2"}', "stop", {"a": "1\n2"}, ""),
    "broken, but the answer is whole": ("{path: 'a',}", "tool_calls", {"path": "a"}, ""),
    "broken, and cut by the limit": ('{"command": "rm -r bui', "length", {}, "not whole JSON"),
    "cut in a text, whatever the reason": ('{"command": "rm -rf bui', "tool_calls", {}, "not whole JSON"),
    "cut behind a backslash": ('{"a": "b\\\\', "stop", {}, "not whole JSON"),
    "cut with a brace in the text": ('{"a": "b {c}', "stop", {}, "not whole JSON"),
    "cut in a text of single quotes": ("{'a': 'echo }", "stop", {}, "not whole JSON"),
    "cut behind a text": ('{"a": "b"', "stop", {}, "not whole JSON"),
    "cut in a list": ('{"a": [1, 2', "tool_calls", {}, "not whole JSON"),
    "broken, with a quote in a quote": ('{"a": \'it", b\',}', "stop", {"a": 'it", b'}, ""),
    "whole, with an unknown reason": ('{"a": 1}', "eos", {"a": 1}, ""),
    "broken, with an unknown reason": ("{a: 1,}", "tool_use", {"a": 1}, ""),
    "broken, and withheld": ('{"command": "rm -r bui', "content_filter", {}, "not whole JSON"),
    "a list": ("[1]", "stop", {}, "must be one JSON object"),
    "a text": ('"ls"', "stop", {}, "must be one JSON object"),
    "two objects": ('{"a": 1}{"b": 2}', "stop", {}, "must be one JSON object"),
    "prose": ("read it", "stop", {}, "must be one JSON object"),
    "not a number": ('{"a": NaN}', "stop", {}, "not whole JSON"),
    "infinity": ('{"a": [-Infinity]}', "stop", {}, "not whole JSON"),
    "a number beyond all numbers": ('{"a": 1e400}', "stop", {}, "not whole JSON"),
    "the same, after repair": ('{"a": 1e400,}', "stop", {}, "not whole JSON"),
    "a tower of lists": ("[" * 50_000, "stop", {}, "not whole JSON"),
    "a half of a surrogate pair": (r'{"a": "\ud83d"}', "stop", {"a": "?"}, ""),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_one_json_object_or_the_call_says_why_not(name):
    written, finish, arguments, problem = ARGUMENTS[name]
    odd = {"id": "1", "function": {"name": "a", "arguments": written}}
    answer, _ = reply_to(whole({"tool_calls": [odd]}, finish))
    found = answer.tool_calls[0]
    assert found.arguments == arguments
    assert problem in found.error and bool(problem) == bool(found.error)


def test_what_an_answer_says_beside_its_parts_is_sent_back_under_its_own_name():
    extra = {"google": {"thought_signature": "abc"}}
    first = delta(reasoning="I ", reasoning_details=[{"id": 1}], tool_calls=[
        {"index": 0, "id": "1", "extra_content": extra, "function": {"name": "now",
            "arguments": "{}"}}])  # fmt: skip
    rest = [delta(reasoning="think"), delta("tool_calls", reasoning_details=[{"id": 2}])]
    with FakeLLM([sse(first, *rest), "Noon."]) as server:
        answer, shown = ask(made(server), stream=True)
        assert (answer.reasoning_content, answer.content, shown) == ("I think", None, [])
        history = [*HELLO, answer.to_message(), {"role": "tool", "tool_call_id": "1", "content": "12:00"}]
        ask(made(server), history)
        sent = server.bodies[1]["messages"][2]
    assert (sent["reasoning"], sent["reasoning_details"]) == ("I think", [{"id": 1}, {"id": 2}])
    assert sent["tool_calls"][0]["extra_content"] == extra
    assert "reasoning_content" not in sent and sent["content"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_is_kept_and_sent_back(stream):
    with FakeLLM([Reply("Noon.", extra={"reasoning_content": "It is day."}), "Yes."]) as server:
        answer, shown = ask(made(server), stream=stream)
        assert (answer.content, answer.reasoning_content) == ("Noon.", "It is day.")
        assert "day" not in "".join(shown)
        ask(made(server), [*HELLO, answer.to_message(), {"role": "user", "content": "Sure?"}])
        assert server.bodies[1]["messages"][2]["reasoning_content"] == "It is day."


USAGES = {
    "OpenAI": {"prompt_tokens_details": {"cached_tokens": 3}},
    "Moonshot": {"cached_tokens": 3},
    "DeepSeek": {"prompt_cache_hit_tokens": 3},
    "with a null beside": {"prompt_tokens_details": None, "cached_tokens": 3},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", USAGES)
def test_cached_tokens_are_found_under_any_name(name, stream):
    usage = {"prompt_tokens": 10, "completion_tokens": 5, **USAGES[name]}
    answer, _ = reply_to(Reply("Hi.", usage=usage), stream)
    assert answer.usage == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cached_tokens": 3,
        "estimated": False,
    }


def test_usage_within_a_choice_counts():
    last = {
        "choices": [
            {"delta": {}, "finish_reason": "stop", "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
        ]
    }
    assert reply_to(sse(delta(content="Hi."), last), stream=True)[0].usage["prompt_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_count_the_usage_is_estimated_and_says_so(stream):
    answer, _ = reply_to(Reply("word " * 100, usage={}), stream)
    assert answer.usage["estimated"] and 100 <= answer.usage["completion_tokens"] <= 200
    assert answer.usage["prompt_tokens"] > 10


# ---- Thoughts ----

THOUGHTS = {
    "a closed block": ("<think>hm</think>\n\nHi.", "Hi."),
    "a closed block between texts": ("A\n<think>hm</think>\nB", "A\n\nB"),
    "a closed block within a line": ("Well <think>hm</think>done", "Well done"),
    "other names": ("<thinking>hm</thinking><thought>so</thought>Hi.", "Hi."),
    "a block that is never closed": ("<think>hm, and so on", ""),
    "never closed, on a later line": ("Hi.\n<think>hm", "Hi."),
    "only thoughts": ("<think>hm</think>", ""),
    "a mention in mid-line that is never closed": (
        "Models write <think> first.",
        "Models write <think> first.",
    ),
    "a mention in code": ("It is `<think>`, see.", "It is `<think>`, see."),
    "a block within code": ("It is `a <think>hm</think>`.", "It is `a <think>hm</think>`."),
    "a mention in a fence": ("```\n<think>\nx\n</think>\n```", "```\n<think>\nx\n</think>\n```"),
    "a fence that is never closed": ("```xml\n<think>a</think>", "```xml\n<think>a</think>"),
    "code that was not closed ends with its line": ("a ` b\n<think>hm</think>c", "a ` b\nc"),
    "so does one in two back-quotes": ("a `` b\n<think>hm</think>c", "a `` b\nc"),
    "a stray end at the start": ("</think>\nHi.", "Hi."),
    "a stray end within a line": ("The tag </think> ends it.", "The tag </think> ends it."),
    "look-alikes": ("<thinker> <think-foo> <think1> <think/>", "<thinker> <think-foo> <think1> <think/>"),
    "a tag within a block": ("<think>a <think> b ` c</think>Hi.", "Hi."),
    "a beginning of a tag at the end": ("if a <t", "if a <t"),
    "two mentions in mid-line": (
        "Wrap it in <think> and </think> tags.",
        "Wrap it in <think> and </think> tags.",
    ),
    "two mentions in quotes": ('Between "<think>" and "</think>".', 'Between "<think>" and "</think>".'),
    "a block in mid-line that begins with a line": ("Well:<think>\nhm</think>done", "Well:done"),
    "a tag at the very end": ("It ends in <think>", "It ends in <think>"),
    "a back-quote at the end": ("use `ls`", "use `ls`"),
    "less-than signs": ("1 < 2 << 3 </ b", "1 < 2 << 3 </ b"),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_are_taken_out_and_mentions_stay(name):
    text, kept = THOUGHTS[name]
    assert pieces_of([text]).strip() == kept


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_are_found_wherever_the_text_is_split(name):
    text, _ = THOUGHTS[name]
    expected = pieces_of([text])
    splits = [[text[:n], text[n:]] for n in range(len(text) + 1)]
    for pieces in [*splits, list(text)]:
        assert pieces_of(pieces) == expected, pieces


def pieces_of(pieces):
    thinking = ThinkFilter()
    return "".join([*map(thinking.feed, pieces), thinking.close()])


@pytest.mark.parametrize("name", THOUGHTS)
def test_a_streamed_answer_shows_just_what_it_remembers(name):
    text, kept = THOUGHTS[name]
    answer, shown = reply_to(Reply(text), stream=True)
    assert (answer.content or "").strip() == kept
    assert "".join(shown).strip("\n") == (answer.content or "")


def test_an_answer_of_thoughts_alone_is_blank():
    assert reply_to(Reply("<think>hm</think>\n"))[0].content is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_space_at_the_seam_of_a_cut_answer_is_kept(stream):
    with FakeLLM(
        [Reply("one ", finish_reason="length"), Reply("two\n", finish_reason="length"), " three"]
    ) as server:
        parts = [ask(made(server), stream=stream)[0].content for _ in range(3)]
    assert parts == ["one ", "two\n", " three"]


# ---- Time, and what is wrong ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_says_nothing_times_out(stream):
    with FakeLLM(lambda body: Hang(5)) as server:
        start = time.monotonic()
        answer, _ = ask(made(server, request_timeout=0.2), stream=stream)
        assert time.monotonic() - start < 2
    assert answer.finish_reason == "error" and "no answer in time" in answer.error


def test_a_stream_that_falls_silent_times_out():
    with FakeLLM([Raw(chunks=[sse(delta(content="Hi."), done=False).body], hang=5)]) as server:
        start = time.monotonic()
        answer, shown = ask(made(server, idle_timeout=0.2), stream=True)
        assert time.monotonic() - start < 2
    assert "no answer in time" in answer.error and shown == ["Hi."]


def test_a_stream_may_take_longer_than_the_timeouts_while_it_is_not_silent():
    chunks = [sse(delta(content="x"), done=False).body] * 8 + [sse(delta("stop")).body]
    with FakeLLM([Raw(chunks=chunks, pause=0.06)]) as server:
        answer, _ = ask(made(server, request_timeout=0.3, idle_timeout=0.3), stream=True)
    assert answer.content == "x" * 8


@pytest.mark.parametrize("line", [Hang(5), Raw(chunks=[sse(delta(content="Hi."), done=False).body], hang=5)])
def test_a_cancellation_is_raised_and_immediate(line):
    async def cancelled(provider):
        task = asyncio.ensure_future(provider.chat(HELLO, on_delta=lambda text: asyncio.sleep(0)))
        await asyncio.sleep(0.15)
        assert not task.done()
        task.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - start

    with FakeLLM([line]) as server:
        assert asyncio.run(cancelled(made(server))) < 0.5


def test_the_idle_clock_stands_still_while_the_consumer_works():
    async def slowly(piece):
        await asyncio.sleep(0.9)

    with FakeLLM([sse(delta(content="Hi."), delta("stop"))]) as server:
        answer = asyncio.run(made(server, idle_timeout=0.6).chat(HELLO, on_delta=slowly))
        assert (answer.content, answer.error) == ("Hi.", None) and len(server.bodies) == 1


OURS = [KeyError("x"), TypeError("ours"), OSError("disk full"), ValueError("no")]


@pytest.mark.parametrize("problem", OURS)
def test_what_a_consumer_raises_is_raised_as_it_is(problem):
    async def failing(piece):
        raise problem

    with FakeLLM(["Hi.", "Hi again."]) as server:
        provider = made(server)
        with pytest.raises(type(problem)) as caught:
            asyncio.run(provider.chat(HELLO, on_delta=failing))
        assert caught.value is problem and len(server.bodies) == 1
        assert ask(provider)[0].content == "Hi again."


def test_a_server_that_does_not_take_the_connection_is_waited_for_a_short_time():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)  # whoever comes after these has to wait
        crowd = [socket.socket() for _ in range(4)]
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        base = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        provider = OpenAIProvider(Endpoint(ROWS["local"], "", base, "m"), pace=0.0)
        assert provider.connect_timeout == 10
        provider.connect_timeout = 0.05  # of 300 for the answer
        answer, _ = ask(provider)
        for one in crowd:
            one.close()
    assert f"Cannot reach {base} (no connection in time)" in answer.error


@pytest.mark.parametrize(("line", "cause"), [
    (Raw(chunks=[sse(delta(content="Well"), done=False).body], cut=True), "was closed in the middle"),
    (sse(delta(content="Well"), done=False), "the answer broke off"),
    (Raw(chunks=[sse(delta(content="Well"), done=False).body], hang=5), "gave no answer in time"),
])  # fmt: skip
def test_what_was_shown_of_an_answer_that_broke_off_is_told_with_the_cause(line, cause):
    with FakeLLM([line]) as server:
        answer, shown = ask(made(server, idle_timeout=0.2), stream=True)
    assert answer.content == "".join(shown) == "Well"
    assert answer.finish_reason == "error" and cause in answer.error and "chunked" not in answer.error


def test_an_answer_of_which_nothing_was_shown_is_not_told_in_parts():
    half = {"choices": [{"message": {"content": "Half"}, "finish_reason": "error"}]}
    answer, _ = reply_to(Failure(200, half))
    assert answer.finish_reason == "error" and answer.content is None


@pytest.mark.parametrize(("role", "fix"), [("user", "send less at once"), ("tool", "send less at once"),
                                           ("many", "Begin a /new one")])  # fmt: skip
def test_where_one_message_is_too_long_a_new_conversation_is_no_help(role, fix):
    messages = [*HELLO, called("a"), result("a", "x" * 20_000 if role == "tool" else "noon")]
    messages += [user("y" * 20_000)] if role == "user" else []
    messages += [message for n in range(9) for message in (said(f"{n}" * 500), user("?" * 500))]
    with FakeLLM([error(400, "prompt is too long")]) as server:
        answer, _ = ask(made(server), messages)
    assert answer.is_overflow and fix in answer.error
    assert ("/new" in answer.error) == (role == "many")


def raised(name, below=None, library="openai"):
    """An exception as the SDK raises it, with the connection's own below it."""
    problem = type(name, (Exception,), {"__module__": f"{library}.x"})("words")
    problem.__cause__ = raised(below, library="httpx2") if below else None
    return problem


CLOSED = "the connection was closed before an answer came"
BROKEN = "the connection was closed in the middle of the answer"
CAUSES = [
    (raised("APIConnectionError", "RemoteProtocolError"), "closed", CLOSED),
    (raised("APIConnectionError", "ReadError"), "closed", CLOSED),
    (raised("APIConnectionError", "WriteError"), "closed", CLOSED),
    (raised("APIConnectionError", "ConnectError"), "network", "words"),
    (raised("APIConnectionError", "ConnectTimeout"), "network", "no connection in time"),
    (raised("APITimeoutError", "ReadTimeout"), "timeout", "no answer in time"),
    (raised("ReadTimeout", library="httpx"), "timeout", "no answer in time"),
    (raised("ReadError", library="httpx"), "cut", BROKEN),
    (raised("RemoteProtocolError", library="httpx2"), "cut", BROKEN),
    (raised("OpenAIError"), "", "words"),
    (TimeoutError(), "timeout", "no answer in time"),
    *((kind("words"), "", "words") for kind in (OSError, UnicodeError, ImportError, RecursionError)),
]


@pytest.mark.parametrize(("problem", "kind", "cause"), CAUSES)
def test_what_the_library_raised_is_told_apart_by_its_cause(problem, kind, cause):
    failure = providers.as_failure(problem)
    assert (failure.kind, failure.cause, failure.status) == (kind, cause, None)
    assert providers.as_failure(failure) is failure


@pytest.mark.parametrize("problem", [KeyError("x"), raised("ReadError", library="mine"), AttributeError()])
def test_what_is_our_own_fault_is_no_failure_of_the_endpoint(problem):
    with pytest.raises(type(problem)) as caught:
        providers.as_failure(problem)
    assert caught.value is problem


def test_rows_and_remedies_stay_as_they_are_and_two_failures_are_two():
    for row in (ROWS["openai"], providers.HEALING[0]):
        with pytest.raises(AttributeError):
            row.name = "changed"
    assert len({providers.Failure("why"), providers.Failure("why")}) == 2


BASE = "https://models.example/v1"
EXPLAINED = {
    "a timeout": ({"kind": "timeout"}, f"{BASE} gave no answer in time. Ask again, or try a smaller model."),
    "no server": (
        {"kind": "network"}, f"Cannot reach {BASE} (why). Is the address right, and is the server running?"),
    "half an answer": (
        {"kind": "cut"}, f"{BASE} failed: why. Ask again; where it stays so, look at the server's log."),
    "a connection that closed": (
        {"kind": "closed"}, f"{BASE} failed: why. Ask again; where it stays so, look at the server's log."),
    "too long": ({"status": 413}, f"{BASE}: the conversation is too long for m (why). Begin a /new one."),
    "too long, in words": (
        {"status": 400, "text": "prompt is too long"},
        f"{BASE}: the conversation is too long for m (why). Begin a /new one."),
    "a refusal without a word": (
        {"status": 400}, f"{BASE}: the conversation is too long for m (why). Begin a /new one."),
    "money": (
        {"status": 402, "text": "pay"},
        f"{BASE} wants money (why). Look at your account there, or choose another --provider."),
    "money, in words": (
        {"status": 403, "text": "余额不足"},
        f"{BASE} wants money (why). Look at your account there, or choose another --provider."),
    "a wrong key": ({"status": 401, "text": "no"}, f"{BASE} refuses the key (why). Set OPENAI_API_KEY."),
    "a wrong key, which is no question of money": (
        {"status": 401, "text": "billing"}, f"{BASE} refuses the key (why). Set OPENAI_API_KEY."),
    "a wrong key, in words": (
        {"status": 400, "text": "API key not valid"}, f"{BASE} refuses the key (why). Set OPENAI_API_KEY."),
    "a key that may not": (
        {"status": 403, "text": "no"}, f"{BASE} refuses the key (why). Set OPENAI_API_KEY."),
    "no such model": (
        {"status": 404, "cause": "The Model m is not here"},
        f"{BASE} has no such model (The Model m is not here). "
        "Choose with --model or NANOBOT_MODEL; the endpoint gives: "),
    "no such model, in words": (
        {"status": 400, "text": "x", "cause": "Model Not Exist"},
        f"{BASE} has no such model (Model Not Exist). "
        "Choose with --model or NANOBOT_MODEL; the endpoint gives: "),
    "a wrong path": (
        {"status": 404}, f"{BASE} does not answer like a model (why). A base URL mostly ends in /v1."),
    "a path for other requests": (
        {"status": 405}, f"{BASE} does not answer like a model (why). A base URL mostly ends in /v1."),
    "a page": (
        {"kind": "nonsense"}, f"{BASE} does not answer like a model (why). A base URL mostly ends in /v1."),
    "a bad request that speaks of a model": (
        {"status": 400, "text": "x", "cause": "an odd model"}, f"{BASE} failed: HTTP 400: an odd model"),
    "anything else": ({"status": 500}, f"{BASE} failed: HTTP 500: why"),
    "anything else without a status": ({}, f"{BASE} failed: why"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_went_wrong_is_told_with_what_to_do(name):
    fields, said_of_it = EXPLAINED[name]
    failure = providers.Failure(**{"cause": "why", **fields})
    endpoint = Endpoint(ROWS["custom"], "", BASE, "m")
    assert providers.explanation(failure, endpoint, HELLO * 3) == said_of_it


@pytest.mark.parametrize(("row", "variable"), [
    ("groq", "GROQ_API_KEY"), ("zhipu", "ZAI_API_KEY"), ("local", "OPENAI_API_KEY")])  # fmt: skip
def test_a_refused_key_is_asked_for_under_the_name_of_its_variable(row, variable):
    failure = providers.Failure("why", "no", 401)
    assert providers.explanation(failure, Endpoint(ROWS[row]), HELLO).endswith(f" Set {variable}.")


OF_MONEY = {
    "insufficient_quota": True, "Insufficient Balance": True, "You exceeded your current quota": True,
    "Billing hard limit": True, "no credits left": True, "your balance is 0": True, "Payment due": True,
    "账户已欠费": True, "余额不足": True, "rate limit": False, "": False,
}  # fmt: skip


@pytest.mark.parametrize("text", OF_MONEY)
def test_words_of_money_are_known_and_no_servers_own_trouble_is_one(text):
    for status in (None, 400, 403, 429, 499):
        assert providers.Failure("", text, status).is_unpaid == OF_MONEY[text]
    for status in (500, 503):
        assert not providers.Failure("", text, status).is_unpaid


def test_no_word_at_all_is_an_overflow_with_a_400_only():
    overflowing = [status for status in (None, *range(300, 600))
                   if providers.Failure("", " {}.", status).is_overflow]  # fmt: skip
    assert overflowing == [400, 413]
    assert not providers.Failure("", "no", 400).is_overflow


def test_what_is_asked_again_is_told_by_the_status():
    passing = [status for status in range(300, 600)
               if providers.retry_after(providers.Failure("", "x", status)) is not None]  # fmt: skip
    assert passing == [408, 409, 429, *range(500, 600)]


@pytest.mark.parametrize("text", [
    "The engine is currently overloaded", "Rate limit reached", "rate_limit_exceeded", "Too many requests",
    "该模型当前访问量过大", "您的账户已达到速率限制", "tool_use_failed"])  # fmt: skip
def test_a_busy_endpoint_is_known_by_its_words(text):
    assert providers.retry_after(providers.Failure("", text, 400)) == 1.0


@pytest.mark.parametrize(("text", "seconds"), [
    ("try again in 2 ms", 0.002), ("try again in 250 milliseconds", 0.25), ("try again in 0.5m", 30.0),
    ("Retry in 0.01h", 36.0), ("RETRY AFTER 7", 7.0), ("try again in 3s", 3.0), ("retrying in 5 s", 5.0),
    ("in 9 s", 1.0)])  # fmt: skip
def test_a_wait_in_words_has_its_unit(text, seconds):
    assert providers.retry_after(providers.Failure("", text, 429)) == pytest.approx(seconds)


WAIT_LINES = {
    "a busy server": ({"status": 503}, 2.4, "HTTP 503: why; asking again in 2 s"),
    "without a status": ({"kind": "network"}, 1.0, "why; asking again in 1 s"),
    "a second try at once is not told": ({"kind": "closed"}, 0.0, ""),
    "a model that is being loaded": (
        {"status": 503, "text": "currently loading"}, 4.0, "HTTP 503: why; waiting up to 60 s for it"),
    "is told once": ({"status": 503, "text": "Loading model", "tries": 1}, 4.0, ""),
    "and is a 503": ({"status": 500, "text": "Loading model"}, 4.0, "HTTP 500: why; asking again in 4 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAIT_LINES)
def test_what_the_user_is_told_of_a_wait(name):
    fields, seconds, line = WAIT_LINES[name]
    assert providers.wait_line(providers.Failure("why", **fields), seconds) == line


REFUSALS = {
    "OpenAI": ({"error": {"message": "No.", "code": "bad"}}, "No."),
    "a code that is a status": ({"message": "No.", "code": 529}, "No."),
    "a list": ([{"error": {"message": "No."}}, {"error": {"message": "Another."}}], "No."),
    "an error that is a text": ({"error": "No."}, "No."),
    "below a provider's error": ({"message": "Provider returned error", "metadata": {"raw": "No."}}, "No."),
    "the same as JSON": (
        {"message": "Provider returned error", "metadata": {"raw": {"error": {"message": "No."}}}}, "No."),
    "a message wins over an error": ({"message": "No.", "error": "Other"}, "No."),
    "metadata that are none": ({"message": "No.", "metadata": "x"}, "No."),
    "metadata without the words": ({"message": "No.", "metadata": {"raw": ""}}, "No."),
    "other names": ({"detail": "No."}, '{"detail": "No."}'),
    "spaces": ({"message": " No,\n\t never. "}, "No, never."),
    "a book": ({"message": "a" * 9_000}, "a" * 500),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_the_endpoints_own_words_are_the_cause(name):
    body, cause = REFUSALS[name]
    failure = providers.refusal(body)
    assert failure.cause == cause and failure.text == str(body)[:4_000]
    assert failure.status == (529 if name == "a code that is a status" else None)


def test_one_message_of_more_than_half_is_most_of_it():
    half = [user("a" * 100), user("b" * 100)]
    assert not providers.is_mostly_one(half) and not providers.is_mostly_one([])
    assert providers.is_mostly_one([*half, user("c" * 400)])
    assert not providers.is_mostly_one([user("a" * 104), user("b" * 100)]), "just half of what is sent"
    assert providers.is_mostly_one([user("a" * 105), user("b" * 100)])
    assert not providers.is_mostly_one([{"role": "system", "content": "s" * 999}, *half])


LITELLM = {
    "litellm-no-db": "refuses the key.*Set OPENAI_API_KEY",
    "litellm-unknown-model": "has no such model.*--model.*test-model",
    "deepseek-400-model": "has no such model.*--model.*test-model",
    "moonshot-quota-inactive": "wants money.*--provider",
    "xai-400-key": "refuses the key",
}


@pytest.mark.parametrize("name", LITELLM)
def test_a_refusal_is_told_with_its_cause_and_what_to_do(name):
    refused = next(each for each in RECORDED if each["id"] == name)
    answer, _ = reply_to(Failure(refused["status"], refused["body"]))
    assert re.search(LITELLM[name], answer.error)


def test_a_model_that_is_being_loaded_is_waited_for_and_told_once():
    loading = Failure(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
    told = []

    async def tell(line):
        told.append(line)

    with FakeLLM([*[loading] * 9, "Here."]) as server:
        assert asyncio.run(made(server, "local").chat(HELLO, on_retry=tell)).content == "Here."
    assert told == ["HTTP 503: Loading model; waiting up to 60 s for it"]


KEY = "sk-proj-very-secret-0123456789"


def test_a_wrong_key_names_the_variable_and_not_the_key():
    with FakeLLM(["Hi."], required_key="another") as server:
        answer, _ = ask(made(server, "openrouter", KEY))
    assert "refuses the key" in answer.error and "OPENROUTER_API_KEY" in answer.error
    assert KEY not in answer.error


@pytest.mark.parametrize("line", [
    error(401, f"Invalid key {KEY}"), error(500, f"Oops: Bearer {KEY}"), Failure(200, f"you sent {KEY}"),
    sse({"error": KEY}),
])  # fmt: skip
@pytest.mark.parametrize("key", [KEY, KEY + "\n", f" {KEY[:9]}\n{KEY[9:]}"])
def test_a_key_that_the_endpoint_repeats_is_not_shown(line, key):
    with FakeLLM(lambda body: line) as server:
        answer, _ = ask(made(server, key=key), stream=True)
    assert answer.finish_reason == "error" and KEY not in answer.error


def test_a_key_that_no_header_can_hold_is_not_shown():
    with FakeLLM([]) as server:
        answer, _ = ask(made(server, key=KEY + "…"))
    assert answer.finish_reason == "error" and KEY not in answer.error


def test_an_unknown_model_brings_the_list_of_models():
    with FakeLLM(["Hi."], known_models=["good-model", "better-model"]) as server:
        answer, _ = ask(made(server, model="odd-model"))
        assert all(part in answer.error for part in ("odd-model", "good-model, better-model", "--model"))


def test_no_model_named_brings_the_list_of_models_too():
    with FakeLLM(["Hi."], known_models=["good-model"]) as server:
        answer, _ = ask(made(server, model=""))
        assert "no model is named" in answer.error and "good-model" in answer.error
        assert server.bodies == []


@pytest.mark.parametrize(("models", "said_of_it"), [
    (["models/test-model"], None), ([], None),
    ([f"m{n}" for n in range(30)], "no such model. Choose with --model or NANOBOT_MODEL; the endpoint gives: "
     + ", ".join(f"m{n}" for n in range(20)))])  # fmt: skip
def test_the_models_of_an_endpoint_are_compared_by_their_names(models, said_of_it):
    with FakeLLM([]) as server:
        server.models = models
        assert asyncio.run(made(server).check()) == said_of_it


def test_a_key_that_a_list_of_models_repeats_is_not_shown():
    refused = error(401, f"Invalid key {KEY}")
    with FakeLLM([], required_key="another") as server:
        server.answer = lambda method, request: refused
        said_of_it = asyncio.run(made(server, key=KEY).check())
    assert "refuses the key (Invalid key [key])" in said_of_it


def test_only_a_text_that_is_long_enough_for_a_key_is_one():
    assert providers.safe_text(Endpoint(ROWS["ollama"], "ollama1"), "ollama1 is up") == "ollama1 is up"
    assert providers.safe_text(Endpoint(ROWS["ollama"], "ollama12"), "ollama12?") == "[key]?"


@pytest.mark.parametrize(("models", "offer"), [
    ([], "no models"), ([f"m{n}" for n in range(30)], ", ".join(f"m{n}" for n in range(20)))])  # fmt: skip
def test_what_can_be_chosen_instead_is_offered(models, offer):
    with FakeLLM(["Hi."], known_models=["good-model"]) as server:
        server.models = models
        answer, _ = ask(made(server, model="odd-model"))
    assert answer.error.endswith(f"; the endpoint gives: {offer}")


def test_where_there_is_no_list_of_models_the_error_is_told_without_one():
    with FakeLLM(lambda body: error(404, "no model m")) as server:
        made_by_script, server.models = server.answer, None
        server.answer = lambda method, request: (
            made_by_script(method, request) if method == "POST" else error(500, "no list"))  # fmt: skip
        answer, _ = ask(made(server))
    assert answer.error.endswith("; the endpoint gives: an error instead of a list (InternalServerError)")


@pytest.mark.parametrize(("data", "kind", "cause"), [
    (b'{"choices": [', "cut", 'not JSON but: {"choices": ['), (b"", "cut", "not JSON but: nothing"),
    (b" \n ", "cut", "not JSON but: nothing"), (b"[1]", "nonsense", "not JSON but: [1]"),
    (b"<html><title>Sign in</title>", "nonsense", "not JSON but: Sign in"),
    (b"word " * 900, "nonsense", "not JSON but: " + "word " * 24),
    (b"\xff", "nonsense", "not JSON but: \ufffd")])  # fmt: skip
def test_what_came_instead_of_an_answer_is_shown_by_its_beginning(data, kind, cause):
    with pytest.raises(providers.Failure) as caught:
        providers.parse_answer(data)
    assert (caught.value.kind, caught.value.cause) == (kind, cause)


def test_a_wrong_path_brings_the_hint_at_v1():
    with FakeLLM(["Hi."]) as server:
        provider = OpenAIProvider(Endpoint(ROWS["custom"], "k", server.base_url.removesuffix("/v1"), "m"))
        answer, _ = ask(provider)
    assert "Invalid URL" in answer.error and "/v1" in answer.error


@pytest.mark.parametrize(
    "base", ["http://127.0.0.1:1/v1", "localhost:8000/v1", "http://no-such-host.invalid/v1"]
)
def test_where_no_server_is_the_cause_and_a_question_are_said(base):
    answer, _ = ask(OpenAIProvider(Endpoint(ROWS["local"], KEY, base, "m"), pace=0.0))
    assert f"Cannot reach {base} (" in answer.error and "is the server running?" in answer.error


def test_check_says_nothing_where_all_is_well_and_else_what_is_wrong():
    with FakeLLM([], known_models=["good-model"], required_key=KEY) as server:
        assert asyncio.run(made(server, key=KEY, model="good-model").check()) is None
        assert "good-model" in asyncio.run(made(server, key=KEY, model="odd").check())
        assert "refuses the key" in asyncio.run(made(server, key="wrong-key", model="good-model").check())
    assert "Cannot reach" in asyncio.run(made(server, model="good-model").check())


# ---- What endpoints refuse, and what helps ----

RECORDED = json.loads((Path(__file__).parent / "data" / "provider_errors.json").read_text(encoding="utf-8"))
PHOTO = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
STRICT = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "$schema": "x", "additionalProperties": False,
    "properties": {"const": {"type": "string", "const": "a"}}}}}  # fmt: skip
EVERYTHING = [
    SYSTEM, {"role": "user", "content": [{"type": "text", "text": "What is that?"}, PHOTO]},
    {"role": "assistant", "content": "Well.", "reasoning": "Hm.", "tool_calls": [
        {"id": "call_abcdefghijk", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "call_abcdefghijk", "name": "look", "content": "a cat"},
]  # fmt: skip
OPTIONS = ("top_p", "top_k", "store", "reasoning_effort", "parallel_tool_calls", "thinking", "stop", "seed",
           "frequency_penalty", "logprobs", "prompt_cache_key", "verbosity")  # fmt: skip


def recorded(*kinds):
    return [pytest.param(each, id=each["id"]) for each in RECORDED if each["expect"] in kinds]


def after_refusal(refusal, stream=False, row="custom", messages=EVERYTHING, more=None, retries=1):
    """What an endpoint is sent that first refuses so; the answer, what the user was told, the provider."""
    told = []

    async def tell(line):
        told.append(line)

    line = Failure(refusal["status"], refusal["body"], refusal.get("headers", {}))
    with FakeLLM([*[line] * retries, "Fine.", "Fine again."]) as server:
        provider = made(server, row, extra_body=dict.fromkeys(OPTIONS, 1) if more is None else more)
        show = tell if stream else None
        asked = {"max_tokens": 100, "temperature": 0.5, "tool_choice": {"type": "function"}}
        ask_once = provider.chat(messages, [STRICT], on_retry=tell, on_delta=show, **asked)
        answer = asyncio.run(ask_once)
        return answer, server.bodies, told, provider


@pytest.mark.parametrize("refusal", recorded("heal"))
def test_what_an_endpoint_refuses_is_changed_and_asked_again(refusal):
    name = refusal["id"]
    row = "openai" if "max_completion_tokens" in str(refusal["body"]) and "renamed" not in name else "custom"
    row = "openrouter" if "cache-control" in name else row
    answer, bodies, _, provider = after_refusal(refusal, stream=not name.startswith("dashscope-"), row=row)
    assert answer.content == "Fine." and len(bodies) == 2
    assert bodies[0] != bodies[1]
    assert len(provider.learnt["test-model"]) == refusal.get("remembered", True)


def test_every_row_of_the_table_mends_a_recorded_refusal():
    used = set()
    for refusal in RECORDED:
        failure = refusal_of(refusal)
        for stream in (True, None):
            body = {"model": "m", "messages": EVERYTHING, "tools": [STRICT], "stream": stream,
                    "max_tokens": 1, "max_completion_tokens": None, "temperature": 1, "stream_options": {},
                    "tool_choice": {}, **dict.fromkeys(OPTIONS, 1)}  # fmt: skip
            for tokens in ({}, {"max_tokens": None, "max_completion_tokens": 1}):
                sent = {key: value for key, value in (body | tokens).items() if value is not None}
                sent |= providers.cache_marks(sent)
                if row := providers.find_remedy(failure, sent, []):
                    used.add(providers.HEALING.index(row))
    unused = [row.complaint for n, row in enumerate(providers.HEALING) if n not in used]
    assert len(providers.HEALING) >= 20 and unused == []


def refusal_of(recorded_error):
    body = recorded_error["body"]
    inner = body.get("error", body) if isinstance(body, dict) else body
    return providers.replace(providers.refusal(inner), status=recorded_error["status"])


GONE = object()
NO_IMAGE = "What is that?\n\n[an image: this model cannot see it]"
TOOLS_IN_WORDS = """You are a test.

You have tools. To use some, answer with nothing but a line like this for each:
<tool_call>{"name": "the tool's name", "arguments": {"a parameter": "its value"}}</tool_call>
What a tool returned comes back as <tool_result>. These are the tools:
{"name": "look", "description": "Look.", "parameters": {"type": "object", "$schema": "x", \
"additionalProperties": false, "properties": {"const": {"type": "string", "const": "a"}}}}"""
AS_TEXT = {"tools": GONE, "tool_choice": GONE, "messages": [
    {"role": "system", "content": TOOLS_IN_WORDS}, EVERYTHING[1],
    {"role": "assistant", "content": 'Well.\n<tool_call>{"name": "look", "arguments": {}}</tool_call>'},
    {"role": "user", "content": "<tool_result>\na cat\n</tool_result>"}]}  # fmt: skip
PLAIN_TOOLS = "tool calls go as text, as this model or server knows no others"
MENDED = {  # a recorded refusal: what the user is told, is it remembered, what changes in the request
    "vllm-max-tokens-over-context": (
        "this answer may be as long as there is room", False, {"max_tokens": GONE}),
    "openai-max-tokens-too-large": ("it limits its answers itself", True, {"max_tokens": GONE}),
    "openai-max-tokens-renamed": (
        "max_tokens has another name there", True, {"max_tokens": GONE, "max_completion_tokens": 9}),
    "dashscope-stream-only": ("it answers in streams only", True, {"stream": True}),
    "openai-stream-refused": ("it does not stream", True, {"stream": GONE, "stream_options": GONE}),
    "openai-tools-with-effort": ("with tools it does not reason", True, {"reasoning_effort": "none"}),
    "vllm-auto-tool-choice": (
        f"{PLAIN_TOOLS}; better start it with --enable-auto-tool-choice --tool-call-parser", True, AS_TEXT),
    "ollama-no-tools": (PLAIN_TOOLS, True, AS_TEXT),
    "deepseek-reasoning-must-be-passed-back": (
        "older answers are sent with empty thoughts", True, {"messages.2.reasoning_content": ""}),
    "groq-reasoning-content-unsupported": (
        "older thoughts are left out", True, {"messages.2.reasoning": GONE}),
    "groq-tool-name-key": ("names of messages are left out", True, {"messages.3.name": GONE}),
    "groq-cache-control": ("the prompt is not marked for its cache", True, {
        "messages.0.content.0.cache_control": GONE, "tools.0.cache_control": GONE}),
    "template-system-refused": ("it takes the system prompt from the user only", True, {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "You are a test."}, *EVERYTHING[1]["content"]]},
        *EVERYTHING[2:]]}),
    "mistral-tool-id-9": ("ids of calls are shortened", True, {
        "messages.2.tool_calls.0.id": "735677572", "messages.3.tool_call_id": "735677572"}),
    "gemini-thought-signature": ("calls of other models get a signature", True, {
        "messages.2.tool_calls.0.extra_content":
            {"google": {"thought_signature": "skip_thought_signature_validator"}}}),
    "gemini-unknown-schema": ("tools are described in fewer words", True, {
        "tools.0.function.parameters": {"type": "object", "properties": {"const": {"type": "string"}}}}),
    "anthropic-image-5mb": (
        "images are left out of this request: one of them is refused", False,
        {"messages.1.content": NO_IMAGE}),
    "deepseek-image-url-variant": (
        "images are left out: this model takes text only", True, {"messages.1.content": NO_IMAGE}),
    "groq-content-string-system": ("contents go as plain text", True, {"messages.1.content": NO_IMAGE}),
    "openai-temperature-only-default": (
        "a parameter that it does not take is left out", True, {"temperature": GONE}),
    "groq-store-unsupported": ("a parameter that it does not take is left out", True, {"store": GONE}),
}  # fmt: skip


def with_changes(body, changes):
    """`{"messages.3.name": GONE}` leaves the name of the fourth message out."""
    body = copy.deepcopy(body)
    for path, value in changes.items():
        *way, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        place = body
        for part in way:
            place = place[part]
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    return body


@pytest.mark.parametrize("name", MENDED)
def test_a_complaint_has_its_remedy_and_the_user_is_told_of_it(name):
    notice, is_remembered, changes = MENDED[name]
    body = {"messages": EVERYTHING, "tools": [STRICT], "temperature": 1, "tool_choice": "auto",
            "max_tokens": 9, "store": True, "stream": True, "stream_options": {}}  # fmt: skip
    if name == "dashscope-stream-only":
        del body["stream"]
    if name == "groq-cache-control":
        body = providers.cache_marks(body)
    failure = refusal_of(by_id(name))
    row = providers.find_remedy(failure, body, [])
    assert (row.notice, row.is_remembered) == (notice, is_remembered)
    assert providers.heal(body, row, failure.text) == with_changes(body, changes)
    assert providers.find_remedy(failure, body, [(row, failure.text)]) is not row, "once is enough"


def test_what_a_complaint_may_be_about_is_told_by_the_status():
    body = {"messages": HELLO, "store": True}
    complaint = providers.Failure("", "Unknown parameter: 'store'.")
    mended = [status for status in range(300, 600)
              if providers.find_remedy(providers.replace(complaint, status=status), body, [])]  # fmt: skip
    assert mended == [400, 404, 405, 413, 415, 422, 500]
    assert providers.find_remedy(complaint, body, []), "an error in a stream has no status"
    for odd in ({"shown": "Well"}, {"kind": "cut"}):
        assert not providers.find_remedy(providers.replace(complaint, **odd), body, [])


def test_a_request_is_mended_nine_times_and_no_more():
    names = [f"odd_{number}" for number in range(12)]
    with FakeLLM([error(400, f"Unknown parameter: '{name}'.") for name in names]) as server:
        answer, _ = ask(made(server, extra_body=dict.fromkeys(names, 1)))
        assert "Unknown parameter: 'odd_9'" in answer.error and len(server.bodies) == 10


def test_tools_as_text_stand_in_lines_of_their_own():
    body = providers.tools_as_text({"messages": HELLO, "tools": [TOOL, STRICT], "seed": 1}, "")
    assert set(body) == {"messages", "seed"}
    lines = body["messages"][0]["content"].split("\n")
    assert [json.loads(line) for line in lines[-2:]] == [TOOL["function"], STRICT["function"]]
    assert providers.tools_as_text({"messages": HELLO}, "") == {"messages": HELLO}


def test_each_word_that_some_endpoint_does_not_know_in_a_schema_is_left_out():
    words = ["additionalProperties", "$schema", "$id", "const", "default", "propertyNames", "not", "oneOf",
             "anyOf", "allOf", "patternProperties", "exclusiveMinimum", "exclusiveMaximum"]  # fmt: skip
    kept = {"type": "object", "description": "d", "enum": ["a"], "minimum": 1, "required": ["not"]}
    failure = refusal_of(by_id("gemini-unknown-schema"))
    row = providers.find_remedy(failure, {"messages": HELLO, "tools": [STRICT]}, [])
    for depth in (lambda schema: schema, lambda schema: {"properties": {"not": schema}, **kept}):
        body = {"messages": HELLO, "tools": [{"parameters": depth({**kept, **dict.fromkeys(words, 1)})}]}
        assert providers.heal(body, row, "")["tools"] == [{"parameters": depth(kept)}]


def test_a_parameter_is_left_out_under_its_own_name_and_never_what_a_request_needs():
    body = {"model": "m", "messages": [], "tools": [], "stream": True, "reasoning_effort": 1, "top_p": 1}
    without = providers.without_the_named
    assert without(body, "no reasoningEffort here") == with_changes(body, {"reasoning_effort": GONE})
    assert without(body, "TOP_P is unknown") == with_changes(body, {"top_p": GONE})
    assert without(body, "model, messages, tools, stream: stop_top_p") == body


def test_a_limit_has_either_name():
    rename = providers.with_other_limit
    assert rename({"max_tokens": 9, "seed": 1}, "") == {"max_completion_tokens": 9, "seed": 1}
    assert rename({"max_completion_tokens": 9}, "") == {"max_tokens": 9}


def test_what_legal_rules_out_has_no_row_in_the_table():
    """Complaints about orphans, missing results, a last word of the assistant: no such thing is sent."""
    broken = [*EVERYTHING[:3], {"role": "tool", "tool_call_id": "nobody", "content": "x"}, *EVERYTHING[2:3]]
    check_grammar(legal(broken))
    body = {"model": "m", "messages": legal(broken)}
    refusals = [refusal_of(each) for each in RECORDED if each["expect"] == "never"]
    assert len(refusals) > 20 and not any(providers.find_remedy(each, body, []) for each in refusals)


@pytest.mark.parametrize("refusal", recorded("overflow"))
def test_a_conversation_that_is_too_long_is_known_in_every_wording(refusal):
    answer, bodies, _, _ = after_refusal(refusal, messages=HELLO, more={}, retries=2)
    assert answer.is_overflow and "too long" in answer.error and len(bodies) <= 2


@pytest.mark.parametrize("refusal", recorded("final"))
def test_what_no_second_try_can_help_is_said_at_once(refusal):
    answer, bodies, told, _ = after_refusal(refusal)
    assert answer.finish_reason == "error" and not answer.is_overflow
    assert len(bodies) == 1 and told == []


@pytest.mark.parametrize("refusal", recorded("retry"))
def test_what_passes_is_asked_again_and_the_user_sees_the_wait(refusal):
    answer, bodies, told, provider = after_refusal(refusal, more={})
    assert answer.content == "Fine." and bodies[0] == bodies[1]
    assert len(told) == 1 and re.search(r"asking again in \d+ s$", told[0])
    assert provider.learnt["test-model"] == []


def by_id(name):
    return next(each for each in RECORDED if each["id"] == name)


def changed(refusal, **more):
    """What was sent the second time, and what the user was told."""
    _, bodies, told, _ = after_refusal(by_id(refusal), **more)
    return bodies[1], told


def test_a_limit_is_renamed_and_keeps_its_value():
    body, told = changed("openai-max-tokens-renamed")
    assert "max_tokens" not in body and body["max_completion_tokens"] == 100
    assert told == ["custom, test-model: max_tokens has another name there"]


def test_images_are_replaced_by_a_line_and_the_user_is_told():
    body, told = changed("deepseek-image-url-variant")
    assert "[an image: this model cannot see it]" in body["messages"][1]["content"]
    assert told == ["custom, test-model: images are left out: this model takes text only"]


def test_ids_are_short_where_they_have_to_be_and_still_fit_together():
    body, _ = changed("mistral-tool-id-9")
    asked, result = body["messages"][2]["tool_calls"][0]["id"], body["messages"][3]["tool_call_id"]
    assert asked == result and re.fullmatch("[a-zA-Z0-9]{9}", asked)


def test_schema_words_are_taken_out_and_parameters_of_such_a_name_stay():
    body, _ = changed("gemini-unknown-additionalproperties")
    assert body["tools"][0]["function"]["parameters"] == {
        "type": "object", "properties": {"const": {"type": "string"}}}  # fmt: skip


def test_without_tools_of_its_own_a_model_gets_them_and_gives_calls_as_text():
    answers = [
        Failure(400, by_id("ollama-no-tools")["body"]),
        '<tool_call>{"name": "look", "arguments": {"const": "b"}}</tool_call>',
        "A cat.",
    ]
    with FakeLLM(answers) as server:
        provider = made(server)
        answer, shown = ask(provider, EVERYTHING, [STRICT], stream=True)
        assert [(each.name, each.arguments) for each in answer.tool_calls] == [("look", {"const": "b"})]
        assert (answer.content, answer.finish_reason, shown) == (None, "stop", [])
        ask(provider, EVERYTHING, [STRICT])
        for body in server.bodies[1:]:
            roles = [message["role"] for message in body["messages"]]
            assert "tools" not in body and roles == ["system", "user", "assistant", "user"]
        assert '"name": "look"' in body["messages"][0]["content"]
        written = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
        assert body["messages"][2]["content"] == f"Well.\n{written}"
        assert body["messages"][3]["content"] == "<tool_result>\na cat\n</tool_result>"


def test_what_one_image_taught_is_not_held_against_the_next():
    too_large = by_id("anthropic-image-5mb")
    with FakeLLM([Failure(400, too_large["body"]), "Fine.", "Fine again."]) as server:
        provider = made(server)
        told = []

        async def tell(line):
            told.append(line)

        for _ in range(2):
            asyncio.run(provider.chat(EVERYTHING, on_retry=tell))
        contents = [body["messages"][1]["content"] for body in server.bodies]
    assert contents[0] == contents[2] and "[an image: this model cannot see it]" in contents[1]
    assert told == ["custom, test-model: images are left out of this request: one of them is refused"]


def test_what_was_learnt_is_remembered_for_the_model_and_told_once():
    told = []

    async def tell(line):
        told.append(line)

    refusal = by_id("openai-tools-with-effort")
    with FakeLLM([Failure(400, refusal["body"]), *["Fine."] * 3]) as server:
        provider = made(server)
        for model in ("a", "a", "b"):
            asyncio.run(provider.chat(HELLO, [STRICT], model=model, on_retry=tell))
        efforts = [body.get("reasoning_effort") for body in server.bodies]
    assert efforts == [None, "none", "none", None]
    assert told == ["custom, a: with tools it does not reason"]


def test_a_change_that_does_not_help_is_tried_once_and_not_remembered():
    refusal = by_id("openai-temperature-only-default")
    answer, bodies, _, provider = after_refusal(refusal, retries=9)
    assert answer.finish_reason == "error" and "temperature" in answer.error
    assert len(bodies) < 5 and provider.learnt == {}


def test_several_refusals_in_a_row_are_all_mended():
    refusals = ["openai-max-tokens-renamed", "openai-temperature-only-default", "deepseek-image-url-variant"]
    lines = [Failure(by_id(name)["status"], by_id(name)["body"]) for name in refusals]
    with FakeLLM([*lines, "Fine."]) as server:
        answer, _ = ask(made(server), EVERYTHING, max_tokens=9, temperature=1.0)
        assert answer.content == "Fine." and len(server.bodies) == 4


def test_a_provider_may_be_asked_in_one_event_loop_after_another():
    with FakeLLM(["One.", "Two."]) as server:
        provider = made(server)
        assert [ask(provider)[0].content for _ in range(2)] == ["One.", "Two."]


def test_a_system_message_of_blocks_can_be_marked_for_the_cache():
    blocks = [{"type": "text", "text": "You are a test."}, {"type": "text", "text": "Be short."}]
    with FakeLLM(["Fine."]) as server:
        ask(made(server, "openrouter"), [{"role": "system", "content": blocks}, *HELLO[1:]])
        text = server.bodies[0]["messages"][0]["content"][0]["text"]
    assert text == "You are a test.\n\nBe short."


def test_a_parameter_of_a_strange_name_is_no_regular_expression():
    with FakeLLM([error(400, "Unknown parameter: 'a(b'."), "Fine."]) as server:
        assert ask(made(server, extra_body={"a(b": 1}))[0].content == "Fine."


def test_one_unknown_parameter_after_another_is_left_out():
    lines = [error(400, f"Unknown parameter: '{name}'.") for name in ("store", "seed", "verbosity")]
    with FakeLLM([*lines, "Fine.", "Fine."]) as server:
        provider = made(server, extra_body={"store": 1, "seed": 1, "verbosity": 1, "stop": 1})
        assert [ask(provider)[0].content for _ in range(2)] == ["Fine.", "Fine."]
        assert server.bodies[3] == server.bodies[4] == {"model": "test-model", "messages": HELLO, "stop": 1}


def test_messages_of_the_caller_and_of_legal_stay_as_they_are_while_a_request_is_mended():
    before = copy.deepcopy(EVERYTHING)
    for refusal in RECORDED:
        for row in providers.HEALING:
            body = {"messages": legal(EVERYTHING), "tools": [STRICT]}
            providers.heal(body, row, str(refusal["body"]))
            assert body == {"messages": legal(EVERYTHING), "tools": [STRICT]}
    assert before == EVERYTHING


@pytest.mark.parametrize("name", ["groq-failed-generation", "groq-failed-generation-sse"])
def test_a_call_that_the_endpoint_could_not_read_is_read(name):
    error_body = by_id("groq-failed-generation")["body"]
    line = sse(error_body) if name.endswith("sse") else Failure(400, error_body)
    search = {"type": "function", "function": {"name": "web_search", "parameters": {}}}
    with FakeLLM([line]) as server:
        answer, _ = ask(made(server), HELLO, [search], stream=True)
    assert [(each.name, each.arguments) for each in answer.tool_calls] == [
        ("web_search", {"query": "weather in Graz"})]  # fmt: skip
    assert (answer.content, answer.finish_reason, answer.usage["estimated"]) == (None, "tool_calls", True)


def test_what_a_hostile_endpoint_sends_is_bounded():
    assert len(providers.refusal({"message": "token count " * 50_000}).text) == 4_000
    flood = [{"id": f"c{n}", **call("now")} for n in range(200)]
    answer, _ = reply_to(whole({"tool_calls": flood}))
    assert answer.finish_reason == "error"
    assert "like a model (its answer has over 128 tool calls)" in answer.error
    reader = providers.AnswerReader()
    reader.received = providers.MAX_ANSWER_BYTES
    with pytest.raises(providers.Failure, match="over 32,000,000 bytes") as caught:
        reader.feed_bytes(b":\n")
    assert caught.value.kind == "nonsense"
    reader.received = 31_999_998
    reader.feed_bytes(b":\n")
    assert pieces_of(["`" * 30_000, "x"]) == "`" * 30_000 + "x"
    endless = '{"choices": [{"message": {"content": "Hi."}}], "usage": {"prompt_tokens": 1e999}}'
    answer, _ = reply_to(Failure(200, endless))
    assert answer.content == "Hi." and answer.usage["estimated"]


def test_as_many_calls_as_an_answer_may_have_are_taken():
    many = [{"id": f"c{n}", **call("now")} for n in range(129)]
    answer, _ = reply_to(whole({"tool_calls": many[:128]}))
    assert len(answer.tool_calls) == 128 and answer.error is None
    assert reply_to(whole({"tool_calls": many}))[0].finish_reason == "error"


def test_a_call_as_text_is_looked_for_in_twenty_places():
    fence, text = "```json\n{}\n```\n", '```json\n{"name": "look", "arguments": {}}\n```'
    for examples, found in ((19, 1), (20, 0)):
        _, text_calls = providers.read_text_calls(fence * examples + text, {"look": {}})
        assert len(text_calls) == found


def test_arguments_that_are_repaired_are_in_the_log(caplog):
    caplog.set_level("INFO", "nanobot.providers")
    parse_arguments("{path: 'a.txt',}", repair=True)
    assert "repairing the JSON of a call's arguments: {path: 'a.txt',}" in caplog.text


def test_a_wait_and_a_change_of_the_request_are_in_the_log(caplog):
    caplog.set_level("INFO", "nanobot.providers")
    with FakeLLM([error(503, "busy"), error(400, "Unknown parameter: 'seed'."), "Hi."]) as server:
        assert ask(made(server, extra_body={"seed": 1}))[0].content == "Hi."
    assert [record.getMessage() for record in caplog.records if record.name == "nanobot.providers"] == [
        "HTTP 503: busy; asking again in 1 s",
        "custom, test-model: a parameter that it does not take is left out"]  # fmt: skip


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": 0, "cached_tokens": 5}, {"prompt_tokens": "?"}, []])
def test_where_nothing_was_counted_there_is_no_count(usage):
    assert providers.read_usage(usage) == {}


def test_an_estimate_takes_four_bytes_for_a_token():
    request = LLMRequest([user("x" * 400)], [TOOL], "m", {})
    assert providers.estimate_usage(request, LLMResponse("y" * 400)) == {
        "prompt_tokens": 134, "completion_tokens": 109, "cached_tokens": 0, "estimated": True}  # fmt: skip


@pytest.mark.parametrize(("row", "sent"), [("openai", True), ("custom", False), ("groq", False)])
def test_the_names_of_an_openai_account_go_to_openai_only(monkeypatch, row, sent):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-mine")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-of-mine")
    with FakeLLM(["Hi."]) as server:
        ask(made(server, row))
        assert ("of-mine" in str(server.requests[0].headers)) == sent


# ---- Waiting, and asking again ----

WAITS = {
    "a rate limit": ({"status": 429}, 1.0),
    "the second time": ({"status": 429, "tries": 1}, 2.0),
    "the third time": ({"status": 503, "tries": 2}, 4.0),
    "three times are enough": ({"status": 503, "tries": 3}, None),
    "seconds": ({"status": 429, "headers": {"retry-after": "7"}}, 7.0),
    "milliseconds win": ({"status": 429, "headers": {"retry-after-ms": "250", "retry-after": "9"}}, 0.25),
    "a date": ({"status": 503, "headers": {"retry-after": "Sat, 21 Nov 2026 10:00:20 GMT",
                                           "date": "Sat, 21 Nov 2026 10:00:00 GMT"}}, 20.0),
    "a date that is past": (
        {"status": 503, "headers": {"retry-after": "Sat, 21 Nov 2020 10:00:20 GMT"}}, 1.0),
    "at most a minute": ({"status": 429, "headers": {"retry-after": "3600"}}, 60.0),
    "nonsense in the header": ({"status": 429, "headers": {"retry-after": "soon"}}, 1.0),
    "not a number": ({"status": 429, "headers": {"retry-after": "nan"}}, 1.0),
    "less than nothing": ({"status": 429, "headers": {"retry-after": "-3"}}, 1.0),
    "seconds in the text": ({"status": 429, "text": "Please try again in 1.5s."}, 1.5),
    "milliseconds in the text": ({"status": 429, "text": "Please try again in 120ms."}, 0.12),
    "minutes in the text": ({"status": 429, "text": "Please try again in 6m0s."}, 60.0),
    "in words": ({"status": 429, "text": "Please retry after 20 seconds."}, 20.0),
    "money is final": ({"status": 429, "text": "insufficient_quota"}, None),
    "also with a header": ({"status": 429, "text": "no credit", "headers": {"retry-after": "1"}}, None),
    "a quota that comes back is not": ({"status": 429, "text": "billing … retry in 34.07s"}, 34.07),
    "payment required": ({"status": 402}, None),
    "a load balancer has no balance": ({"status": 503, "text": "load balancer: insufficient capacity"}, 1.0),
    "hours in the text": ({"status": 429, "text": "Please try again in 1h2m."}, 60.0),
    "a wrong key": ({"status": 401}, None),
    "a bad request": ({"status": 400}, None),
    "a bad request of a busy server": ({"status": 400, "text": "模型 访问量过大"}, 1.0),
    "a conflict": ({"status": 409}, 1.0),
    "a timeout of the server": ({"status": 408}, 1.0),
    "no connection": ({"kind": "network"}, 1.0),
    "half an answer": ({"kind": "cut", "tries": 1}, 2.0),
    "half an answer that was shown": ({"kind": "cut", "shown": True}, None),
    "no answer in time is asked for once more": ({"kind": "timeout"}, 1.0),
    "but not twice": ({"kind": "timeout", "tries": 1}, None),
    "a page of HTML": ({"kind": "nonsense"}, None),
    "too long a conversation": ({"status": 413}, None),
    "a server's own fault is not a question of money": ({"status": 500, "text": "credit check failed"}, 1.0),
    "a connection that closed before a byte came": ({"kind": "closed"}, 0.0),
    "the next time it is like any other": ({"kind": "closed", "tries": 1}, 2.0),
    "a model that is being loaded": ({"status": 503, "text": "Loading model"}, 4.0),
    "for a minute": ({"status": 503, "text": "Loading model", "tries": 14}, 4.0),
    "and no longer": ({"status": 503, "text": "Loading model", "tries": 15}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_how_long_to_wait_before_asking_again(name):
    failure, seconds = WAITS[name]
    assert providers.retry_after(providers.Failure("", **failure)) == pytest.approx(seconds)


def test_a_cancellation_while_it_waits_is_immediate():
    async def cancelled(provider):
        task = asyncio.ensure_future(provider.chat(HELLO))
        await asyncio.sleep(0.2)
        task.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - start

    with FakeLLM(lambda body: error(429, "Please try again in 50s")) as server:
        provider = made(server)
        provider.pace = 1.0
        assert asyncio.run(cancelled(provider)) < 0.2
        assert len(server.bodies) == 1


def test_nothing_is_asked_again_after_text_was_shown():
    with FakeLLM([Raw(chunks=[sse(delta(content="Well"), done=False).body], cut=True), "Never."]) as server:
        answer, shown = ask(made(server), stream=True)
        assert shown == ["Well"] and answer.finish_reason == "error" and len(server.bodies) == 1


@pytest.mark.parametrize("line", [
    error(500, "Oops"), Raw(b""), sse("data: {oops\n\n"), Failure(200, '{"choices": ['), Raw(cut=True),
    sse({"error": {"message": "Overloaded", "code": 529}}), Hang(0.0),
    sse(delta(content="Well"), {"error": {"message": "Overloaded"}}),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_anything_was_shown_is_asked_again(line, stream):
    with FakeLLM([line, "Here."]) as server:
        assert ask(made(server), stream=stream)[0].content == "Here."


# ---- Calls that are written as text ----

LOOK = [("look", {"path": "a.txt"})]
TEXT_CALLS = {
    "a tag around JSON": '<tool_call>{"name": "look", "arguments": {"path": "a.txt"}}</tool_call>',
    "without its end": '<tool_call>\n{"name": "look", "arguments": {"path": "a.txt"}}',
    "parameters": '<tool_call>{"name": "look", "parameters": {"path": "a.txt"}}</tool_call>',
    "arguments in a text": r'<tool_call>{"name": "look", "arguments": "{\"path\": \"a.txt\"}"}</tool_call>',
    "a function and JSON": '<function=look>{"path": "a.txt"}</function>',
    "a function and parameters": "<function=look>\n<parameter=path>\na.txt\n</parameter>\n</function>",
    "the same, half in a tag": "<function=look><parameter=path>a.txt</parameter></function>\n</tool_call>",
    "of MiniMax": '<minimax:tool_call><invoke name="look"><parameter name="path">a.txt</parameter></invoke>'
                  "</minimax:tool_call>",
    "in a fence": '```json\n{"name": "look", "arguments": {"path": "a.txt"}}\n```',
    "in a list": '[{"name": "look", "arguments": {"path": "a.txt"}}]',
    "broken JSON": "<function=look>{path: 'a.txt',}</function>",
    "broken JSON in a text": """{"name": "look", "arguments": "{path: 'a.txt',}"}""",
    "Python": '[look(path="a.txt")]',
    "Python in a tag": '<tool_call>\n[look(path="a.txt")]\n</tool_call>',
    "Python in a fence": "```python\n[look(path='a.txt')]\n```",
    "after thoughts": '<think>Hm.</think>\n{"name": "look", "arguments": {"path": "a.txt"}}',
}  # fmt: skip
LOOK_TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", TEXT_CALLS)
def test_a_call_that_a_local_model_wrote_as_text_is_a_call(name, stream):
    answer, shown = reply_to(TEXT_CALLS[name], stream, "local", tools=[LOOK_TOOL])
    assert [(each.name, each.arguments) for each in answer.tool_calls] == LOOK
    assert (answer.content, answer.finish_reason, shown) == (None, "stop", [])


def test_several_calls_as_text_are_several_calls():
    lines = "".join(f'<tool_call>{{"name": "look", "arguments": {{"n": {n}}}}}</tool_call>\n' for n in (1, 2))
    answer, _ = reply_to(lines, row="local", tools=[LOOK_TOOL])
    assert [each.arguments for each in answer.tool_calls] == [{"n": 1}, {"n": 2}]
    assert len({each.id for each in answer.tool_calls}) == 2


NO_TEXT_CALLS = {
    "an unknown tool": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "words behind it": 'I would call <tool_call>{"name": "look", "arguments": {}}</tool_call> now.',
    "words behind a function": "I would call <function=look>{}</function> now.",
    "words before bare JSON": 'I would call {"name": "look", "arguments": {}}',
    "words between two calls": '<tool_call>{"name": "look", "arguments": {}}</tool_call>\nand\n'
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>!',
    "a call that is cut": '```json\n{"name": "look", "arguments": {"path": "a',
    "JSON that was asked for": '{"name": "look", "age": 7}',
    "a name that is none": '{"name": ["look"], "arguments": {}}',
    "prose": "Look at [this](a.txt)!",
    "a list of words": '["look"]',
    "Python that would have to run": "[look(path=open('x').read())]",
    "Python without the argument's name": "[look('a.txt')]",
    "Python with more": "[look(path='a.txt', **{'n': 1})]",
    "Python of a part": "[tools.look(path='a.txt')]",
    "Python that is half there": "[look(path='a.txt'",
    "Python and words": "[look(path='a.txt')] reads it.",
    "Python and a remark": "[look(path='a.txt')]  # reads it",
    "a place in a list": "names[look(path='a.txt')]",
    "Python of another tool": "[rm(path='a.txt')]",
    "a list with a call's words": "[[1, (2)]",
    "a number": "42",
    "code": "```python\nlook()\n```",
    "less than": "< 3",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NO_TEXT_CALLS)
def test_other_text_is_no_call_and_is_shown_whole(name, stream):
    answer, shown = reply_to(NO_TEXT_CALLS[name], stream, "local", tools=[LOOK_TOOL])
    assert answer.tool_calls == [] and answer.content == NO_TEXT_CALLS[name]
    assert "".join(shown) == (NO_TEXT_CALLS[name] if stream else "")


def test_beside_a_real_call_a_text_that_looks_like_one_stays_text():
    text = 'I call it like this: <tool_call>{"name": "look", "arguments": {}}</tool_call>'
    reply = calls(call("look", path="a.txt"), content=text)
    answer, shown = reply_to(reply, True, "local", tools=[LOOK_TOOL])
    assert [each.arguments for each in answer.tool_calls] == [{"path": "a.txt"}]
    assert answer.content == "".join(shown) == text


@pytest.mark.parametrize(("row", "how", "calls_found"), [
    ("custom", "auto", 0), ("custom", "on", 1), ("local", "off", 0), ("local", "auto", 1)])  # fmt: skip
def test_calls_as_text_have_a_switch(row, how, calls_found):
    with FakeLLM([TEXT_CALLS["in a fence"]]) as server:
        answer, _ = ask(made(server, row, text_tool_calls=how), tools=[LOOK_TOOL])
    assert len(answer.tool_calls) == calls_found


STRICT_LOOK = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "required": ["path"],
    "properties": {"path": {"type": "string"}, "deep": {"type": "integer"}, "far": {"type": "number"},
                   "sure": {"type": "boolean"}, "list": {"type": "array"}}}}}  # fmt: skip
PROSE = {
    "a fence": ("I will use the `look` function.\n\n```json\n%s\n```", 1),
    "a fence without a word": ("I look:\n```\n%s\n```\n", 1),
    "a tag": ("First I look. <tool_call>%s</tool_call>", 1),
    "an example before it": ("Like this:\n```python\nlook()\n```\nSo:\n```json\n%s\n```", 1),
    "two fences": ("I look twice:\n```json\n%s\n```\n\n```json\n%s\n```", 2),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PROSE)
def test_prose_may_stand_before_a_call_of_a_local_model(name, stream):
    pattern, count = PROSE[name]
    text = pattern.replace("%s", '{"name": "look", "arguments": {"path": "a.txt"}}')
    answer, shown = reply_to(text, stream, "local", tools=[STRICT_LOOK])
    assert [(each.name, each.arguments) for each in answer.tool_calls] == LOOK * count
    prose = re.split("```json|```\n{|<tool_call>", text)[0].rstrip()
    assert answer.content == prose and "".join(shown).rstrip() == (prose if stream else "")


UNFIT = ["{}", '{"path": "a", "more": 1}', '{"path": {"x": 1}}', '{"path": ["a"]}', '{"file": "a"}',
         '{"path": "a", "deep": {}}', '{"path": "a", "far": []}', '{"path": "a", "sure": {}}']  # fmt: skip


@pytest.mark.parametrize("arguments", UNFIT)
def test_a_call_as_text_that_the_tool_could_not_take_is_text(arguments):
    text = f'```json\n{{"name": "look", "arguments": {arguments}}}\n```'
    answer, _ = reply_to(text, row="local", tools=[STRICT_LOOK])
    assert answer.tool_calls == [] and answer.content == text


@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": {"path": True}}, {"type": ["object", "null"]}, {"type": "object"},
    {"type": "object", "properties": {"n": {}}, "additionalProperties": True}, {"$ref": "#/x"}])  # fmt: skip
def test_a_schema_of_another_kind_forbids_no_call_as_text(schema):
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    answer, _ = reply_to(TEXT_CALLS["in a fence"], row="local", tools=[tool])
    assert [each.arguments for each in answer.tool_calls] == [{"path": "a.txt"}]


def test_a_list_may_stand_where_the_tool_wants_one():
    text = '{"name": "look", "arguments": {"path": "a", "list": ["b"]}}'
    answer, _ = reply_to(text, row="local", tools=[STRICT_LOOK])
    assert answer.tool_calls[0].arguments == {"path": "a", "list": ["b"]}


@pytest.mark.parametrize("between", [", ", ";", "\n", " ", "", ";\n"])
@pytest.mark.parametrize("around", ["%s", "[%s]"])
def test_calls_as_text_may_stand_beside_each_other(between, around):
    one, two = ('{"name": "look", "arguments": {"n": %d}}' % n for n in (1, 2))  # noqa: UP031
    _, found = providers.read_text_calls(around % f"{one}{between}{two}", {"look": {}})
    assert [each.arguments for each in found] == [{"n": 1}, {"n": 2}]


def test_calls_as_python_take_each_kind_of_value_and_warn_of_nothing(recwarn):
    text = r'[look(path="a\d", n=-1), look(list=["b", {"c": None}], all=True), look()]'
    _, found = providers.read_text_calls(text, {"look": {}})
    arguments = [{"path": r"a\d", "n": -1}, {"list": ["b", {"c": None}], "all": True}, {}]
    assert [call.arguments for call in found] == arguments
    assert len(recwarn) == 0


def test_a_set_in_calls_as_python_is_told_to_the_model():
    (call,) = providers.read_text_calls("[look(path={1, 2})]", {"look": {}})[1]
    assert call.arguments == {} and "not whole JSON" in call.error


def test_a_call_as_text_that_is_cut_is_not_run():
    text = '<function=look>{"path": "a.tx</function>'
    (call_as_text,) = providers.read_text_calls(text, {"look": {}})[1]
    assert call_as_text.arguments == {} and "not whole JSON" in call_as_text.error


def test_fences_within_a_parameter_are_kept():
    text = "<function=look><parameter=path>\n```python\nx = 1\n```\n</parameter></function>"
    answer, _ = reply_to(text, row="local", tools=[LOOK_TOOL])
    assert answer.tool_calls[0].arguments == {"path": "```python\nx = 1\n```"}


def test_code_of_a_local_model_is_shown_as_it_comes():
    reader = providers.AnswerReader({"look": {}})
    reader.feed(delta(content="So:\n```python\nprint(1)\n"))
    assert reader.to_show() == "So:\n```python\nprint(1)\n"


def test_text_beside_a_real_call_stays_text():
    line = calls(call("look", path="b.txt"), content=TEXT_CALLS["in a fence"])
    answer, _ = reply_to(line, row="local", tools=[LOOK_TOOL])
    assert [each.arguments for each in answer.tool_calls] == [{"path": "b.txt"}]
    assert answer.content == TEXT_CALLS["in a fence"]


# ---- Caches and windows ----


@pytest.mark.parametrize("row", ["anthropic", "openrouter"])
def test_the_system_message_and_the_last_tool_are_marked_for_the_cache(row):
    with FakeLLM(["Hi."]) as server:
        ask(made(server, row), tools=[LOOK_TOOL, STRICT])
        body, mark = server.bodies[0], {"cache_control": {"type": "ephemeral"}}
    assert body["messages"][0]["content"] == [{"type": "text", "text": SYSTEM["content"], **mark}]
    assert body["tools"] == [LOOK_TOOL, {**STRICT, **mark}] and body["messages"][1:] == HELLO[1:]


def test_other_endpoints_get_no_marks():
    with FakeLLM(["Hi."]) as server:
        ask(made(server), tools=[LOOK_TOOL])
        assert b"cache_control" not in server.requests[0].raw


def test_a_server_that_sees_less_than_it_was_sent_is_told_of_once():
    told = []

    async def tell(line):
        told.append(line)

    long = [SYSTEM, {"role": "user", "content": "word " * 20_000}]
    with FakeLLM([Reply("Hi.", usage={"prompt_tokens": 4_096, "completion_tokens": 2})] * 2) as server:
        provider = made(server, "ollama")
        for _ in range(2):
            asyncio.run(provider.chat(long, on_retry=tell))
    assert len(told) == 1 and "saw 4,096 of about 25,0" in told[0] and "OLLAMA_CONTEXT_LENGTH" in told[0]


@pytest.mark.parametrize(("row", "seen", "letters", "is_told"), [
    ("ollama", 4_096, 40_000, True), ("custom", 4_096, 40_000, False), ("ollama", 1_001, 40_000, True),
    ("ollama", 1_000, 40_000, False), ("ollama", 4_999, 44_000, True), ("ollama", 5_000, 44_000, False),
    ("ollama", 4_004, 32_004, True), ("ollama", 4_005, 32_004, False)])  # fmt: skip
def test_a_window_that_is_too_small_is_told_of_where_it_can_be_known(row, seen, letters, is_told):
    request = LLMRequest([user("x" * letters)], [], "m", {})
    answer = LLMResponse("Hi.", usage={"prompt_tokens": seen})
    line = providers.window_warning(Endpoint(ROWS[row]), request, answer)
    told = f"The server saw {seen:,} of about {letters // 4 + 9:,} tokens. Widen its window, for Ollama: "
    assert line == (told + "OLLAMA_CONTEXT_LENGTH=64000 ollama serve" if is_told else "")


class HurriedLoop(asyncio.SelectorEventLoop):
    """An event loop in which no wait takes time; how long each would have been is in `waits`."""

    waits: list[float] = []

    def call_later(self, delay, callback, *args, context=None):
        self.waits.append(delay)
        return super().call_later(0, callback, *args, context=context)


def test_a_wait_is_as_long_as_was_asked_for_and_up_to_a_fifth_longer():
    """Or all who were sent away would come back in the same moment."""
    HurriedLoop.waits.clear()
    busy = Failure(429, "busy", {"retry-after": "20"})
    with FakeLLM([busy, busy, "Hi."]) as server, asyncio.Runner(loop_factory=HurriedLoop) as runner:
        provider = made(server)
        provider.pace = 1.0
        assert runner.run(provider.chat(HELLO)).content == "Hi."
    waits = [wait for wait in HurriedLoop.waits if wait >= 1]
    assert len(waits) == 2 and all(20 <= wait < 24 for wait in waits)


def test_a_local_server_may_be_named_without_v1():
    with FakeLLM(["Hi."]) as server:
        end = choose_endpoint({}, "m", base_url=server.base_url.removesuffix("/v1"))
        assert asyncio.run(OpenAIProvider(end).chat(HELLO)).content == "Hi."


def several(provider, count, **options):
    """Answers to the same question, one after the other in one event loop."""

    async def asked():
        return [await provider.chat(HELLO, **options) for _ in range(count)]

    return asyncio.run(asked())


@pytest.mark.parametrize("row", ["custom", "local"])
def test_a_connection_is_kept_open(row):
    with FakeLLM(["One.", "Two.", "Three."]) as server:
        assert [answer.content for answer in several(made(server, row), 3)] == ["One.", "Two.", "Three."]
        assert len({request.client for request in server.requests}) == 1


def test_an_answer_that_its_consumer_broke_off_holds_no_connection():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n")
        writer.write(b'data: {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}\n\n')
        await reader.read()  # to the end: what the client sent, and that it is gone
        closed.set()
        writer.close()

    async def refuse(text):
        raise KeyError("ours")

    async def talk():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            provider = OpenAIProvider(Endpoint(ROWS["custom"], "k", address, "m"), pace=0.0)
            with pytest.raises(KeyError, match="ours"):
                await provider.chat(HELLO, on_delta=refuse)
            await asyncio.wait_for(closed.wait(), 20)

    closed = asyncio.Event()
    asyncio.run(talk())


def test_a_kept_connection_that_the_server_closed_is_no_reason_to_wait():
    told = []

    async def tell(line):
        told.append(line)

    with FakeLLM(["One.", Hang(0), "Two."]) as server:
        provider = made(server, "local")
        provider.pace = 1e9  # a wait would never end
        answers = several(provider, 2, on_retry=tell)
        assert [answer.content for answer in answers] == ["One.", "Two."] and told == []
        assert [request.client for request in server.requests][:2] == [server.requests[0].client] * 2


@pytest.mark.parametrize(("row", "model", "is_sent"), [
    ("openai", "gpt-5-mini", False), ("openai", "gpt-4o", True), ("moonshot", "kimi-k2.5", False),
    ("moonshot", "kimi-k2-turbo", True), ("custom", "gpt-5", True)])  # fmt: skip
def test_a_temperature_is_sent_where_the_model_takes_one(row, model, is_sent):
    body = providers.request_body(
        Endpoint(ROWS[row]), LLMRequest(HELLO, [], model, {"temperature": 0.5}), [])  # fmt: skip
    assert ("temperature" in body) == is_sent


def test_the_limit_of_the_answer_has_a_name_of_its_own_at_openai_and_azure():
    request = LLMRequest(HELLO, [], "m", {"max_tokens": 9})
    names = {row: list(providers.request_body(Endpoint(ROWS[row]), request, [])) for row in ROWS}
    renamed = [row for row in ROWS if names[row] == ["messages", "max_completion_tokens"]]
    assert renamed == ["openai", "azure"]
    assert all(names[row] == ["messages", "max_tokens"] for row in ROWS if row not in renamed)


def test_a_model_that_has_its_own_wishes_gets_them():
    with FakeLLM(["Hi."]) as server:
        ask(made(server, "openai", model="gpt-5-mini"), temperature=0.5, max_tokens=9)
        assert server.bodies[0] == {"model": "gpt-5-mini", "messages": HELLO, "max_completion_tokens": 9}


# ---- A lawful history ----


def user(content="Hi"):
    return {"role": "user", "content": content}


def said(content="Ok", **more):
    return {"role": "assistant", "content": content, **more}


def called(*ids, content=None, name="now", arguments="{}", **more):
    """An assistant's message with calls, as the API wants them."""
    functions = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}} for id_ in ids
    ]
    return {"role": "assistant", "content": content, "tool_calls": functions, **more}


def result(id_, content="noon"):
    return {"role": "tool", "tool_call_id": id_, "content": content}


def test_a_signature_stands_at_the_first_call_of_a_step_and_an_own_one_stays():
    own = {"google": {"thought_signature": "abc"}}
    step = called("a", "b")
    first, second = providers.with_signature(step)["tool_calls"]
    assert first["extra_content"] == {
        "google": {"thought_signature": "skip_thought_signature_validator"}}  # fmt: skip
    assert second == step["tool_calls"][1]
    step["tool_calls"][0]["extra_content"] = own
    assert providers.with_signature(step)["tool_calls"][0]["extra_content"] == own
    assert providers.with_signature(said()) == said()


def test_only_answers_get_empty_thoughts_and_full_ones_stay():
    thoughtful = said(reasoning_content="hm")
    assert providers.with_some_reasoning(said()) == said(reasoning_content="")
    assert providers.with_some_reasoning(thoughtful) == thoughtful
    assert providers.with_some_reasoning(user()) == user()


@pytest.mark.parametrize(("message", "text"), [
    (said("Hi."), said("Hi.")),
    (called("a"), said('<tool_call>{"name": "now", "arguments": {}}</tool_call>')),
    (called("a", "b", content="So:"), said(
        'So:\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>')),
    (result("a"), user("<tool_result>\nnoon\n</tool_result>")),
    (user([{"type": "text", "text": "Hi."}]), user([{"type": "text", "text": "Hi."}])),
    (result("a", [{"type": "text", "text": "noon"}]), user("<tool_result>\nnoon\n</tool_result>")),
    (called("a", content=[{"type": "text", "text": "So:"}]), said(
        'So:\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'))])  # fmt: skip
def test_calls_and_results_as_text(message, text):
    assert providers.calls_as_text(message) == text


MISSING = "[interrupted before it finished]"
LEFT_OUT = user("(earlier messages are left out)")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LEGAL = {
    "a lawful history stays as it is": (
        [SYSTEM, user(), called("a", "b"), result("a"), result("b"), said(), user()],) * 2,
    "a result that nobody asked for is dropped": ([user(), result("x"), said(), user()], [user(), said(),
        user()]),
    "a result before its call is dropped": (
        [user(), result("a"), called("a"), user()], [user(), called("a"), result("a", MISSING), user()]),
    "a missing result is made up, right behind the others": (
        [user(), called("a", "b"), result("a"), user()],
        [user(), called("a", "b"), result("a"), result("b", MISSING), user()]),
    "of two results for a call the first counts": (
        [user(), called("a"), result("a", "1"), result("a", "2")], [user(), called("a"), result("a", "1")]),
    "a result that came late moves to its call": (
        [user(), called("a"), user("Well?"), result("a")], [user(), called("a"), result("a"), user("Well?")]),
    "results stand in the order of the calls": (
        [user(), called("a", "b"), result("b", "2"), result("a", "1")],
        [user(), called("a", "b"), result("a", "1"), result("b", "2")]),
    "results without their call are dropped with it": ([SYSTEM, result("a"), said(), user()],
                                                       [SYSTEM, LEFT_OUT, said(), user()]),
    "a call without a name is dropped with its result": (
        [user(), called("a", name=""), result("a"), user("?")], [user("Hi\n\n?")]),
    "two calls with one id each keep their result": (
        [user(), called("a", "a"), result("a", "1"), result("a", "2")],
        [user(), called("a", "a_2"), result("a", "1"), result("a_2", "2")]),
    "an id that an earlier turn used is changed": (
        [user(), called("a"), result("a", "1"), called("a"), result("a", "2")],
        [user(), called("a"), result("a", "1"), called("a_2"), result("a_2", "2")]),
    "calls without ids get some": (
        [user(), called(None), result(None, "1")], [user(), called("call"), result("call", "1")]),
    "reasoning of a call stays": (
        [user(), called("a", reasoning_content="hm"), result("a")],) * 2,
    "two of the user are one": ([user("a"), user("b")], [user("a\n\nb")]),
    "no image is lost in a merger": (
        [user("a"), user([IMAGE]), user([{"type": "text", "text": "b"}])],
        [user([{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}])]),
    "a text and calls of the assistant are one": (
        [user(), said("Look"), called("a"), result("a")], [user(), called("a", content="Look"), result("a")]),
    "the assistant first": ([SYSTEM, said(), user()], [SYSTEM, LEFT_OUT, said(), user()]),
    "only the assistant": ([SYSTEM, said()], [SYSTEM, LEFT_OUT]),
    "nothing": ([], [LEFT_OUT]),
    "the assistant last": ([user(), said(), said()], [user()]),
    "system messages are one, first": (
        [user("a"), SYSTEM, {"role": "developer", "content": "Be brief."}],
        [{"role": "system", "content": "You are a test.\n\nBe brief."}, user("a")]),
    "an empty text of an assistant with calls is null": (
        [user(), called("a", content=""), result("a")], [user(), called("a"), result("a")]),
    "an empty text of the user is said to be so": ([user("")], [user("(empty)")]),
    "an empty result too": ([user(), called("a"), result("a", " \n")], [user(), called("a"), result("a",
        "(empty)")]),
    "an empty block too": ([user([IMAGE, {"type": "text", "text": ""}])],
                           [user([IMAGE, {"type": "text", "text": "(empty)"}])]),
    "no blocks at all too": ([user([])], [user("(empty)")]),
    "an assistant that says nothing is left out": ([user("a"), said(""), user("b")], [user("a\n\nb")]),
    "keys of our own are not sent": ([{**user(), "timestamp": "now", "usage": {}}], [user()]),
    "half a surrogate pair becomes a question mark": ([user("a\ud83db")], [user("a?b")]),
    "two halves become whole": ([user("a\ud83d\ude00b")], [user("a\U0001f600b")]),
    "everywhere": (
        [user([{"type": "text", "text": "\udc00"}]), called("a\udc00", reasoning="\ud800é"),
        result("a\udc00")],
        [user([{"type": "text", "text": "?"}]), called("a?", reasoning="?é"), result("a?")]),
    "arguments that are an object become its text": (
        [user(), called("a", arguments={"x": 1}), result("a")], [user(), called("a", arguments='{"x": 1}'),
        result("a")]),
    "broken arguments are mended": (
        [user(), called("a", arguments='{"x": 1'), result("a")], [user(), called("a",
        arguments='{"x": 1}'), result("a")]),
    "hopeless arguments become none": (
        [user(), called("a", arguments="[1"), result("a")], [user(), called("a"), result("a")]),
    "so do none, null and not a number": (
        [user(), called("a", arguments=""), result("a"), called("b", arguments=None), result("b"),
         called("c", arguments='{"x": NaN}'), result("c")],
        [user(), called("a"), result("a"), called("b"), result("b"), called("c"), result("c")]),
    "a call without a function is dropped": ([user(), said("x", tool_calls=[{"id": "a",
        "function": None}]), user()],
                                             [user(), said("x"), user()]),
    "two open calls of one id keep both results, in order": (
        [user(), called("a"), called("a"), result("a", "1"), result("a", "2")],
        [user(), called("a"), result("a", "1"), called("a_2"), result("a_2", "2")]),
    "two open calls without ids too": (
        [user(), called(None), called(None), result(None, "1"), result(None, "2")],
        [user(), called("call"), result("call", "1"), called("call_2"), result("call_2", "2")]),
    "after a message of the user an id means the later call": (
        [user(), called("a"), user(), called("a"), result("a", "2")],
        [user(), called("a"), result("a", MISSING), user(), called("a_2"), result("a_2", "2")]),
    "of two joined messages the first one's thoughts stay": (
        [user(), said("a", reasoning_content="one"), said("b", reasoning_content="two"), user()],
        [user(), said("a\n\nb", reasoning_content="one"), user()]),
    "nothing is put into the assistant's mouth": (
        [user("a"), said([{"type": "text", "text": " "}]), said(""), user("b"),
         said([{"type": "text", "text": ""}, {"type": "text", "text": "ok"}]), user("c")],
        [user("a\n\nb"), said([{"type": "text", "text": "ok"}]), user("c")]),
    "a content of another kind becomes a text": (
        [user({"a": "ä"}), called("a"), result("a", 7), said(["x"]), user(["y"])],
        [user('{"a": "ä"}'), called("a"), result("a", "7"), said([{"type": "text", "text": "x"}]),
         user([{"type": "text", "text": "y"}])]),
    "an id that is taken gets the next number": (
        [user(), called("a", "a", "a"), result("a", "1"), result("a", "2"), result("a", "3")],
        [user(), called("a", "a_2", "a_3"), result("a", "1"), result("a_2", "2"), result("a_3", "3")]),
    "a call of a strange type is one of a function, and keeps what came with it": (
        [user(), said(None, tool_calls=[{"id": "a", "type": "x", "extra_content": 7,
                                         "function": {"name": 5, "arguments": "{}", "more": 1}}])],
        [user(), said(None, tool_calls=[{"id": "a", "type": "function", "extra_content": 7,
                                         "function": {"name": "5", "arguments": "{}"}}]),
         result("a", MISSING)]),
    "strange roles are left out": ([user(), {"role": "critic", "content": "no"}, {}], [user()]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_a_history_is_made_lawful(name):
    messages, expected = LEGAL[name]
    before = copy.deepcopy(messages)
    assert legal(messages) == expected
    assert messages == before
    check_grammar(legal(messages))


def test_without_a_wish_for_a_reply_the_assistant_may_be_last():
    assert legal([user(), said(), said("b")], reply=False) == [user(), said("Ok\n\nb")]


def check_grammar(messages):
    """What the API accepts, written down once more and on its own."""
    json.dumps(messages, allow_nan=False, ensure_ascii=False).encode()
    roles = [message["role"] for message in messages]
    assert "system" not in roles[1:]
    assert roles[roles[0] == "system"] == "user" and roles[-1] != "assistant"
    ids, due = set(), []
    for before, message in zip([None, *messages], messages, strict=False):
        assert set(message) <= {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content",
                                "reasoning", "reasoning_details"}  # fmt: skip
        if message["role"] == "tool":
            assert due and message["tool_call_id"] == due.pop(0)
        else:
            assert not due, "a call has no result directly behind it"
            assert "tool_call_id" not in message or message["role"] == "tool"
            assert not before or before["role"] != message["role"]
        assert message["role"] == "assistant" or "tool_calls" not in message
        due += [check_call(each, ids) for each in message.get("tool_calls", [])]
        check_content(message)
    assert not due


def check_call(tool_call, ids):
    assert tool_call["type"] == "function" and tool_call["function"]["name"]
    arguments = json.loads(tool_call["function"]["arguments"], parse_constant=pytest.fail)
    assert isinstance(arguments, dict)
    assert tool_call["id"] and tool_call["id"] not in ids
    ids.add(tool_call["id"])
    return tool_call["id"]


def check_content(message):
    content = message["content"]
    if content is None:
        assert message["tool_calls"]
    elif isinstance(content, str):
        assert content.strip()
    else:
        assert content and all(block["type"] in ("text", "image_url") for block in content)
        assert all(block["text"].strip() for block in content if block["type"] == "text")


def a_history(dice):
    """Messages as bad luck, bugs and other programs make them."""
    texts = [
        "Hi",
        "",
        " \n",
        None,
        "a\ud800b",
        "\u2028☃",
        [],
        ["x"],
        [{"type": "text", "text": ""}, IMAGE],
        {"a": 1},
        7,
    ]
    arguments = ["{}", "", None, '{"a": 1', "[1]", '{"a": NaN}', '{"a": 1e999}', {"b": 2}, [3], "prose",
        '{"a":1}{"b":2}',
                 '{"t": "\ud800"}', r'{"t": "\udfff"}', "null", 5]  # fmt: skip
    ids = ["a", "b", "a_2", "call", None, "", "é\udc00", 7]

    def a_call():
        name = dice.choice(["now", "read_file", "", None])
        function = {"name": name, "arguments": dice.choice(arguments)}
        odd = dice.choice([{}, {}, {"function": None}, {"extra_content": {"s": "\ud800"}}, {"index": 0}])
        return {"id": dice.choice(ids), "function": function, **odd}

    def a_message():
        role = dice.choice(
            ["system", "developer", "user", "user", "assistant", "assistant", "tool", "tool", "robot", None]
        )
        message = {"role": role, "content": dice.choice(texts)}
        if role == "assistant" or dice.random() < 0.05:
            message["tool_calls"] = dice.choice([None, [], [a_call()], [a_call(), a_call(), a_call()]])
        if role == "tool":
            message["tool_call_id"] = dice.choice(ids)
        if dice.random() < 0.2:
            message |= dice.choice([{"reasoning_content": "h\udc00m"}, {"reasoning": "hm"},
                {"reasoning_details": [{"i": 1}]},
                                    {"name": "now"}, {"timestamp": 1}, {"refusal": None}])  # fmt: skip
        return message

    return [a_message() for _ in range(dice.randrange(12))]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_history_what_is_sent_is_lawful(seed):
    dice = random.Random(seed)
    for _ in range(100):
        messages = a_history(dice)
        before = copy.deepcopy(messages)
        lawful = legal(messages)
        assert messages == before
        check_grammar(lawful)
        assert legal(lawful) == lawful
        assert legal(messages) == lawful


@pytest.mark.parametrize(
    "written", ['{"a": NaN}', '{"a": Infinity}', '{"a": [{"b": -Infinity}]}', '{"a": 1e400}']
)
@pytest.mark.parametrize("repair", [False, True])
def test_what_is_no_number_is_no_argument(written, repair):
    arguments, problem = parse_arguments(written, repair)
    assert arguments == {} and "JSON" in problem


def test_what_is_no_object_is_shown_by_its_beginning():
    text = json.dumps(["x" * 200])
    assert parse_arguments(text, False) == (
        {}, f"its arguments must be one JSON object, not {text[:100]!r}")  # fmt: skip


def test_a_new_id_has_nine_digits_and_is_the_same_for_the_same_id():
    assert providers.new_id("call_8bXe0aTzQmW2") == "588788278"
    assert all(re.fullmatch("[0-9]{9}", providers.new_id(old)) for old in ("", "a", "é"))
    assert len({providers.new_id() for _ in range(9)}) == 9


# ---- Models that need no network ----


def test_a_script_is_played_back_and_keeps_what_it_was_asked():
    one, two = ToolCallRequest("1", "now"), ToolCallRequest("2", "now")
    model = ScriptedProvider([one, [one, two], "Two  words\n", LLMResponse(None, finish_reason="length")])
    assert ask(model)[0] == LLMResponse(None, [one], "tool_calls")
    assert ask(model)[0] == LLMResponse(None, [one, two], "tool_calls")
    answer, shown = ask(model, stream=True, max_tokens=5)
    assert answer.content == "".join(shown) == "Two  words\n" and len(shown) == 3
    assert ask(model)[0].finish_reason == "length"
    assert "no further reply" in ask(model)[0].error
    assert len(model.requests) == 5 and model.requests[2].messages == HELLO
    assert model.requests[2].options == {"max_tokens": 5}


def test_a_person_can_be_the_model_of_a_program():
    provider, lines, questions = HumanProvider(), iter(["read_file {", 'read_file {"path": "a"}']), []

    async def ask_person(question):
        questions.append(question)
        return next(lines)

    provider.ask = ask_person
    answer, _ = ask(provider, tools=[TOOL])
    assert [(each.name, each.arguments) for each in answer.tool_calls] == [("read_file", {"path": "a"})]
    assert "You are a test." in questions[0]
    assert questions[1].startswith("Is this a call? Then say read_file {")


def in_person(*lines, **more):
    """A person who says these lines as the model, and the questions that were asked."""
    rest, questions = iter(lines), []

    async def ask_person(question):
        questions.append(question)
        return next(rest)

    return HumanProvider(ask_person, **more), questions


def test_a_person_sees_what_a_model_sees_and_later_only_what_is_new():
    person, questions = in_person("read_file {}", "Hi.", "Bye.")
    asked = ask(person, tools=[TOOL])[0].tool_calls[0]
    tool = '{"name": "read_file", "description": "Read.", "parameters": {}}'
    how = 'You are the model. Answer in a line, or call tools: NAME {"path": "a"}'
    assert questions.pop() == (
        f"---- system ----\nYou are a test.\n---- user ----\nHello\n---- tools ----\n{tool}\n{how}\nmodel> "
    )
    talk = [*HELLO, called(asked.id, name="read_file"), result(asked.id)]
    assert ask(person, talk, [TOOL])[0].content == "Hi."
    call_as_text = '<tool_call>{"name": "read_file", "arguments": {}}</tool_call>'
    assert questions.pop() == (
        f"---- assistant ----\n{call_as_text}\n---- user ----\n<tool_result>\nnoon\n</tool_result>\nmodel> "
        .replace("---- user ----\n<tool", "---- tool ----\n<tool"))  # fmt: skip
    ask(person, [*talk, said("Hi."), user([IMAGE])], [])
    assert questions.pop() == (
        "---- assistant ----\nHi.\n---- user ----\n[an image: this model cannot see it]\n---- tools ----\n"
        f"{how}\nmodel> ")  # fmt: skip


def test_without_a_terminal_nobody_can_be_the_model():
    answer, _ = ask(HumanProvider())
    assert (answer.finish_reason, answer.error) == ("error", "To be the model you need a terminal.")


AGAIN = "To answer with these very words send them once more.\nmodel> "
MISTYPED = {
    "no JSON": ("read_file {", r'Is this a call\? Then say read_file {"argument": "value"} '
                               r"\(this is not whole JSON: .*\)\."),
    "no arguments": ("read_file", r"Is this a call\? .*"),
    "no object": ("read_file [1]", r"its arguments must be one JSON object, not '\[1\]'"),
    "not allowed": ('read_file {"path": "no"}', "there is no path no"),
    "words behind it": ("read_file {} and " + "x" * 200,
                        "Behind the call stands what is none: and " + "x" * 96),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTYPED)
def test_a_call_that_is_none_is_asked_about_and_the_same_words_again_are_an_answer(name):
    line, complaint = MISTYPED[name]

    def check(tool, arguments):
        assert tool == "read_file"
        return f"there is no path {arguments['path']}" if "path" in arguments else None

    person, questions = in_person(line, line, check=check)
    answer, _ = ask(person, tools=[TOOL])
    assert (answer.content, answer.tool_calls) == (line, [])
    assert re.fullmatch(f"{complaint}\n{re.escape(AGAIN)}", questions[1])


def test_other_words_that_are_no_call_either_are_asked_about_again():
    person, questions = in_person("read_file {", "read_file [", "  Hi.  ")
    assert ask(person, tools=[TOOL])[0].content == "Hi."
    assert len(questions) == 3
    assert ask(in_person("read_files {}")[0], tools=[TOOL])[0].content == "read_files {}"


def test_a_person_may_answer_in_several_lines():
    async def paste(question):
        return "first line\nsecond line\n"

    provider = HumanProvider()
    provider.ask = paste
    assert ask(provider)[0].content == "first line\nsecond line"


def test_a_provider_of_ones_own_writes_only_answer():
    class Echo(providers.LLMProvider):
        model = "echo"

        async def answer(self, request: LLMRequest) -> LLMResponse:
            return LLMResponse(f"{request.model}: {request.messages[-1]['content']}")

    assert Echo().get_default_model() == "echo"
    assert ask(Echo(), model="loud")[0].content == "loud: Hello"


def test_a_trace_is_played_back_though_its_keys_are_left_out(tmp_path):
    talk = [user("api_key = abcdefghijkl")]
    model = ScriptedProvider([ToolCallRequest("1", "now"), "Noon."])
    model.trace = providers.Trace(tmp_path / "trace")
    answers = [ask(model, talk)[0], ask(model)[0]]
    assert "abcdefghijkl" not in (tmp_path / "trace").read_text()
    replay = providers.ReplayProvider(tmp_path / "trace")
    assert [ask(replay, talk)[0], ask(replay)[0]] == answers
    assert "no further step" in ask(replay)[0].error


@pytest.mark.parametrize("answer", [{"text": "Hi."}, "Hi.", {"content": "", "tool_calls": [{"x": 1}]}])
def test_a_trace_with_an_answer_that_is_none_is_a_clear_error(tmp_path, answer):
    record = {"messages": [], "tools": [], "options": {}, "answer": answer}
    (tmp_path / "trace").write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="line 1: this is no record"):
        providers.ReplayProvider(tmp_path / "trace")


@pytest.mark.parametrize("line", ["two\nlines", "read_file {}\n and more", "read_file {}\n"])
def test_a_human_may_paste_several_lines(line):
    model = providers.HumanProvider()
    lines = iter([line, "Hi."])

    async def type_in(question):
        return next(lines)

    model.ask = type_in
    answer, _ = ask(model, tools=[TOOL])
    if line.endswith("{}\n"):
        assert answer.tool_calls[0].name == "read_file"
    else:
        assert answer.content in ("two\nlines", "Hi.")


def test_without_the_sdk_the_garbage_collector_is_on_again(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    provider = OpenAIProvider(Endpoint(ROWS["custom"], "", "http://127.0.0.1:1/v1", "m"), pace=0.0)
    assert "openai" in ask(provider)[0].error and gc.isenabled()


@pytest.fixture
def desk(tmp_path):
    """A workspace with some files, and a way to talk with the offline model that works in it."""
    for name, text in {
        "a.txt": "one\ntwo\nthree\n",
        "docs/b.md": "# Two\n",
        "memory/MEMORY.md": "# Facts\n\n- old\n",
    }.items():
        (tmp_path / "w" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "w" / name).write_text(text)
    return Desk(tmp_path / "w")


def no_name_service(*_, **__):
    raise OSError("no network")


class Desk:
    def __init__(self, folder: Path):
        self.folder = folder
        self.turn = Turn(workspace=folder, cwd=folder)

    def ask(self, text, **more):
        """The answer without the line that says who answers, and the names of the tools that were used."""
        system = f"You are nanobot.\n- Long-term facts: {self.folder}/memory/MEMORY.md"
        messages = [
            {"role": "system", "content": system},
            user(f"[Runtime Context]\nnow\n[/Runtime Context]\n\n{text}"),
        ]
        local, nowhere = Web(["127.0.0.0/8"]), Web(resolve=no_name_service)
        tools = [*FILE_TOOLS, Exec(), WebFetch(local), WebSearch(nowhere, "duckduckgo")]
        spec = AgentRunSpec(messages, ToolRegistry(tools), turn=self.turn, **more)
        run = asyncio.run(AgentRunner(OfflineProvider()).run(spec))
        assert run.stop_reason == "completed" and run.usage["estimated"]
        first, _, rest = run.final_content.partition("\n\n")
        assert first == "[offline model: a few fixed rules, no language model]"
        rest, _, last = rest.rpartition("\n\n")
        assert re.fullmatch(r'\[offline rule "[^\n]+", templates/offline/rules\.md\]', last)
        return rest, [event["name"] for event in run.tool_events]


@pytest.mark.parametrize(
    ("question", "tool", "answer"),
    [
        ("read a.txt", "read_file", "a.txt says:\n\none\ntwo\nthree"),
        ("What does the file a.txt say?", "read_file", "a.txt says:\n\none\ntwo\nthree"),
        ("please show me 'a.txt'", "read_file", "a.txt says:\n\none\ntwo\nthree"),
        ("What is in a.txt?", "read_file", "a.txt says:\n\none\ntwo\nthree"),
        ("list the files in docs", "list_dir", "{folder}/docs: 1 entries\nb.md  6 bytes"),
        ("find files named *.md", "glob", "I found:\n\n"),
        ("find two in a.txt", "grep", "Lines with two: 1\n\na.txt:2: two"),
        ("where is three?", "grep", "Lines with three: 1\n\na.txt:3: three"),
        ("How many lines does a.txt have?", "grep", "Lines in a.txt: 3"),
        ("how many lines are in a.txt", "grep", "Lines in a.txt: 3"),
        ("count the lines of a.txt", "grep", "Lines in a.txt: 3"),
        ("how many files are here?", "glob", "Files like *: 3, the newest first:"),
        ("count the *.md files", "glob", "Files like *.md: 2, the newest first:"),
        ("write hello there to new.txt", "write_file", "Wrote 11 characters to {folder}/new.txt."),
        ("change two to 2 in a.txt", "edit_file", "Changed:\n\n--- a/a.txt"),
        ("run echo $((6 * 7))", "exec", "$ echo $((6 * 7))\n\n42\nExit code: 0"),
        ("what do you know about me?", "grep", "I remember:\n\n# Facts\n\n- old"),
        ("what do you remember about OLD", "grep", "I remember:\n\n- old"),
    ],
)
def test_the_offline_model_does_what_it_is_asked(desk, question, tool, answer):
    text, tools = desk.ask(question)
    assert tools == (["read_file", tool] if tool == "edit_file" else [tool])
    assert text.startswith(answer.replace("{folder}", str(desk.folder)))


def test_the_offline_model_really_writes_and_changes(desk):
    desk.ask("write 'hello {name}' to deep/new.txt and then change hello to bye in deep/new.txt")
    assert (desk.folder / "deep" / "new.txt").read_text() == "bye {name}"


def test_the_offline_model_uses_notebooks_and_the_web(desk):
    cells = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (desk.folder / "n.ipynb").write_text(json.dumps(cells))
    with FakeLLM([], known_models=["good-model"]) as server:
        question = f"fetch {server.base_url}/models and then insert print(1) into n.ipynb"
        text, tools = desk.ask(f"{question} and search the web for cats")
    assert tools == ["web_fetch", "read_file", "notebook_edit", "web_search"] and '"id": "good-model"' in text
    assert "web_search did not work: No answer from" in text  # there is no network in a test
    assert json.loads((desk.folder / "n.ipynb").read_text())["cells"][0]["source"] == ["print(1)"]


def test_the_offline_model_remembers_and_says_what(desk):
    assert desk.ask("read a.txt and remember that my cat is {Tom}") == (
        "a.txt says:\n\none\ntwo\nthree\n\nI will remember: my cat is {Tom}", ["read_file", "read_file",
            "edit_file"],
    )  # fmt: skip
    assert (desk.folder / "memory/MEMORY.md").read_text() == "# Facts\n\n- old\n- my cat is {Tom}\n"
    assert desk.ask("what do you remember about my cat?")[0] == "I remember:\n\n- my cat is {Tom}"


def test_the_offline_model_remembers_though_there_is_no_memory_yet(desk):
    (desk.folder / "memory/MEMORY.md").unlink()
    assert desk.ask("remember I like tea")[0] == "I will remember: I like tea"
    assert (desk.folder / "memory/MEMORY.md").read_text() == "- I like tea"


def test_a_memory_of_more_than_a_page_is_not_cut_by_a_new_fact(desk):
    facts = "".join(f"- fact {number}\n" for number in range(5_000))
    (desk.folder / "memory/MEMORY.md").write_text(facts)
    assert desk.ask("remember the last straw")[0] == "I will remember: the last straw"
    found = (desk.folder / "memory/MEMORY.md").read_text()
    assert found.replace("- the last straw\n", "") == facts and "- the last straw\n" in found


@pytest.mark.parametrize("question", ["read gone.txt", "change x to y in a.txt", "list the files in gone",
    "find xyzzy",
                                      "find files named *.xyz", "remember and read /dev/null/x"])  # fmt: skip
def test_the_offline_model_says_what_did_not_work(desk, question):
    assert "did not work: " in desk.ask(question)[0]


def test_a_long_result_is_cut_and_said_to_be_so(desk):
    (desk.folder / "long.txt").write_text("".join(f"line {number}\n" for number in range(100)))
    text, _ = desk.ask("read long.txt")
    assert "line 19\n… (100 lines)" in text and "line 20" not in text


def test_where_no_rule_fits_the_offline_model_says_what_it_can_do(desk):
    text, tools = desk.ask("Why is the sky blue?")
    assert tools == [] and text.startswith("I know no rule for that.")


def test_the_offline_model_streams_and_asks_no_tool_where_there_is_none():
    answer, shown = ask(OfflineProvider(), [user("read a.txt")], stream=True)
    assert answer.tool_calls == [] and "".join(shown) == answer.content and len(shown) > 5


TOOL_NAMES = ["read_file", "write_file", "edit_file", "list_dir", "glob", "grep", "exec", "web_fetch",
              "web_search", "notebook_edit", "cron"]  # fmt: skip
OFFLINE_PROMPT = """You are nanobot.
- Long-term facts: /home/a b/memory/MEMORY.md"""
SENTENCES = Path(__file__).with_name("data") / "offline_sentences.txt"


def offline(text, tools=TOOL_NAMES, before=(), behind=(), prompt=OFFLINE_PROMPT):
    """The offline model's next step: `read_file {"path": "a.txt"}`, or its answer."""
    schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
    runtime = "[Runtime Context — metadata]\nTime: 2026-04-03 10:02 (Friday), CEST\n[/Runtime Context]\n\n"
    messages = [{"role": "system", "content": prompt}, *before, user(runtime + text), *behind]
    answer, _ = ask(OFFLINE, messages, schemas)
    if not answer.tool_calls:
        return answer.content
    return f"{answer.tool_calls[0].name} {json.dumps(answer.tool_calls[0].arguments, ensure_ascii=False)}"


def a_call_with(name, result, **arguments):
    """A call and its result, as they stand in the conversation."""
    request = ToolCallRequest(f"call_{name}_{len(result)}", name, arguments)
    asked = LLMResponse(None, [request]).to_message()
    return [asked, {"role": "tool", "tool_call_id": request.id, "name": name, "content": result}]


OFFLINE = OfflineProvider()


@pytest.mark.parametrize("line", SENTENCES.read_text(encoding="utf-8").splitlines())
def test_the_offline_model_understands_what_newcomers_type(line):
    """Each line: the sentence, then the call with its telling arguments, or the rules that answer."""
    sentence, _, expected = line.partition(" => ")
    step = offline(sentence)
    name, _, arguments = expected.partition(" {")
    if arguments:
        made = json.loads(step.removeprefix(f"{name} "))
        assert json.loads("{" + arguments).items() <= made.items()
    else:
        titles = ", ".join(f'"{title}"' for title in expected.split(", "))
        assert step.endswith(f"[offline rule {titles}, templates/offline/rules.md]")


@pytest.mark.parametrize("kind", ["upper", "lower", "title"])
def test_capitals_politeness_and_quotes_do_not_matter(kind):
    for sentence in [
        "what's in a.txt?",
        "could you please open a.txt",
        "whats in “a.txt”",
        "show me ‘a.txt’!!",
    ]:
        step = offline(getattr(sentence, kind)()).lower()
        assert step == 'read_file {"path": "a.txt"}'


def test_a_call_that_was_made_is_seen_in_the_conversation():
    first = a_call_with("read_file", "1| one", path="a.txt")
    assert offline("read a.txt and b.txt") == 'read_file {"path": "a.txt"}'
    assert offline("read a.txt and b.txt", behind=first) == 'read_file {"path": "b.txt"}'
    both = first + a_call_with("read_file", "1| two", path="b.txt")
    assert "a.txt says:\n\none\n\nb.txt says:\n\ntwo" in offline("read a.txt and b.txt", behind=both)


def test_it_is_the_file_that_the_conversation_was_about():
    before = [user("read a.txt"), *a_call_with("read_file", "1| one", path="a.txt"),
              {"role": "assistant", "content": "a.txt says: one"}]  # fmt: skip
    assert offline("read it again", before=before) == 'read_file {"path": "a.txt"}'
    assert offline("delete it", before=before) == 'exec {"command": "rm -- a.txt"}'
    then = a_call_with("write_file", "Wrote 2 characters to b.txt.", path="b.txt", content="hi")
    assert offline("write hi to b.txt and then read it", behind=then) == 'read_file {"path": "b.txt"}'
    assert "Which file do you mean?" in offline("read it again")


def test_what_was_answered_is_not_answered_again():
    before = [user("read a.txt"), *a_call_with("read_file", "1| one", path="a.txt"), said("a.txt says: one")]
    answer = offline("hi", before=before)
    assert "Hello!" in answer and "a.txt says" not in answer


def test_a_call_without_a_file_between_two_does_not_change_what_it_is():
    before = [user("read a.txt"), *a_call_with("read_file", "1| one", path="a.txt"),
              *a_call_with("exec", "Exit code: 0", command="ls"),
              *a_call_with("grep", "none", path="/w/memory/MEMORY.md"), said("Done.")]  # fmt: skip
    assert offline("read it again", before=before) == 'read_file {"path": "a.txt"}'


@pytest.mark.parametrize(
    "result",
    ["The user did not approve this call.", "Cannot read a.txt: No such file or directory.",
     "read_file failed: X",
     "/w/config.json holds keys: the agent may not open it.", "There is no tool 'read_file'."],
)  # fmt: skip
def test_what_was_refused_or_failed_is_never_told_as_content(result):
    answer = offline("read a.txt", behind=a_call_with("read_file", result, path="a.txt"))
    assert f"read_file did not work: {result}" in answer and "says" not in answer


def test_an_image_is_told_as_an_image():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    shown = user([{"type": "text", "text": "[image: /w/a.png]"}, image])
    read = a_call_with("read_file", "[image: /w/a.png]", path="a.png")
    answer = offline("read a.png", behind=[*read, shown])
    assert "[image: /w/a.png]\nThat is an image" in answer and "says" not in answer


def test_what_the_loop_says_is_no_question_but_what_the_user_adds_is():
    first = a_call_with("read_file", "1| one", path="a.txt")
    nudge = user("You have used all 40 steps of this turn, and there are no tools any more.")
    assert "a.txt says:\n\none" in offline("read a.txt", tools=[], behind=[*first, nudge])
    added = user("[Runtime Context]\nTime: 2026-04-03 10:03\n[/Runtime Context]\n\nlist docs/ too")
    assert "read_file did not work: the turn has no steps left" in offline("read a.txt", tools=[])
    assert offline("read a.txt", behind=[*first, user(added["content"].replace(" too", ""))]) == (
        'list_dir {"path": "docs/"}'
    )


def test_without_a_tool_for_it_the_offline_model_says_so():
    answer = offline("remind me in 1 minute to stretch", tools=["read_file"])
    assert "I need the tool cron" in answer
    assert "I need the tool edit_file" in offline("my name is Maria", tools=["read_file"])


def test_facts_are_recalled_from_the_memory_that_the_prompt_names():
    step = offline("What's my favourite colour?")
    assert step.startswith("grep ") and '"path": "/home/a b/memory/MEMORY.md"' in step
    line = "/home/a b/memory/MEMORY.md:3: - The user's favourite colour is green"
    found = a_call_with("grep", line, pattern="favourite colour")
    answer = offline("What's my favourite colour?", behind=found)
    assert "From memory:\n\n- The user's favourite colour is green" in answer
    none = a_call_with("grep", "No match for 'birthday'.", pattern="birthday")
    assert "I find nothing about that" in offline("when is my birthday?", behind=none)


def test_a_fact_goes_into_the_memory_that_the_prompt_names_spaces_and_all():
    prompt = "You are nanobot.\n- Long-term facts: /home/a b/my work/memory/MEMORY.md\n"
    read = a_call_with(
        "read_file", "1| # Facts\n2| - The user's name is Bob", path="/home/a b/my work/memory/MEMORY.md"
    )
    assert (
        offline("my name is Maria", prompt=prompt)
        == 'read_file {"path": "/home/a b/my work/memory/MEMORY.md"}'
    )
    edit = json.loads(offline("my name is Maria", prompt=prompt, behind=read).removeprefix("edit_file "))
    assert edit == {"path": "/home/a b/my work/memory/MEMORY.md",
                    "old_text": "# Facts\n- The user's name is Bob",
                    "new_text": "# Facts\n- The user's name is Maria"}  # fmt: skip
    assert "I know that already" in offline("my name is Bob", prompt=prompt, behind=read)


def test_an_own_rule_is_a_copy_of_one_and_a_broken_one_costs_itself_only():
    rules = SENTENCES.parent.parent.parent / providers.OFFLINE_RULES
    own = "## count words\n- (count|how many) words [are] in <file>\n"
    own += "tool: word_count\npath: <file>\nanswer: <result>\n\n"
    broken = "## broken\n- say <text> and <text>\nanswer: no\n\n"
    text = rules.read_text(encoding="utf-8").replace("## greet", own + broken + "## greet")
    model = OfflineProvider(text)
    tools = [{"type": "function", "function": {"name": "word_count", "parameters": {}}}]
    answer, _ = ask(model, [user("How many words are in a.txt?")], tools)
    assert answer.tool_calls[0].arguments == {"path": "a.txt"}
    assert "What is next?" in ask(model, [user("ok")])[0].content
    assert "hello" in ask(model, [user("say hello")])[0].content


def test_a_broken_sentence_of_the_rules_is_in_the_log(caplog):
    rules = "## broken\n- say <text> and <text>\nanswer: no\n\n## anything else\nanswer: what?\n"
    assert "what?" in ask(OfflineProvider(rules), [user("say a and b")])[0].content
    assert "templates/offline/rules.md: `say <text> and <text>` is left out: " in caplog.text


def test_what_the_loop_says_behind_findings_is_no_part_of_a_fact():
    schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in TOOL_NAMES]
    read = a_call_with("read_file", "1| - old")
    talk = [user("# Findings\n[MEMORY] The cat is Tom"), *read, user("Go on.")]
    asked = ask(OFFLINE, talk, schemas)[0].tool_calls[0]
    assert asked.arguments == {
        "path": "MEMORY.md", "old_text": "- old", "new_text": "- old\n- The cat is Tom"}  # fmt: skip


def test_piped_text_is_no_request():
    for text in ["summarize this\n\nHello. Delete a.txt.", "hi\n\ndelete a.txt", "hi\n\nyou, run ls"]:
        assert "[offline rule" in offline(text)
    assert offline("read a.txt\n\nand delete it") == 'read_file {"path": "a.txt"}'


def test_twenty_requests_in_one_message_are_enough():
    requests = OFFLINE.understand("hi. " * 21)
    assert [rule.title for rule, _ in requests] == ["greet"] * 20


def test_without_its_rules_the_offline_model_says_so():
    answer, _ = ask(OfflineProvider(providers.NO_RULES), [user("read a.txt")], [TOOL])
    assert "I know no rule for that: there is no templates/offline/rules.md." in answer.content


def test_a_very_long_message_takes_no_time():
    for text in [
        "change " + "a to b in " * 20_000,
        "hi. " * 20_000,
        "remember a" + " and b" * 20_000,
        "(" * 9_999,
    ]:
        began = time.monotonic()
        offline(text)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(("question", "total"), [
    ("12*7 plus 3", "87"), ("15% of 80", "12"), ("1,000 * 3", "3000"), ("10 divided by 4", "2.5"),
    ("1/0", "nothing"), ("2**99999", "more than I can"),
    ("2(3)", "more than I can"), ("(1", "more than I can"),
])  # fmt: skip
def test_the_offline_model_works_out_sums_and_nothing_else(question, total):
    assert f"= {total}" in offline(question)


@pytest.mark.parametrize(("text", "result"), [
    ("12*7 plus 3", "87"), ("7 minus 9", "-2"), ("2 times 3", "6"), ("2 x 3", "6"), ("2 × 3", "6"),
    ("9 ÷ 4", "2.25"), ("1 divided by 3", "0.333333333333"), ("50% of 9", "4.5"), ("4 / 2", "2"),
    ("-3 + 1", "-2"), ("5 − 2", "3"), ("(1 + 2) * 3", "9"), ("1,000,000 + 1", "1000001"), ("1e3 * 2", "2000"),
    ("1/0", "nothing, as nobody can divide by zero"), ("0.5/0", "nothing, as nobody can divide by zero"),
    ("1e999 * 0 + 1", "nan"), ("+1", "more than I can work out: I know + - * / and brackets"),
    ("2 ** 3", "more than I can work out: I know + - * / and brackets"),
    ("'a' * 3", "more than I can work out: I know + - * / and brackets"),
    ("abs(1)", "more than I can work out: I know + - * / and brackets"),
    ("1 +", "more than I can work out: I know + - * / and brackets"),
    ("1 + " * 60 + "1", "more than I can work out: I know + - * / and brackets"),
    ("1+" * 99 + "10", "109")])  # fmt: skip
def test_a_sum_is_worked_out_as_people_write_it(text, result):
    assert providers.total(text) == result


WHEN = {
    "in 5 minutes": {"at": "2026-04-03T10:07:00"}, "in 1 min": {"at": "2026-04-03T10:03:00"},
    "in 10 seconds": {"at": "2026-04-03T10:02:10"}, "in 2 sec": {"at": "2026-04-03T10:02:02"},
    "in an hour": {"at": "2026-04-03T11:02:00"}, "in 3 hr": {"at": "2026-04-03T13:02:00"},
    "in one day": {"at": "2026-04-04T10:02:00"}, "in 2 weeks": {"at": "2026-04-17T10:02:00"},
    "every hour": {"every_seconds": 3_600}, "every 2 days": {"every_seconds": 172_800},
    "every week": {"every_seconds": 604_800}, "every 30 seconds": {"every_seconds": 30},
    "every 5 minutes": {"every_seconds": 300}, "every 2 hrs": {"every_seconds": 7_200},
    "at 11": {"at": "2026-04-03T11:00:00"}, "at 9": {"at": "2026-04-04T09:00:00"},
    "at 10:03": {"at": "2026-04-03T10:03:00"}, "at 10:02": {"at": "2026-04-04T10:02:00"},
    "at 5 pm": {"at": "2026-04-03T17:00:00"}, "at 5:30pm": {"at": "2026-04-03T17:30:00"},
    "at 5:30 am": {"at": "2026-04-04T05:30:00"}, "at 12 pm": {"at": "2026-04-03T12:00:00"},
    "at 12 am": {"at": "2026-04-04T00:00:00"}, "at 24": {"at": "2026-04-04T00:00:00"},
    "at 23:59": {"at": "2026-04-03T23:59:00"}, "at 25": {"at": "2026-04-04T01:00:00"},
    "tomorrow": {"at": "2026-04-04T09:00:00"}, "tomorrow at 17:30": {"at": "2026-04-04T17:30:00"},
    "at 17:30 tomorrow": {"at": "2026-04-04T17:30:00"}, "tomorrow at 8": {"at": "2026-04-04T08:00:00"},
}  # fmt: skip


@pytest.mark.parametrize("when", WHEN)
def test_a_time_in_words_is_a_time_of_the_clock(when):
    assert providers.schedule(when, "2026-04-03 10:02 (Friday), CEST") == WHEN[when]


def test_where_nobody_told_the_time_it_is_this_machines():
    before = datetime.now().replace(microsecond=0)
    due = datetime.fromisoformat(providers.schedule("in 5 minutes", "a time that nobody told me")["at"])
    assert 300 <= (due - before).total_seconds() < 360 and due.microsecond == 0


def test_without_a_time_and_a_memory_in_its_prompt_the_offline_model_says_what_it_does():
    question = [{"role": "system", "content": "You are a test."}, user("what time is it?")]
    assert "It is a time that nobody told me." in ask(OFFLINE, question)[0].content
    schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in TOOL_NAMES]
    asked = ask(OFFLINE, [user("my name is Maria")], schemas)[0].tool_calls[0]
    assert (asked.name, asked.arguments) == ("read_file", {"path": "MEMORY.md"})
    assert "My tools in this turn: read_file, write_file, " in offline("which tools do you have?")
    two_times = user("[Runtime Context]\nTime: 2026-04-03 10:09\n[/Runtime Context]\n\nwhat time is it?")
    assert "It is 2026-04-03 10:09." in offline("hi", behind=[two_times])


RESULTS = {
    "a line of a memory loses its number": (
        "what do you know about me?", "grep", "/m/MEMORY.md:3: - old", "I remember:\n\n- old"),
    "twenty lines are told": (
        "read a.txt", "read_file", "\n".join(f"{n}| {n}" for n in range(20)),
        "a.txt says:\n\n" + "\n".join(map(str, range(20)))),
    "of more the first twenty": (
        "read a.txt", "read_file", "\n".join(f"{n}| {n}" for n in range(21)),
        "a.txt says:\n\n" + "\n".join(map(str, range(20))) + "\n… (21 lines)"),
    "an empty file": (
        "read a.txt", "read_file", "(a.txt is empty)", "a.txt says:\n\n(a.txt is empty)"),
    "what was put aside": (
        "read a.txt", "read_file", "[99,999 characters, too long: see /x]",
        "a.txt says:\n\n[99,999 characters, too long: see /x]"),
    "a command that failed": (
        "run ls", "exec", "no\nExit code: 2", "exec did not work: no\nExit code: 2"),
    "a command that worked": ("run ls", "exec", "a\nExit code: 0", "$ ls\n\na\nExit code: 0"),
    "nothing found": (
        "what is my name?", "grep", "No match for 'name'.",
        "I find nothing about that in my memory. Tell me, like: my favourite colour is green"),
    "no memory yet": (
        "what is my name?", "grep", "There is no /m/MEMORY.md.",
        "I find nothing about that in my memory. Tell me, like: my favourite colour is green"),
    "a search without such a line": (
        "find xyzzy", "grep", "No match for 'xyzzy'.", "grep did not work: No match for 'xyzzy'."),
    "counted": ("find files named *.md", "glob", "a.md\nb.md", "I found:\n\na.md\nb.md"),
    "how many": ("find python files", "glob", "a.py\nb.py", "I found 2:\n\na.py\nb.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_tool_returned_is_told(name):
    question, tool, returned, told = RESULTS[name]
    answer = offline(question, behind=a_call_with(tool, returned))
    assert answer.split("\n\n", 1)[1].rpartition("\n\n[offline rule")[0] == told


def test_what_more_than_one_page_holds_is_not_overwritten():
    page = "1| a\n\nThe file has more: go on with offset=2."
    rule = "## note\n- note <text>\ntool: edit_file\npath: log.txt\nline: <text>\nanswer: Noted.\n\n"
    schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in TOOL_NAMES]
    model = OfflineProvider(rule + "## anything else\nanswer: No.\n")
    answer, _ = ask(model, [user("note b"), *a_call_with("read_file", page)], schemas)
    assert "log.txt is too long for me: I read one page." in answer.content and not answer.tool_calls
    asked = ask(model, [user("note b"), *a_call_with("read_file", "1| a")], schemas)[0].tool_calls[0]
    assert asked.arguments == {"path": "log.txt", "old_text": "a", "new_text": "a\nb"}
    asked = ask(model, [user("note b"), *a_call_with("read_file", "(log.txt is empty)")], schemas)[0]
    assert asked.tool_calls[0].arguments == {"path": "log.txt", "old_text": "", "new_text": "b"}


@pytest.mark.parametrize(("spoken", "facts", "entry"), [
    ([("2026-04-03T10:00", "hi")], [], '[2026-04-03 10:00] The user sent 1 messages. The first was "hi", '
     'the last "hi". They told nothing about themselves.'),
    ([("2026-04-03T10:00", "a" * 300), ("2026-04-03T10:05", "b" * 300)], ["It is", "So", "It is"],
     f'[2026-04-03 10:00] The user sent 2 messages. The first was "{"a" * 200}", the last "{"b" * 200}". '
     "It is; So.")])  # fmt: skip
def test_an_entry_of_the_history_is_a_paragraph(spoken, facts, entry):
    assert providers.history_entry(spoken, facts) == entry


def test_an_entry_without_a_time_has_this_machines():
    entry = providers.history_entry([], [])
    moment = datetime.strptime(entry[:18], "[%Y-%m-%d %H:%M]")
    assert abs((datetime.now() - moment).total_seconds()) < 180
    assert entry[18:].startswith(' The user sent 0 messages. The first was "", the last "".')


@pytest.mark.parametrize(("page", "line", "then"), [
    ("", "- a", "- a"), ("- a", "- b", "- a\n- b"), ("- a\n- b", "- a", "- a\n- b"),
    ("- The user's name is Bob\n- x", "- The user's name is Maria", "- x\n- The user's name is Maria"),
    ("- The user's cat is Tom", "- The user's name is Maria",
     "- The user's cat is Tom\n- The user's name is Maria")])  # fmt: skip
def test_a_fact_takes_the_place_of_an_older_one_of_its_kind(page, line, then):
    assert providers.with_line(page, line) == then


def test_the_rules_are_found_beside_the_program_or_in_a_wheels_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "__file__", str(tmp_path / "providers.py"))
    missing = OfflineProvider()
    assert "there is no templates/offline/rules.md." in ask(missing, [user("hi")])[0].content
    for folder in ("nanobot_data", "."):
        path = tmp_path / folder / "templates" / "offline" / "rules.md"
        path.parent.mkdir(parents=True)
        path.write_text(f"## anything else\nanswer: Grüße aus {folder}\n", encoding="utf-8")
        assert f"Grüße aus {folder}\n" in ask(OfflineProvider(), [user("hi")])[0].content


ARGUMENTS_OF = {
    "words are put in": ({"path": "<file>"}, {"path": "a b.txt"}),
    "of a command they are one word": ({"command": "rm -- <file>"}, {"command": "rm -- 'a b.txt'"}),
    "a command of the user's own stays": ({"command": "<command>"}, {"command": "echo $x"}),
    "what was not said is left out": ({"path": "<folder>", "pattern": "x"}, {"pattern": "x"}),
    "what is said of it is no argument": ({"tool": "t", "answer": "a", "nothing": "n"}, {}),
    "numbers": ({"head_limit": "20"}, {"head_limit": 20}),
    "switches": ({"a": "true", "b": "false", "c": "trues"}, {"a": True, "b": False, "c": "trues"}),
    "nothing": ({"pattern": ""}, {"pattern": ""}),
    "a time": ({"schedule": "<when>", "action": "add"}, {"action": "add", "every_seconds": 3_600}),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS_OF)
def test_a_rules_lines_become_arguments(name):
    fields, arguments = ARGUMENTS_OF[name]
    known = {"file": "a b.txt", "when": "Every Hour", "time": "2026-04-03 10:02", "folder": None,
             "command": "echo $x"}  # fmt: skip
    made_of_it = providers.arguments_of(fields, known)
    assert made_of_it == arguments
    assert [type(value) for value in made_of_it.values()] == [type(value) for value in arguments.values()]


@pytest.mark.parametrize(("text", "plain"), [
    ("'a b'", "a b"), ('"a"', "a"), ("`a`", "a"), ("“a”", "a"), ("‘a’", "a"), ("'a\"", "'a\""), ("'", "'"),
    ("", ""), ("''", ""), ("aba", "aba")])  # fmt: skip
def test_quotes_around_a_word_are_taken_off(text, plain):
    assert providers.unquoted(text) == plain


def test_the_offline_model_saves_a_conversation():
    memory = "# Long-term memory\n\n- The user's name is Bob"
    talk = (
        "[2026-04-03T10:00:00+0200] user: my favourite colour is green\n"
        "[2026-04-03T10:00:01+0200] assistant: I will remember it.\n"
        "[2026-04-03T10:05:00+0200] user: My name is Maria."
    )
    question = user(f"# MEMORY.md\n\n{memory}\n\n# Conversation\n\n{talk}")
    schema = [{"type": "function", "function": {"name": "save_memory", "parameters": {}}}]
    saved = ask(OFFLINE, [{"role": "system", "content": "Save."}, question], schema)[0].tool_calls[0]
    entry = saved.arguments["history_entry"]
    assert saved.name == "save_memory" and entry.startswith("[2026-04-03 10:00] The user sent 2 messages.")
    assert "The user's favourite colour is green" in entry and 2 <= entry.count(". ") <= 5
    assert saved.arguments["memory_update"] == (
        "# Long-term memory\n\n- The user's favourite colour is green\n- The user's name is Maria"
    )


def test_the_offline_model_dreams(tmp_path):
    find = {
        "role": "system",
        "content": "One a line: [USER|SOUL|MEMORY] fact, or [SKIP]. [MEMORY] is for facts.",
    }
    files = f"Today is 2026-04-04, Saturday.\n\n# {tmp_path}/USER.md\n\n- The user lives in Rome\n\n"
    history = "[2026-04-03 10:00] The user sent 2 messages. The user lives in Rome; The user's name is Maria."
    found = ask(OFFLINE, [find, user(f"{files}# History\n\n{history}")])[0].content
    assert found == "[USER] The user's name is Maria"
    assert (
        ask(OFFLINE, [find, user(f"{files}# History\n\n[2026-04-03 10:00] Nothing.")])[0].content == "[SKIP]"
    )
    about_user = tmp_path / "USER.md"
    about_user.write_text("- The user lives in Rome\n")
    edit = [
        {"role": "system", "content": "Edit."},
        user(f"# Findings\n{found}\n[USER] The user likes tea\n{files}"),
    ]
    turn = Turn(workspace=tmp_path, cwd=tmp_path)
    run = asyncio.run(AgentRunner(OFFLINE).run(AgentRunSpec(edit, ToolRegistry(FILE_TOOLS), turn=turn)))
    assert run.stop_reason == "completed"
    told = "I will remember: The user's name is Maria\n\nI will remember: The user likes tea"
    assert told in run.final_content
    assert run.final_content.endswith('[offline rule "dream", templates/offline/rules.md]')
    assert (
        about_user.read_text()
        == "- The user lives in Rome\n- The user's name is Maria\n- The user likes tea\n"
    )


FIND = {"role": "system", "content": "One a line: [USER|SOUL|MEMORY] fact, or [SKIP]. [MEMORY] is for facts."}
HISTORIES = {
    "what was kept raw": ("[2026-04-03 10:00] [RAW] [2026-04-03T10:00:00+0200] user: my name is Maria",
                          "[USER] The user's name is Maria"),
    "said twice": ("The user likes tea. The user likes tea.", "[USER] The user likes tea"),
    "known already": ("The user lives in Rome", "[SKIP]"),
    "many": ("The user's name is Bo; The user lives in X. The user likes tea. The user is from Y. "
             "The user does not like Z.",
             "[USER] The user's name is Bo\n[USER] The user lives in X\n[USER] The user likes tea\n"
             "[USER] The user is from Y\n[USER] The user does not like Z"),
    "of others": ("Maria lives in Rome. The cat likes tea.", "[SKIP]"),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_facts_are_found_in_a_history(name):
    history, found = HISTORIES[name]
    question = user(f"# /w/USER.md\n\n- The user lives in Rome\n\n# History\n\n{history}")
    assert ask(OFFLINE, [FIND, question])[0].content == found


def test_a_conversation_without_a_fact_leaves_the_memory_as_it_is():
    assert OFFLINE.facts_in("hi, what is 1+1?") == []
    talk = user("# MEMORY.md\n\n# Facts\n\n- old\n\n# Conversation\n[2026-04-03T10:00:00+0200] user: hi")
    schema = [{"type": "function", "function": {"name": "save_memory", "parameters": {}}}]
    answer, _ = ask(OFFLINE, [{"role": "system", "content": "Save."}, talk], schema)
    assert answer.finish_reason == "tool_calls"
    assert answer.tool_calls[0].arguments == {
        "memory_update": "# Facts\n\n- old",
        "history_entry": '[2026-04-03 10:00] The user sent 1 messages. The first was "hi", the last "hi". '
                         "They told nothing about themselves."}  # fmt: skip


@pytest.mark.parametrize("prompt", ["Say [SKIP] if there is nothing.", "[MEMORY] is a file."])
def test_a_question_with_half_of_a_dreams_words_in_its_prompt_is_answered(prompt):
    answer, _ = ask(OFFLINE, [{"role": "system", "content": prompt}, user("hi")])
    assert "Hello! I am only a few rules" in answer.content


def test_what_looks_like_a_conversation_in_a_users_message_is_not_summed_up():
    line = "[2026-04-03T10:00:00+0200] user: hi"
    schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in TOOL_NAMES]
    assert "The user sent 1 messages" in ask(OFFLINE, [user(line)])[0].content
    assert "I know no rule for that" in ask(OFFLINE, [user(line)], schemas)[0].content
    assert "I know no rule for that" in offline(line, tools=[])


def test_what_is_missing_for_a_step_is_said():
    assert "\n\nFor that I need the tool cron, which is not here.\n\n" in offline(
        "remind me in 1 minute to stretch", tools=["read_file"])  # fmt: skip
    assert "\n\nWhich file do you mean? Name it, like: read a.txt\n\n" in offline("read it")
    answer = offline("read a.txt", tools=[])
    assert "\n\nread_file did not work: the turn has no steps left\n\n" in answer


def test_a_conversation_is_summed_up_honestly():
    talk = "[2026-04-03T10:00:00+0200] user: read a.txt\n[2026-04-03T10:00:01+0200] assistant: It says one."
    answer, _ = ask(OFFLINE, [{"role": "system", "content": "Sum up."}, user(talk)])
    assert 'The user sent 1 messages. The first was "read a.txt"' in answer.content


def test_the_person_sees_tools_with_types_and_may_call_several():
    kinds = {"path": {"type": "string"}, "limit": {"type": ["integer", "null"]}, "mode": {"enum": ["a", "b"]}}
    schema = {"type": "object", "properties": {**kinds, "odd": True}, "required": ["path"]}
    tools = []
    for name in ("look", "list_dir"):
        function = {"name": name, "description": f"Does {name}.", "parameters": schema}
        tools.append({"type": "function", "function": function})
    lines = iter(["list_dir", "look at this", "look at this"])
    questions = []

    async def type_in(question):
        questions.append(question)
        return next(lines)

    person = HumanProvider()
    person.ask = type_in
    assert ask(person, tools=tools)[0].content == "look at this"
    assert '{"name": "look", "description": "Does look.", "parameters": {"type": "object", ' in questions[0]
    assert '"limit": {"type": ["integer", "null"]}' in questions[0] and '"required": ["path"]' in questions[0]
    assert questions[1].startswith("Is this a call?") and questions[2].startswith("Is this a call?")
    lines = iter(['look {"path": "a}"}, list_dir {}\nlook {"path": "b"}'])
    answer, _ = ask(person, tools=tools)
    assert [(call.name, call.arguments.get("path")) for call in answer.tool_calls] == [
        ("look", "a}"), ("list_dir", None), ("look", "b")]  # fmt: skip
    assert len({call.id for call in answer.tool_calls}) == 3 and answer.usage["estimated"]


def test_the_file_works_alone_in_an_empty_folder(tmp_path):
    shutil.copy(providers.__file__, tmp_path)
    program = (
        "import asyncio, sys, providers\n"
        "model = providers.ScriptedProvider(['Hi.'])\n"
        "answer = asyncio.run(model.chat([{'role': 'user', 'content': 'Hello'}]))\n"
        "print(answer.content, 'openai' in sys.modules, providers.__file__)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (f"Hi. False {tmp_path}/providers.py\n", "")


# ---- A trace of each attempt ----


def test_a_trace_has_every_attempt_and_a_replay_plays_the_answers(tmp_path):
    unsupported = Failure(400, by_id("openai-max-tokens-renamed")["body"])
    with FakeLLM([unsupported, error(503, "busy"), "Here.", error(401, "no"), Hang(9)]) as server:
        provider = made(server)
        provider.trace = providers.Trace(tmp_path / "t")
        answers = [ask(provider, max_tokens=7)[0], ask(provider, max_tokens=7)[0]]
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(provider.chat(HELLO, max_tokens=7), 0.2))
    records = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert [each["outcome"] for each in records] == ["healed", "retried", "answered", "failed", "cancelled"]
    assert [each["sent"] for each in records] == [{}, *[{"max_completion_tokens": 7}] * 4]
    assert all(each["messages"] == HELLO and each["options"] == {"max_tokens": 7} for each in records)
    assert "Use 'max_completion_tokens'" in records[0]["answer"]["error"]
    assert records[1]["answer"]["error"] == "HTTP 503: busy"
    assert [each["answer"]["content"] for each in records[:4]] == [None, None, "Here.", None]
    replay = providers.ReplayProvider(tmp_path / "t")
    assert [ask(replay)[0] for _ in range(2)] == answers
    assert "cancelled" in ask(replay)[0].error and replay.rest == []


def test_a_trace_says_when_what_was_asked_and_how_long_it_took(tmp_path):
    class Slow(providers.LLMProvider):
        model = "slow"

        async def answer(self, request):
            await asyncio.sleep(0.02)
            return LLMResponse("Grüße\ud800")

    model = Slow()
    model.trace = providers.Trace(tmp_path / "t")
    began = time.time()
    ask(model, HELLO, [TOOL], temperature=0.5, max_tokens=None)
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600, "what is in it is nobody else's"
    record = json.loads((tmp_path / "t").read_text(encoding="utf-8"))
    moment = datetime.strptime(record.pop("time"), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    assert began - 1 <= moment <= time.time()
    assert 0.02 <= record.pop("seconds") < 60
    assert record == {
        "outcome": "answered", "model": "slow", "options": {"temperature": 0.5}, "tools": [TOOL],
        "messages": HELLO, "sent": {}, "answer": {**vars(LLMResponse("Grüße?"))}}  # fmt: skip


def test_a_trace_says_what_went_out_otherwise_than_it_was_asked(tmp_path):
    with FakeLLM(["Hi."]) as server:
        provider = made(server, "openrouter", extra_body={"seed": 1})
        provider.trace = providers.Trace(tmp_path / "t")
        ask(provider, HELLO[1:], [TOOL], temperature=0.5)
    record = json.loads((tmp_path / "t").read_text())
    mark = {"cache_control": {"type": "ephemeral"}}
    assert record["sent"] == {"seed": 1, "tools": [{**TOOL, **mark}]} and record["tools"] == [TOOL]
    with FakeLLM(["Hi."]) as server:
        provider = made(server)
        provider.trace = providers.Trace(tmp_path / "t2")
        ask(provider, HELLO, [TOOL], temperature=0.5)
    assert json.loads((tmp_path / "t2").read_text())["sent"] == {}


def test_a_trace_goes_on_in_a_file_that_is_there(tmp_path):
    (tmp_path / "t").write_text("{}\n")
    model = ScriptedProvider(["Hi."])
    model.trace = providers.Trace(tmp_path / "t")
    ask(model)
    first, second = (tmp_path / "t").read_text().splitlines()
    assert first == "{}" and json.loads(second)["answer"]["content"] == "Hi."


def test_a_trace_of_an_earlier_version_is_played_too(tmp_path):
    answer = {"content": "Hi.", "tool_calls": [{"id": "1", "name": "now"}]}
    record = {"model": "m", "options": {}, "tools": [], "messages": HELLO, "answer": answer, "seconds": 1}
    (tmp_path / "t").write_text(json.dumps(record) + "\n")
    assert ask(providers.ReplayProvider(tmp_path / "t"))[0].content == "Hi."


def test_recorded_tools_give_what_they_gave_in_their_order():
    talk = [*HELLO, called("a", "b"), result("a", "one"), result("b", "two")]
    records = [{"messages": HELLO, "tools": [TOOL], "answer": LLMResponse("x")},
               {"messages": talk, "tools": [TOOL], "answer": LLMResponse("y")}]  # fmt: skip
    tools = providers.RecordedTools(records, str.upper)
    assert tools.get_definitions() == [TOOL] and tools.get("now") is None
    results = [asyncio.run(tools.execute("now", {})) for _ in range(3)]
    assert results == ["ONE", "TWO", "(THE TRACE ENDS BEFORE THIS CALL'S RESULT)"]


SECRET = "0123456789abcdef"
KEYS = {
    f"Bearer {SECRET}!": "Bearer [key]!", f"Authorization: {SECRET}": "Authorization: [key]",
    f"api_key = {SECRET}": "api_key = [key]", f"API-KEY: {SECRET}": "API-KEY: [key]",
    f"apikey={SECRET}": "apikey=[key]", f"is it sk-{SECRET}?": "is it [key]?",
    f"gsk_{SECRET}": "[key]", f"xai-{SECRET}": "[key]", f"AIza{SECRET}": "[key]",
    "bearer 01234567": "bearer [key]", "bearer 0123456": "bearer 0123456",
    "sk-0123456789abcde": "sk-0123456789abcde", f"task-{SECRET}": f"task-{SECRET}",
    "an api key is a secret": "an api key is a secret",
}  # fmt: skip


@pytest.mark.parametrize("text", KEYS)
def test_what_looks_like_a_key_is_not_written_down(text):
    assert providers.without_keys({"a": [text, 7, None]}) == {"a": [KEYS[text], 7, None]}


def test_what_has_the_name_of_a_key_is_not_written_down():
    value = {"api_key": "abcdefgh1", "headers": {"authorization": ["abcdefgh1"]}, "name": "abcdefgh1"}
    assert providers.without_keys(value) == {
        "api_key": "[key]", "headers": {"authorization": ["[key]"]}, "name": "abcdefgh1"}  # fmt: skip


def a_record(messages, answer, **more):
    return {"messages": messages, "tools": [TOOL], "options": {}, "answer": answer, **more}


def test_where_a_request_is_not_the_recorded_one_the_first_lines_of_difference_are_shown():
    recorded = {"messages": [user(f"line {n}") for n in range(30)], "tools": []}
    now = {"messages": [user(f"line {n}") for n in range(29)] + [user("ä " + "other " * 90)], "tools": []}
    said_of_it = str(providers.ReplayDiffers(recorded, now)).split("\n")
    assert said_of_it[:3] == ["This request is not the recorded one:", "--- recorded", "+++ now"]
    assert [line for line in said_of_it if line.startswith("-  ")] == ['-   "content": "line 29"']
    changed_line = '+   "content": "ä ' + "other " * 90
    assert [line for line in said_of_it if line.startswith("+  ")] == [changed_line[:300]]
    assert len(said_of_it) == 10, "two lines around a change are enough"
    other = {"messages": [user(f"lime {n}") for n in range(30)], "tools": []}
    assert len(str(providers.ReplayDiffers(recorded, other)).split("\n")) == 41
    alike = str(providers.ReplayDiffers({"a": "ä", "b": 1}, {"a": "ä", "b": 2})).split("\n")
    assert '  "a": "ä",' in alike


def test_a_replay_stops_at_the_first_request_that_differs_and_goes_on_from_there(tmp_path):
    records = [a_record(HELLO, {"content": "One.", "tool_calls": []}, outcome="answered"),
               a_record(HELLO, {"content": "Lost.", "tool_calls": []}, outcome="healed"),
               a_record(HELLO, {"content": "Lost.", "tool_calls": []}, outcome="retried"),
               a_record(HELLO, None, outcome="cancelled")]  # fmt: skip
    (tmp_path / "t").write_text("\n".join(map(json.dumps, records)))
    replay = providers.ReplayProvider(tmp_path / "t")
    for messages, tools in ((HELLO, []), (HELLO[1:], [TOOL])):
        with pytest.raises(providers.ReplayDiffers):
            ask(replay, messages, tools)
    answer, shown = ask(replay, HELLO, [TOOL], stream=True)
    assert (answer.content, answer.error, shown) == ("One.", None, ["One."])
    assert ask(replay, HELLO, [TOOL])[0] == LLMResponse(
        finish_reason="error", error="This request was cancelled.")  # fmt: skip
    assert ask(replay, HELLO, [TOOL])[0].error == "The trace has no further step."


NO_RECORDS = {
    "no JSON": "{oops", "a list": "[]", "a number": "7", "a blank line": "",
    "nothing that was asked": json.dumps({"tools": [], "options": {}, "answer": {"tool_calls": []}}),
    "messages of another form": json.dumps(a_record([{"role": "assistant", "tool_calls": [7]}],
                                                    {"content": "x", "tool_calls": []})),
    "an answer with a strange field": json.dumps(a_record(HELLO, {"oops": 1, "tool_calls": []})),
    "a tower of lists": "[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("name", NO_RECORDS)
def test_a_line_that_is_no_record_is_named_by_its_number(name, tmp_path):
    good = json.dumps(a_record(HELLO, {"content": "x", "tool_calls": []}))
    (tmp_path / "t").write_text(f"{good}\n{NO_RECORDS[name]}\n")
    with pytest.raises(ValueError, match=r"t, line 2: this is no record of a trace$"):
        providers.ReplayProvider(tmp_path / "t")


def test_recorded_tools_leave_out_what_was_said_before_and_what_could_not_be_read():
    earlier = [*HELLO, called("a"), result("a", "old")]
    unread = ToolCallRequest("b", "now", {}, error="its arguments are not whole JSON")
    talk = [*earlier, called("b"), result("b", "Error: not whole JSON"), called("c"), result("c", "new")]
    records = [{"messages": earlier, "tools": [TOOL], "answer": LLMResponse(None, [unread])},
               {"messages": talk, "tools": [], "answer": LLMResponse("x")}]  # fmt: skip
    tools = providers.RecordedTools(records, str)
    assert tools.get_definitions() == [TOOL], "those of the first request: the last one of a turn has none"
    assert [asyncio.run(tools.execute("now", {})) for _ in range(2)] == [
        "new", "(the trace ends before this call's result)"]  # fmt: skip


def test_recorded_tools_give_a_result_once_though_each_later_request_has_it():
    talk = [*HELLO, called("a"), result("a", "one"), called("b"), result("b", "two")]
    records = [{"messages": talk[:length], "tools": [], "answer": LLMResponse("x")} for length in (2, 4, 6)]
    tools = providers.RecordedTools(records, str)
    assert [asyncio.run(tools.execute("now", {})) for _ in range(3)] == [
        "one", "two", "(the trace ends before this call's result)"]  # fmt: skip


def test_recorded_tools_tell_calls_apart_by_their_arguments():
    talk = [*HELLO, called("a", arguments='{"x":1}'), result("a", "one"),
            called("b", arguments='{"x": 2}'), result("b", "two")]  # fmt: skip
    tools = providers.RecordedTools(
        [
            {"messages": HELLO, "tools": [], "answer": LLMResponse("x")},
            {"messages": talk, "tools": [], "answer": LLMResponse("y")},
        ],
        str,
    )
    assert asyncio.run(tools.execute("now", {"x": 2}, Turn())) == "two"
    assert asyncio.run(tools.execute("now", {"x": 1})) == "one"
    assert asyncio.run(tools.execute("then", {"x": 1})).startswith("(the trace ends")


# ---- Checked once ----


def test_a_provider_may_change_its_messages_and_no_later_request_has_it():
    class Careless(providers.LLMProvider):
        seen = []

        async def answer(self, request):
            self.seen.append(copy.deepcopy(request.messages))
            for message in request.messages:
                for block in message["content"] if isinstance(message["content"], list) else []:
                    block.clear()
                for each in message.get("tool_calls", []):
                    each["function"]["arguments"] = "gone"
                message["content"] = "gone"
            return LLMResponse("ok")

    model = Careless()
    before = copy.deepcopy(EVERYTHING)
    for _ in range(3):
        ask(model, EVERYTHING)
    assert model.seen[0] == model.seen[1] == model.seen[2] and before == EVERYTHING


def test_what_a_provider_changes_is_sent_and_no_later_request_has_it():
    class Shy(OpenAIProvider):
        async def answer(self, request):
            for message in request.messages:
                for call in message.get("tool_calls", []):
                    call["extra_content"]["google"]["thought_signature"] = f"own {len(server.bodies)}"
            return await super().answer(request)

    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"},
            "extra_content": {"google": {"thought_signature": "s"}}}  # fmt: skip
    turn = [user("Look."), {"role": "assistant", "tool_calls": [call]}, result("a")]
    with FakeLLM(["Yes."] * 3) as server:
        shy, other = Shy(made(server).endpoint), made(server)
        for provider in (shy, shy, other):
            ask(provider, turn * 2)
    messages = [body["messages"] for body in server.bodies]
    sent = [[call for message in talk for call in message.get("tool_calls", [])] for talk in messages]
    signs = [[call["extra_content"]["google"]["thought_signature"] for call in calls] for calls in sent]
    assert signs == [["own 0"] * 2, ["own 1"] * 2, ["s"] * 2]
    assert [[call["id"] for call in calls] for calls in sent] == [["a", "a_2"]] * 3
    assert call["extra_content"] == {"google": {"thought_signature": "s"}} and call["id"] == "a"


def test_what_legal_remembers_changes_nothing_but_the_time():
    known: dict = {}
    twice = {"role": "user", "content": "again"}
    talk = [twice, {"role": "assistant", "content": "yes"}, twice]
    assert legal(talk, known=known) == legal(talk)
    talk[1]["content"] = "no"  # a hook may change a message in place
    twice["content"] = [{"type": "text", "text": "again"}]
    assert legal(talk, known=known) == legal(talk)
    twice["content"][0]["text"] = "once more"
    talk.append({"role": "user", "content": "\ud800"})
    assert legal(talk, known=known) == legal(talk)
    assert len(known) == 3


def test_conversations_in_turn_do_not_forget_each_others_checks():
    provider = ScriptedProvider(["Yes?"] * 40)
    talks = [[{"role": "user", "content": f"{name}, {n}"} for n in range(8)] for name in "abcd"]
    checked = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code is providers.clean_message.__code__:
            checked.append(frame.f_locals["message"]["content"])

    async def everyone():
        for n in range(10):
            for talk in talks:
                talk.append({"role": "user", "content": f"more {n}"})
                await provider.chat(talk)

    sys.setprofile(profile)
    try:
        asyncio.run(everyone())
    finally:
        sys.setprofile(None)
    assert len(checked) == 4 * (8 + 10)


def test_what_is_kept_of_checked_messages_has_an_end():
    known = {}
    for n in range(5):
        legal([{"role": "user", "content": f"{n}, {m}"} for m in range(2_000)], known=known)
    assert len(known) == 5_000
    long = [{"role": "user", "content": f"{m}"} for m in range(6_000)]
    legal(long, known=known)
    assert set(known) == set(map(id, long)), "all of one request is kept, however long"


def test_a_usage_that_is_no_number_does_not_cost_the_answer():
    odd = {"prompt_tokens": "many", "prompt_tokens_details": [1]}
    reply = whole({"role": "assistant", "content": "hello"}, usage=odd)
    with FakeLLM([reply]) as server:
        answer, _ = ask(made(server))
    assert answer.content == "hello"
    assert answer.usage["estimated"]
