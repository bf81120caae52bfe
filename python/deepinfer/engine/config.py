"""What a user may set on an engine, checked once.

`EngineConfig` is what was asked for; `RunConfig` is what holds on the device after defaults. Both are immutable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from deepinfer.engine import environ
from deepinfer.engine.data_parallel.place import RankPlace
from deepinfer.errors import ConfigError, UnsupportedFormatError
from deepinfer.kvcache import store_address
from deepinfer.models.base import TablePlace, Truncation, WeightForm
from deepinfer.platforms import Platform, get_platform
from deepinfer.speculative import OFF, SpeculativeSettings

EngineType = Literal["normal", "prompt", "completion"]
TransferKind = Literal["shm", "tcp"]
CacheType = Literal["auto", "fp8", "packed", "bfloat16", "float32"]
"""``models.base.CacheForm``, and ``fp8`` of models without caches of their own kind."""
HitPolicy = Literal["exact", "replay"]
GraphUse = bool | Literal["auto", "on", "off"]
Prefetch = Literal["best_effort", "wait", "timeout"]
StoreWrite = Literal["on_finish", "write_through"]
StepPolicy = Literal["mixed", "decode_first"]
MOST_RANKS = 1024
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
QUANTIZATIONS = ("fp8", "gguf")
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}

# A batch that keeps each device busy without making one step long enough to be felt.
_DEFAULT_SEQS = {"cpu": 64, "cuda": 256}
_DEFAULT_TOKENS = {"cpu": 512, "cuda": 8192}
STORE_ROLES = ("check", "get", "put")
"""What an engine does in a KV store."""
_TENANT = re.compile(r"[A-Za-z0-9._-]{0,64}")
_MOST_THREADS = 1024  # the threads' library ends the process when it cannot start what it is told to
_DEFAULT_FRACTION = {"cpu": 0.5, "cuda": 0.9}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, as `LLM(...)` takes them.

    Args:
        model: directory, GGUF file, hub id or known alias.
        tokenizer: where the tokenizer comes from if not from the model.
        revision: hub revision of the model.
        chat_template: template text or a path to one, instead of the model's.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is bfloat16 on a GPU and on processors with bf16
            dot products (AVX512-BF16, AMX, Arm BF16), float32 on others.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; ``auto`` takes ``DEEPINFER_ACCELERATOR``, then a GPU if there is one.
        quantization: ``fp8`` or ``gguf`` to insist on it; what a checkpoint declares is read anyway. Others are refused by name.
        weights: whether FP8 weights stay ``packed`` (half the memory, the same results) or are ``expanded`` to ``dtype`` when loaded;
            ``auto`` = expanded, which is faster, unless they took more than half of a GPU. ``packed`` is an error where
            they cannot stay so.
        max_model_len: longest prompt plus answer, in tokens; ``None`` = the model's own limit, lowered to what the KV memory holds.
        max_num_seqs: most sequences in one step; ``None`` = 64 on a CPU, 256 on a GPU (never above ``max_num_batched_tokens``).
        max_num_batched_tokens: most token rows in one step; longer prompts are cut in chunks. ``None`` = 512 on a CPU, 8192 on a GPU.
        block_size: tokens of a KV page, the unit of prefix reuse: 16, 32, 64 or 128; ``None`` = the model's own choice, mostly 64.
        num_kv_blocks: KV pages to allocate; ``None`` = from ``kv_memory_fraction``.
        kv_memory_fraction: on a GPU the share of the card that weights and KV together may take (0.9); on a CPU the share of
            the memory left after loading that KV may take (0.5), and never more than ``max_num_seqs`` full sequences need.
        gpu_memory_utilization: another name for ``kv_memory_fraction``.
        swap_space_gib: host memory that preempted sequences may be swapped to where that is cheaper than computing them again; ``None`` =
            at most 1 GiB on a CPU, 4 on a GPU, and an eighth of what is free; 0 = none.
        state_snapshot_gib: host memory for snapshots of sequences' states, of models that keep windows beside their KV: a prompt whose
            beginning has one goes on from there. ``None`` = at most 1 GiB on a CPU, 4 on a GPU, and a sixteenth of what is free; 0 = none.
        state_slice_gib: host memory for slices of such states, at prompts' last boundaries and where answers ended: smaller than
            snapshots, and what other engines can use. A beginning with a slice has fewer rows to compute again than without. 0 = none;
            ``None`` = none without a KV store, and with one as much as for snapshots.
        hit_policy: of such models where a beginning has KV and no snapshot: ``exact`` computes rows again until results are those of the
            whole prompt; ``replay`` only as many as the model was trained to bear, results then depend on what was cached. With a
            truncated prefill that is approximate itself, ``exact`` hits may differ from what the prompt gives without a hit, too.
        enable_prefix_caching: keep finished blocks for prompts with the same beginning.
        kv_store: where KV of finished prefixes is kept beyond this engine (docs/kvstore.md): ``dir:PATH`` (a store of this process alone),
            ``tcp://HOST:PORT[,HOST:PORT...]`` or ``unix:PATH`` (entry points), ``agent:PATH`` (the agent of this host). Left out: nowhere.
            A store that fails costs time, never a request.
        kv_store_tenant: who shares such KV with whom: engines of one tenant.
        kv_store_token: secret of the roles that a store asks for, or one each of ``check``, ``get`` and ``put``; ``None`` =
            ``DEEPINFER_KV_STORE_TOKEN``, else ``DEEPINFER_KVSTORE_TOKEN_CHECK``, ``…_GET`` and ``…_PUT``.
        kv_store_tls_ca: file of the authority (PEM) that a store of ``tcp://`` has its certificate from; ``None`` = no TLS.
            ``kv_store_tls_name``: whom it is for; ``None`` = the address's host.
        kv_store_gib: most that a store of ``dir:PATH`` holds; ``None`` = its default.
        kv_store_write: ``on_finish`` stores what prompts and requests have completed, ``write_through`` after each step.
        kv_prefetch: ``wait`` lets a request wait for KV that the store has, ``timeout`` for at most ``kv_prefetch_timeout`` seconds, which
            is then computed; ``best_effort`` for nothing: what has come when its turn comes is used. Nobody else waits.
        kv_prefetch_timeout: seconds.
        kv_prefetch_min_tokens: a store is asked for nothing that saves fewer tokens to compute.
        data_parallel_size: engines of one model that share the requests, a process each and on GPUs a GPU each.
        expert_parallel: spread the experts of the model's layers over these engines, which then step together; results are the same.
        step_policy: ``mixed`` lets rows of prompts and of answers share a step; ``decode_first`` gives each a step of its own, prompts one
            after 70 steps of answers where all engines have some and can place them, after 100 where any has, and at once where nobody
            answers: several engines then agree on every step and make it together. Results are the same. ``None`` = ``mixed``, with
            ``expert_parallel`` ``decode_first``, which it needs.
        rank: which of them this is; set by what starts them.
        seed: start of the seeds of requests that bring none.
        load_format: ``auto``, ``safetensors``, ``gguf``, or ``dummy`` (random weights from a configuration alone).
        trust_remote_code: refused.
        engine_type: ``normal``; ``prompt`` computes prompts and first tokens and hands the sequences over; ``completion`` goes on with
            such sequences. See `PrefillDecodePair` for one of each.
        kv_transfer: how KV goes from one to the other: ``shm`` (shared memory, one machine) or ``tcp``.
        kv_transfer_address: ``host:port`` at which a prompt engine offers KV over TCP; port 0 = any free one.
        kv_transfer_token: shared secret of the engines that hand over to each other, at least 16 bytes.
        handover_lease: seconds that a hand-over may take; what is held for it is free after that.
        zero_overhead: plan and launch the next step while the device runs this one; results are the same either way. ``None`` =
            ``DEEPINFER_ZERO_OVERHEAD_SCHEDULING``.
        batch_invariant: whatever runs beside a request, and however its prompt is cut, its answer has the same bits. ``False`` lets
            products run by whatever is fastest at a step's number of rows: answers may then differ in last bits, and so in tokens where two
            are nearly as likely, from run to run, with and without cached beginnings, drafts, overlapped steps and preemption. On a GPU it
            has to be the same for all engines of a process.
        cuda_graphs: on a GPU, record steps once and replay each with one launch; results are the same either way. ``auto`` takes
            ``DEEPINFER_CUDA_GRAPHS``, else records them where the model can; ``on`` (``True``) makes it an error where it cannot.
        speculative: ``ngram`` proposes drafts by prompt lookup, ``dspark`` by the draft stages of a checkpoint that has them (see
            `deepinfer.speculative`); results are the same. ``off`` = no drafts; ``None`` = ``dspark`` where ``USE_NEXTN_DECODE`` asks
            for it and the model can, else no drafts.
        num_draft_tokens: most drafts of a sequence and step; ``None`` = 4 by prompt lookup, all that the model's stages make.
        ngram_min, ngram_max: how many of the newest tokens must have occurred before, and how many are compared at most.
        draft_budget: most draft rows of one step; ``None`` = found from the times of completed steps.
        kv_cache_dtype: ``auto`` keeps KV in ``dtype``; ``fp8``, of models of the Llama family, as 8-bit floats (e4m3) with the checkpoint's
            scales if it has any: half the bytes of 16 bits everywhere, so twice the tokens, and approximate. Models with compressed
            caches keep their rows ``packed`` (FP8 and FP4 records), in ``bfloat16`` or ``float32``, with the same values; ``auto`` is
            packed there where the model allows it.
        yoco_prefill_truncation: of models whose decoder reads one cache made by their encoder: leave the decoder's rows of all but a
            prompt's last tokens out (``compact``) or keep later rows from seeing them (``mask``). Approximate unless enough tokens
            are kept; ``None`` = ``YOCO_PREFILL_TRUNCATION_MODE``, else ``off``.
        yoco_prefill_keep_tokens: last tokens of a prompt that are left whole; ``None`` = ``YOCO_PREFILL_KEEP_TOKENS``, else the fewest
            allowed (window and ``max_backtracking_tokens``).
        max_backtracking_tokens: most rows that a step of such a model may write past the last one that counts; ``None`` =
            ``MAX_BACKTRACKING_TOKENS``, else what the drafts of the model or of ``num_draft_tokens`` need.
        engram_cache_gib: host memory for rows of a model's Engram tables, all tables together; the tables themselves stay in their
            files. 0 = none, ``None`` = 0.25 a table.
        engram_tables: where a model's Engram tables are for a step: in their ``files`` (a CPU), on the ``device``, or in page-locked
            ``host`` memory that a GPU reads; ``None`` or ``auto`` = files on a CPU, a GPU that has twice their room, else the host.
        max_images_per_prompt: most images of a prompt, for models that take images.
        max_image_pixels: most pixels (width times height) of an image as it comes, before it is scaled for the model.
        grammar_workers: processes that compile what requests ask for as ``structured_outputs``; they start at the first need. ``None`` =
            ``SO_BUILDER_CPUS``, else 4; a core is left to all else anyway.
        grammar_timeout: seconds that one grammar may take to compile; ``None`` = ``XGRAMMAR_TIMEOUT``, else 20.
        grammar_cache_gib: host memory for compiled grammars, which requests find again, taken as they come; 0 = none, ``None`` =
            ``XGRAMMAR_CACHE_GIB``, else 10.
        num_threads: torch threads; ``None`` = ``DEEPINFER_NUM_THREADS``, else torch's choice.
        quiet: leave the capacity report out; ``None`` = ``DEEPINFER_QUIET``.

    Raises:
        ConfigError: a value is out of range or two conflict; the message says what to change.
        UnsupportedFormatError: a quantization that is not read.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    quantization: str | None = None
    weights: WeightForm = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_memory_fraction: float | None = None
    gpu_memory_utilization: float | None = None
    swap_space_gib: float | None = None
    state_snapshot_gib: float | None = None
    state_slice_gib: float | None = None
    hit_policy: HitPolicy = "exact"
    enable_prefix_caching: bool = True
    kv_store: str | None = None
    kv_store_tenant: str = ""
    kv_store_token: str | Mapping[str, str] | None = field(default=None, repr=False)
    kv_store_tls_ca: str | None = None
    kv_store_tls_name: str | None = None
    kv_store_gib: float | None = None
    kv_store_write: StoreWrite = "on_finish"
    kv_prefetch: Prefetch = "timeout"
    kv_prefetch_timeout: float = 5.0
    kv_prefetch_min_tokens: int = 128
    data_parallel_size: int = 1
    expert_parallel: bool = False
    step_policy: StepPolicy | None = None
    rank: RankPlace | None = None
    seed: int = 0
    load_format: LoadFormat = "auto"
    trust_remote_code: bool = False
    engine_type: EngineType = "normal"
    kv_transfer: TransferKind = "shm"
    kv_transfer_address: str = "127.0.0.1:0"
    kv_transfer_token: bytes | None = field(default=None, repr=False)
    handover_lease: float = 60.0
    zero_overhead: bool | None = None
    batch_invariant: bool = True
    cuda_graphs: GraphUse = "auto"
    speculative: str | None = None
    num_draft_tokens: int | None = None
    ngram_min: int = 2
    ngram_max: int = 4
    draft_budget: int | None = None
    num_threads: int | None = None
    quiet: bool | None = None
    kv_cache_dtype: CacheType = "auto"
    yoco_prefill_truncation: Truncation | None = None
    yoco_prefill_keep_tokens: int | None = None
    max_backtracking_tokens: int | None = None
    engram_cache_gib: float | None = None
    engram_tables: TablePlace | None = None
    max_images_per_prompt: int = 64
    max_image_pixels: int = 1 << 26
    grammar_workers: int | None = None
    grammar_timeout: float | None = None
    grammar_cache_gib: float | None = None

    def __post_init__(self) -> None:
        if self.trust_remote_code:
            raise ConfigError(
                "trust_remote_code=True is refused: a checkpoint's Python would run with your rights, outside the engine's "
                "exactness tests. Register the architecture with deepinfer.models.register_model instead"
            )
        if not isinstance(self.model, str | os.PathLike) or not str(self.model):
            raise ConfigError(f"model must be a path, a hub id or an alias such as 'smollm2', got {self.model!r}")
        object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "device", str(self.device))
        self._check_dtype()
        _positive("max_model_len", self.max_model_len, "leave it out for the model's own limit")
        _positive("max_num_seqs", self.max_num_seqs, most=(1 << 20) - 1)
        _positive("max_num_batched_tokens", self.max_num_batched_tokens, most=(1 << 24) - 1)
        _positive("num_kv_blocks", self.num_kv_blocks, "leave it out to size the pool from kv_memory_fraction")
        _positive("max_images_per_prompt", self.max_images_per_prompt)
        _positive("max_image_pixels", self.max_image_pixels)
        _positive("num_threads", self.num_threads, most=_MOST_THREADS)
        _positive("grammar_workers", self.grammar_workers)
        _gib("grammar_cache_gib", self.grammar_cache_gib)
        seconds, most = self.grammar_timeout, environ.MOST_COMPILE_SECONDS
        if seconds is not None and (not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0.01 <= seconds <= most):
            raise ConfigError(f"grammar_timeout must be a number of seconds between 0.01 and {most:g}, got {seconds!r}")
        self._check_caches()
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size!r}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise UnsupportedFormatError(
                f"quantization {self.quantization!r} is not read; {' and '.join(QUANTIZATIONS)} checkpoints are, without naming it"
            )
        if self.weights not in get_args(WeightForm):
            raise ConfigError(f"weights must be one of {', '.join(get_args(WeightForm))}, got {self.weights!r}")
        if self.load_format not in get_args(LoadFormat):
            raise ConfigError(f"load_format must be one of {', '.join(get_args(LoadFormat))}, got {self.load_format!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}")
        if not isinstance(self.batch_invariant, bool):
            raise ConfigError(f"batch_invariant must be True or False, got {self.batch_invariant!r}")
        if self.zero_overhead is not None and not isinstance(self.zero_overhead, bool):
            raise ConfigError(f"zero_overhead must be True, False or left out, got {self.zero_overhead!r}")
        if not isinstance(self.cuda_graphs, bool) and self.cuda_graphs not in ("auto", "on", "off"):
            raise ConfigError(f"cuda_graphs must be 'auto', 'on', 'off', True or False, got {self.cuda_graphs!r}")
        self._check_memory()
        self._check_role()
        self._check_store()
        self._check_ranks()
        _ = self.speculative_settings
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and seqs > tokens:
            raise ConfigError(
                f"max_num_seqs ({seqs}) is above max_num_batched_tokens ({tokens}), so one step could not decode all of them; "
                "raise max_num_batched_tokens or lower max_num_seqs"
            )

    def _check_dtype(self) -> None:
        name = str(self.dtype).removeprefix("torch.")
        if name != "auto" and name not in DTYPES:
            raise ConfigError(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got {self.dtype!r}")
        object.__setattr__(self, "dtype", name)

    def _check_caches(self) -> None:
        if self.kv_cache_dtype not in get_args(CacheType):
            raise ConfigError(f"kv_cache_dtype must be one of {', '.join(get_args(CacheType))}, got {self.kv_cache_dtype!r}")
        if self.yoco_prefill_truncation is not None and self.yoco_prefill_truncation not in get_args(Truncation):
            raise ConfigError(
                f"yoco_prefill_truncation must be one of {', '.join(get_args(Truncation))}, got {self.yoco_prefill_truncation!r}"
            )
        _positive("yoco_prefill_keep_tokens", self.yoco_prefill_keep_tokens, most=environ.MOST_KEPT)
        _positive("max_backtracking_tokens", self.max_backtracking_tokens, most=environ.MOST_BACKTRACKING)
        _gib("engram_cache_gib", self.engram_cache_gib)
        if self.engram_tables is not None and self.engram_tables not in get_args(TablePlace):
            raise ConfigError(f"engram_tables must be one of {', '.join(get_args(TablePlace))}, got {self.engram_tables!r}")

    def _check_role(self) -> None:
        if self.engine_type not in get_args(EngineType):
            raise ConfigError(f"engine_type must be one of {', '.join(get_args(EngineType))}, got {self.engine_type!r}")
        if self.kv_transfer not in get_args(TransferKind):
            raise ConfigError(f"kv_transfer must be one of {', '.join(get_args(TransferKind))}, got {self.kv_transfer!r}")
        host, _, port = str(self.kv_transfer_address).rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"kv_transfer_address must be host:port, got {self.kv_transfer_address!r}")
        token = self.kv_transfer_token
        if token is not None and (not isinstance(token, bytes) or len(token) < 16):
            raise ConfigError("kv_transfer_token must be at least 16 bytes; take random ones")
        lease = self.handover_lease
        if not isinstance(lease, int | float) or isinstance(lease, bool) or not 0.001 <= lease <= 3600:
            raise ConfigError(f"handover_lease must be between 0.001 and 3600 seconds, got {lease!r}")

    def _check_store(self) -> None:
        where = self.kv_store
        if where is not None:
            kind = where.partition(":")[0] if isinstance(where, str) else ""
            if not store_address.is_address(where):
                raise ConfigError(f"kv_store must be one of {', '.join(store_address.FORMS)}, got {where!r}")
            if not self.enable_prefix_caching:
                raise ConfigError("kv_store keeps what prefix caching finds: set enable_prefix_caching=True or leave kv_store out")
            if self.engine_type == "completion":
                raise ConfigError("a completion engine computes no prompts; give kv_store to the prompt engine")
            if self.kv_store_gib is not None and kind != "dir":
                raise ConfigError(f"kv_store_gib sizes a store of dir:PATH, and {where!r} has a size of its own; leave kv_store_gib out")
        elif self.kv_store_gib is not None:
            raise ConfigError("kv_store_gib sizes a store of dir:PATH; set kv_store, or leave kv_store_gib out")
        ca, name = self.kv_store_tls_ca, self.kv_store_tls_name
        if (ca is not None and not str(where).startswith("tcp:")) or (name is not None and ca is None):
            raise ConfigError("kv_store_tls_ca is for a kv_store of tcp://HOST:PORT, kv_store_tls_name for one with it; leave them out")
        tenant, token = self.kv_store_tenant, self.kv_store_token
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            raise ConfigError(f"kv_store_tenant must be at most 64 letters, digits, dots, dashes and underscores, got {tenant!r}")
        if isinstance(token, Mapping):
            if not token or not set(token) <= set(STORE_ROLES) or not all(isinstance(one, str) and one for one in token.values()):
                raise ConfigError(f"kv_store_token must be a text, or texts by role, of {', '.join(STORE_ROLES)}")
        elif token is not None and (not isinstance(token, str) or not token):
            raise ConfigError("kv_store_token must be a text; leave it out for a store that asks for none")
        _gib("kv_store_gib", self.kv_store_gib)
        if self.kv_store_gib == 0:
            raise ConfigError("kv_store_gib must be above 0; leave kv_store out for no store")
        for name, value, kinds in (("kv_store_write", self.kv_store_write, StoreWrite), ("kv_prefetch", self.kv_prefetch, Prefetch)):
            if value not in get_args(kinds):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(kinds))}, got {value!r}")
        seconds, least = self.kv_prefetch_timeout, self.kv_prefetch_min_tokens
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0.001 <= seconds <= 3600:
            raise ConfigError(f"kv_prefetch_timeout must be between 0.001 and 3600 seconds, got {seconds!r}")
        if not isinstance(least, int) or isinstance(least, bool) or least < 0:
            raise ConfigError(f"kv_prefetch_min_tokens must be an integer of at least 0, got {least!r}")

    def _check_ranks(self) -> None:
        size = self.data_parallel_size
        _positive("data_parallel_size", size, most=MOST_RANKS)
        if not isinstance(self.expert_parallel, bool):
            raise ConfigError(f"expert_parallel must be True or False, got {self.expert_parallel!r}")
        if self.step_policy is not None and self.step_policy not in get_args(StepPolicy):
            raise ConfigError(f"step_policy must be one of {', '.join(get_args(StepPolicy))}, or left out, got {self.step_policy!r}")
        if self.step_policy == "decode_first" and self.engine_type != "normal":
            raise ConfigError(f"the steps of an engine of type {self.engine_type!r} are of one kind anyway; leave step_policy out")
        if self.step_policy == "mixed" and self.expert_parallel:
            raise ConfigError("ranks whose experts are spread agree on steps of one kind; leave step_policy='mixed' or expert_parallel out")
        if size == 1:
            if self.expert_parallel:
                raise ConfigError("expert_parallel spreads experts over several engines; give data_parallel_size of at least 2")
            return
        if self.engine_type != "normal":
            raise ConfigError(f"several ranks of engine_type {self.engine_type!r} are not served; leave data_parallel_size out")
        if self.kv_store is not None and self.kv_store.startswith("dir:"):
            raise ConfigError(
                f"kv_store={self.kv_store!r} belongs to one process, and there are {size}; "
                "start `deepinfer kvstore serve` on that folder and give its address"
            )
        if self.rank is None and str(self.device).startswith("cuda:"):  # a rank's own is one GPU
            raise ConfigError(f"device {self.device!r} is one GPU, and there are {size} ranks; use device='cuda' for one each")

    def _check_memory(self) -> None:
        _gib("swap_space_gib", self.swap_space_gib)
        _gib("state_snapshot_gib", self.state_snapshot_gib)
        _gib("state_slice_gib", self.state_slice_gib)
        if self.hit_policy not in get_args(HitPolicy):
            raise ConfigError(f"hit_policy must be one of {', '.join(get_args(HitPolicy))}, got {self.hit_policy!r}")
        fraction, alias = self.kv_memory_fraction, self.gpu_memory_utilization
        if fraction is not None and alias is not None and fraction != alias:
            raise ConfigError("kv_memory_fraction and gpu_memory_utilization are one setting under two names; give one of them")
        fraction = alias if fraction is None else fraction
        if fraction is not None:
            if not isinstance(fraction, int | float) or not 0.0 < fraction <= 1.0:
                raise ConfigError(f"kv_memory_fraction must be in (0, 1], got {fraction!r}")
            if self.num_kv_blocks is not None:
                raise ConfigError("num_kv_blocks and kv_memory_fraction both size the KV pool; give one of them")
        object.__setattr__(self, "kv_memory_fraction", fraction)
        object.__setattr__(self, "gpu_memory_utilization", fraction)

    @property
    def steps_together(self) -> bool:
        """Whether several ranks agree on every step and all make it: where their layers exchange rows, and where it was asked for. Ranks
        that have nothing for each other step by themselves."""
        return self.data_parallel_size > 1 and (self.expert_parallel or self.step_policy == "decode_first")

    @property
    def speculative_settings(self) -> SpeculativeSettings | None:
        """Drafting as it was asked for, ``None`` without."""
        if self.speculative is None or self.speculative == OFF:
            return None
        return SpeculativeSettings(self.speculative, self.num_draft_tokens, self.ngram_min, self.ngram_max, self.draft_budget)

    @classmethod
    def from_args(cls, model: str, **settings: Any) -> EngineConfig:
        """Like the constructor, but an unknown name is a :class:`ConfigError` that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(map(repr, unknown))}; known are {', '.join(sorted(known - {'model'}))}")
        return cls(model=model, **settings)

    def resolve(self) -> RunConfig:
        """Fills in what depends on the machine.

        Raises:
            ConfigError: the device is not there.
        """
        device = str(self.device)
        platform = get_platform(environ.get("DEEPINFER_ACCELERATOR") if device == "auto" else device)
        kind = platform.name
        tokens = self.max_num_batched_tokens
        seqs = self.max_num_seqs
        if tokens is None:
            tokens = max(_DEFAULT_TOKENS[kind], seqs or 0)
        if seqs is None:
            seqs = min(_DEFAULT_SEQS[kind], tokens)
        graphs = environ.get("DEEPINFER_CUDA_GRAPHS") if self.cuda_graphs == "auto" else self.cuda_graphs in (True, "on")
        if graphs and kind == "cpu":
            raise ConfigError("cuda_graphs is on, and graphs are a GPU's; leave cuda_graphs (or DEEPINFER_CUDA_GRAPHS) out on a CPU")
        dtype = platform.default_dtype if self.dtype == "auto" else DTYPES[str(self.dtype)]
        if dtype is torch.float16 and kind == "cpu":
            raise ConfigError("dtype float16 is not supported on a CPU; use 'bfloat16' or 'float32'")
        threads = environ.get("DEEPINFER_NUM_THREADS") if self.num_threads is None else self.num_threads
        _positive("DEEPINFER_NUM_THREADS", threads, most=_MOST_THREADS)
        return RunConfig(
            platform=platform,
            dtype=dtype,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            kv_memory_fraction=_DEFAULT_FRACTION[kind] if self.kv_memory_fraction is None else self.kv_memory_fraction,
            num_threads=threads,
            quiet=environ.get("DEEPINFER_QUIET") if self.quiet is None else self.quiet,
            zero_overhead=environ.get("DEEPINFER_ZERO_OVERHEAD_SCHEDULING") if self.zero_overhead is None else self.zero_overhead,
            cuda_graphs=graphs,
            batch_invariant=self.batch_invariant,
        )


@dataclass(frozen=True)
class RunConfig:
    """The machine-dependent half: every value is set. ``cuda_graphs``: ``None`` = where the model can."""

    platform: Platform
    dtype: torch.dtype
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_memory_fraction: float
    num_threads: int | None
    quiet: bool
    zero_overhead: bool = True
    cuda_graphs: bool | None = None
    batch_invariant: bool = True

    @property
    def device(self) -> torch.device:
        """Where weights and KV live."""
        return self.platform.device


def _gib(name: str, value: float | None) -> None:
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1 << 20):
        raise ConfigError(f"{name} must be a number of GiB of at least 0, got {value!r}")


def _positive(name: str, value: int | None, hint: str = "", *, most: int | None = None) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}" + (f"; {hint}" if hint else ""))
    if most is not None and value > most:
        raise ConfigError(f"{name} must be at most {most}, got {value}")
