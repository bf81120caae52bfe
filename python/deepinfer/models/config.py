"""Reads ``config.json`` and decides about every field of it.

A field is *known* (a family interprets it), *harmless* (it cannot change the hidden states of inference) or unknown. An
unknown field that is off (null, false, empty) is accepted, because a feature that is off changes nothing; any other
unknown field is refused by name, because a wrong answer is worse than none. ``register_harmless_fields`` is the way out
for private fields.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsupportedConfigError, UnsupportedFormatError

HARMLESS_FIELDS: set[str] = {
    # identity and bookkeeping
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation", "architectures",
    "model_type", "torch_dtype", "dtype", "transformers_version", "name_or_path", "license", "unsloth_version", "unsloth_fixed",
    "task_specific_params", "problem_type", "id2label", "label2id", "finetuning_task", "tokenizer_class", "is_llama_config",
    "transformers.js_config", "neftune_noise_alpha",
    # training only
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "use_cache",
    "gradient_checkpointing", "pretraining_tp", "output_attentions", "output_hidden_states",
    "output_scores", "return_dict", "return_dict_in_generate", "torchscript", "use_return_dict", "router_aux_loss_coef",
    "chunk_size_feed_forward",
    # special tokens and generation defaults: read elsewhere
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "prefix",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "remove_invalid_values",
    # encoder-decoder and pruning switches of old configurations, off in decoder-only models
    "tf_legacy_loss", "use_bfloat16", "tie_encoder_decoder", "is_encoder_decoder", "is_decoder",
}  # fmt: skip

_MUST_BE_OFF = {"is_encoder_decoder": "an encoder", "chunk_size_feed_forward": "chunked feed-forward"}

FOREIGN_FORMATS: dict[str, str] = {
    "awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "bitsandbytes", "bnb": "bitsandbytes", "aqlm": "AQLM", "hqq": "HQQ",
    "quanto": "quanto", "eetq": "EETQ", "compressed-tensors": "compressed-tensors", "torchao": "torchao", "higgs": "HIGGS",
    "vptq": "VPTQ", "fbgemm_fp8": "FBGEMM FP8", "mxfp4": "MXFP4", "bitnet": "BitNet", "spqr": "SpQR", "modelopt": "ModelOpt",
    "quark": "Quark", "auto-round": "AutoRound", "exl2": "EXL2", "marlin": "Marlin", "finegrained_fp4": "fine-grained FP4",
}  # fmt: skip


def register_harmless_fields(*names: str) -> None:
    """Declares config fields that do not change what a model computes."""
    HARMLESS_FIELDS.update(names)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``; ``CheckpointError`` names the file if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def refuse_foreign_format(config: Mapping[str, Any]) -> None:
    """Raises ``UnsupportedFormatError`` with the format's name unless weights are plain or FP8."""
    quantization = config.get("quantization_config")
    if not quantization:
        return
    if not isinstance(quantization, dict):
        raise UnsupportedConfigError(f"config field 'quantization_config' must be an object, found {quantization!r}")
    method = str(quantization.get("quant_method", "")).lower()
    if not method and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "fp8":
        return
    name = FOREIGN_FORMATS.get(method, "an unknown method" if method else "an unnamed method")
    raise UnsupportedFormatError(
        f"checkpoints quantised with {name} are not read (quantization_config.quant_method = {method!r}); "
        "use the unquantised checkpoint, an FP8 one or a GGUF file"
    )


def refuse_remote_code(config: Mapping[str, Any], registered: Collection[str]) -> None:
    """Refuses a model that only its own code can run; a registered architecture with ``auto_map`` is run by ours."""
    if not config.get("auto_map"):
        return
    names = config.get("architectures") or []
    if not any(name in registered for name in names):
        raise UnsupportedConfigError(
            "config field 'auto_map' asks for code from the checkpoint, which is never executed; "
            f"register an implementation of {names or 'its architecture'} with deepinfer.models.register_model"
        )


def check_fields(config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses every field that is neither in ``known`` nor harmless nor off; the message names all of them."""
    known_names = {*known, "quantization_config", "auto_map"}
    for name, what in _MUST_BE_OFF.items():
        if config.get(name):
            raise UnsupportedConfigError(f"config field {name!r} = {config[name]!r}: {what} is not implemented")
    unknown = {
        name: value for name, value in config.items() if name not in known_names and name not in HARMLESS_FIELDS and not _is_off(value)
    }
    if unknown:
        listed = ", ".join(f"{name} = {json.dumps(value, default=str)[:80]}" for name, value in sorted(unknown.items()))
        raise UnsupportedConfigError(
            f"config fields that may change the mathematics and are not implemented: {listed}; if they do not matter, remove them "
            "from config.json or call deepinfer.models.config.register_harmless_fields"
        )


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {}


def required_int(config: Mapping[str, Any], name: str, most: int | None = None) -> int:
    """A positive integer field, at most ``most``; ``UnsupportedConfigError`` names it if it is absent or something else.

    ``most`` is for numbers of things that are counted one by one before anything else can be found wrong with them.
    """
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UnsupportedConfigError(f"config field {name!r} must be a positive integer, found {value!r}")
    if most is not None and value > most:
        raise UnsupportedConfigError(f"config field {name!r} = {value} is not implemented; at most {most} is")
    return value


def optional_int(config: Mapping[str, Any], name: str, default: int, most: int | None = None) -> int:
    """Like ``required_int`` with a default for absent or null."""
    return default if config.get(name) is None else required_int(config, name, most)


def optional_float(config: Mapping[str, Any], name: str, default: float) -> float:
    """A finite positive number with a default for absent or null."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UnsupportedConfigError(f"config field {name!r} must be a positive number, found {value!r}")
    return float(value)


def optional_bool(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A boolean with a default for absent or null."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedConfigError(f"config field {name!r} must be true or false, found {value!r}")
    return value
