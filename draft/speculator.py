"""DraftSpeculator: decides which tokens each request drafts in a step, and how many.

Sources look up the next tokens in earlier tokens, or derive them from a grammar. An optional
proposer (a draft model or a trained head) drafts in the model thread. The speculator measures the
acceptance rate of each drafter (control/estimators.py) and the cost of a step
(control/cost_model.py). The controller drafts every token whose expected gain exceeds the price of
its row, and may draft no token. Look-ups run before a step; committed tokens are indexed while the
next step runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat, zip_longest
from typing import Literal

import numpy as np
from typing_extensions import override

from ..core.interface.draft import NO_DRAFT, NO_DRAFT_PLAN, Draft, DraftPlan
from ..core.interface.output import RequestOutput, StepOutput
from ..core.interface.plan import ScheduledRequest, StepPlan
from ..core.interface.protocols import ProposerTraits, RowPrice, Speculator
from ..core.interface.request import Request
from .control.controller import Allocation, Controller, IntArray, StepCandidates
from .control.cost_model import Mean
from .control.draft_state import MAX_PERIOD, DraftState
from .control.estimators import AcceptanceModel, NodeWorth
from .control.look_ups import LookUps, survival_table
from .control.outcome import DraftOutcome
from .sources.grammar import GrammarSource
from .sources.merge import GuessTree, Survival
from .sources.source import GuardedSource, Source, SourceIndexer

PROPOSER = "proposer"  # key of the proposer in `drafters`; other keys are names of sources
SURE = 0.9  # minimum survival of a looked-up chain, at a fixed depth, to skip the proposer
LOOKUP_LEN = 24  # maximum path length of a look-up in "auto", in tokens
PROPOSER_NODES = 16  # maximum number of nodes in a proposer's draft in "auto"
FEW_TO_CATCH_UP = 6  # maximum tokens of missing KV that the proposer computes while prompts wait
PROPOSER_PRIORS = {"greedy": 0.75, "sampled": 0.65}  # prior probability that the best node is right

# Share of a step's time that decisions may take before look-ups without hits back off.
DECIDE_SHARE = 0.02


class DraftSpeculator(Speculator):
    """Plans drafts for all requests of an engine.

    ``depth``: "auto" lets the controller decide, and a number fixes the length of drafts; a request
    may override it. ``overlaps``: whether the engine launches a step without drafts before it has
    read the tokens of the preceding step. If so, look-ups that find nothing are paused even if they
    are cheap. ``proposer``: the traits of the draft model or trained head that drafts in the model
    thread; None without one.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        controller: Controller,
        acceptance: AcceptanceModel,
        *,
        depth: Literal["auto"] | int = "auto",
        proposer: ProposerTraits | None = None,
        overlaps: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.depth = depth
        self.controller = controller
        self.acceptance = acceptance
        self._sources = [GuardedSource(source) for source in sources]
        grammar = next((s for s in sources if isinstance(s, GrammarSource)), None)
        self._look_ups = LookUps(self._sources, grammar, acceptance)
        self._indexer = SourceIndexer(self._sources)
        self._proposer, self._overlaps = proposer, overlaps
        self._lost_proposer = False  # whether the proposer was dropped after failures
        self._clock = clock
        self._states: dict[str, DraftState] = {}  # states of requests that may draft, by request id
        self._decide_s = Mean()  # seconds of a decision
        self._num_steps = 0  # number of steps observed
        self._is_resting = False  # whether all look-ups of the last plan backed off
        self._proposer_use = _ProposerUse()  # the proposer's work in the current step
        self._uses_proposer = proposer is not None and depth != "auto"
        self._node_worth = NodeWorth(PROPOSER_NODES, **PROPOSER_PRIORS)
        self._draft_shape = Mean(), Mean()  # maximum levels and nodes of a step's proposer drafts
        for source in self._sources:
            acceptance.register(source.name, source.priors)

    # -- plan -----------------------------------------------------------------------------------

    @override
    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        # The proposer drafts even if the look-ups find nothing.
        uses_proposer = self._uses_proposer and any(
            each.request_id in self._states for each in requests
        )
        self._is_resting = not uses_proposer and all(
            self._finds_nothing(request, num_new_tokens) for request in requests
        )
        return self._is_resting

    def _finds_nothing(self, request: Request, num_new_tokens: int) -> bool:
        state = self._states.get(request.request_id)
        return state is None or (
            state.is_paused(num_new_tokens) and request.sampling.constraint is None
        )

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """Plan drafts for requests with a fixed depth; let the controller plan the others.

        The controller gets the rest of ``budget``, which limits the rows that all drafts add.
        """
        self._proposer_use = _ProposerUse()
        plans = [NO_DRAFT_PLAN] * len(requests)
        share = budget // max(1, len(requests))
        depths = [self.depth if each.depth is None else each.depth for each in requests]
        auto = [index for index, depth in enumerate(depths) if depth == "auto"]
        fixed = [index for index, depth in enumerate(depths) if depth != "auto" and depth > 0]
        if fixed:
            states = self._states_of([requests[index] for index in fixed])
            own_depths = [depth for depth in depths if depth != "auto" and depth > 0]
            most = map(min, [limits[index] for index in fixed], own_depths, repeat(share))
            for index, plan in zip(fixed, self._fixed(states, list(most)), strict=True):
                plans[index] = plan
        if auto:
            began = self._clock()
            budget -= sum([plans[index].num_rows for index in fixed])
            states = self._states_of([requests[index] for index in auto])
            auto_limits = [limits[index] for index in auto]
            candidates, trees = self._candidates(
                states,
                auto_limits,
                budget,
                num_prefill=num_prefill,
                num_others=len(requests) - len(auto),
            )
            drafted = self._allocate(states, auto_limits, candidates, trees)
            for index, plan in zip(auto, drafted, strict=True):
                plans[index] = plan
            self._decide_s.observe(self._clock() - began)
        return plans

    def _depth(self, request: Request) -> Literal["auto"] | int:
        return self.depth if request.depth is None else request.depth

    def _states_of(self, requests: Sequence[Request]) -> list[DraftState]:
        known = self._states
        return [
            known[request.request_id]
            if request.request_id in known
            else known.setdefault(request.request_id, DraftState(request))
            for request in requests
        ]

    def _fixed(self, states: Sequence[DraftState], depths: Sequence[int]) -> list[DraftPlan]:
        """Plan a chain for each request: the likeliest guess, or the proposer's if it is better.

        ``depths``: maximum number of tokens of each chain. If the proposer was dropped after
        failures, only look-ups remain, and they may find nothing for many steps. Then they are
        paused, if the engine launches steps without drafts ahead.
        """
        depths = self._unpaused(states, depths)
        may_back_off = self._lost_proposer and self._overlaps
        plans = [NO_DRAFT_PLAN] * len(states)
        trees = self._look_ups.find(states, depths)
        for index, (state, depth, tree) in enumerate(zip(states, depths, trees, strict=True)):
            if not depth:
                continue
            known = NO_DRAFT if tree is None else tree.chain(depth)
            may_propose = self._proposer is not None and self._may_propose(state, known)
            max_draft = depth if may_propose else 0
            if known.token_ids or max_draft:
                state.num_fruitless = 0
                plans[index] = DraftPlan(known, max_draft=max_draft)
            else:
                state.note_fruitless(step=self._num_steps, may_back_off=may_back_off)
        return plans

    def _unpaused(self, states: Sequence[DraftState], most: Sequence[int]) -> list[int]:
        """Return ``most`` with 0 for the requests whose look-ups are paused."""
        return [
            0 if state.paused_until and self._finds_nothing(state.request, 0) else length
            for state, length in zip(states, most, strict=True)
        ]

    def _candidates(
        self,
        states: Sequence[DraftState],
        limits: Sequence[int],
        budget: int,
        *,
        num_prefill: int,
        num_others: int,
    ) -> tuple[StepCandidates, Sequence[GuessTree | None]]:
        most = self._unpaused(states, list(map(min, limits, repeat(LOOKUP_LEN))))
        trees = self._look_ups.find(states, most)
        context_lens = np.array(list(map(len, [state.request.tokens for state in states])))
        num_uncached = self._num_uncached(states, context_lens)
        expected_accepted, node_probability = self._proposer_nodes(
            states, limits, num_uncached, is_busy=num_prefill > 0
        )
        levels, nodes = self._draft_shape
        candidates = StepCandidates(
            lookup_survival=survival_table(trees),
            expected_accepted=expected_accepted,
            num_uncached_draft_tokens=num_uncached,
            budget=budget,
            num_prefill=num_prefill,
            num_others=num_others,
            node_probability=node_probability,
            tokens_per_pass=1 if self._proposer is None else self._proposer.tokens_per_pass,
            passes_per_node=levels.value / nodes.value if nodes.value else 1.0,
            context_lens=context_lens,
        )
        return candidates, trees

    def _num_uncached(self, states: Sequence[DraftState], context_lens: IntArray) -> IntArray:
        """Return the number of tokens before the last whose KV the proposer lacks.

        The shape is [num_requests]. The first pass of a draft computes the last token, too, and its
        price already contains one row for each request.
        """
        if self._proposer is None or not self._proposer.catches_up:
            return np.zeros_like(context_lens)
        return context_lens - 1 - np.array([state.proposer_len for state in states], np.int64)

    def _proposer_nodes(
        self,
        states: Sequence[DraftState],
        limits: Sequence[int],
        num_uncached: IntArray,
        *,
        is_busy: bool,
    ) -> tuple[Survival, Survival]:
        """Return two probabilities for the proposer's best nodes of each request.

        The first: that the 1st, 2nd, ... best node exists and is accepted. The second: that it
        exists. Both are [num_requests, most], and [num_requests, 0] without a proposer.
        """
        if self._proposer is None:
            return (none := np.zeros((len(states), 0))), none
        most = self._most_nodes(states, limits, num_uncached, is_busy=is_busy)
        width, sampled = int(most.max()), [int(state.is_sampled) for state in states]
        is_allowed, worth = np.arange(width) < most[:, None], self._node_worth
        accepted = [worth.expected_accepted(width, sampled=each) for each in (False, True)]
        probability = [worth.node_probability(width, sampled=each) for each in (False, True)]
        return (
            np.where(is_allowed, np.array(accepted)[sampled], 0.0),
            np.where(is_allowed, np.array(probability)[sampled], 0.0),
        )

    def _most_nodes(
        self,
        states: Sequence[DraftState],
        limits: Sequence[int],
        num_uncached: IntArray,
        *,
        is_busy: bool,
    ) -> IntArray:
        """Return the maximum number of nodes that the proposer may draft for each request.

        It is 0 while prompts are prefilled and the proposer lacks much KV, because computing that
        KV would delay the prompts. It is 0 for packed requests, too: the proposer's KV shares the
        target's page table.
        """
        most = np.minimum(limits, PROPOSER_NODES)
        if is_busy:
            most[num_uncached > FEW_TO_CATCH_UP] = 0
        requests = [state.request for state in states]
        most[[each.extras.kv_budget > 0 and each.is_packed for each in requests]] = 0
        return most

    def _may_propose(self, state: DraftState, known: Draft) -> bool:
        """Whether the proposer may draft beside a looked-up chain, at a fixed depth.

        It does not if the chain is sure to be accepted, such as tokens that a grammar forces.
        """
        is_sure = bool(known.survival) and known.survival[-1] >= SURE
        return not (is_sure or state.request.is_packed)

    def _allocate(
        self,
        states: Sequence[DraftState],
        limits: Sequence[int],
        candidates: StepCandidates,
        trees: Sequence[GuessTree | None],
    ) -> list[DraftPlan]:
        """Return the controller's draft for each request; pause look-ups that find nothing."""
        allocation = self.controller.allocate(candidates)
        may_back_off = self._overlaps or self._is_deciding_dear(candidates.num_decodes)
        num_lookup, depths = allocation.num_lookup.tolist(), allocation.num_proposer.tolist()
        self._uses_proposer = any(depths)
        # A proposer that compares its nodes with their price may use the rest of the budget.
        room = candidates.budget - allocation.num_rows
        num_proposing = max(1, int(np.count_nonzero(allocation.num_proposer)))
        weighs = self._proposer is not None and self._proposer.weighs
        prices = _TreePrices.of(allocation, num_proposing) if weighs else None
        plans = [NO_DRAFT_PLAN] * len(states)
        for at, (state, tree, num_nodes, depth) in enumerate(
            zip(states, trees, num_lookup, depths, strict=True)
        ):
            if depth:
                most = min(limits[at], PROPOSER_NODES, depth + room // num_proposing)
                alone = DraftPlan(max_draft=depth)
                plans[at] = alone if prices is None else prices.plan(tree, most, at)
            elif num_nodes and tree is not None:
                plans[at] = DraftPlan(tree.draft(num_nodes))
            if state.paused_until and state.is_paused(0):
                continue
            if plans[at].draft.token_ids:  # looked-up tokens only
                state.num_fruitless = 0
            else:
                state.note_fruitless(step=self._num_steps, may_back_off=may_back_off)
        return plans

    def _is_deciding_dear(self, num_decodes: int) -> bool:
        step_s = self.controller.costs.step_seconds(num_decodes)
        return self._decide_s.value > DECIDE_SHARE * step_s

    # -- outcomes -------------------------------------------------------------------------------

    def observe(
        self, request: Request, scheduled: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        """Score every guess of the step, verified or not, against the committed tokens."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        if state.unscored:
            state.score(self.acceptance, request.tokens[-num_served:])
        if scheduled.draft_plan.max_draft and self._proposer is not None:
            outcome = DraftOutcome(output.draft, output.path)
            uncached = scheduled.stop - state.proposer_len if self._proposer.catches_up else 0
            self._proposer_use.add(uncached, outcome, self._proposer.tokens_per_pass)
            is_trial = self.controller.is_trying
            state.judge_proposer(
                self._node_worth, scheduled, outcome, num_served, is_trial=is_trial
            )

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Learn the cost of a step that took ``seconds``; give up a proposer that failed in it."""
        self._num_steps += 1
        if output.lost_proposer and self._proposer is not None:
            self._proposer, self._lost_proposer, self._uses_proposer = None, True, False
        pairs = list(zip(plan.requests, output.requests, strict=True))
        decodes = [out for each, out in pairs if each.stop - each.start == 1]
        num_drafted = map(len, [out.draft.token_ids for out in output.requests])
        use, draft_s = self._proposer_use, output.times.get("draft", 0.0)
        self.controller.costs.observe(
            num_rows=output.num_rows,
            num_requests=len(decodes),
            num_tokens=sum(map(len, [out.token_ids for out in decodes])),
            forward_s=output.times.get("forward", 0.0),
            draft_s=draft_s,
            seconds=seconds,
            with_prompts=len(decodes) < len(plan.requests),
            with_proposer=bool(use.passes),
            num_keys=sum(
                [
                    each.start * (each.stop - each.start - 1 + count)
                    for each, count in zip(plan.requests, num_drafted, strict=True)
                ]
            ),
        )
        self.controller.costs.observe_draft(use.passes, draft_s)
        self.controller.observe(seconds, num_drafted=use.num_drafted, num_hits=use.num_hits)
        if use.most_nodes:
            levels, nodes = self._draft_shape
            levels.observe(use.most_levels)
            nodes.observe(use.most_nodes)
        self._proposer_use = _ProposerUse()

    # -- requests -------------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """Register a request that may draft.

        If the proposer is in use, cached pages include its KV, so it has the KV of a prefix hit.
        """
        if self._depth(request) == 0:
            return
        (state,) = self._states_of([request])
        state.proposer_len = request.num_computed if self._uses_proposer else 0
        self._indexer.join(request)

    def leave(self, request: Request) -> None:
        """Forget a request; the sources store its tokens later, while a step runs."""
        if self._states.pop(request.request_id, None) is not None:
            self._indexer.leave(request)
            self.acceptance.forget(request.request_id)

    @override
    def has_work(self) -> bool:
        # Look-ups that back off resume in steps whose number is a multiple of `MAX_PERIOD`.
        if self._is_resting and (self._num_steps + 1) % MAX_PERIOD:
            return self._indexer.has_backlog
        return self._indexer.has_work

    def work(self) -> None:
        """Index new tokens."""
        self._indexer.work()

    @override
    def flush(self, *namespaces: str | None) -> None:
        self._indexer.keep()
        for source in self._sources:
            source.flush(*namespaces)

    def drafters(self) -> Mapping[str, bool]:
        """Return whether each source is still in use, by name, and whether the proposer is.

        Without a proposer, there is no entry for it.
        """
        working = {source.name: source.works for source in self._sources}
        if self._proposer is not None or self._lost_proposer:
            working[PROPOSER] = not self._lost_proposer
        return working

    @override
    def describe(self) -> Mapping[str, object]:
        return self.controller.describe()

    @override
    def row_price(self, num_requests: int) -> RowPrice | None:
        costs, count = self.controller.costs, max(1, num_requests)
        if not costs.is_ready:
            return None
        seconds = float(costs.row_seconds(count, 1, count)[-1])
        return RowPrice(seconds=seconds, tokens=seconds * costs.rate(count))


@dataclass(frozen=True, slots=True)
class _TreePrices:
    """Prices of the nodes of a step's draft trees, in tokens."""

    rows: tuple[float, ...]  # price of 1, 2, ... rows in all trees together
    per_tree: Survival  # price of 1, 2, ... rows in one tree, if all trees have equally many
    keys: list[float]  # additional price of a node, for the keys it attends to, by request
    passes: tuple[float, ...]  # price of one pass of the proposer with 1, 2, ... rows

    @classmethod
    def of(cls, allocation: Allocation, num_trees: int) -> _TreePrices | None:
        """Return the prices of an allocation, or None if the proposer drafts nothing in it."""
        rows, keys, passes = allocation.row_prices, allocation.key_prices, allocation.pass_prices
        if rows is None or keys is None or passes is None:
            return None
        per_tree = rows[num_trees - 1 :: num_trees] / num_trees
        return cls(tuple(rows.tolist()), per_tree, keys.tolist(), tuple(passes.tolist()))

    def plan(self, known: GuessTree | None, most: int, request: int) -> DraftPlan:
        """Plan a tree of at most ``most`` nodes for the request with the index ``request``.

        The tree begins with the looked-up nodes that are worth their rows.
        """
        draft = NO_DRAFT
        if known is not None:
            survival = known.survival[: min(most, len(self.per_tree))]
            net = (survival - self.keys[request]).cumsum() - self.per_tree[: len(survival)]
            draft = known.draft(int(net.argmax()) + 1 if net.size and net.max() > 0.0 else 0)
        return DraftPlan(
            draft,
            max_draft=most,
            may_branch=True,
            row_prices=self.rows,
            key_price=self.keys[request],
            pass_prices=self.passes,
        )


class _ProposerUse:
    """The proposer's work in one step."""

    def __init__(self) -> None:
        self.num_drafted = self.num_hits = self.most_nodes = self.most_levels = 0
        self.passes: list[int] = []  # rows of each pass

    def add(
        self, num_uncached_draft_tokens: int, outcome: DraftOutcome, tokens_per_pass: int
    ) -> None:
        """Add one request's draft: the rows of each pass, and the drafted and accepted tokens."""
        pass_rows, num_ranked = outcome.note.pass_rows, outcome.num_ranked
        # A head that drafts blocks computes one row per pass and request; any other proposer
        # computes one row per node that it expands.
        rows = pass_rows if tokens_per_pass == 1 else [1] * -(-len(pass_rows) // tokens_per_pass)
        mine = [max(1, num_uncached_draft_tokens), *rows[1:]]
        self.passes = [sum(pair) for pair in zip_longest(self.passes, mine, fillvalue=0)]
        self.most_nodes = max(self.most_nodes, num_ranked)
        self.most_levels = max(self.most_levels, len(pass_rows))
        self.num_drafted += num_ranked
        self.num_hits += len(outcome.accepted_ranks)
