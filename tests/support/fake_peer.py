"""A worker without an engine: says what the driver expects, or fails as its mode tells."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "lab" / "peers"))

from wire import Call, Generate, Job, Tokens, UnsupportedError, serve


def load(job: Job) -> Generate:
    if job.mode == "cannot":
        raise UnsupportedError("nothing of the kind")
    if job.mode == "breaks":
        raise OSError("no such library")
    print("loading, says the engine on its standard output")

    def generate(call: Call) -> Tokens:
        if job.mode == "hangs" and call.num_new > 4:
            time.sleep(60)
        if job.mode == "dies" and call.num_new > 4:
            sys.exit("out of memory")
        num_new = call.num_new - (job.mode == "short")
        return [[sum(prompt) + at for at in range(num_new)] for prompt in call.prompts]

    return generate


if __name__ == "__main__":
    serve(load, ())
