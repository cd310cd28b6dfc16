"""The speculators library itself loads our folders: `make bench-train` installs it in an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headtrain.export import export
from headtrain.heads.base import head_class, save_head
from headtrain.heads.vocab import mapping

pytestmark = pytest.mark.slow

PYTHON = Path(__file__).parents[2] / ".venv-bench" / "bin" / "python"
SIZES = dict(
    hidden_size=64, target_hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=200, draft_vocab_size=50, max_position_embeddings=4096, taps=[2, 4, 5], target_layers=8,
    unroll=5,
)  # fmt: skip
OF_TARGET = {"verifier_lm_head.weight", "verifier_norm.weight"}
LOAD = """
import json, sys, torch
from safetensors.torch import load_file
from speculators import SpeculatorModel
model, written = SpeculatorModel.from_pretrained(sys.argv[1]), load_file(sys.argv[1] + "/model.safetensors")
state = model.state_dict()
print("FOUND", json.dumps({
    "class": type(model).__name__, "unknown": sorted(written.keys() - state.keys()),
    "not_filled": sorted(state.keys() - written.keys()), "taps": model.config.eagle_aux_hidden_state_layer_ids,
    "differ": [n for n in written.keys() & state.keys() if not torch.equal(state[n].to(written[n].dtype), written[n])],
    "rope": model.config.transformer_layer_config.rope_parameters,
}))
"""


@pytest.mark.parametrize(("kind", "more", "missing"), [
    ("eagle3", {}, {"embed_tokens.weight"}),
    ("peagle", {"layers": 3, "mask_token": 7}, {"embed_tokens.weight"}),
    ("peagle", {"layers": 2, "mask_token": 7, "own_embedding": True}, set()),
])  # fmt: skip
def test_the_library_fills_its_model_with_every_tensor_of_ours(kind, more, missing, tmp_path):
    if not PYTHON.is_file():
        pytest.skip("there is no .venv-bench with speculators in it")
    torch.manual_seed(0)
    made = head_class(kind)
    head = made(made.Config(type=kind, **SIZES, **more))
    for p in head.parameters():
        p.data.copy_(torch.randn(p.shape) * 0.05)
    head.d2t, head.t2d = mapping(torch.randperm(200)[:50].sort().values, 200)
    save_head(head, tmp_path / "run" / "head")
    out = export(tmp_path / "run" / "head", "speculators", tmp_path / "out", {"family": "llama"})
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=200, **sizes)).save_pretrained(tmp_path / "target")
    config = json.loads((out / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "target")
    (out / "config.json").write_text(json.dumps(config))
    ran = subprocess.run(
        [PYTHON, "-c", LOAD, out], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False
    )
    found = json.loads(ran.stdout.partition("FOUND ")[2] or "null")
    assert found, ran.stderr[-2000:]
    assert found["class"] == {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}[kind]
    assert found["unknown"] == [] and found["differ"] == [] and found["taps"] == [2, 4, 5]
    assert set(found["not_filled"]) == OF_TARGET | missing
    assert found["rope"]["rope_theta"] == 10000.0
