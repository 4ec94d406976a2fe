"""Mistakes in what happens to a request before the engine has it."""

from __future__ import annotations

from ..mutation import Mutation

TEST = "tests/api/test_waiting.py"
WORKER = "tests/api/test_worker.py"
LEAVES = f"{TEST}::test_who_leaves_while_its_text_waits_is_not_waited_for"

MUTATIONS = (
    Mutation(
        "worker-does-the-work-of-who-left",
        "api/worker.py",
        "            self._waiting.drop(future)\n",
        "            pass\n",
        (f"{WORKER}::test_what_nobody_waits_for_any_more_does_not_wait_on", LEAVES),
        "who leaves frees what he had",
    ),
    Mutation(
        "worker-interrupts-once",
        "api/worker.py",
        "            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._insist, future)\n",
        "            pass\n",
        (f"{WORKER}::test_an_interrupt_that_was_swallowed_comes_again",),
        "a template that never ends holds no thread",
    ),
    Mutation(
        "worker-serves-who-asks-most",
        "api/waiting.py",
        "        self._by_caller.move_to_end(caller)\n",
        "",
        (f"{WORKER}::test_callers_are_served_in_turn",),
        "nobody delays others by how much he asks",
    ),
    Mutation(
        "worker-lets-all-wait",
        "api/waiting.py",
        "    return num_waiting > 0 and num_waiting + num_bytes > limit\n",
        "    return False\n",
        (
            f"{WORKER}::test_a_caller_fills_its_share_and_all_of_them_the_whole",
            f"{TEST}::test_more_than_may_wait_is_refused",
        ),
        "what waits is bounded",
    ),
    Mutation(
        "deadlines-count-from-the-engine",
        "api/arrival.py",
        "    left = since.at + min(given) - time.monotonic()\n",
        "    left = min(given)\n",
        ("tests/api/test_host.py::test_a_deadline_counts_from_when_the_request_arrived",),
        "the wait is part of what a request may take",
    ),
    Mutation(
        "who-waits-has-no-deadline",
        "api/service.py",
        "        return await unless_gone(request.receive, work, left)\n",
        "        return await unless_gone(request.receive, work)\n",
        (f"{TEST}::test_a_deadline_of_the_caller_counts_while_it_waits",),
        "the wait is part of what a request may take",
    ),
    Mutation(
        "chat-opens-for-who-left",
        "api/chat.py",
        "            ask = await self.service.wanted(request, reading, body.deadline_ms)\n"
        "            self.service.check_room(1, ask.params.n)\n",
        "            ask = await reading\n            self.service.check_room(1, ask.params.n)\n",
        (f"{TEST}::test_who_leaves_while_a_large_body_is_read_is_not_waited_for",),
        "who leaves frees what he had",
    ),
    Mutation(
        "renderer-logs-where-it-is-interrupted",
        "api/template.py",
        "            param = deeper(messages, options)\n",
        "            param = deeper(messages, options)\n"
        "            __import__('logging').getLogger('foretoken').warning('x')\n",
        ("tests/api/test_tokenizer.py::test_nothing_is_logged_where_an_interrupt_may_come",),
        "an interrupt leaves no lock behind",
    ),
)
