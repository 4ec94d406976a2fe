"""A server over the real engine and the model of hashes: python serve_engine.py FOLDER JSON.

JSON holds options of `Supervision`, of `Limits`, ``drain_seconds``, and ``front``: an address that
it serves as a replica instead. Each line of stdin is an
order: "hold" the steps to come until "go"; "raise" in all of them; "hang" in the next one for
ever; "leap" with the engine's clock, 100 seconds on; "stall" the event loop. On stdout it says
"obeyed", "submitted" and, in a step that is held, "entered".
"""

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))

from tokenizers import Tokenizer as Backend

from foretoken import AsyncLLM
from foretoken.api.cluster.replica.engine_host import EngineHost
from foretoken.api.cluster.replica.process import serve
from foretoken.api.cluster.wire.transport import ReplicaSocket
from foretoken.api.server.observation.logs import configure
from foretoken.api.server.process import run
from foretoken.api.serving.limits import Limits
from foretoken.api.serving.settings import Listen, Settings
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.core.config import EngineConfig
from foretoken.core.engine.engine import Engine
from foretoken.core.engine.model_thread import Supervision
from support.fake_engine import make_built
from support.fake_model import EOS, VOCAB_SIZE, FakeRunner, make_scheduler


def load(folder: Path, *, max_model_len: int) -> Tokenizer:
    """Without transformers, whose import takes seconds."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    return Tokenizer(SimpleNamespace(backend_tokenizer=backend), max_model_len=max_model_len)


class Obedient(FakeRunner):
    order = "go"
    may_go = threading.Event()

    def step(self, plan):
        order = self.order
        if order == "raise":
            raise RuntimeError("the forward pass failed")
        if order in ("hold", "hang"):
            print("entered", flush=True)
            threading.Event().wait() if order == "hang" else self.may_go.wait()
        return super().step(plan)


class Clock:
    ahead = 0.0  # seconds

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def obey() -> None:
    for line in sys.stdin:
        order = line.strip()
        if order == "stall":
            engine._task.get_loop().call_soon_threadsafe(time.sleep, 1000)
        elif order == "leap":
            clock.ahead += 100
        else:
            runner.order = order
            runner.may_go.set() if order == "go" else runner.may_go.clear()
        print("obeyed", flush=True)


def submit(request):
    stream = Engine.submit(engine, request)
    print("submitted", flush=True)
    return stream


Tokenizer.load = load
folder, options = sys.argv[1], json.loads(sys.argv[2])
supervision = Supervision(
    step_timeout=options.get("step_timeout", 120.0),
    ready_step_seconds=options.get("ready_step_seconds", 10.0),
    dump_dir=Path(options["dump_dir"]),
)
scheduler, runner, clock = make_scheduler(max_running=2, max_queued=4), Obedient(4), Clock()
engine = Engine(scheduler, runner, supervision=supervision, clock=clock)
engine.submit = submit
threading.Thread(target=obey, daemon=True).start()
built = make_built(engine, Path(folder), EOS, vocab_size=VOCAB_SIZE)
if front := options.get("front"):
    configure("info", "text")
    tokenizer = load(Path(folder), max_model_len=built.max_model_len)
    config = EngineConfig(step_timeout=supervision.step_timeout)
    dial = partial(ReplicaSocket, front, None)
    sys.exit(serve(EngineHost(built, tokenizer, dial, address=front, config=config)))
llm = AsyncLLM("builtin", step_timeout=supervision.step_timeout)
llm._built = built
listen = Listen(
    port=0,
    drain_seconds=options.get("drain_seconds", 20.0),
    settings=Settings(limits=Limits(**options.get("limits", {}))),
)
configure(listen.log_level, listen.log_format)
sys.exit(run(llm, listen))
