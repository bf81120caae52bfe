"""docs/adding-a-model.md is executed: its blocks are a package, which is built, installed beside DeepInfer, run and tested."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.running import environment
from deepinfer import SamplingParams, register_model
from deepinfer.models import base
from deepinfer.models.registry import _registered
from engine_kit import collect, make_engine, random_prompts, request
from fake_cuda import ones_land, watched_cuda
from test_layering import imported_modules, package_folder

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "adding-a-model.md"
FAMILY = ROOT / "examples" / "outside_family"
ROLES = ("topology", "containers", "forward", "ops")


def blocks() -> dict[str, str]:
    """File → text of every block of the page that names one."""
    found = re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == len({name for name, _ in found}), "a file stands on the page twice"
    return dict(found)


def public_names() -> set[str]:
    """Full names of the page's list of what a family may import."""
    section = PAGE.read_text(encoding="utf-8").split("## What a family may import")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(deepinfer\.[\w.]+)` \| (.+?) \|", section, re.MULTILINE)
    return {f"{module}.{name}" for module, names in rows for name in re.findall(r"`(\w+)`", names)}


def test_protocols_that_the_page_recommends_are_among_the_names() -> None:
    """What a family is told to be has to be something that it may import."""
    text = PAGE.read_text(encoding="utf-8")
    protocols = {name for name, member in vars(base).items() if getattr(member, "_is_protocol", False)} | {"LoadsItself"}
    recommended = protocols & set(re.findall(r"`(?:[\w.]+\.)?(\w+)`", text))
    assert {"RemarkingModel", "LoadsItself"} <= recommended
    assert recommended <= {name.rsplit(".", 1)[-1] for name in public_names()}


def test_the_page_holds_the_packages_files() -> None:
    made = ("__pycache__", ".egg-info", "build", "cache")
    files = [p for p in FAMILY.rglob("*") if p.is_file() and p.stat().st_size and not any(m in part for part in p.parts for m in made)]
    there = {str(p.relative_to(FAMILY)): p.read_text(encoding="utf-8") for p in files}
    shown = blocks()
    assert shown.keys() == there.keys()
    for name, text in there.items():
        assert shown[name] == text, f"{name}: the block of docs/adding-a-model.md and the file in examples/outside_family differ"


def test_a_family_is_small() -> None:
    lines = {name: len(text.splitlines()) for name, text in blocks().items() if name.startswith("src/")}
    assert {Path(name).stem for name in lines} == {*ROLES, "__init__"}
    assert sum(lines.values()) <= 300


def imports_of_family(folder: Path, package: str) -> set[str]:
    found: set[str] = set()
    for role in ROLES:
        source = (folder / f"{role}.py").read_text(encoding="utf-8")
        found.update(name for _, name in imported_modules(source, f"{package}.{role}", is_package=False))
    return {name for name in found if not name.startswith(f"{package}.")}


def test_families_import_public_names_only() -> None:
    """The built-in family, too: what it can do, one of another package can."""
    public = public_names()
    assert imports_of_family(FAMILY / "src" / "deepinfer_mixtral", "deepinfer_mixtral") - public == set()
    assert imports_of_family(package_folder() / "models" / "llama", "deepinfer.models.llama") - public == set()


def has_docstring(module: Any, name: str) -> bool:
    """Whether a constant is followed by a string that says what it is."""
    body = ast.parse(inspect.getsource(module)).body
    for at, node in enumerate(body[:-1]):
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == name:
            after = body[at + 1]
            return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    return False


@pytest.mark.parametrize("name", sorted(public_names()))
def test_public_names_can_be_imported_and_say_what_they_are(name: str) -> None:
    module, _, short = name.rpartition(".")
    owner = importlib.import_module(module)
    value = getattr(owner, short)
    assert not short.startswith("_") and owner.__doc__
    if not callable(value):
        assert has_docstring(owner, short)
        return
    assert value.__doc__ and not value.__doc__.startswith(f"{short}("), "a dataclass's made-up docstring says nothing"
    if inspect.isclass(value) and value.__module__.startswith("deepinfer.models"):
        methods = [n for n, m in vars(value).items() if not n.startswith("_") and (inspect.isfunction(m) or isinstance(m, classmethod))]
        assert [n for n in methods if not getattr(value, n).__doc__] == []


def test_public_names_are_those_of_the_contract() -> None:
    assert {"deepinfer.models.base.LoadableModel", "deepinfer.kernels.linear.pack_linear"} <= public_names()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where the page's files lie, and where they are installed: outside of site-packages, built without a network."""
    source, site = tmp_path_factory.mktemp("deepinfer-mixtral"), tmp_path_factory.mktemp("site")
    for name, text in blocks().items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (source / "src" / "deepinfer_mixtral" / "py.typed").touch()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--root-user-action", "ignore"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(site), str(source)]
    built = subprocess.run([*pip, *offline], capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    return source, site


def run_beside(package: tuple[Path, Path], *arguments: str) -> str:
    """What Python prints with the package installed; the package's sources are not on its path."""
    source, site = package
    others = environment().get("PYTHONPATH")
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=source,
        env=environment(PYTHONPATH=f"{site}:{others}" if others else str(site), PYTHONSAFEPATH="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def ids_in(text: str) -> list[list[int]]:
    """Lines that are lists of ids."""
    return [[int(i) for i in line.split(",")] for line in re.findall(r"^\[(\d+(?:, \d+)*)\]$", text, re.MULTILINE)]


def test_the_walk(package: tuple[Path, Path]) -> None:
    """The page's two commands, in one process because starting torch is most of their time."""
    both = (
        "import runpy, sys, pytest; runpy.run_path('try_it.py', run_name='__main__'); "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests']))"
    )
    printed = run_beside(package, "-c", both)
    assert [len(ids) for ids in ids_in(printed)] == [8]
    passed = re.search(r"^(\d+) passed", printed, re.MULTILINE)
    assert passed is not None and int(passed[1]) >= 10 and "skipped" not in printed


OTHER_PROCESS = """
import asyncio, pathlib, sys
from deepinfer import LLM, AsyncLLM, SamplingParams

settings = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 16, "quiet": True, "num_threads": 1}
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

async def elsewhere(folder):
    async with AsyncLLM(folder, **settings) as llm:
        async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params):
            last = output
    print(last.outputs[0].token_ids)

folder = sys.argv[1]
with LLM(folder, **settings) as llm:
    print(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
asyncio.run(elsewhere(folder))
"""


@pytest.mark.nightly
def test_engines_in_other_processes_find_the_family(package: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    here, elsewhere = ids_in(run_beside(package, "-c", OTHER_PROCESS, str(tmp_path)))
    assert here == elsewhere and len(here) == 6


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The family under its name, from the checkout."""
    monkeypatch.syspath_prepend(FAMILY / "src")
    monkeypatch.setattr("deepinfer.models.registry._registered", dict(_registered))
    register_model("MixtralForCausalLM", "deepinfer_mixtral.forward:MixtralModel")
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "deepinfer_mixtral"]:
        del sys.modules[name]


CONFIG = """{"architectures": ["MixtralForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 256, "sliding_window": 24}"""


@pytest.mark.usefixtures("registered")
def test_the_family_never_waits_for_the_device(tmp_path: Path) -> None:
    """Prefill in chunks and decoding on a device that refuses every value read back, `.item()` and data-dependent shapes included."""
    (tmp_path / "config.json").write_text(CONFIG)
    with watched_cuda("fake", ones_land), make_engine(str(tmp_path), "cuda", load_format="dummy", max_num_batched_tokens=24) as engine:
        for i, prompt in enumerate(random_prompts([20, 33])):
            engine.add_request(request(str(i), prompt, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)))
        answers = collect(engine)
    assert [(a.finish, a.error, len(a.tokens)) for a in answers.values()] == [("length", None, 4)] * 2
