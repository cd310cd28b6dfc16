"""The residual stream after the target's last block, which few engines hand to a head."""

import pytest

from headtrain.export import audit


@pytest.mark.parametrize(("family", "faults"), [("llama", 1), ("qwen3", 1), (None, 1), ("gpt_oss", 0), ("gemma3", 0)])
def test_sglang_is_refused_a_tap_after_the_last_block_of_a_target_that_hands_out_what_enters_its_blocks(
    family, faults, make_head
):
    head = make_head("eagle3", taps=[2, 4, 8])
    found = audit(head, "sglang", "0.5.23", {"family": family})
    assert len(found) == faults and all("after the last block (8)" in f and "format=vllm" in f for f in found)
    assert audit(head, "vllm", None, {"family": family}) == []
