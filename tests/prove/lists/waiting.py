"""Mistakes in what happens to a request before the engine has it."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "worker-does-the-work-of-who-left",
        "Worker._give_up",
        "            self._waiting.drop(future)\n",
        "            pass\n",
        (
            "test_what_nobody_waits_for_any_more_does_not_wait_on",
            "test_who_leaves_while_its_text_waits_is_not_waited_for",
        ),
        "who leaves frees what he had",
    ),
    Mutation(
        "worker-interrupts-once",
        "Worker._insist",
        "            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._insist, future)\n",
        "            pass\n",
        ("test_an_interrupt_that_was_swallowed_comes_again",),
        "a template that never ends holds no thread",
    ),
    Mutation(
        "worker-serves-who-asks-most",
        "Waiting.take",
        "        self._by_caller.move_to_end(caller)\n",
        "",
        ("test_callers_are_served_in_turn",),
        "nobody delays others by how much he asks",
    ),
    Mutation(
        "worker-lets-all-wait",
        "_is_over",
        "    return num_waiting > 0 and num_waiting + num_bytes > limit\n",
        "    return False\n",
        (
            "test_a_caller_fills_its_share_and_all_of_them_the_whole",
            "test_more_than_may_wait_is_refused",
        ),
        "what waits is bounded",
    ),
    Mutation(
        "deadlines-count-from-the-engine",
        "seconds_left",
        "    left = since.at + min(given) - time.monotonic()\n",
        "    left = min(given)\n",
        ("test_a_deadline_counts_from_when_the_request_arrived",),
        "the wait is part of what a request may take",
    ),
    Mutation(
        "who-waits-has-no-deadline",
        "Service.wanted",
        "        return UnlessGone(receive, left)\n",
        "        return UnlessGone(receive)\n",
        ("test_a_deadline_of_the_caller_counts_while_it_waits",),
        "the wait is part of what a request may take",
    ),
    Mutation(
        "chat-opens-for-who-left",
        "UnlessGone._watch",
        "            self._timeout.reschedule(0)",
        "            self._timeout.reschedule(None)",
        ("test_who_leaves_while_a_large_body_is_read_is_not_waited_for",),
        "who leaves frees what he had",
    ),
    Mutation(
        "renderer-logs-where-it-is-interrupted",
        "ChatTemplate.render",
        "            param = deeper(messages, options)\n",
        "            param = deeper(messages, options)\n"
        "            __import__('logging').getLogger('foretoken').warning('x')\n",
        ("test_nothing_is_logged_where_an_interrupt_may_come",),
        "an interrupt leaves no lock behind",
    ),
)
