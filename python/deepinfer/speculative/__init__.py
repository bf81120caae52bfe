"""Drafts: guesses at the next tokens of a sequence, computed together in one step and kept as far as they are right.

Owns: the settings (`SpeculativeSettings`), which drafter proposes, and the budget of draft rows. Never touches: tensors, and what counts
as right, which the worker finds on the device (`deepinfer.worker.verify`).

Results are those of running without drafts, bit for bit, greedy or sampled, log-probabilities too: a draft counts only if the token
drawn for its position, with that position's own random number, is equal to it. What changes is the number of steps.

`ngram`: prompt lookup in the Rust core. The newest tokens of a sequence are looked up in its own prompt and answer, what followed them
there is proposed. It needs no second model and pays where text repeats: summaries, edits, code, retrieval, tables.

`dspark`: the draft stages of a checkpoint that has them. A step ends with drafts for every sequence that drew a token; they stay on the
device, and the next step has rows for them before anybody on the host knows them. Where rows are short, confidences choose which drafts
are verified.

The budget: more draft rows make more tokens a step and longer steps. `MtpRuntime` learns both from completed steps and gives the
number of draft rows with the most tokens per second; with few sequences every draft is verified.
"""

from deepinfer.speculative.drafting import Drafting, ModelDrafting, NgramDrafting
from deepinfer.speculative.settings import METHODS, OFF, SpeculativeSettings

__all__ = ["METHODS", "OFF", "Drafting", "ModelDrafting", "NgramDrafting", "SpeculativeSettings"]
