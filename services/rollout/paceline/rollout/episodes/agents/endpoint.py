"""The endpoint of agents: an OpenAI-compatible address on a rollout server, with a token for each episode.

    POST /v1/chat/completions    an answer of the policy, at once or as a stream of events
    POST /v1/responses           the same, in OpenAI's other form
    GET  /v1/models              the one model that there is

A token opens the inbox of one episode, as long as the episode lasts. Answers are made by the episode itself,
in its own task; when it ends, the requests that still wait are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import ssl
from collections.abc import Callable, Iterator

from aiohttp import web

from paceline.core.errors import EnvironmentLackError
from paceline.core.samples.episode import OVER_CODE, OVER_MESSAGE
from paceline.rollout.episodes.agents.completions import (
    ChatAnswer,
    ChatRequest,
    RefusedRequestError,
    ToChat,
    completion,
    events,
    read_request,
)
from paceline.rollout.episodes.agents.responses import chat_body, response, response_events
from paceline.service.addresses import join
from paceline.service.identity.credentials import CERTIFICATE_FILE, KEY_FILE, TlsFiles
from paceline.service.threads import in_thread

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 * 2**20
_MAX_WAITING = 64
_CLOSE_S = 2.0
_RETRY_HEADER = "x-stainless-retry-count"
_IGNORED_HEADER = "x-paceline-ignored"


class PendingRequest:
    """A request that waits for its answer."""

    def __init__(self, request: ChatRequest, digest: bytes, *, is_repeated: bool) -> None:
        self.request, self.digest, self.is_repeated = request, digest, is_repeated
        self.answered: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()

    def answer(self, answer: ChatAnswer) -> None:
        """Gives the answer, unless the client has gone."""
        if not self.answered.done():
            self.answered.set_result(answer)

    def refuse(self, refusal: RefusedRequestError) -> None:
        """Refuses the request, unless the client has gone."""
        if not self.answered.done():
            self.answered.set_exception(refusal)


class EpisodeInbox:
    """One episode's place at the endpoint: its address, its token, and the requests that wait there."""

    def __init__(self, base_url: str, model: str, temperature: float) -> None:
        self.base_url, self.model, self.temperature = base_url, model, temperature
        self.token = secrets.token_urlsafe(24)
        self._requests: asyncio.Queue[PendingRequest | None] = asyncio.Queue()
        self._waiting: set[PendingRequest] = set()
        self._is_closed = False

    async def next(self) -> PendingRequest | None:
        """Returns the next request; None if the inbox is closed."""
        return await self._requests.get()

    def close(self) -> None:
        """Takes no more requests of the agent, and drops those that are queued."""
        if not self._is_closed:
            self._is_closed = True
            while not self._requests.empty():
                self._requests.get_nowait()
            self._requests.put_nowait(None)

    def refuse_all(self) -> None:
        """Refuses all requests that still wait."""
        self.close()
        for pending in self._waiting:
            pending.refuse(_over())

    async def ask(self, pending: PendingRequest) -> ChatAnswer:
        """Returns the episode's answer to a request.

        Raises:
            RefusedRequestError: there is no answer.
        """
        if self._is_closed:
            raise _over()
        if len(self._waiting) >= _MAX_WAITING:
            raise RefusedRequestError(429, "too_many_requests", f"{_MAX_WAITING} requests wait already")
        self._waiting.add(pending)
        self._requests.put_nowait(pending)
        try:
            return await pending.answered
        finally:
            self._waiting.discard(pending)


