"""Real hosts on one machine: network namespaces joined by a bridge, each link shaped in both directions.

Needs root and iproute2 (ip, tc). There is bandwidth and queueing, but no latency of distance.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BURST, QUEUE = "32kb", "400ms"


class Hosts:
    """A few hosts; host i is at address(i) and can run commands."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._name = f"fr{os.getpid()}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def shape(self, host: int, rate: str) -> None:
        """Give one host's link a bandwidth, such as 50mbit, both ways; "none" takes the limit away."""
        for namespace, device in ((self._host(host), "eth0"), (self._hub, f"port{host}")):
            command = ["ip", "netns", "exec", namespace, "tc", "qdisc"]
            if rate == "none":
                subprocess.run([*command, "del", "dev", device, "root"], stderr=subprocess.DEVNULL, check=False)
            else:
                _do(*command, "replace", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE)

    def shape_all(self, rate: str) -> None:
        for host in range(self.count):
            self.shape(host, rate)

    def run(self, commands: Sequence[Sequence[str]], limit: float, port: int = 29700) -> list[str]:
        """A command per host, with the variables that torchrun would set; what each printed on its last line."""
        children: list[subprocess.Popen[str]] = []
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / str(host) for host in range(len(commands))]
            try:
                for host, command in enumerate(commands):
                    with outputs[host].open("w") as output:
                        children.append(
                            subprocess.Popen(
                                ["ip", "netns", "exec", self._host(host), *command],
                                env={**os.environ, **self._environment(host, len(commands), port)},
                                stdout=output,
                                text=True,
                            )
                        )
                _wait(children, limit)
            finally:
                for child in children:
                    child.kill()
                    child.wait()
            return [output.read_text().strip().splitlines()[-1] for output in outputs]

    def _environment(self, host: int, count: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(host),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }

    def _host(self, host: int) -> str:
        return f"{self._name}h{host}"

    @property
    def _hub(self) -> str:
        return f"{self._name}hub"

    def _up(self) -> None:
        _do("ip", "netns", "add", self._hub)
        _do("ip", "-n", self._hub, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", self._hub, "link", "set", "br0", "up")
        for host in range(self.count):
            name, port = self._host(host), f"port{host}"
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _do("ip", "-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "-n", self._hub, "link", "set", port, "master", "br0", "up")
            _do("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "eth0", "up")

    def _down(self) -> None:
        for namespace in (*(self._host(host) for host in range(self.count)), self._hub):
            subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Hosts that are gone afterwards, whatever happened."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        sys.exit(
            "This benchmark makes hosts of network namespaces: run it as root, with iproute2 (ip and tc) installed."
        )
    made = Hosts(count)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        made._up()
        yield made
    finally:
        made._down()


def _wait(children: Sequence[subprocess.Popen[str]], limit: float) -> None:
    """Until all have ended well; raises as soon as one has not, or time is over."""
    deadline = time.monotonic() + limit
    while True:
        codes = [child.poll() for child in children]
        if any(codes):
            raise RuntimeError(f"host {next(i for i, code in enumerate(codes) if code)} failed")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"no end after {limit:g} s")
        time.sleep(0.05)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)
