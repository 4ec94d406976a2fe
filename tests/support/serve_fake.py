"""A server over the fake engine: python serve_fake.py FOLDER EOS VOCAB_SIZE PORT DRAIN [UDS]."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))

from tokenizers import Tokenizer as Backend

from foretoken import AsyncLLM
from foretoken.api.server.observation.logs import configure
from foretoken.api.server.process import run
from foretoken.api.serving.settings import Listen
from foretoken.api.text.tokenizer import Tokenizer
from support.fake_engine import FakeEngine, make_built


def load(folder: Path, *, max_model_len: int) -> Tokenizer:
    """Without transformers, whose import takes seconds."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    return Tokenizer(SimpleNamespace(backend_tokenizer=backend), max_model_len=max_model_len)


Tokenizer.load = load
folder, eos, vocab_size, port, drain, *uds = sys.argv[1:]
engine = FakeEngine()
engine.by_hand = True


def obey() -> None:
    """Each line of stdin is an order."""
    for line in sys.stdin:
        order = {"step": engine.step, "die": engine.die}[line.strip()]
        engine._task.get_loop().call_soon_threadsafe(order)


def tell() -> None:
    """Say on stdout when a request is there."""
    while True:
        engine.submitted.acquire()
        print("submitted", flush=True)


for target in (obey, tell):
    threading.Thread(target=target, daemon=True).start()
built = make_built(engine, Path(folder), int(eos), vocab_size=int(vocab_size))
listen = Listen(port=int(port), uds=uds[0] if uds else None, drain_seconds=float(drain))
configure(listen.log_level, listen.log_format)
sys.exit(run(AsyncLLM.from_built(built), listen))
