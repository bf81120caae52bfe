"""Configuration: what is kept, and that a value that cannot work is named."""

from __future__ import annotations

from typing import Any

import pytest

from core_driver import Driver, make_config, make_ring, prompt
from deepinfer import _core
from deepinfer.errors import ConfigError


def test_values_come_back() -> None:
    config = make_config(max_draft=2, ring_slots=4)
    assert (config.block_tokens, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (16, 4, 64, 128)
    assert (config.vocab_size, config.max_draft, config.ring_slots, config.prefix_caching, config.device_ordered) == (
        1000,
        2,
        4,
        True,
        True,
    )
    assert make_config(max_draft=2, device_drafts=2).device_drafts == 2 and config.device_drafts == 0
    group = _core.PagedGroup(page_tokens=64, num_pages=9, sources=[(64, 128), (32, 8)])
    assert (group.page_tokens, group.num_pages, group.sources) == (64, 9, [(64, 128), (32, 8)])
    state = _core.StateGroup(stored=10, dropped=20, replicas=1, ring=134, cut=128)
    assert (state.stored, state.dropped, state.replicas, state.ring, state.cut) == (10, 20, 1, 134, 128)


def test_a_rule_of_windows_comes_back_and_is_checked_with_the_rest() -> None:
    rule = _core.WindowRule(encoder=20, decoder=19, window=128, grain=128, backtrack=6, exact=False, keep=134, truncated=True)
    assert (rule.encoder, rule.decoder, rule.window, rule.grain, rule.backtrack) == (20, 19, 128, 128, 6)
    assert (rule.exact, rule.keep, rule.truncated) == (False, 134, True)
    assert eval(repr(rule), {"WindowRule": _core.WindowRule}).keep == 134
    plain = _core.WindowRule(encoder=2, decoder=2, window=5, grain=16, backtrack=3)
    assert (plain.exact, plain.keep, plain.truncated) == (True, 0, False)
    paged = _core.PagedGroup(page_tokens=16, num_pages=33, sources=[(16, 64)])
    groups = [paged, _core.StateGroup(stored=8, dropped=8, replicas=1, cut=16)]
    config = make_config(groups=groups, hit_rule=plain, snapshot_slots=3)
    assert config.snapshot_slots == 3
    core = _core.Core(config)
    assert core.counts()["snapshots"]["total"] == core.counts()["snapshots"]["free"] == 3
    for changes, named in (
        ({"groups": [paged]}, "state group"),
        ({"groups": [paged, _core.StateGroup(stored=8, dropped=8)]}, "replica"),
        ({"hit_rule": None}, "snapshot_slots is 3"),
        ({"hit_rule": _core.WindowRule(encoder=2, decoder=2, window=5, grain=24, backtrack=3)}, "page_tokens.* 24"),
        ({"max_draft": 4}, "max_draft is 4; .* at most 3"),
    ):
        with pytest.raises(ConfigError, match=named):
            _core.Core(make_config(**{"groups": groups, "hit_rule": plain, "snapshot_slots": 3, **changes}))
    for wrong in (7, b"all", [plain]):
        with pytest.raises(ConfigError, match=r"hit_rule is .*WindowRule"):
            make_config(hit_rule=wrong)


def test_steps_say_how_sequences_begin_and_which_states_are_copied() -> None:
    groups = [
        _core.PagedGroup(page_tokens=16, num_pages=33, sources=[(16, 64)]),
        _core.StateGroup(stored=8, dropped=8, replicas=1, cut=16),
    ]
    rule = _core.WindowRule(encoder=2, decoder=2, window=5, grain=16, backtrack=3)
    for places, begins in ((4, [32, 32, 1]), (0, [16, 32, 3])):
        driver = Driver(groups=groups, hit_rule=rule, snapshot_slots=places)
        driver.core.add(prompt(34), max_new_tokens=1)
        list(driver.run())
        driver.core.add(prompt(40), max_new_tokens=1)
        slot = driver.schedule()
        fields = driver.ring[slot]
        header, copied = fields["header"], int(places > 0)
        assert fields["admitted"][:6].tolist()[3:] == begins
        # The chunk of a rerun ends at 32, where its state can be copied.
        hidden = 32 - begins[0]
        assert (header[24], header[25], header[3]) == (copied, copied, hidden or 8)
        assert ((fields["slots0"][: header[3]] == -1) == (hidden > 0)).all()
        if places:
            assert fields["snapshot_out"][:2].tolist() == [1, 0] and fields["snapshot_in"][0] == 0
            assert driver.core.counts()["snapshots"]["held"] == 1
        driver.sample(slot)
        driver.complete(slot)
        list(driver.run())
        stats = driver.core.stats()
        assert (stats["hit_tokens"], stats["rerun_tokens"], stats["snapshots_taken"]) == (32, hidden, copied)
        assert (stats["start_nothing"], stats["start_snapshot"], stats["start_slice"], stats["start_rerun"]) == (1, copied, 0, 1 - copied)
        driver.check_counts()


def test_representation_leaves_the_salt_out() -> None:
    assert "secret" not in repr(make_config(salt=b"secret-tenant"))


def test_objects_are_frozen() -> None:
    config = make_config()
    with pytest.raises(AttributeError):
        config.max_num_seqs = 5  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        config.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": []}, "paged KV group"),
        ({"groups": [_core.StateGroup(stored=1, dropped=1)]}, "paged"),
        ({"groups": [_core.PagedGroup(page_tokens=24, num_pages=9, sources=[(24, 8)])]}, "page_tokens"),
        ({"groups": [_core.PagedGroup(page_tokens=16, num_pages=1, sources=[(16, 8)])]}, "num_pages"),
        ({"groups": [_core.PagedGroup(page_tokens=16, num_pages=9, sources=[])]}, "no source"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"ring_slots": 2}, "ring_slots"),
        ({"hit_rule": "sometimes"}, "hit_rule"),
        ({"step_policy": "prefill_first"}, "step_policy"),
        ({"all_interval": 0}, "all_interval"),
        ({"any_interval": 0}, "any_interval"),
        ({"chunk_budget_ns": 10, "max_chunk_tokens": 8, "chunk_cost": (0, 0, 1, 0)}, "max_chunk_tokens and chunk_budget_ns"),
        ({"chunk_budget_ns": 10}, "chunk_cost"),
        ({"chunk_budget_ns": 10, "chunk_cost": (0.0, 0.0, 1.0, -1.0)}, "chunk_cost e"),
        ({"chunk_budget_ns": 10, "chunk_cost": (0.5, 0.0, 2.0, 9.0)}, "chunk_budget_ns is 10; it must be at least 12"),
        ({"groups": [_core.PagedGroup(page_tokens=1 << 17, num_pages=9, sources=[(1, 8)])]}, "page_tokens"),
        (
            {
                "groups": [_core.PagedGroup(page_tokens=t, num_pages=n, sources=[(1, 8)]) for t, n in [(64, 9)] + [(1, 1 << 20)] * 3],
                "max_model_len": 1 << 29,
            },
            "pages of one block|columns of the block table",
        ),
        ({"event_capacity": 2**63}, "memory|cannot be had"),
        ({"event_capacity": 2**52}, "event_capacity"),
        ({"max_model_len": 2**30 - 1, "max_num_seqs": 2**20 - 1, "max_num_batched_tokens": 2**20}, "lower max_num_seqs"),
    ],
)
def test_value_that_cannot_work_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _core.Core(make_config(**changes))


