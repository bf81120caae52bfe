"""Trains a small DeepSeek-V4.1 with everything that it has, in slices that can be resumed, and writes it in the released form.

    python corpus.py --out work                                      # once: text, tokenizer, ids
    python train.py --work work --minutes 8                        # first slice
    python train.py --work work --minutes 8 --resume               # goes on where the last one ended
    python train.py --work work --export checkpoint                # what deepinfer.LLM(model="checkpoint") reads

Owns: the schedule, optimisers, state files. Never touches: how anything is computed.

Phases, by share of ``--total-minutes`` (or of ``--total-steps``): dense attention while the indexer learns what it looks at; attention to
what the indexer selects; the same with every rounding of the released formats (straight-through); draft stages on the frozen rest.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import functions
import numpy as np
import torch
import torch.nn.functional as F
from configuration import config
from corpus import Batches
from drafts import draft_loss
from export import export
from model import Rounding, TrainingModel
from tokenizers import Tokenizer

from deepinfer.models.deepseek_v41.engram import compressed_keys, identity_map, token_map
from deepinfer.models.deepseek_v41.topology import read_topology

SPARSE_FROM, ROUNDED_FROM, DRAFTS_FROM = 0.32, 0.60, 0.76
"""Shares of a run at which attention becomes sparse, values are rounded, and draft stages are trained."""
BALANCE, BIAS_STEP = 1e-4, 1e-3


@dataclass
class Progress:
    """How far a run is; ``spent`` seconds of training."""

    step: int = 0
    spent: float = 0.0
    draft_step: int = 0


def prepare(work: Path, name: str) -> tuple[dict[str, Any], torch.Tensor]:
    """The configuration for the tokenizer in ``work``, and the map to compressed ids."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    compressed = len(set(compressed_keys(tokenizer)))
    fields = config(name, vocab, None if compressed == vocab else compressed)
    return fields, identity_map(vocab, vocab) if compressed == vocab else token_map(tokenizer, compressed, vocab)


def optimiser(model: TrainingModel, drafts: bool, rate: float) -> torch.optim.AdamW:
    """AdamW over the backbone or the draft stages; matrices decay, tables, norms, mixes and sinks do not."""
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, value in model.parameters.items():
        if not value.requires_grad or name.startswith("mtp.") is not drafts:
            continue
        table = name.endswith("embed.weight")
        decay = 0.1 if value.ndim > 1 and not table and not name.endswith("_fn") else 0.0
        groups.setdefault((3.0 if "engram.embed" in name else 1.0, decay), []).append(value)
    return torch.optim.AdamW(
        [{"params": values, "lr": rate * times, "base": rate * times, "weight_decay": decay} for (times, decay), values in groups.items()],
        betas=(0.9, 0.95),
        eps=1e-10,
        fused=model.device.type == "cuda",
    )


def set_rate(opt: torch.optim.Optimizer, step: int, done: float, warmup: int, flat: float) -> None:
    """Linear warm-up by steps, then level, then down to a twentieth over the last part of the phase (``done`` in 0 … 1)."""
    level = min(1.0, (step + 1) / warmup) * (1.0 if done < flat else 1 - 0.95 * (done - flat) / (1 - flat))
    for group in opt.param_groups:
        group["lr"] = group["base"] * level


