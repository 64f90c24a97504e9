"""LangChain, OpenAI's Agents SDK, litellm, instructor and llm."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import instructor
import litellm
import openai
import pytest
from agents import Agent, ModelSettings, Runner, function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict


class Day(BaseModel):
    """A day of the week."""

    model_config = ConfigDict(extra="forbid")
    is_market: bool


@tool
def add(exact: bool) -> str:
    """Adds."""
    return f"42, {exact}"


@pytest.mark.client("langchain-openai")
class TestLangChain:
    """Structured output in each of its ways, tools, streams, and embeddings."""

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, method: Any) -> None:
        model = ChatOpenAI(model="chat").with_structured_output(Day, method=method)
        assert isinstance(model.invoke("Which day?"), Day)

    def test_json_mode(self) -> None:
        model = ChatOpenAI(model="chat").with_structured_output(method="json_mode")
        assert isinstance(model.invoke("JSON, please."), dict)

    def test_structured_output_by_responses(self) -> None:
        model = ChatOpenAI(model="chat", use_responses_api=True).with_structured_output(Day)
        assert isinstance(model.invoke("Which day?"), Day)

    def test_a_tool_and_its_result(self) -> None:
        model = ChatOpenAI(model="chat")
        asked: list[Any] = [HumanMessage("Add.")]
        forced = model.bind_tools([add], tool_choice="add", strict=True)
        answer = forced.invoke(asked)
        (call,) = answer.tool_calls
        asked += [answer, ToolMessage(add.invoke(call["args"]), tool_call_id=call["id"])]
        assert model.bind_tools([add]).invoke(asked).content
        chunks = [part for part in forced.stream("Add.") if part.tool_call_chunks]
        assert chunks[0].tool_call_chunks[0]["name"] == "add"

    def test_embeddings(self) -> None:
        finder = OpenAIEmbeddings(model="finder", check_embedding_ctx_length=False)
        found, twice, other = finder.embed_documents(["a day", "a day", "a night"])
        assert found == twice != other and found == finder.embed_query("a day")


@pytest.mark.client("openai-agents")
class TestAgents:
    """OpenAI's Agents SDK, which asks by the Responses API."""

    @pytest.mark.parametrize("model", [None, "chat"], ids=["default", "named"])
    def test_an_output_type(self, model: str | None) -> None:
        agent = Agent(name="day", instructions="Be brief.", model=model, output_type=Day)
        result = asyncio.run(Runner.run(agent, "Which day?"))
        assert isinstance(result.final_output, Day)

    def test_a_live_session_with_its_default_model(self, url: str) -> None:
        async def answered() -> tuple[str, int]:
            address = url.replace("http", "ws") + "/realtime?model=gpt-realtime-2.1"
            runner = RealtimeRunner(RealtimeAgent(name="sums", instructions="Add."))
            async with await runner.run(model_config={"url": address}) as session:
                await session.send_message("twelve plus thirty")
                num_bytes = 0
                async for event in session:
                    assert event.type != "error", event
                    if event.type == "audio":
                        num_bytes += len(event.audio.data)
                    if event.type == "agent_end":
                        break
                said = session._history[-1]
            return str(said), num_bytes

        text, num_bytes = asyncio.run(asyncio.wait_for(answered(), 120))
        assert "12 + 30 = forty two" in text and num_bytes > 24_000 * 2 * 0.3

    def test_a_tool(self) -> None:
        called: list[bool] = []

        @function_tool
        def look(exact: bool) -> str:
            """Looks."""
            called.append(exact)
            return "42"

        agent = Agent(
            name="tool",
            model="chat",
            tools=[look],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
        )
        assert asyncio.run(Runner.run(agent, "Look.")).final_output == "42" and len(called) == 1

    def test_a_stream(self) -> None:
        async def stream() -> tuple[int, Any]:
            agent = Agent(name="day", model="chat", output_type=Day)
            result = Runner.run_streamed(agent, "Which day?")
            events = [event async for event in result.stream_events()]
            return len(events), result.final_output

        num_events, output = asyncio.run(stream())
        assert num_events > 5 and isinstance(output, Day)


@pytest.mark.client("litellm")
def test_a_form_and_a_stream() -> None:
    asked: Any = {"model": "openai/chat", "messages": [{"role": "user", "content": "Which day?"}]}
    answer = litellm.completion(response_format=Day, **asked)
    Day.model_validate_json(answer.choices[0].message.content)
    parts = list(litellm.completion(stream=True, **asked))
    assert "".join(part.choices[0].delta.content or "" for part in parts)


@pytest.mark.client("instructor")
def test_a_form_of_pydantic() -> None:
    client = instructor.from_openai(openai.OpenAI())
    asked: Any = [{"role": "user", "content": "Which day?"}]
    assert isinstance(
        client.chat.completions.create(model="chat", response_model=Day, messages=asked), Day
    )


@pytest.mark.client("llm")
class TestLlm:
    """The command that asks models."""

    @pytest.fixture(autouse=True)
    def _models(self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
        able = "supports_schema: true, supports_tools: true, audio: true"
        (tmp_path / "extra-openai-models.yaml").write_text(
            "\n".join(
                f"- {{model_id: omni-{name}, model_name: {name}, api_base: '{url}', {able}}}"
                for name in ("caller", "chat", "spoken_sums")
            )
        )

    def test_a_schema(self) -> None:
        schema = (
            '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], '
            '"additionalProperties": false}'
        )
        assert asked("chat", "--schema", schema, "Which?") in ('{"a": true}', '{"a": false}')

    def test_a_tool_is_called(self, tmp_path: Path) -> None:
        file = tmp_path / "called"
        functions = (
            f"def add(a: int, b: int) -> int:\n    open({str(file)!r}, 'a').write(f'{{a}}, {{b}};')"
            "\n    return a + b"
        )
        assert asked("caller", "--functions", functions, "What is 12 + 30?") == "It is 42."
        assert file.read_text() == "12, 30;"

    def test_a_sound_is_attached(self, tmp_path: Path) -> None:
        said = openai.OpenAI().audio.speech.create(
            model="spoken_sums", voice="alloy", input="8 * 4", response_format="wav"
        )
        (tmp_path / "said.wav").write_bytes(said.content)
        data = base64.b64encode(said.content).decode()
        part: Any = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        answer = openai.OpenAI().chat.completions.create(
            model="spoken_sums", messages=[{"role": "user", "content": [part]}]
        )
        written = asked("spoken_sums", "--attachment", str(tmp_path / "said.wav"), "")
        assert written == answer.choices[0].message.content


def asked(model: str, *args: str) -> str:
    """What ``llm`` prints."""
    command = [str(Path(sys.executable).with_name("llm")), "-m", f"omni-{model}", "--key", "none"]
    done = subprocess.run(
        [*command, *args], capture_output=True, text=True, check=False, timeout=120,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
