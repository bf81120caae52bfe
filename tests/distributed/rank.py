"""One rank of a group in a process of its own: a core with random arrivals, its steps agreed over gloo.

``python rank.py RANK RANKS FOLDER STEPS SEED``: the ranks meet through a file in FOLDER. Writes ``RANK.json`` after STEPS steps (kinds,
rounds, votes, tokens) and goes on until the group ends; then ``RANK.end.json``: the error, and when it was noticed.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core_driver import Driver, prompt
from deepinfer.distributed import TorchVote
from deepinfer.errors import RankGroupError


class Counting:
    """A vote that counts its rounds."""

    def __init__(self, vote: TorchVote) -> None:
        self.vote = vote
        self.rounds = 0

    def start(self, words: list[int]) -> None:
        self.rounds += 1
        self.vote.start(words)

    def wait(self) -> list[int]:
        return self.vote.wait()

    def close(self) -> None:
        self.vote.close()


def write(path: Path, what: dict[str, Any]) -> None:
    """All at once: whoever waits for the file reads all of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.rename(path)


def main(rank: int, ranks: int, folder: Path, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    vote = Counting(TorchVote(timeout_s=8.0))
    driver = Driver(all_interval=7, any_interval=10)
    driver.core.set_vote(vote)
    chance = random.Random(seed * 100 + rank)
    # The last rank stays empty for long: it has dummy steps only.
    rate = 0.0 if rank == ranks - 1 else 0.15
    made: list[int] = []
    output = 0
    try:
        for step in itertools.count():
            if step == steps:
                votes = driver.core.metrics()["votes"]
                write(folder / f"{rank}.json", {"kinds": made, "rounds": vote.rounds, "votes": votes, "output": output})
            if chance.random() < (rate if step < steps // 2 else 0.15):
                handle = driver.core.add(prompt(chance.randrange(1, 90), chance.randrange(900)), max_new_tokens=chance.randrange(1, 30))[0]
                if chance.random() < 0.1:
                    driver.core.abort(handle)
            slot = driver.schedule()
            made.append(-1 if slot < 0 else int(driver.ring[slot]["header"][23]))
            if slot < 0:
                driver.core.flush()
            else:
                if driver.ring[slot]["header"][0] != 4:
                    driver.sample(slot)
                output += sum(row[4] for row in driver.complete(slot))
    except RankGroupError as error:
        end = {"error": str(error), "noticed": time.time()}
    driver.check_counts()
    write(folder / f"{rank}.end.json", end)
    driver.core.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
