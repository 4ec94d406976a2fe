"""Agents: conversations of many turns with tools, which branch into sub-agents.

All agents share a system prompt and the schemas of their tools. A turn appends the model's own
answer and the result of a tool; the next turn waits for both. Every few turns an agent branches
into sub-agents, which share its history, work for one turn, and return a summary each.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from .generator import Ask, Job, Piece, Reply, Session
from .workloads import Lengths, Scene, Workload, above_zero, lengths, natural, positive


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--agents", type=positive, default=4, help="number of agents")
    add("--turns", type=positive, default=4, help="turns of each agent")
    add(
        "--system-len",
        type=lengths,
        default=Lengths(256, 256),
        help="length of the system prompt, which all agents share",
    )
    add(
        "--tools-len",
        type=lengths,
        default=Lengths(384, 384),
        help="length of the tools' schemas, which all agents share",
    )
    add(
        "--task-len",
        type=lengths,
        default=Lengths(64, 64),
        help="length of an agent's first message",
    )
    add(
        "--tool-result-len",
        type=lengths,
        default=Lengths(32, 128),
        help="length of the tool result in each turn",
    )
    add("--output-len", type=lengths, default=Lengths(24, 48), help="length of an answer")
    add(
        "--branch-every",
        type=natural,
        default=2,
        metavar="K",
        help="turns between branchings; 0: never",
    )
    add(
        "--branches",
        type=positive,
        default=2,
        metavar="M",
        help="number of sub-agents at a branching",
    )
    add("--think-time", type=above_zero, metavar="S", help="pause before a turn, in seconds")
    add(
        "--record",
        type=Path,
        metavar="BODIES",
        help="folder or file (.jsonl, .jsonl.xz) of recorded sessions to send, one after another, "
        "instead of generated ones (bench serve only)",
    )


@dataclass(slots=True)
class _Agent:
    """A growing conversation; its random draws do not depend on when other agents run."""

    scene: Scene
    name: str
    rng: Random
    history: list[Piece]
    history_len: int

    async def run(self, ask: Ask) -> None:
        """Run all turns, or as many as fit into the context."""
        args = self.scene.args
        due: float | None = None
        for turn in range(args.turns):
            output_len = args.output_len.draw(self.rng)
            if not self.scene.fits(self.history_len, output_len):
                self.scene.num_ended += 1
                return
            reply = await ask(
                Job(name="turn", prompt=list(self.history), output_len=output_len, due=due)
            )
            self._hear(reply, output_len)
            if args.branch_every and (turn + 1) % args.branch_every == 0:
                await self._branch(ask, turn)
            self._use_tool(turn)
            due = await _think(reply, args.think_time)

    def _hear(self, reply: Reply, length: int) -> None:
        self.history.append(Piece("assistant", reply.content))
        self.history_len += length

    def _use_tool(self, turn: object) -> None:
        length = self.scene.args.tool_result_len.draw(self.rng)
        result = self.scene.corpus.cut((self.name, "result", turn), length)
        self.history.append(Piece("user", result))
        self.history_len += length

    async def _branch(self, ask: Ask, turn: int) -> None:
        """Run sub-agents concurrently; a failed one ends the agent once the others are done."""
        num_branches = self.scene.args.branches
        work = [self._sub_agent(ask, (turn, branch)) for branch in range(num_branches)]
        found = await asyncio.gather(*work, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
            if each is not None:
                self.history.append(Piece("user", each[0].content))
                self.history_len += each[1]

    async def _sub_agent(self, ask: Ask, key: object) -> tuple[Reply, int] | None:
        """Run a sub-agent and return its answer and the answer's length.

        None if it does not fit.
        """
        args = self.scene.args
        rng = self.scene.rng(f"{self.name}/{key}")
        task_len, output_len = args.task_len.draw(rng), args.output_len.draw(rng)
        if not self.scene.fits(self.history_len + task_len, output_len):
            self.scene.num_ended += 1
            return None
        task = Piece("user", self.scene.corpus.cut((self.name, "sub-agent", key), task_len))
        prompt = [*self.history, task]
        return await ask(Job(name="sub-agent", prompt=prompt, output_len=output_len)), output_len


async def _think(reply: Reply, seconds: float | None) -> float | None:
    """Wait, and return the time at which the next request is due, even if the wait ends late.

    None means that it is due at once.
    """
    if seconds is None:
        return None
    await asyncio.sleep(seconds)
    return reply.record.times[-1] + seconds


def agents(scene: Scene) -> Sequence[Session]:
    """Return one session for each agent."""
    args, corpus = scene.args, scene.corpus
    rng = scene.rng("agents")
    system_len, tools_len = args.system_len.draw(rng), args.tools_len.draw(rng)
    shared = [
        Piece("system", corpus.cut("system", system_len)),
        Piece("system", corpus.tool_schemas(tools_len)),
    ]
    branchings = args.turns // args.branch_every if args.branch_every else 0
    found = []
    for index in range(args.agents):
        own = scene.rng(f"agent/{index}")
        task_len = args.task_len.draw(own)
        task = Piece("user", corpus.cut(("task", index), task_len))
        length = system_len + tools_len + task_len
        agent = _Agent(scene, f"agent-{index}", own, [*shared, task], length)
        found.append(Session(agent.run, planned=args.turns + branchings * args.branches))
    return found


AGENTS = Workload(
    "agents",
    "conversations with tools that branch into sub-agents",
    _flags,
    agents,
)
