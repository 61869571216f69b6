"""The application: routes of OpenAI's protocol over one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..checks import conform
from ..engine.async_llm import AsyncLLM
from ..engine.prompts import Prompt
from ..engine.structured import Structured
from ..engine.text import check_text
from ..errors import GraphspecError, RequestError
from ..server_options import ServerConfig
from .answers import DONE, ChatWriter, CompletionWriter, Writer, spell, sse
from .errors import ApiError, bad_field, from_engine, internal, unusable
from .generation import Generation
from .limits import ClientGone, Keys, Slots, read_json, unless_gone
from .messages import conversation_of
from .metrics import CONTENT_TYPE, Metrics
from .protocol import Body, ChatBody, CompletionBody, check_model, parse
from .structured import structured_of
from .tokens import TokenTexts
from .tools import read_tools

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
Make = Callable[[Generation], Writer]


class Api:
    """The routes and the state that they share.

    Args:
        llm: the engine, its programs built.
        options: of the server.
        model: the name under which the model is served.
        keys: API keys that are accepted.
    """

    def __init__(self, llm: AsyncLLM, options: ServerConfig, model: str, keys: Keys | None = None) -> None:
        self.llm, self.options, self.model, self.keys = llm, options, model, keys or Keys()
        engine = llm.llm
        self.plan, self.tokenizer = engine.plan, engine.tokenizer
        self.texts: TokenTexts = cache(lambda token: engine.tokenizer.decode([token]))
        waiting = options.max_waiting if self.plan.max_queued is None else self.plan.max_queued
        self.slots = Slots(self.plan.max_rows + waiting)
        self.metrics = Metrics(model, self.plan, engine.load, engine.capture_report)
        self.most_tokens = min(options.max_tokens or self.plan.max_context, self.plan.max_context)

    def app(self) -> Starlette:
        """The application."""
        routes = {
            ("/v1/completions", "POST"): self.completions,
            ("/v1/chat/completions", "POST"): self.chat,
            ("/v1/models", "GET"): self.models,
            ("/tokenize", "POST"): self.tokenize,
            ("/detokenize", "POST"): self.detokenize,
        }
        opened = {("/health", "GET"): self.health, ("/version", "GET"): self.version, ("/metrics", "GET"): self.scrape}
        return Starlette(
            routes=[
                *(Route(path, self._guarded(handler), methods=[method]) for (path, method), handler in routes.items()),
                *(Route(path, handler, methods=[method]) for (path, method), handler in opened.items()),
            ],
            exception_handlers={ApiError: self._refuse, GraphspecError: self._refuse, HTTPException: self._refuse, ClientGone: _gone},
        )

    def _guarded(self, handler: Handler) -> Handler:
        """The handler after a check of the API key, with errors as responses."""

        async def checked(request: Request) -> Response:
            self.keys.check(request.headers.get("authorization"))
            try:
                return await handler(request)
            except (ApiError, GraphspecError, ClientGone, HTTPException):
                raise
            except Exception as error:
                logger.exception("error in %s", request.url.path)
                raise internal() from error

        return checked

    async def _refuse(self, _: Request, error: Exception) -> Response:
        """The response to an error."""
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, error.detail)
        elif isinstance(error, GraphspecError):
            error = from_engine(error)
        assert isinstance(error, ApiError)
        self.metrics.refuse(error.status)
        return _json(error.body, error.status, error.headers)

    async def _read(self, request: Request) -> dict[str, Any]:
        return await read_json(request, self.options.max_body_bytes, self.options.read_seconds)

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = parse(CompletionBody, await self._read(request))
        check_model(body.model, self.model)
        make = partial(CompletionWriter, body, self.model, self.tokenizer, self.texts)
        return await self._answer(request, body, [*body.prompts], make, structured_of(body))

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = parse(ChatBody, await self._read(request))
        check_model(body.model, self.model)
        if not self.tokenizer.has_chat_template:
            raise bad_field("messages", "a checkpoint with a chat template", "one without: send a prompt to /v1/completions")
        tools = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
        make = partial(ChatWriter, body, self.model, self.tokenizer, self.texts, tools=tools)
        return await self._answer(request, body, [conversation_of(body, tools)], make, structured_of(body, tools))

    async def _answer(self, request: Request, body: Body, prompts: list[Prompt], make: Make, structured: Structured | None) -> Response:
        """Serve a request; a stream begins once its prompts have been accepted."""
        params = body.params(self.most_tokens, self.plan.sampling_defaults, structured)
        with ExitStack() as held:
            held.enter_context(self.slots.take(len(prompts) * params.n))
            deadline = self.options.request_seconds
            generation = await unless_gone(
                request.receive, Generation.begin(self.llm, self.metrics, prompts, params, priority=body.priority, deadline=deadline)
            )
            writer = make(generation)
            if body.stream:
                return EventStream(self._events(writer), held.pop_all())
            return _json(await unless_gone(request.receive, _whole(writer)))

    async def _events(self, writer: Writer) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream. An error after the beginning is sent as the last event."""
        try:
            async with aclosing(writer.generation.events()) as events:
                async for event in events:
                    for chunk in writer.chunks(event):
                        yield sse(chunk)
            for chunk in writer.last_chunk():
                yield sse(chunk)
        except ApiError as error:
            self.metrics.refuse(error.status)
            yield sse(error.body)
        except Exception:
            logger.exception("error in a stream")
            unknown = internal()
            self.metrics.refuse(unknown.status)
            yield sse(unknown.body)
        yield DONE

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "graphspec", "max_model_len": self.plan.max_context}
        return _json({"object": "list", "data": [model]})

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: the ids of a text or of messages."""
        data = await self._read(request)
        if "messages" in data:
            body = parse(ChatBody, data)
            check_model(body.model, self.model)
            if not self.tokenizer.has_chat_template:
                raise bad_field("messages", "a checkpoint with a chat template", "one without")
            conversation = conversation_of(body, read_tools(body.tools, body.tool_choice))
            tokens = await asyncio.to_thread(self.tokenizer.chat, conversation)
        else:
            _only(data, "model", "prompt", "add_special_tokens", "return_token_strs")
            check_model(data.get("model"), self.model)
            special, spelled = data.get("add_special_tokens", True), data.get("return_token_strs", False)
            for name, value in (("add_special_tokens", special), ("return_token_strs", spelled)):
                conform(name, value, bool, RequestError)
            encode = self.tokenizer.encode if special else self.tokenizer.words
            tokens = await asyncio.to_thread(encode, check_text("prompt", data.get("prompt")))
        document = {"count": len(tokens), "max_model_len": self.plan.max_context, "tokens": tokens}
        return _json(document | ({"token_strs": [self.texts(token) for token in tokens]} if data.get("return_token_strs") else {}))

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        data = await self._read(request)
        _only(data, "model", "tokens")
        check_model(data.get("model"), self.model)
        tokens, vocab = data.get("tokens"), self.plan.target.vocab_size
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocab for token in tokens):
            raise bad_field("tokens", f"a list of token ids from 0 to {vocab - 1}", "something else")
        return _json({"prompt": await asyncio.to_thread(self.tokenizer.decode, tokens)})

    async def health(self, _: Request) -> Response:
        """``GET /health``: 200 while the engine answers."""
        if not self.llm.llm.load().answers:
            raise unusable()
        return Response(status_code=200)

    async def version(self, _: Request) -> Response:
        """``GET /version``."""
        return _json({"version": __version__})

    async def scrape(self, _: Request) -> Response:
        """``GET /metrics``."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)


class EventStream(Response):
    """Server-sent events.

    Args:
        events: their bytes.
        held: resources that are released when the last event was sent, or the client has disconnected.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], held: ExitStack) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with self._held:
            try:
                await unless_gone(receive, send_all())
            except ClientGone:
                logger.debug("a client disconnected before its stream ended")


async def _whole(writer: Writer) -> dict[str, Any]:
    async with aclosing(writer.generation.events()) as events:
        return writer.whole([event async for event in events])


def _only(data: dict[str, Any], *names: str) -> None:
    others = [name for name in data if name not in names]
    if others:
        raise ApiError(400, f"unsupported: {', '.join(others)}", others[0], "unsupported_field")


async def _gone(_: Request, __: Exception) -> Response:
    """An empty response, for a client that has disconnected."""
    return Response(status_code=499)


def _json(document: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(spell(document), status, headers, "application/json")
