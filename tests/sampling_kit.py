"""Batches of sampling rows of every kind, for the two forms of the sampler: torch operators and kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from deepinfer.kernels.argmax.cuda import Argmax
from deepinfer.kernels.sample.cuda import FEW_ROWS, Draws, Edits, Logprobs
from deepinfer.sampling import SamplingParams
from deepinfer.worker.device_sampler import DeviceSampler
from deepinfer.worker.sampler import Sampler, SampleRows
from deepinfer.worker.sampling_state import DRAWS, EDITS, RANKED, TOP_K, RowSampling, SamplingState
from kernel_kit import device_of, kernels_at

INF, NAN = float("inf"), float("nan")


def device_sampler(
    place: str, vocab: int, dtypes: dict[torch.dtype, torch.dtype], max_rows: int, few_rows: int = FEW_ROWS
) -> DeviceSampler:
    """The kernels in one place. ``dtypes``: by the type of logits, the type that kernels are made for. ``few_rows``: see ``Draws``."""
    device = device_of(place)
    made = {}
    for kept, dtype in dtypes.items():
        name = str(dtype).removeprefix("torch.")
        argmax = Argmax(vocab, dtype, max_rows, device, kernels=kernels_at(place, Argmax.programs(vocab, name)))
        draws = Draws(vocab, dtype, max_rows, device, kernels=kernels_at(place, Draws.programs(vocab, name)), few_rows=few_rows)
        made[kept] = (argmax, draws)
    logprobs = Logprobs(vocab, device, kernels=kernels_at(place, Logprobs.programs(vocab)), few_rows=few_rows)
    return DeviceSampler(Edits(vocab, device, kernels=kernels_at(place, Edits.programs(vocab))), made, logprobs)


@dataclass
class Batch:
    """Rows on a device: logits, what they want, drafts before them."""

    logits: torch.Tensor
    rows: SampleRows
    before: torch.Tensor | None
    state: SamplingState

    def of(self, which: list[int]) -> Batch:
        """Some of the rows, in an order of their own."""
        index = torch.tensor(which, device=self.logits.device)
        rows = self.rows

        def kept(some: torch.Tensor | None) -> torch.Tensor | None:
            wanted = set() if some is None else set(some.tolist())
            found = [new for new, old in enumerate(which) if old in wanted]
            return torch.tensor(found, device=index.device) if found else None

        chosen = replace(
            rows,
            slots=rows.slots[index],
            positions=rows.positions[index],
            edit=kept(rows.edit),
            plain=kept(rows.plain),
            ranked=kept(rows.ranked),
        )
        return Batch(self.logits[index].contiguous(), chosen, None if self.before is None else self.before[index], self.state)

    def drawn(self, kernels: DeviceSampler | None) -> list[int]:
        """Tokens by kernels, or by torch operators with the same weights."""
        sampler = Sampler(self.state, self.logits.shape[1], kernels, portable=True)
        return sampler.draw(self.logits.clone(), self.rows, self.before).tolist()

    def edited(self, kernels: DeviceSampler | None) -> torch.Tensor:
        """Logits once they are edited."""
        logits = self.logits.clone()
        Sampler(self.state, logits.shape[1], kernels, portable=True).draw(logits, self.rows, self.before)
        return logits


def batch(
    device: torch.device,
    logits: torch.Tensor,
    params: list[SamplingParams],
    seed: int = 0,
    *,
    bad_words: bool = False,
    drafts: int = 0,
) -> Batch:
    """Row ``i`` sits in state slot ``i + 1``, with a prompt, an output and a seed of its own."""
    r, vocab = logits.shape
    rng = random.Random(seed)
    state = SamplingState(r + 1, vocab, device)
    positions = []
    for i, p in enumerate(params):
        prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 9))]
        output = [rng.randrange(min(vocab, 40)) for _ in range(rng.randrange(0, 9))]
        words = [
            [rng.choice([*output, rng.randrange(vocab)]) for _ in range(rng.randrange(0, 3))] + [rng.randrange(vocab)] for _ in range(4)
        ]
        row = RowSampling(p, rng.getrandbits(63), prompt, (rng.randrange(vocab),), words if bad_words and rng.random() < 0.5 else ())
        state.admit(i + 1, row, output)
        positions.append(len(prompt) + len(output) + rng.choice([0, 0, 1, 131_000]))
    state.table = torch.from_numpy(state.host).to(device)
    flags = state.flags[1:]

    def rows(mask: np.ndarray) -> torch.Tensor | None:
        found = torch.from_numpy(np.flatnonzero(mask))
        return found.to(device) if len(found) else None

    by_rank = (flags & RANKED) != 0
    chosen = SampleRows(
        torch.arange(1, r + 1, device=device),
        torch.tensor(positions, device=device),
        int(np.bitwise_or.reduce(flags)),
        edit=rows((flags & EDITS) != 0),
        plain=rows(((flags & DRAWS) != 0) & ~by_rank),
        ranked=rows(by_rank),
        max_top_k=int(state.host[1:][by_rank][:, TOP_K].max()) if by_rank.any() else 0,
    )
    before = None
    if drafts:
        lengths = [rng.randrange(drafts + 1) for _ in range(r)]
        before = torch.tensor([[rng.randrange(min(vocab, 40)) if j < n else -1 for j in range(drafts)] for n in lengths], device=device)
    return Batch(logits.to(device), chosen, before, state)


def random_params(rng: random.Random, vocab: int, edits: bool) -> SamplingParams:
    """Values of every kind, extremes among them."""
    values: dict[str, object] = {"temperature": rng.choice([0.0, 1e-4, 0.1, 0.5, 0.7, 1.0, 1.0, 1.3, 2.0, 50.0, 1e10, 1e38])}
    if rng.random() < 0.6:
        values["top_k"] = rng.choice([1, 2, 3, 5, 20, 50, 1000, vocab - 1, vocab, vocab + 5])
    if rng.random() < 0.6:
        values["top_p"] = rng.choice([1e-30, 1e-6, 0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999999, 1 - 2.0**-24, 1.0])
    if rng.random() < 0.4:
        values["min_p"] = rng.choice([0.0, 1e-9, 0.001, 0.05, 0.5, 1.0])
    if edits:
        if rng.random() < 0.5:
            values["repetition_penalty"] = rng.choice([0.5, 1.0, 1.1, 2.0])
        if rng.random() < 0.5:
            values["frequency_penalty"] = rng.choice([-2.0, -0.3, 0.0, 0.5, 2.0])
        if rng.random() < 0.5:
            values["presence_penalty"] = rng.choice([-1.0, 0.0, 0.3, 2.0])
        if rng.random() < 0.5:
            values["logit_bias"] = {rng.randrange(vocab): rng.choice([-100.0, -1.5, 0.0, 2.0, 100.0]) for _ in range(rng.randrange(1, 20))}
        if rng.random() < 0.4:
            values["min_tokens"] = rng.randrange(12)
            values["stop_token_ids"] = [rng.randrange(vocab) for _ in range(rng.randrange(0, 4))]
    values = {name: value for name, value in values.items() if name != "top_k" or int(value) > 0}  # type: ignore[call-overload]
    return SamplingParams(max_tokens=50, **values)  # type: ignore[arg-type]


def hard_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Float32 rows: smooth, coarse with many ties, flat, of both zeros, with infinities, of nothing but −∞, with NaN, with one id left."""
    g = torch.Generator().manual_seed(seed)
    x = torch.empty(rows, vocab)
    for i in range(rows):
        row = torch.randn(vocab, generator=g) * (0.01, 1.0, 3.0, 30.0, 1e4)[i % 5]
        kind = i % 13
        if kind in (1, 2):
            row = row.bfloat16().float()
        elif kind == 3:
            row = row.round()
        elif kind == 4:
            row = torch.full((vocab,), float(row[0]))
        elif kind == 5:
            row = torch.where(row > 0, 0.0, -0.0)
        elif kind == 6:
            row[torch.rand(vocab, generator=g) < 0.9] = -INF
        elif kind == 7:
            row = torch.full((vocab,), -INF)
            if i % 2:
                row[int(torch.randint(vocab, (1,), generator=g))] = -3.0
        elif kind == 8 and i % 3 == 0:
            row[int(torch.randint(vocab, (1,), generator=g))] = (NAN, INF)[i // 3 % 2]
        elif kind == 9:
            row = row * 1e-30
        elif kind == 10:
            row = row - 1e6
        x[i] = row
    return x