class AgentEndpoint:
    """The server for all episodes of a rollout server.

    Args:
        host, port: address to listen on; port 0 takes any free port.
        advertise: the address or name under which agents reach it.
        tls: TLS files for https; None: http.
    """

    def __init__(self, *, host: str, port: int = 0, advertise: str = "", tls: TlsFiles | None) -> None:
        self._host, self._port, self._advertise = host, port, advertise or host
        self.model, self._tls = "policy", tls
        self._inboxes: dict[str, EpisodeInbox] = {}
        self._runner: web.AppRunner | None = None
        self._base_url = ""

    async def start(self) -> None:
        """Begins to listen for agents' requests.

        Raises:
            EnvironmentLackError: the port is taken, or the TLS files cannot be used.
        """
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        try:
            context = _context(self._tls) if self._tls is not None else None
            await web.TCPSite(self._runner, self._host, self._port, ssl_context=context).start()
        except (OSError, ssl.SSLError) as error:
            raise EnvironmentLackError(
                f"agents cannot be served on {join(self._host, self._port)} ({error}); set "
                "rollout.environment.port to a free one, or to 0"
            ) from error
        port = self._runner.addresses[0][1]
        self._base_url = f"{'https' if context else 'http'}://{join(self._advertise, port)}/v1"
        log.info("agents are served at %s", self._base_url)

    async def close(self) -> None:
        """Stops listening; requests that wait are refused."""
        for inbox in list(self._inboxes.values()):
            inbox.refuse_all()
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def open(self, temperature: float) -> Iterator[EpisodeInbox]:
        """Opens an inbox for an episode that samples at this temperature."""
        inbox = EpisodeInbox(self._base_url, self.model, temperature)
        self._inboxes[inbox.token] = inbox
        try:
            yield inbox
        finally:
            del self._inboxes[inbox.token]
            inbox.refuse_all()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, None, completion, events)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        def stream(answer: ChatAnswer, *, has_usage: bool) -> Iterator[str]:
            return response_events(answer)  # always with usage

        return await self._answer(request, chat_body, response, stream)

    async def _answer(
        self,
        request: web.Request,
        to_chat: ToChat | None,
        to_object: Callable[[ChatAnswer], dict[str, object]],
        to_events: Callable[..., Iterator[str]],
    ) -> web.StreamResponse:
        """Answers a request in one of the forms."""
        try:
            inbox, data = self._inbox_of(request), await _body(request)
            asked = await in_thread(
                read_request, data, model=self.model, temperature=inbox.temperature, to_chat=to_chat
            )
            digest = hashlib.blake2b(data, digest_size=16).digest()
            is_repeated = request.headers.get(_RETRY_HEADER, "0") != "0"
            answer = await inbox.ask(PendingRequest(asked, digest, is_repeated=is_repeated))
        except RefusedRequestError as refusal:
            log.debug("a request was refused: %s", refusal)
            return web.json_response(refusal.body(), status=refusal.status)
        headers = {_IGNORED_HEADER: ", ".join(answer.ignored)} if answer.ignored else {}
        if not asked.is_streamed:
            return web.json_response(to_object(answer), headers=headers)
        streamed = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await streamed.prepare(request)
        for event in to_events(answer, has_usage=asked.has_usage):
            await streamed.write(event.encode())
        return streamed

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._inbox_of(request)
        except RefusedRequestError as refusal:
            return web.json_response(refusal.body(), status=refusal.status)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "paceline"}
        return web.json_response({"object": "list", "data": [model]})

    def _inbox_of(self, request: web.Request) -> EpisodeInbox:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        inbox = self._inboxes.get(token.strip())
        if scheme.lower() != "bearer" or inbox is None:
            raise RefusedRequestError(
                401, "invalid_api_key", "the api key belongs to no episode that is open on this server"
            )
        return inbox


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except ConnectionError as error:
        raise RefusedRequestError(400, "request_cut", "the client hung up within its request") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedRequestError(
            413, "request_too_large", f"a request has at most {_MAX_BODY_BYTES} bytes"
        ) from error


def _over() -> RefusedRequestError:
    return RefusedRequestError(400, OVER_CODE, OVER_MESSAGE)


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.folder / CERTIFICATE_FILE, files.folder / KEY_FILE)
    return context
