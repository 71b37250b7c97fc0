"""Stock SGLang servers on the CPU, as processes: how they are started, asked and ended."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

from sglang_here import PYTHON, environment

STAND_IN = '''
"""Stands for a package that is there for GPUs only."""
import enum, importlib.abc, importlib.machinery, sys, types

__version__ = "9.9.9"


class Anything:
    def __init__(self, *a, **k): ...
    def __call__(self, *a, **k): return a[0] if len(a) == 1 and callable(a[0]) and not k else Anything()
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()
    def __getitem__(self, key): return Anything()
    def __mro_entries__(self, bases): return (object,)
    def __or__(self, other): return self
    __ror__ = __or__
    def __iter__(self): return iter(())


class InterpolationMode(enum.Enum):
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(7)


class Module(types.ModuleType):
    __path__ = ()
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return InterpolationMode
        value = type(name, (Anything,), {}) if name[:1].isupper() else Anything()
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec): return Module(spec.name)
    def exec_module(self, module): ...


sys.meta_path.append(Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()
'''


def stand_ins(folder):
    """Packages of which SGLang imports names on the CPU too, without using them; returns the folder."""
    for package, distribution in (("torchvision", "torchvision"), ("sgl_kernel", "sgl-kernel")):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(STAND_IN)
        info = folder / f"{package}-9.9.9.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.9.9\n")
    return folder


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(port, body, path="/generate", timeout=120):
    """The answer, or what was wrong as ``{"error": ...}``."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return {"error": f"{error.code} {error.read().decode()[:500]}"}
    except (OSError, ValueError) as error:
        return {"error": repr(error)}


class Server:
    """A process that answers ``/health``, and its log."""

    def __init__(self, folder, name, port, command, **given):
        self.name, self.port = name, port
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(**given))

    def wait(self, seconds=600):
        """Return once it is healthy."""
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.text()[-6000:]}"
            assert time.monotonic() < end, f"{self.name} is not healthy after {seconds} s:\n{self.text()[-6000:]}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.5)

    def text(self):
        return self.log.read_text(errors="replace")

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


class Pair:
    """A prefill and a decode server of one model."""

    def __init__(self, folder, model, *, page_size=16, chunk=32):
        self.folder, self.model = folder, model
        self.bootstrap = free_port()
        self._packages = str(stand_ins(folder / "packages"))
        self._options = ["--page-size", str(page_size), "--chunked-prefill-size", str(chunk)]
        self.servers = {}
        for role in ("prefill", "decode"):
            self.start(role)

    def start(self, role):
        """Start the server of a role; `Server.wait` says when it is there."""
        port = free_port()
        own = ["--disaggregation-decode-retraction-backup", "cpu_tensor"] if role == "decode" else []
        given = environment()
        self.servers[role] = Server(
            self.folder,
            role,
            port,
            [
                *(
                    PYTHON,
                    "-W",
                    "ignore",
                    "-m",
                    "sglang.launch_server",
                    "--model-path",
                    str(self.model),
                    "--device",
                    "cpu",
                ),
                *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
                *("--grammar-backend", "none"),
                *("--disaggregation-mode", role, "--disaggregation-transfer-backend", "kvbaton"),
                *("--disaggregation-bootstrap-port", str(self.bootstrap), "--attention-backend", "torch_native"),
                *("--sampling-backend", "pytorch", "--disable-overlap-schedule", "--max-total-tokens", "4096"),
                *("--max-running-requests", "8", "--mem-fraction-static", "0.2", "--skip-server-warmup"),
                *self._options,
                *own,
            ],
            PYTHONPATH=f"{self._packages}:{given['PYTHONPATH']}",
            SGLANG_USE_CPU_ENGINE="1",
            SGLANG_HOST_IP="127.0.0.1",
            KVBATON_SECRET="a secret of these servers only",
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS="1",
        )
        return self.servers[role]

    def wait(self):
        for server in self.servers.values():
            server.wait()

    def ask(self, ids, new_tokens, *, roles=("prefill", "decode"), timeout=120):
        """The same request to both, as the router sends it; the decode server's answer."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap,
            "bootstrap_room": random.getrandbits(62),
        }
        answers = {}

        def send(role):
            answers[role] = post(self.servers[role].port, body, timeout=timeout)

        threads = [threading.Thread(target=send, args=(role,)) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers["decode"]

    def close(self):
        for server in self.servers.values():
            server.close()
