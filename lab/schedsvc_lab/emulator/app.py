"""Serves the emulator as an ASGI application."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from schedsvc_lab.emulator.counts import CountsFile
from schedsvc_lab.emulator.endpoints import ClientGoneError, GenerateEndpoint, read_body
from schedsvc_lab.emulator.errors import ApiError, stopping
from schedsvc_lab.emulator.intake import Intake
from schedsvc_lab.emulator.metrics import EngineMetrics
from schedsvc_lab.emulator.protocol import (
    DetokenizeBody,
    TokenizeBody,
    parse_body,
    parse_ids,
    parse_json,
    parse_messages,
)
from schedsvc_lab.emulator.realtime import Generation, RealTimeEngine
from schedsvc_lab.emulator.settings import ConfigView, EmulatorSettings, EngineTelemetry
from schedsvc_lab.engine import Engine

_log = logging.getLogger(__name__)

# A pure ASGI class, whose only argument is the app inside it.
Layer = Callable[[ASGIApp], ASGIApp]


class Emulator:
    """Serves one emulated engine over HTTP.

    `app` is the ASGI application. Its `state` shows a middleware, through `scope["app"].state`:

    - `vllm_config`: sizes under vLLM's names (see ConfigView);
    - `engine_telemetry()`: an EngineTelemetry of this moment;
    - `tokenizer`: counts, encodes and decodes as the server does (see TextTokenizer);
    - `count_prompt_tokens(body)`: the tokens of each prompt of a completion or chat body.
    """

    def __init__(
        self,
        settings: EmulatorSettings,
        middleware: Sequence[Layer] = (),
        counts: CountsFile | None = None,
    ) -> None:
        self.settings = settings
        self._counts = counts
        self._config = ConfigView.of(settings)
        self._tokenizer = settings.tokenizer
        self._created_s = int(time.time())
        config = settings.config
        self._metrics = EngineMetrics(settings.model, self._config.cache_config)
        self.driver = RealTimeEngine(
            Engine(config, settings.profile.step_cost(config.sequences_max)),
            settings.speed,
            on_first_token=self._metrics.first_token,
            on_end=self._ended,
        )
        self._metrics.watch(self.driver)
        self._intake = Intake(
            self._tokenizer,
            settings.model,
            config.context_tokens_max,
            config.block_size_tokens if config.prefix_cache != "off" else 0,
        )
        self.app = self._build(middleware)

    def _build(self, middleware: Sequence[Layer]) -> Starlette:
        taken = self._intake
        chat, completion, generate, generate_stream = (
            GenerateEndpoint(take_in, self.driver, self.settings.model, self._counts)
            for take_in in (taken.chat, taken.completion, taken.generate, taken.generate_stream)
        )
        app = Starlette(
            routes=[
                _post("/v1/completions", completion),
                _post("/v1/chat/completions", chat),
                _post("/generate", generate),
                _post("/generate_stream", generate_stream),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/version", self._version),
                Route("/load", self._load),
                Route("/metrics", self._scrape),
            ],
            exception_handlers={ApiError: _api_error, HTTPException: _http_error},
            lifespan=self._lifespan,
        )
        app.state.vllm_config = self._config
        app.state.tokenizer = self._tokenizer
        app.state.count_prompt_tokens = self._intake.count_prompt_tokens
        app.state.engine_telemetry = lambda: EngineTelemetry.of(self.driver.engine)
        # As in vLLM, the last named layer is the outermost.
        for layer in middleware:
            app.add_middleware(layer)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.driver.run())
        task.add_done_callback(self._engine_stopped)
        try:
            yield
        finally:
            self.driver.close()
            task.cancel()
            await asyncio.wait([task])

    def _engine_stopped(self, task: asyncio.Task[None]) -> None:
        """Answer everything with 503 if the engine has died of a defect."""
        if not task.cancelled():
            _log.critical("the engine has died", exc_info=task.exception())
            self.driver.close()

    def _ended(self, generation: Generation) -> None:
        self._metrics.end(generation, time.monotonic_ns())

    async def _tokenize(self, request: Request) -> Response:
        body = parse_body(TokenizeBody, parse_json(await _body(request)))
        self._intake.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("prompt: give either prompt or messages", "prompt")
        text = body.prompt
        if text is None:
            messages = parse_messages(body.messages)
            text = self._intake.chat_text(messages, body.add_generation_prompt)
        special = body.add_special_tokens
        special = body.messages is None if special is None else special
        ids = self._tokenizer.encode(text, special)
        strings = [self._tokenizer.decode([i]) for i in ids] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self.settings.config.context_tokens_max,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def _detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeBody, parse_json(await _body(request)))
        self._intake.check_model(body.model)
        ids = parse_ids(body.tokens, "tokens", self._tokenizer.vocab_size)
        return JSONResponse({"prompt": self._tokenizer.decode(ids)})

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self.settings.model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "schedsvc",
            "root": self.settings.model,
            "parent": None,
            "max_model_len": self.settings.config.context_tokens_max,
            "permission": [],
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        if self.driver.closed:
            raise stopping()
        return Response()

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": f"schedsvc-emulator {version('schedsvc')}"})

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self.driver.live})

    async def _scrape(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _post(path: str, endpoint: ASGIApp) -> Route:
    return Route(path, endpoint, methods=["POST"])


async def _body(request: Request) -> bytes:
    try:
        return await read_body(request.receive)
    except ClientGoneError as error:
        raise ApiError("the client left") from error


async def _api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return Response(error.body(), error.status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer 404 and 405 in the form of every other error."""
    if not isinstance(error, HTTPException):
        raise error
    body = ApiError(
        f"{request.method} {request.url.path}: {error.detail}", status=HTTPStatus(error.status_code)
    ).body()
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")