class Run:
    """One run: model, optimisers, batches and their state on disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work
        self.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.fields, mapping = prepare(args.work, args.config)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = TrainingModel(read_topology(self.fields), mapping, self.device, dtype, args.seed)
        self.progress, self.log = Progress(), list[dict[str, float]]()
        self.opt, self.draft_opt = optimiser(self.model, False, args.rate), optimiser(self.model, True, args.rate)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
        if args.resume:
            self.load()
        ids = {part: np.load(args.work / f"tokens_{part}.npy") for part in ("train", "held_out")}
        self.batches = Batches(ids["train"], args.length, args.batch, self.device, args.seed)
        self.held_out = Batches(ids["held_out"], args.length, args.batch, self.device, 1)
        self.norm = torch.zeros((), device=self.device)

    @property
    def state_file(self) -> Path:
        """Everything to go on from: weights, moments, progress, log."""
        return self.work / "state.pt"

    def save(self) -> None:
        """Writes the state beside the old one, then in its place."""
        parts = {
            "parameters": {name: value.detach() for name, value in self.model.parameters.items()},
            "optimiser": self.opt.state_dict(),
            "draft_optimiser": self.draft_opt.state_dict(),
            "progress": asdict(self.progress),
            "log": self.log,
        }
        torch.save(parts, self.state_file.with_suffix(".new"))
        self.state_file.with_suffix(".new").replace(self.state_file)

    def write_log(self, file: Path) -> None:
        """All lines of figures as JSON."""
        file.write_text(json.dumps(self.log), encoding="utf-8")

    def load(self) -> None:
        """Reads what ``save`` wrote."""
        parts = torch.load(self.state_file, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for name, value in self.model.parameters.items():
                value.copy_(parts["parameters"][name])
        self.opt.load_state_dict(parts["optimiser"])
        self.draft_opt.load_state_dict(parts["draft_optimiser"])
        self.progress, self.log = Progress(**parts["progress"]), parts["log"]

    def share(self) -> float:
        """How much of the run is done, by time or by steps."""
        p, args = self.progress, self.args
        return p.step / args.total_steps if args.total_steps else p.spent / (60 * args.total_minutes)

    def backbone_step(self, share: float) -> dict[str, torch.Tensor]:
        """One step of everything but the draft stages."""
        sparse, rounded = share >= SPARSE_FROM, share >= ROUNDED_FROM
        self.model.rounding = Rounding(rounded, rounded, rounded)
        ids, targets = self.batches(self.progress.step)
        out = self.model.forward(ids, sparse=sparse, indexer=True)
        loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
        (loss + 0.3 * out.indexer + BALANCE * out.balance).backward()
        self._advance(self.opt, False, share / DRAFTS_FROM, 0.5)
        self._steer(out.loads)
        return {"loss": loss.detach(), "indexer": out.indexer.detach(), "balance": out.balance.detach()}

    def draft_step(self, share: float) -> dict[str, torch.Tensor]:
        """One step of the draft stages on the rounded, frozen backbone."""
        self.model.rounding = Rounding(True, True, True)
        self.model.freeze_backbone()
        functions.undo_compile()
        ids, targets = self.batches(self.progress.step)
        with torch.no_grad():
            out = self.model.forward(ids)
        block = self.model.topology.drafts.block
        draw = np.random.RandomState([self.args.seed, self.progress.step])
        anchors = torch.from_numpy(draw.randint(1, ids.shape[1] - block, (ids.shape[0], self.args.anchors))).to(self.device)
        loss = draft_loss(self.model, torch.cat((ids, targets[:, -1:]), 1), out.taps, out.logits, anchors)
        loss.total.backward()
        self._advance(self.draft_opt, True, (share - DRAFTS_FROM) / (1 - DRAFTS_FROM), 0.4)
        self._steer(loss.loads)
        parts = {"draft_loss": loss.total, "draft_ce": loss.cross_entropy, "confidence": loss.confidence}
        return {name: value.detach() for name, value in parts.items()} | {"overlap_1": loss.overlap[0], "overlap_5": loss.overlap[-1]}

    @torch.no_grad()
    def _steer(self, loads: dict[str, torch.Tensor]) -> None:
        """Raises the bias of experts that got less than their share and lowers that of the others."""
        for prefix, load in loads.items():
            self.model.parameters[f"{prefix}ffn.gate.bias"].add_(torch.sign(load.mean() - load), alpha=BIAS_STEP)

    def _advance(self, opt: torch.optim.Optimizer, drafts: bool, done: float, flat: float) -> None:
        values = [p for group in opt.param_groups for p in group["params"]]
        self.norm = torch.nn.utils.clip_grad_norm_(values, 1.0)
        set_rate(opt, self.progress.draft_step if drafts else self.progress.step, done, self.args.warmup, flat)
        opt.step()
        opt.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Steps until the slice's minutes are up or the run is done, then saves; a line of figures every now and then."""
        began, before = time.monotonic(), self.progress.spent
        ending = began + 60 * self.args.minutes
        most = self.progress.step + self.args.slice_steps if self.args.slice_steps else math.inf
        while (share := self.share()) < 1 and time.monotonic() < ending and self.progress.step < most:
            drafts = share >= DRAFTS_FROM
            figures = self.draft_step(share) if drafts else self.backbone_step(share)
            self.progress.step += 1
            self.progress.draft_step += drafts
            if self.progress.step % self.args.report == 0:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.progress.spent = before + time.monotonic() - began
                line = {"step": self.progress.step, "seconds": round(self.progress.spent, 1), "norm": float(self.norm)}
                line |= {name: round(float(value), 4) for name, value in figures.items()}
                self.log.append(line)
                print(json.dumps(line), flush=True)
                if not math.isfinite(line.get("loss", line.get("draft_loss", 0.0))):
                    raise SystemExit("the loss is not finite; resume from the last state with a lower --rate")
            elif self.device.type == "cpu" or self.progress.step % 4 == 0:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.progress.spent = before + time.monotonic() - began
        self.progress.spent = before + time.monotonic() - began
        self.save()

    @torch.no_grad()
    def held_out_loss(self, batches: int) -> float:
        """Nats a token on held-out files, everything rounded as the engine does."""
        self.model.rounding = Rounding(True, True, True)
        total = 0.0
        for number in range(batches):
            ids, targets = self.held_out(number)
            total += float(F.cross_entropy(self.model.forward(ids).logits.flatten(0, 1), targets.flatten()))
        return total / batches


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="trains a small DeepSeek-V4.1")
    parser.add_argument("--work", type=Path, required=True, help="folder of corpus.py's files; states are kept there")
    parser.add_argument("--config", default="tiny", help="tiny, small or smoke")
    parser.add_argument("--minutes", type=float, default=8.0, help="length of this slice")
    parser.add_argument("--total-minutes", type=float, default=16.0, help="length of the whole run")
    parser.add_argument("--total-steps", type=int, default=0, help="length in steps instead")
    parser.add_argument("--slice-steps", type=int, default=0, metavar="N", help="end the slice after so many steps, too")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=64, help="draft blocks of a sequence and step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--report", type=int, default=20, help="steps between lines of figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="")
    parser.add_argument("--compile", action="store_true", help="compile what memory bandwidth bounds (CUDA)")
    parser.add_argument("--held-out", type=int, default=0, metavar="N", help="batches of held-out text to judge at the end")
    parser.add_argument("--log", type=Path, help="write the lines of figures here, as JSON")
    parser.add_argument("--export", type=Path, help="write the released form here at the end")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Run:
    """Trains a slice, and judges and writes if asked to."""
    args = arguments(argv)
    if args.compile:
        functions.compile_leaves()
    run = Run(args)
    run.train()
    functions.undo_compile()
    if args.log:
        run.write_log(args.log)
    if args.held_out:
        print(json.dumps({"held_out_loss": round(run.held_out_loss(args.held_out), 4)}), flush=True)
    if args.export:
        nbytes = export(run.fields, run.model.by_checkpoint_name(), args.work / "tokenizer.json", args.export)
        print(json.dumps({"written": str(args.export), "bytes": nbytes}), flush=True)
    return run


if __name__ == "__main__":
    main()
