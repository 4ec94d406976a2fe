"""Mistakes in serving: engine, streams, the model thread, the gate."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "mail-aborts-before-it-adds",
        "RequestInbox.drain",
        "        arrived, self._arrived = self._arrived, []\n",
        "        arrived, self._arrived = self._arrived, []\n"
        "        for request_id in self._aborted:\n"
        "            self.queue_events(self._scheduler.abort(request_id, now))\n"
        "        self._aborted.clear()\n",
        ("test_an_abort_ends_a_request_wherever_it_is",),
        "I4: an abort before the first step ends its stream",
    ),
    Mutation(
        "mail-tells-events-twice",
        "RequestInbox.deliver",
        "        events, self._events = self._events, []\n",
        "        events, self._events = self._events, self._events[:1]\n",
        ("test_many_streams_run_side_by_side_and_each_is_its_solo_answer",),
        "I4: exactly one terminal event",
    ),
    Mutation(
        "engine-takes-requests-while-it-drains",
        "Engine.submit",
        "if not self.alive or self.draining:\n            raise EngineDead(",
        "if not self.alive:\n            raise EngineDead(",
        ("test_an_engine_takes_nothing_from_the_moment_it_is_told_to_close",),
        "new work is refused while draining",
    ),
    Mutation(
        "engine-flush-stops-at-the-speculator",
        "Scheduler.flush",
        "        finally:\n",
        "        except ValueError:\n            pass\n        else:\n",
        ("test_a_flush_reaches_the_cache_even_if_the_speculator_fails",),
        "a flush reaches the cache even if the speculator fails",
    ),
    Mutation(
        "stepper-goes-on-without-its-gpu",
        "StepExecutor._recover",
        "lost = may_have_lost_model(bisection.failure) and not bisection.num_passed",
        "lost = False",
        ("test_a_model_that_is_lost_ends_the_engine_at_once_and_blames_nobody",),
        "a GPU that is lost ends the engine at once",
    ),
    Mutation(
        "stepper-does-not-wait-for-the-step",
        "StepExecutor._compute",
        (
            "            finally:\n"
            "                # Requests must not change while the model thread reads them.\n"
            "                output = await self._outcome(job, in_flight.plan)"
        ),
        "            except ValueError:\n                raise\n"
        "            else:\n                output = await self._outcome(job, in_flight.plan)",
        ("test_a_step_is_over_before_what_failed_meanwhile_is_raised",),
        "law 5: requests do not change under a step",
    ),
    Mutation(
        "recovery-blames-the-neighbours",
        "StepBisection.failed",
        "        self.failing_requests += part.requests\n",
        "        self.failing_requests += self._plan.requests\n",
        ("test_one_culprit_is_found_in_few_runs_and_its_neighbours_never_know",),
        "one bad request harms nobody else",
    ),
    Mutation(
        "recovery-runs-drafts-again",
        "StepBisection.__init__",
        "[_without_drafts(each) for each in plan.requests if not _moved_state(each)]",
        "list(plan.requests)",
        ("test_a_failure_that_follows_from_drafts_costs_the_drafts_alone",),
        "the parts go without drafts, which may be what failed",
    ),
    Mutation(
        "stream-merge-loses-the-first",
        "TokenStream.push",
        "self._slot.merge(delta)",
        "self._slot = delta",
        ("test_what_a_slow_reader_missed_is_told_at_once_and_whole",),
        "a slow reader misses nothing",
    ),
    Mutation(
        "thread-lets-go-of-a-running-call",
        "Job.result",
        "self._ended = self.loop.create_future()  # the cancellation ended the future only",
        "break",
        ("test_who_is_cancelled_waits_for_the_call_to_end",),
        "law 5: requests do not change under a step",
    ),
    Mutation(
        "gate-lets-everybody-in",
        "AuthMiddleware._unwelcome",
        "if known is None and (self._needs_key or needs_admin):",
        "if known is None and needs_admin:",
        ("test_without_a_key_nothing_is_served_but_health_and_the_page",),
        "every route but health needs the key",
    ),
    Mutation(
        "gate-opens-a-path",
        "OPEN_PATHS",
        'OPEN_PATHS = frozenset({"/health"})',
        'OPEN_PATHS = frozenset({"/health", "/metrics"})',
        ("test_without_a_key_nothing_is_served_but_health_and_the_page",),
        "every route but health needs the key",
    ),
    Mutation(
        "gate-does-not-name-the-caller",
        "AuthMiddleware.__call__",
        "context.caller = known or (offered[0] if offered else NOBODY)",
        "context.caller = NOBODY",
        ("test_the_prompt_of_another_key_is_not_known",),
        "nobody reads what another key has kept",
    ),
)
