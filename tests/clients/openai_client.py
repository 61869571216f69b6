"""What OpenAI's own client sees of a server; run by tests/clients with an interpreter that has it. Arguments: its address,
and of one that requires a key.

Exits with an error at the first thing that is not as it should be; prints what it looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import openai

QUESTION = [{"role": "user", "content": "def fib(n):"}]
GREEDY = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}}


def refused(kind: type[Exception], call, *words: str) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def chats(client: openai.OpenAI, model: str) -> str:
    whole = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
    assert whole.object == "chat.completion" and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24 and whole.usage.prompt_tokens > 0
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True}, **GREEDY,
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[0].choices[0].delta.role == "assistant"
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[-1] == 24 and any(after - before > 1 for before, after in itertools.pairwise(counts))
    # The helper takes an answer that was cut off for an error.
    stop = text.split()[3]
    with client.chat.completions.stream(model=model, messages=QUESTION, stop=stop, **GREEDY) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == (text[: text.index(stop)], "stop")
    scored = client.chat.completions.create(model=model, messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY)
    entries = scored.choices[0].logprobs.content
    assert len(entries) == 24 and all(len(e.top_logprobs) == 3 and e.top_logprobs[0].logprob >= e.logprob for e in entries)
    assert all(bytes(e.bytes).decode() == e.token for e in entries)
    some = client.chat.completions.create(model=model, messages=QUESTION, n=3, seed=1, max_tokens=8)
    again = client.chat.completions.create(model=model, messages=QUESTION, n=3, seed=1, max_tokens=8)
    assert [c.message.content for c in some.choices] == [c.message.content for c in again.choices]
    offered = client.chat.completions.create(model=model, messages=QUESTION, tools=[TOOL], parallel_tool_calls=True, **GREEDY)
    assert offered.choices[0].message.tool_calls is None
    return text


def completions(client: openai.OpenAI, model: str) -> None:
    text = client.completions.create(model=model, prompt="def fib(n):", **GREEDY).choices[0].text
    streamed = client.completions.create(model=model, prompt=["def fib(n):"], stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text
    echoed = client.completions.create(model=model, prompt="def fib(n):", echo=True, logprobs=2, **GREEDY).choices[0]
    assert echoed.text == "def fib(n):" + text
    assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.text_offset[0] == 0
    assert "".join(echoed.logprobs.tokens) == echoed.text
    stopped = client.completions.create(model=model, prompt="def fib(n):", stop=["\n\n"], **GREEDY).choices[0]
    assert "\n\n" not in stopped.text


async def together(url: str, model: str, text: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def one() -> str:
            stream = await client.chat.completions.create(model=model, messages=QUESTION, stream=True, **GREEDY)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert set(await asyncio.gather(*(one() for _ in range(12)))) == {text}
        # Leaves in the middle.
        stream = await client.chat.completions.create(model=model, messages=QUESTION, stream=True, **GREEDY)
        await anext(aiter(stream))
        await stream.close()


def errors(client: openai.OpenAI, model: str, guarded: str) -> None:
    chat = client.chat.completions.create
    refused(openai.BadRequestError, lambda: chat(model=model, messages=QUESTION, modalities=["audio"]), "modalities")
    refused(openai.BadRequestError, lambda: chat(model=model, messages=QUESTION, temperature=-1), "temperature")
    refused(openai.BadRequestError, lambda: chat(model=model, messages=QUESTION, extra_body={"what": 1, "why": 2}), "what, why")
    refused(openai.NotFoundError, lambda: chat(model="another", messages=QUESTION), "model")
    refused(openai.AuthenticationError, openai.OpenAI(base_url=guarded, api_key="wrong", max_retries=0).models.list, "API key")
    assert openai.OpenAI(base_url=guarded, api_key="right").models.list().data[0].id == model


def main(url: str, guarded: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    [model] = [model.id for model in client.models.list()]
    text = chats(client, model)
    completions(client, model)
    asyncio.run(together(url, model, text))
    errors(client, model, guarded)
    print(f"openai {openai.__version__}: models, chats, completions, streams, {model} as expected")


main(*sys.argv[1:])
