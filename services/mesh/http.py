"""Asking another service: one request, its status and its body, or the news that nobody answered.

Whatever keeps an answer from coming is a ConnectionError: one that was never made is Unreachable, all others (it broke, a
time-out) leave open what became of the request. A simulation has a client of its own, without sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import aiohttp

CONNECT_S = 5.0


class Unreachable(ConnectionError):
    """Nobody took the connection. The request was certainly not seen."""


class Client(Protocol):
    """`timeout_s` bounds the whole request; 0 waits for as long as the connection holds."""

    async def post(
        self, url: str, body: bytes, *, headers: Mapping[str, str] | None = None, timeout_s: float = 0.0
    ) -> tuple[int, bytes]:
        """Status and body. Raises ConnectionError; cancelling it breaks the connection."""

    async def aclose(self) -> None: ...


class HttpClient:
    """Implements `Client`; connects on first use."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, url: str, body: bytes, *, headers: Mapping[str, str] | None = None, timeout_s: float = 0.0
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        timeout = aiohttp.ClientTimeout(total=timeout_s or None, sock_connect=CONNECT_S)
        sent = {"content-type": "application/json", **(headers or {})}
        try:
            async with self._session.post(url, data=body, headers=sent, timeout=timeout) as response:
                return response.status, await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"no connection: {type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionError(f"no answer: {type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
