"""The application: routes of OpenAI's protocol over one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..api.async_llm import AsyncLLM, length_of
from ..api.prompts import Prompt
from ..config.checks import check_text
from ..config.server_options import ServerConfig
from ..engine.request import SamplingParams
from ..errors import GraphspecError
from ..text.bounds import check_fits, fewest_tokens
from . import channels
from .access import Access, Hosts, Lengths, Record, record_of
from .answers import DONE, ChatWriter, CompletionWriter, Writer, spell, sse
from .bodies import LARGE_BODY, MAX_VALUES, parse_json, read_body
from .errors import ApiError, bad_field, from_engine, internal, unusable
from .generation import Generation
from .grammar_trials import GrammarTrials
from .limits import ClientGone, Keys, Slots, check_bounds, check_prompt_sizes, unless_gone
from .messages import conversation_of
from .metrics import CONTENT_TYPE, Metrics
from .protocol import Body, ChatBody, CompletionBody, TextBody, TokensBody, check_model, parse
from .structured import structured_of
from .tools import MARKS, read_tools

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
GONE = 499
"""Status of a request whose client has disconnected, as nginx logs it."""
HEALTH_SECONDS = 1.0
STUCK_SECONDS = 30.0
"""Far above what a text that may fit the context takes."""
Result = TypeVar("Result")
Make = Callable[[Generation], Writer]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for text, checked as far as that needs no tokenizer.

    Attributes:
        body: its fields.
        prompts: of the request.
        make: makes the writer of its response.
        params: for all prompts.
    """

    body: Body
    prompts: list[Prompt]
    make: Make
    params: SamplingParams


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
        waiting = options.max_waiting if self.plan.max_queued is None else self.plan.max_queued
        self.trials = GrammarTrials(llm, options.grammar_seconds)
        self.slots = Slots(self.plan.max_rows + waiting)
        self.metrics = Metrics(model, self.plan, engine.load, engine.capture_report)
        self.max_values = max(MAX_VALUES, 2 * self.plan.max_context)
        # Reads the file once, before anybody waits for it.
        fewest_tokens("", self.tokenizer.folder)
        self._plain = {"special_tokens_as_text": options.special_tokens_in_text == "text"}
        self._ping: asyncio.Future[None] | None = None
        self.max_tokens = min(options.max_tokens or self.plan.max_context, self.plan.max_context)

    def app(self, hosts: Collection[str] | None = None) -> Starlette:
        """The application.

        Args:
            hosts: names that the ``Host`` header may have (:func:`~graphspec.serve.access.hosts_of`); None: any.
        """
        routes = {
            ("/v1/completions", "POST"): self.completions,
            ("/v1/chat/completions", "POST"): self.chat,
            ("/v1/models", "GET"): self.models,
            ("/v1/models/{name:path}", "GET"): self.one_model,
            ("/tokenize", "POST"): self.tokenize,
            ("/detokenize", "POST"): self.detokenize,
        }
        opened = {
            ("/health", "GET"): self.health,
            ("/live", "GET"): self.live,
            ("/version", "GET"): self.version,
            ("/metrics", "GET"): self.scrape,
        }
        routed = [
            *(Route(path, self._guarded(handler), methods=[method]) for (path, method), handler in routes.items()),
            *(Route(path, handler, methods=[method]) for (path, method), handler in opened.items()),
        ]
        handlers = {ApiError: self._refuse, GraphspecError: self._refuse, HTTPException: self._refuse, ClientGone: _gone}
        access = Middleware(Access, style=self.options.access_log)
        checks = [Middleware(Lengths, refuse=self._refuse), Middleware(Hosts, names=hosts, refuse=self._refuse)]
        middleware = [access, *checks, *self._cors()]
        app = Starlette(routes=routed, middleware=middleware, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    def _cors(self) -> list[Middleware]:
        """Lets the pages of ``server.cors_origins`` read answers."""
        if not self.options.cors_origins:
            return []
        allowed = {"allow_methods": ("GET", "POST"), "allow_headers": ("*",), "expose_headers": ("X-Request-Id",)}
        return [Middleware(CORSMiddleware, allow_origins=self.options.cors_origins, **allowed)]

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

    def close(self) -> None:
        """End the process that the routes have started."""
        self.trials.close()

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """The response to an error."""
        if isinstance(error, HTTPException):
            methods = {*(error.headers or {}).get("Allow", "").split(", "), "OPTIONS"} - {""}
            allow = ", ".join(sorted(methods)) if error.status_code == 405 else None
            if allow is not None and request.method == "OPTIONS":
                return Response(status_code=204, headers={"Allow": allow})
            error = ApiError(error.status_code, error.detail, allow=allow)
        elif isinstance(error, GraphspecError):
            error = from_engine(error)
        assert isinstance(error, ApiError)
        self.metrics.refuse(error.status)
        return _json(error.body, error.status, error.headers)

    async def _read(self, request: Request, understand: Callable[[dict[str, Any]], Result]) -> Result:
        """What a body says. A large one is parsed and checked by a thread of its own, so that others are served meanwhile.

        Args:
            request: the request.
            understand: makes it of the body's JSON object, whose fields have sizes that can be served.
        """
        with self.metrics.preparing("reading"):
            body = await read_body(request, self.options.max_body_bytes, self.options.read_seconds)

            def read() -> Result:
                data = parse_json(body, self.max_values)
                check_bounds(data, self.plan)
                check_prompt_sizes(data.get("prompt"), self.plan, self.slots.maximum)
                return understand(data)

            return read() if len(body) < LARGE_BODY else await self.llm.work(read, len(body))

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._answer(request, await self._read(request, self._completion))

    def _completion(self, data: dict[str, Any]) -> Asked:
        body = parse(CompletionBody, data)
        check_model(body.model, self.model)
        make = partial(CompletionWriter, body, self.model, self.tokenizer)
        return Asked(
            body, body.prompts(**self._plain), make, body.params(self.max_tokens, self.plan.sampling_defaults, structured_of(body))
        )

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._answer(request, await self._read(request, self._chat))

    def _chat(self, data: dict[str, Any]) -> Asked:
        body = parse(ChatBody, data)
        check_model(body.model, self.model)
        if not self.tokenizer.has_chat_template:
            raise bad_field("messages", "a checkpoint with a chat template", "one without: send a prompt to /v1/completions")
        tools = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
        make = partial(ChatWriter, body, self.model, self.tokenizer, tools=tools)
        kept = (*(MARKS if tools.read else ()), *(channels.MARKS if channels.in_channels(self.tokenizer.special_tokens) else ()))
        params = body.params(self.max_tokens, self.plan.sampling_defaults, structured_of(body, tools), kept)
        return Asked(body, [conversation_of(body, tools, **self._plain)], make, params)

    async def _answer(self, request: Request, asked: Asked) -> Response:
        """Serve a request; a stream begins once its prompts have been accepted."""
        body, prompts, params = asked.body, asked.prompts, asked.params
        if body.priority and not self.options.allow_priority:
            raise bad_field("priority", "0, unless the server runs with server.allow_priority=true", body.priority)
        self.llm.llm.check_class(params.resolve(self.plan.sampling_defaults).sampling_class)
        with ExitStack() as held:
            held.enter_context(self.slots.take(len(prompts) * params.n))
            options = {"priority": body.priority, "deadline": self.options.request_seconds, "cache_salt": body.cache_salt}
            with self.metrics.preparing("encoding" if params.structured is None else "compiling"):
                generation = await unless_gone(request.receive, self._begin(prompts, params, options))
            record = record_of(request.scope)
            record.generation = generation
            writer = asked.make(generation)
            if body.stream:
                return EventStream(self._events(writer, record), held.pop_all())
            return _json(await unless_gone(request.receive, _whole(writer)))

    async def _begin(self, prompts: list[Prompt], params: SamplingParams, options: dict[str, Any]) -> Generation:
        if params.structured is not None:
            await self.trials.check(params.structured)
        return await Generation.begin(self.llm, self.metrics, prompts, params, **options)

    async def _events(self, writer: Writer, record: Record) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream. An error after the beginning is sent as the last event."""
        try:
            async with aclosing(writer.generation.events()) as events:
                async for event in events:
                    for chunk in writer.chunks(event):
                        yield sse(chunk)
            for chunk in writer.last_chunk():
                yield sse(chunk)
        except ApiError as error:
            record.status = error.status
            self.metrics.refuse(error.status)
            yield sse(error.body)
        except Exception:
            logger.exception("error in a stream")
            unknown = internal()
            record.status = unknown.status
            self.metrics.refuse(unknown.status)
            yield sse(unknown.body)
        yield DONE

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``."""
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """``GET /v1/models/NAME``."""
        check_model(request.path_params["name"], self.model)
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "graphspec", "max_model_len": self.plan.max_context}

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: the ids of a text or of messages."""
        length, encode, spelled = await self._read(request, self._encoding)

        def answer() -> bytes:
            tokens = encode()
            if len(tokens) > self.max_values:
                raise bad_field("prompt", f"at most {self.max_values} tokens", f"{len(tokens)} of them")
            document = {"count": len(tokens), "max_model_len": self.plan.max_context, "tokens": tokens}
            strings = [self.tokenizer.token_text(token, first=not place) for place, token in enumerate(tokens)] if spelled else None
            return spell(document | ({} if strings is None else {"token_strs": strings}))

        return await self._work(request, answer, length)

    def _encoding(self, data: dict[str, Any]) -> tuple[int, Callable[[], list[int]], bool]:
        """Characters of what is to be encoded, a function that does it, and whether the tokens' texts are wanted too."""
        if "messages" in data:
            body = parse(ChatBody, data)
            check_model(body.model, self.model)
            if not self.tokenizer.has_chat_template:
                raise bad_field("messages", "a checkpoint with a chat template", "one without")
            conversation = conversation_of(body, read_tools(body.tools, body.tool_choice), **self._plain)
            return length_of(conversation), partial(self.tokenizer.chat, conversation), False
        asked = parse(TextBody, data)
        check_model(asked.model, self.model)
        text = check_text("prompt", asked.prompt)
        check_fits("prompt", text, self.tokenizer.folder, self.plan.max_context)
        encode = self.tokenizer.encode if asked.add_special_tokens else self.tokenizer.words
        return len(text), partial(encode, text, **self._plain), asked.return_token_strs

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        tokens = await self._read(request, self._tokens)
        return await self._work(request, lambda: spell({"prompt": self.tokenizer.decode(tokens)}), len(tokens))

    def _tokens(self, data: dict[str, Any]) -> list[int]:
        vocab, maximum = self.plan.target.vocab_size, self.plan.max_context
        given = data.get("tokens")
        if isinstance(given, list) and len(given) > maximum:
            raise bad_field("tokens", f"at most {maximum} of them", len(given))
        body = parse(TokensBody, data)
        check_model(body.model, self.model)
        if not all(0 <= token < vocab for token in body.tokens):
            raise bad_field("tokens", f"a list of token ids from 0 to {vocab - 1}", "something else")
        return body.tokens

    async def _work(self, request: Request, answer: Callable[[], bytes], length: int) -> Response:
        """A response that a thread makes, in one slot."""
        with self.slots.take(1), self.metrics.preparing("encoding"):
            return Response(await unless_gone(request.receive, self.llm.work(answer, length)), media_type="application/json")

    async def health(self, _: Request) -> Response:
        """``GET /health``: 200 if the engine's thread answers within :data:`HEALTH_SECONDS`, and texts and grammars get on."""
        if max(self.llm.stuck_seconds, self.trials.stuck_seconds) > STUCK_SECONDS or not await self._answers():
            raise unusable()
        return Response(status_code=200)

    async def live(self, _: Request) -> Response:
        """``GET /live``: 200 while the process serves HTTP."""
        return Response(status_code=200)

    async def _answers(self) -> bool:
        """Whether the engine's thread answers in time. All that ask wait for one question to it."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(self.llm.ping())
        await asyncio.wait({self._ping}, timeout=HEALTH_SECONDS)
        return self._ping.done() and self._ping.exception() is None and self.llm.llm.load().answers

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
                record_of(scope).status = GONE
                logger.debug("a client disconnected before its stream ended")


async def _whole(writer: Writer) -> dict[str, Any]:
    async with aclosing(writer.generation.events()) as events:
        return writer.whole([event async for event in events])


async def _gone(_: Request, __: Exception) -> Response:
    """An empty response, for a client that has disconnected."""
    return Response(status_code=GONE)


def _json(document: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(spell(document), status, headers, "application/json")
