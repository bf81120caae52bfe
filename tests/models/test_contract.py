"""A family that does not keep the contract is told so in one line that names what to change in it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from checkpoint_kit import save
from deepinfer import LLM, SamplingParams
from deepinfer.errors import CheckpointError, ConfigError, ModelContractError, UnsupportedModelError
from deepinfer.models import load_model, register_model, resolve_architecture, resolve_model
from deepinfer.models.base import ForwardBatch, PagedGroup, Source, StateGroup
from deepinfer.models.contract import checked_groups
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.models.places import ParameterPlaces
from deepinfer.models.registry import _registered

NAME = "LlamaForCausalLM"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("deepinfer.models.registry._registered", dict(_registered))
    yield


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[LlamaModel]]:
    """Makes a family like Llama with some methods replaced, registered for Llama's checkpoints as ``fam:Family``."""

    def make(**changes: Any) -> type[LlamaModel]:
        found: type[LlamaModel] = type("Family", (LlamaModel,), {**changes, "__module__": "fam"})
        module = types.ModuleType("fam")
        module.Family = found  # type: ignore[attr-defined]
        monkeypatch.setitem(__import__("sys").modules, "fam", module)
        register_model(NAME, "fam:Family")
        return found

    return make


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("target", ["module.Class", "module:", ":Class", "a b:Class", "module:Class.inner", "", None, LlamaModel])
def test_a_target_of_another_form_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match='"module:Class"') as error:
        register_model("X", target)
    one_line(error)
    with pytest.raises(ConfigError, match="architecture"):
        register_model("", "module:Class")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no.such.module:Thing", "ModuleNotFoundError"),
        ("deepinfer.models.llama.forward:NoSuchModel", "NoSuchModel"),
        ("broken_family:Thing", "RuntimeError: built for another torch"),
    ],
)
def test_a_target_that_cannot_be_imported_is_named(target: str, said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_family.py").write_text("raise RuntimeError('built for\\n  another torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    register_model("X", target)
    with pytest.raises(UnsupportedModelError, match="'X' is registered as") as error:
        resolve_architecture("X")
    assert target in one_line(error) and said in one_line(error)


def test_entry_points_of_another_form_or_of_two_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("A", "some_package", "deepinfer.models"), EntryPoint("B", "x:Y", "deepinfer.models")]
    monkeypatch.setattr("deepinfer.models.registry.entry_points", lambda group: [*points, EntryPoint("B", "z:Y", group)])
    with pytest.raises(UnsupportedModelError, match=r"'some_package'.*module:Class.*pyproject\.toml"):
        resolve_architecture("A")
    with pytest.raises(UnsupportedModelError, match="more than once: x:Y and z:Y"):
        resolve_architecture("B")


class Half:
    """Some of the methods."""

    vocab_size = 1

    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Half",
            "has no kv_groups, logits, from_config, position_limit, parameter_shapes, optional_tensors, parameter, finish_loading; add",
        ),
        ("one_line", "is a function, not a class"),
        ("NAME", "is a str, not a class"),
    ],
)
def test_what_is_no_model_class_is_named(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fam")
    setattr(module, name, globals()[name])
    monkeypatch.setitem(__import__("sys").modules, "fam", module)
    register_model("X", f"fam:{name}")
    with pytest.raises(ModelContractError, match=said) as error:
        resolve_architecture("X")
    assert f"fam:{name}" in one_line(error)


def plain(self: Any, config: Any, dtype: Any, device: Any) -> Any: ...


def short(self: Any, batch: Any) -> Any: ...


def greedy(self: Any, batch: Any, kv: Any, window: Any) -> Any: ...


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"from_config": plain}, "from_config is called on the class; make it a classmethod"),
        ({"from_config": classmethod(short)}, r"from_config\(batch\) cannot be called as from_config\(config, dtype, device\)"),
        ({"forward": short}, r"forward\(self, batch\) cannot be called as forward\(batch, kv\)"),
        ({"forward": greedy}, "'window'"),
        ({"logits": None}, "has no logits"),
    ],
)
def test_a_method_that_cannot_be_called_as_asked_is_named(changes: dict[str, Any], said: str, family: Any) -> None:
    family(**changes)
    with pytest.raises(ModelContractError, match=said) as error:
        resolve_architecture(NAME)
    assert "fam:Family" in one_line(error)


def test_other_names_and_further_optional_arguments_are_fine(family: Any) -> None:
    made = family(forward=lambda self, b, caches, *, debug=False: None, kv_groups=lambda self, *args: None)
    assert resolve_architecture(NAME) is made


def lost(self: Any, name: str) -> torch.Tensor:
    return torch.empty(self._places[name].shape)


def flat(self: Any, name: str) -> torch.Tensor:
    return self._places[name].flatten()


def some(self: Any, name: str) -> torch.Tensor:
    return {"model.norm.weight": self._places["model.norm.weight"]}[name]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameter": flat}, r"parameter\('model.embed_tokens.weight'\) has shape \[7680\], parameter_shapes\(\) says \[120, 64\]"),
        ({"parameter": lost}, "gives a new tensor at every call"),
        ({"parameter": some}, "raised KeyError.*lists that name"),
        ({"parameter": lambda self, name: None}, "must give a tensor, found a NoneType"),
        ({"parameter_shapes": lambda self: ["a"]}, "must give a mapping of name to shape, found a list"),
        ({"vocab_size": property(lambda self: 0, lambda self, value: None)}, "vocab_size must be a positive integer.*found 0"),
        ({"max_position": property(lambda self: 9.5, lambda self, value: None)}, "max_position must be a positive integer.*found 9.5"),
    ],
)
def test_parameters_that_are_not_what_the_model_declares_are_named(changes: dict[str, Any], said: str, family: Any) -> None:
    family(**changes)
    with pytest.raises(ModelContractError, match=said) as error:
        load_model(resolve_model(str(save("llama"))))
    assert "fam:Family" in one_line(error)


