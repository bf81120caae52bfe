"""The option tables against the API: each option is an argument of that name, each argument has an option."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from deepinfer.cli import options
from deepinfer.cli.console import UserError
from deepinfer.engine.config import EngineConfig
from deepinfer.sampling import SamplingParams

ALIASES = {"gpu_memory_utilization"}  # a second spelling of --kv-memory-fraction
# A command runs one whole engine; halves of one are set where both are started (`PrefillDecodePair`).
OF_A_PAIR = {"rank", "engine_type", "kv_transfer", "kv_transfer_address", "kv_transfer_token", "handover_lease"}
SECRETS = {"kv_store_token"}  # a command line is for everybody to see; environment variables are not
# seed is the engine option of that name; a command prints text; structured outputs have a table of their own
NOT_OFFERED = {"seed", "detokenize", "structured_outputs"}


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_engine_options(parser)
    options.add_sampling_options(parser)
    return parser.parse_args(["--model", "m", *argv])


def test_every_engine_setting_has_an_option() -> None:
    settings = {f.name for f in dataclasses.fields(EngineConfig)} - {"model"} - ALIASES - OF_A_PAIR - SECRETS
    assert {o.name for o in options.ENGINE_OPTIONS} == settings


def test_every_sampling_value_has_an_option() -> None:
    values = {f.name for f in dataclasses.fields(SamplingParams)} - NOT_OFFERED
    assert {o.name for o in options.SAMPLING_OPTIONS} == values


def test_only_what_was_given_is_passed_on() -> None:
    args = parse()
    assert options.engine_arguments(args) == {"model": "m"}
    assert options.sampling_arguments(args) == {}
    args = parse(
        "--no-enable-prefix-caching",
        "--gpu-memory-utilization",
        "0.3",
        "--seed",
        "4",
        "--stop",
        "a",
        "--stop",
        "b",
        "--no-skip-special-tokens",
    )
    assert options.engine_arguments(args) == {"model": "m", "enable_prefix_caching": False, "kv_memory_fraction": 0.3, "seed": 4}
    assert options.sampling_arguments(args) == {"stop": ["a", "b"], "skip_special_tokens": False, "seed": 4}


def test_logit_bias_is_read() -> None:
    assert options.sampling_arguments(parse("--logit-bias", "4=-1.5", "--logit-bias", "7=2"))["logit_bias"] == {4: -1.5, 7: 2.0}
    with pytest.raises(UserError, match="ID=VALUE"):
        options.sampling_arguments(parse("--logit-bias", "4"))


def test_two_sizes_of_the_pool_are_refused() -> None:
    with pytest.raises(UserError, match="give one of them"):
        options.engine_arguments(parse("--num-kv-blocks", "9", "--kv-memory-fraction", "0.5"))
