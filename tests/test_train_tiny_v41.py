"""examples/train_tiny_v41: the training form is the same model, slices resume to the bit, what is written loads and generates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.kernels.block_formats import decode_fp8_weight, decode_mxfp4_weight, encode_fp8_weight, encode_mxfp4_weight
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology, read_topology
from deepseek_v41 import arithmetic
from deepseek_v41 import drafts as plain_drafts
from deepseek_v41.sequential import Run, Sequential
from deepseek_v41.weights_kit import RandomWeights

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_tiny_v41"
sys.path.insert(0, str(EXAMPLE))

import corpus  # noqa: E402
import drafts  # noqa: E402
import engine_drafts  # noqa: E402
import functions  # noqa: E402
import train  # noqa: E402
from configuration import config  # noqa: E402
from export import read_released  # noqa: E402
from model import TrainingModel  # noqa: E402

STEPS = ["--config", "smoke", "--device", "cpu", "--total-steps", "5", "--batch", "2", "--length", "40", "--anchors", "3"]
STEPS += ["--report", "1", "--warmup", "2"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are so small that threads wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as corpus.py leaves one: ids of some of this repository's own files."""
    folder = tmp_path_factory.mktemp("work")
    files = sorted((EXAMPLE.parents[1] / "python" / "deepinfer").glob("*.py"))
    documents = [(path.name, path.read_text(encoding="utf-8")) for path in files]
    parts = corpus.split(documents)
    tokenizer = corpus.train_tokenizer(parts["train"], 400)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, texts in parts.items():
        np.save(folder / f"tokens_{name}.npy", corpus.encode(tokenizer, texts))
    return folder


@pytest.fixture(scope="module")
def trained(work: Path) -> train.Run:
    """Five steps: dense twice, sparse, rounded, drafts; written to ``work/written``."""
    return train.main([*STEPS, "--work", str(work), "--held-out", "1", "--export", str(work / "written")])


def random_model(topology: DeepseekV41Topology) -> TrainingModel:
    model = TrainingModel(topology, torch.arange(topology.vocab))
    model.load(RandomWeights(topology, 3))
    return model


@torch.no_grad()
def test_the_training_form_is_the_model() -> None:
    topology = read_topology(config("smoke", 300, None))
    model = random_model(topology)
    plain = Sequential(topology, model.by_checkpoint_name(), Run(caches=False))
    ids = torch.randint(4, 300, (2, 75), generator=torch.Generator().manual_seed(0))
    for keep in (None, 22):
        made = model.forward(ids, keep=keep)
        for row in range(2):
            wanted = plain.forward(ids[row], keep=keep)
            rows = wanted.logits.shape[0]
            assert (made.logits[row, -rows:] - wanted.logits).abs().max() < 1e-4
            assert (made.taps[row, -rows:] - wanted.taps).abs().max() < 1e-4
            if keep is None and row == 0:
                _drafts_agree(model, plain, ids[:1], made.taps[:1])


def _drafts_agree(model: TrainingModel, plain: Sequential, ids: torch.Tensor, taps: torch.Tensor) -> None:
    anchors = torch.tensor([[1, 30, 74]])  # within the first window, behind it, at the end
    block = drafts.stage_blocks(model, ids, taps, anchors)
    drawn, sure = drafts.greedy_drafts(model, ids, taps, anchors)
    for place, anchor in enumerate(anchors[0].tolist()):
        wanted = plain_drafts.draft(plain, taps[0, :anchor], int(ids[0, anchor]))
        assert (block.base[0, place] - wanted.base).abs().max() < 1e-4
        assert drawn[0, place].tolist() == wanted.tokens.tolist()
        assert (sure[0, place] - wanted.accepted()).abs().max() < 1e-5


def test_rounding_is_that_of_the_stored_formats() -> None:
    values = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 1, 70)[:, None]
    values.requires_grad_()
    for rounded, stored in (
        (functions.round_blocks(values), decode_fp8_weight(*encode_fp8_weight(values.detach()), (70, 96))),
        (functions.round_rows(values, "mxfp4"), decode_mxfp4_weight(*encode_mxfp4_weight(values.detach()), (70, 96))),
        (functions.round_rows(values, "fp8"), arithmetic.round_fp8(values.detach())),
        (functions.round_rows(values, "fp4"), arithmetic.round_fp4(values.detach())),
    ):
        torch.testing.assert_close(rounded.detach(), stored, rtol=1e-6, atol=0)
        (gradient,) = torch.autograd.grad(rounded.sum(), values)
        assert torch.equal(gradient, torch.ones_like(values))


