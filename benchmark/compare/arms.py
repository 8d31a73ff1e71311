"""What differs between the servers of a comparison, and how each of them comes up."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from compare.options import Options
from dsv4_reference_platform.launch import Server, ServerError

FLAG = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
CHECKS = "SGLANG_SWA_DBG_CHECKSUM"
TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


class Arm(NamedTuple):
    """One server of the comparison: its column's title and the environment that makes it."""

    title: str
    env: Mapping[str, str]


ARMS = {
    "off": Arm("off", {FLAG: "0", CHECKS: "0"}),
    # The feature brings a tree core in Python. What stock loses by that alone is not its cost.
    "python": Arm("off, python tree", {FLAG: "0", CHECKS: "0", TREE_CORE: "python"}),
    "dev": Arm("dev", {FLAG: "1", CHECKS: "0"}),
    # Not for its speed: every restore is read back and compared.
    "checked": Arm("dev, checked", {FLAG: "1", CHECKS: "1"}),
}

REFERENCE_ARGS = (
    *("--chunked-prefill-size", "512"),
    *("--max-running-requests", "16"),
    "--enable-metrics",
)
"""Of the reference platform's server, in every arm."""

DEFAULT_PORT = 30000
"""SGLang's."""


class Endpoint(NamedTuple):
    """A server that answers; its log, where this program started it; where it computes on the CPU, the
    CPU seconds that its processes have used so far."""

    url: str
    log: Path | None = None
    cpu_seconds: Callable[[], float] | None = None


class CommandServer(Server):
    """A server started by any command line instead of the reference platform's.

    Args:
        command: of the server; it listens on the loopback address, at its --port.
        env: added to this process's environment.
        log_path, start_timeout: as for Server.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        start_timeout: float,
    ) -> None:
        super().__init__(log_path=log_path, start_timeout=start_timeout)
        self.argv = list(command)
        self.env = {**os.environ, **env}
        self.port = port_of(command)


def port_of(command: Sequence[str]) -> int:
    """The port that a launch command gives, or SGLang's default."""
    for i, argument in enumerate(command):
        name, equals, value = argument.partition("=")
        if name == "--port":
            return int(value if equals else command[i + 1])
    return DEFAULT_PORT


def _listens(port: int) -> bool:
    """Whether anything accepts connections at a port of the loopback address."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def serve(key: str, options: Options, logs: Path) -> Iterator[Endpoint]:
    """The server of an arm, for as long as the block runs.

    Raises:
        ServerError: it did not come up, with the end of its log; or something else listens at its port,
            and would be measured in its place.
    """
    if key in options.urls:
        yield Endpoint(options.urls[key])
        return
    log, env = logs / f"{key}.log", ARMS[key].env
    if options.command:
        server = CommandServer(options.command, env, log, options.start_timeout)
        if _listens(server.port):
            raise ServerError(
                f"port {server.port} is in use: stop what listens there, or see --port"
            )
    else:
        # The reference platform is no ROCm; this alone changes nothing in any arm.
        env = {**env, "SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP": "1"}
        server = Server(REFERENCE_ARGS, env, log_path=log, start_timeout=options.start_timeout)
    with server:
        yield Endpoint(server.url, log, None if options.command else server.cpu_seconds)
