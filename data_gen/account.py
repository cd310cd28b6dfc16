"""How far a run is that asks servers: for `claims/servers.json`, which `headtrain status` reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from headtrain.data_gen import claims, turns

EVERY = 2.0  # seconds between two notes


class Account:
    """Counts what is settled: `prompts` answered or left out; `settled`, the new tokens that these might have had;
    `left_out` (reason -> number)."""

    def __init__(self, folder: Path, plan: dict[str, Any], open_batches: set[int], meter: claims.Meter):
        from headtrain.data_gen import store

        self.meter, self.left_out = meter, Counter()
        self.budgets = {row[0]: row[2] for batch in plan["batches"] for row in batch}
        closed = [n for n in range(len(plan["batches"])) if n not in open_batches]
        self.prompts = sum(len(plan["batches"][n]) for n in closed)
        self.settled = sum(row[2] for n in closed for row in plan["batches"][n])
        for batch in closed:
            self.left_out.update(store.read_header(folder / claims.file_name("responses", batch))[1]["left_out"])

    def settle(self, chat: turns.Chat, reason: str) -> None:
        """A chat is answered, or left out for a reason."""
        self.prompts, self.settled = self.prompts + 1, self.settled + self.budgets[chat.prompt.id]
        if reason:
            self.left_out[reason] += 1
        elif chat.left_out:
            self.left_out[chat.left_out] += len(chat.later)

    def tell(self, servers: list[Any]) -> None:
        """Writes the note. Servers are told apart by their place in data.responses.urls."""
        known = ("ready", "busy", "answered", "failed", "reason")
        self.meter.tell(
            prompts=self.prompts, settled=self.settled, left_out=dict(self.left_out),
            servers=[{key: getattr(server, key) for key in known} for server in servers],
        )  # fmt: skip

    async def keep_telling(self, servers: list[Any]) -> None:
        """Also while nothing is answered."""
        while True:
            self.tell(servers)
            await asyncio.sleep(EVERY)
