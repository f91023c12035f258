"""A TCP proxy on loopback that can be slow, can cut connections, and can swallow answers. For tests only."""

from __future__ import annotations

import asyncio
import contextlib
import threading

CHUNK_BYTES = 16 << 10
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"


class Proxy:
    """Forwards to a port of this host. Settings take effect at once.

    Attributes:
        bytes_per_s: rate of each direction of a connection, 0 for no limit.
        cut_after: cut a connection once the client has sent this many bytes on it; None: never.
        refuse: answer every request with 403.
        swallow_answers: forward what the client sends and drop what the server says.
        forwarded: bytes that clients have sent.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.bytes_per_s, self.cut_after, self.swallow_answers = 0, None, False  # type: tuple[int, Any, bool]
        self.forwarded = 0
        self.refuse = False
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # at the end; asyncio would complain of a cancelled handler
            await self._connect(reader, writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        tasks = [
            asyncio.create_task(self._pump(reader, back, writer, from_client=True)),
            asyncio.create_task(self._pump(there, writer, writer, from_client=False)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for end in (writer, back):
            end.close()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        answer: asyncio.StreamWriter,
        *,
        from_client: bool,
    ) -> None:
        seen = 0
        while data := await source.read(CHUNK_BYTES):
            if from_client:
                seen += len(data)
                self.forwarded += len(data)
                if self.refuse:
                    answer.write(FORBIDDEN)
                    continue
                if self.cut_after is not None and seen >= self.cut_after:
                    return
            elif self.swallow_answers:
                continue
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            try:
                sink.write(data)
                await sink.drain()
            except OSError:
                return
