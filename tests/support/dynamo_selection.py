"""Dynamo's SelectionService beside one worker, run by a Python of its own: its pins are not ours.

Arguments: address of events, address of replays, token ids as JSON, tokens that are to be found.
Prints the overlap as JSON once it has so many, or the last one.
"""

import asyncio
import json
import sys

TRIES, SECONDS = 100, 0.1
NAMES = {"model_name": "m", "tenant_id": "t"}


async def main(address: str, replay_address: str, token_ids: str, wanted: str) -> None:
    """Ask until the service has caught up with what was published before it came."""
    from dynamo.llm import SelectionService

    service = SelectionService(indexer_threads=1)
    await service.upsert_worker(
        {
            **NAMES,
            "worker_id": 1,
            "endpoint": "x://1",
            "block_size": 16,
            "max_num_batched_tokens": 256,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "kv_events_endpoints": {0: address},
            "replay_endpoint": replay_address,
        }
    )
    overlap = {}
    for number in range(TRIES):
        asked = {"token_ids": json.loads(token_ids), "allowed_worker_ids": [1]}
        found = await service.select_and_reserve({**NAMES, **asked, "selection_id": str(number)})
        overlap = found["overlap"]
        if overlap["longest_matched"] >= int(wanted):
            break
        await asyncio.sleep(SECONDS)
    print(json.dumps(overlap))


asyncio.run(main(*sys.argv[1:]))