def test_group_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="PagedGroup or a StateGroup"):
        make_config(groups=[{"page_tokens": 16}])


def test_layout_follows_the_contract() -> None:
    core = _core.Core(make_config(max_draft=1))
    words = dict(core.layout())
    tokens, seqs, rows, columns = 64, 4, 4 * 2, 8
    assert words == {
        "header": 64,
        "ids": tokens,
        "pos": tokens,
        "slots0": tokens,
        "cu_q": seqs + 1,
        "seq_len": seqs,
        "state_row": seqs,
        "seq_flags": seqs,
        "sample_off": seqs + 1,
        "sample_row": rows,
        "rng_pos": rows,
        "grammar_row": rows,
        "table_delta": 3 * (2 * columns + seqs + tokens),
        "clone_blocks": 3 * seqs,
        "clone_states": 2 * seqs,
        "zero_states": seqs,
        "admitted": 6 * seqs,
        "prev_seq": seqs,
        "swap_out": 3 * (2 * columns + seqs + tokens),
        "swap_in": 3 * (2 * columns + seqs + tokens),
        "swap_out_states": 2 * seqs,
        "swap_in_states": 2 * seqs,
        "snapshot_out": 2 * seqs,
        "snapshot_in": 2 * seqs,
        "tokens": rows,
        "accepted": seqs,
        "verified": seqs,
    }
    assert core.slot_maps() == [(0, 16)]
    assert core.table_columns() == [0, columns]


def test_one_slot_map_for_each_group_and_entry_count() -> None:
    groups = [
        _core.PagedGroup(page_tokens=128, num_pages=9, sources=[(64, 528), (64, 288), (128, 68)]),
        _core.PagedGroup(page_tokens=64, num_pages=17, sources=[(64, 32)]),
        _core.StateGroup(stored=64, dropped=64),
    ]
    core = _core.Core(make_config(groups=groups, max_model_len=256))
    assert core.slot_maps() == [(0, 64), (0, 128), (1, 64)]
    assert core.table_columns() == [0, 2, 6]
    core.register_ring(make_ring(core))


def test_drafts_of_the_device_are_the_only_ones() -> None:
    core = _core.Core(make_config(max_draft=3, device_drafts=2))
    for call in (lambda: core.propose(1, [1]), lambda: core.set_ngram(2)):
        with pytest.raises(ConfigError, match="device_drafts is 2"):
            call()
    with pytest.raises(ConfigError, match="device_drafts"):
        _core.Core(make_config(max_draft=1, device_drafts=2))