def test_a_checkpoint_of_other_shapes_is_told_from_a_broken_family(family: Any) -> None:
    def wider(self: Any) -> dict[str, tuple[int, ...]]:
        return self._places.shapes()

    def from_config(cls: Any, config: Any, dtype: Any, device: Any) -> Any:
        return super(cls, cls).from_config({**config, "intermediate_size": 128}, dtype, device)

    family(parameter_shapes=wider, from_config=classmethod(from_config))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight' in .* has shape \[96, 64\], the configuration needs \[128, 64\]"):
        load_model(resolve_model(str(save("llama"))))


def page(*names: str, tokens: int = 16, entries: int = 16, shape: tuple[int, ...] = (2, 4)) -> PagedGroup:
    return PagedGroup(tokens, (Source(names, entries, shape, torch.float32),))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([page("k")], "must give a pair"),
        (([], []), "no paged group"),
        (([StateGroup(8, 0)], []), "a StateGroup where a PagedGroup belongs"),
        (([page("k")], [page("v")]), "a PagedGroup where a StateGroup belongs"),
        (([page("k", "k")], []), "tensor 'k' twice"),
        (([page("k"), page("k", tokens=8, entries=8)], []), "tensor 'k' twice"),
        (([page("k"), page("v", tokens=12, entries=12)], []), "page_tokens 12 of group 1 must divide"),
        (([page("k", entries=5)], []), "entries_per_page 5 of .* must divide page_tokens 16"),
        (([page("k", shape=(2, 0))], []), "a shape of positive sizes"),
        (([page()], []), "needs tensor names"),
        (([PagedGroup(16, ())], []), "group 0 has no sources"),
        (([page("k")], [StateGroup(8, 0)]), "needs end_step"),
    ],
)
def test_groups_that_cannot_be_laid_out_are_named(groups: Any, said: str, family: Any) -> None:
    made = family(kv_groups=lambda self, block_tokens: groups)
    model = made.from_config(resolve_model(str(save("llama"))).config, torch.float32, torch.device("meta"))
    with pytest.raises(ModelContractError, match=said) as error:
        checked_groups(model, 16)
    assert "fam:Family.kv_groups(16)" in one_line(error)


def halved(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return LlamaModel.logits(self, hidden).bfloat16()


def narrow(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return LlamaModel.logits(self, hidden)[:, :-1]


def last(self: Any, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
    return LlamaModel.forward(self, batch, kv)[-1:]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logits": halved}, "logits must give float32 [1, 120], found bfloat16 [1, 120]"),
        ({"logits": narrow}, "logits must give float32 [1, 120], found float32 [1, 119]"),
        ({"forward": last}, "forward must give [3, hidden], one row for each of the batch, found float32 [1, 64]"),
    ],
)
def test_a_step_that_gives_something_else_ends_its_requests_with_that_line(changes: dict[str, Any], said: str, family: Any) -> None:
    family(**changes)
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 16, "block_size": 16, "num_threads": 1, "device": "cpu", "quiet": True}
    with LLM(str(save("llama")), **settings) as llm:
        output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "error" and said in (output.error or "")


def test_places_of_parameters() -> None:
    places = ParameterPlaces(torch.bfloat16, torch.device("cpu"))
    norm = places.add("norm", (4,), torch.float32)
    fused = places.add_fused(["q", "k"], [3, 2], 4)
    bias = places.add_fused(["q.b", "k.b"], [3, 2], None)
    assert places.shapes() == {"norm": (4,), "q": (3, 4), "k": (2, 4), "q.b": (3,), "k.b": (2,)}
    assert norm.dtype == torch.float32 and fused.dtype == bias.dtype == torch.bfloat16
    places["q"].fill_(1)
    places["k"].fill_(2)
    places["k.b"].copy_(torch.tensor([5.0, 6.0]))
    assert fused.tolist() == [[1.0] * 4] * 3 + [[2.0] * 4] * 2 and bias[3:].tolist() == [5.0, 6.0]
    with pytest.raises(ValueError, match="'q' is declared twice"):
        places.add("q", (1,))
    with pytest.raises(KeyError):
        places["v"]
    places.close()
    for late in (places.shapes, places.close, lambda: places["q"]):
        with pytest.raises(RuntimeError, match="already loaded"):
            late()


def test_padded_rows_write_to_the_null_page() -> None:
    batch = ForwardBatch(
        ids=torch.tensor([4, 5]), pos=torch.tensor([8, 9]), slots=[torch.tensor([24, 25]), torch.tensor([-1, 12])],
        cu_q=torch.tensor([0, 2]), seq_len=torch.tensor([10]), block_table=torch.tensor([[1]]), num_decodes=0, max_q=2, max_len=10,
    )  # fmt: skip
    ids, pos, slots = batch.padded(4)
    assert (ids.tolist(), pos.tolist()) == ([4, 5, 0, 0], [8, 9, 0, 0])
    assert [s.tolist() for s in slots] == [[24, 25, 0, 0], [0, 12, 0, 0]]
    assert [s.tolist() for s in batch.padded(2)[2]] == [[24, 25], [0, 12]]