def test_equal_scores_go_to_the_lower_index() -> None:
    scores = torch.randint(-2, 3, (40, 30), generator=torch.Generator().manual_seed(2)).float()
    scores[scores == -2] = -torch.inf
    for count in (1, 7, 29, 30, 50):
        chosen = arithmetic.highest(scores, count)
        wanted = torch.zeros(40, 31, dtype=torch.bool).scatter(1, torch.where(chosen < 0, 30, chosen), True)[:, :30]
        assert torch.equal(functions.lowest_ties(scores, count), wanted)


def test_accepted_lengths_along_a_text() -> None:
    # at 0 two drafts hold, so the next block starts at 3, then at 4, then at 9, which is behind the end
    assert drafts.walk([2, 5, 5, 0, 4, 5, 5, 5, 5], 0, 9) == [2, 0, 4] and drafts.mean_length([2, 0, 4]) == 3.0


def test_every_phase_trains_its_own_part(trained: train.Run) -> None:
    fresh = TrainingModel(trained.model.topology, torch.arange(400), seed=0)
    still = {name for name, value in trained.model.parameters.items() if torch.equal(value, fresh.parameters[name])}
    # routing of images is not trained; a bias stays where experts happened to get equal shares
    assert all(name.endswith((".bias", ".bias_vl")) for name in still), still
    assert sum(name.endswith("ffn.gate.bias") for name in still) < 5
    assert ["draft_loss" in line for line in trained.log] == [False] * 4 + [True]


def test_slices_resume_to_the_bit(work: Path, trained: train.Run, tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokens_train.npy", "tokens_held_out.npy"):
        (tmp_path / file).symlink_to(work / file)
    train.main([*STEPS, "--work", str(tmp_path), "--slice-steps", "3"])
    resumed = train.main([*STEPS, "--work", str(tmp_path), "--resume"])
    assert resumed.progress.step == 5 and resumed.progress.draft_step == trained.progress.draft_step == 1
    for name, value in trained.model.parameters.items():
        assert torch.equal(value, resumed.model.parameters[name]), name


def test_what_is_written_loads_and_generates(work: Path, trained: train.Run) -> None:
    written = work / "written"
    values = read_released(written)
    name = "layers.3.ffn.experts.2.w2.weight"
    assert torch.equal(values[name], functions.round_rows(trained.model.parameters["layers.3.ffn.experts.w2"][2], "mxfp4").detach())
    assert values.keys() == trained.model.by_checkpoint_name().keys()
    loss = trained.held_out_loss(1)
    trained.model.load(values)  # beyond what was rounded anyway, only what is stored as bfloat16 changes
    assert abs(trained.held_out_loss(1) - loss) < 0.01
    with LLM(model=str(written), device="cpu", max_model_len=256) as llm:
        (out,) = llm.generate(["def main():"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 8


def test_the_kept_checkpoint_has_learned_what_it_was_shown() -> None:
    with LLM(model=str(EXAMPLE / "checkpoint"), device="cpu", max_model_len=256) as llm:
        prompt = 'import numpy as np\n\n\ndef mean(values):\n    """Return the'
        (out,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert "\n    Parameters\n    ----------\n    values" in out.outputs[0].text


def held_out(prompts: int, characters: int) -> list[str]:
    """Pieces of what training never saw, of files that are everywhere."""
    return engine_drafts.cut(corpus.split(list(corpus.texts(("stdlib",), 1000)))["held_out"], prompts, characters, 2)


@pytest.mark.nightly
def test_the_engine_accepts_the_drafts_that_the_training_form_would() -> None:
    found = engine_drafts.measure(EXAMPLE / "checkpoint", held_out(3, 250), 20, num_threads=1)
    assert found["same_tokens"] and found["blocks"] > 20
    # sums in another order may decide between two drafts, and one that is taken moves the blocks behind it
    assert abs(found["tokens_a_step"] - 1 - sum(found["training_form"])) < 0.15
    assert found["accepted_by_position"][0] > 0.15


@pytest.mark.nightly
def test_the_engine_accepts_about_what_was_published() -> None:
    """docs/deepseek-v41-trained.md; prompts differ from each other, so that a share of some hundred blocks is good to a few hundredths."""
    found = engine_drafts.measure(EXAMPLE / "checkpoint", held_out(24, 870), 64)
    assert found["same_tokens"]
    for place, (engine, form, published, error) in enumerate(
        zip(
            found["accepted_by_position"], found["training_form"], (0.485, 0.206, 0.105, 0.044, 0.021), found["standard_error"], strict=True
        )
    ):
        assert abs(engine - form) < 0.02, place
        assert abs(engine - published) < 0.03 + 3 * error, place
