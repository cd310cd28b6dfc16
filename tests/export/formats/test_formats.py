"""Every type of head in every format: exported as the format's loader reads it, or refused with a reason."""

import json

import pytest
import torch
from safetensors.torch import load_file

from headtrain.export import ExportError, audit, export, formats

INFO = {"model": "org/Name-7B", "family": "llama"}
REFUSED = {  # (type of head, format): words of the reason and of the nearest thing that works
    ("eagle", "trtllm"): ("runs no EAGLE-1", "format=vllm"),
    ("eagle", "speculators"): ("no EAGLE-1", "format=vllm"),
    ("eagle", "medusa"): ("another kind", "format=eagle"),
    ("eagle", "mtp"): ("not a module", "format=vllm"),
    ("eagle3", "medusa"): ("another kind", "format=eagle"),
    ("eagle3", "mtp"): ("not a module", "format=vllm"),
    ("medusa", "vllm"): ("removed Medusa in 0.33.0", "engine_version=0.32.0"),
    ("medusa", "sglang"): ("no Medusa", "engine_version=0.32.0"),
    ("medusa", "trtllm"): ("no Medusa", "engine_version=0.32.0"),
    ("medusa", "speculators"): ("no Medusa", "engine_version=0.32.0"),
    ("medusa", "eagle"): ("another kind", "format=medusa"),
    ("medusa", "mtp"): ("not a module", "format=medusa"),
    ("peagle", "sglang"): ("no parallel drafting", "format=vllm"),
    ("peagle", "trtllm"): ("PARD", "format=vllm"),
    ("peagle", "eagle"): ("no P-EAGLE", "format=vllm"),
    ("peagle", "medusa"): ("another kind", "format=vllm"),
    ("peagle", "mtp"): ("not a module", "format=vllm"),
}
OURS = ("eagle", "medusa", "mtp", "sglang", "speculators", "trtllm", "vllm")
PAIRS = [(kind, format) for kind in ("eagle", "eagle3", "medusa", "peagle") for format in OURS]


@pytest.mark.parametrize(("kind", "format"), PAIRS)
def test_every_head_is_exported_in_every_format_or_refused_with_what_works(kind, format, make_head, tmp_path):
    head, out = make_head(kind), tmp_path / "out"
    if (kind, format) in REFUSED:
        with pytest.raises(ExportError) as caught:
            export(head, format, out, INFO)
        assert all(words in str(caught.value) for words in REFUSED[kind, format])
        assert audit(head, format, target_info=INFO) == [str(caught.value)]
        assert not out.exists()
        return
    assert audit(head, format, target_info=INFO) == []
    assert export(head, format, out, INFO) == out
    text = (out / "README.md").read_text()
    assert "org/Name-7B" in text and "HEAD_FOLDER" in text and "```" in text
    assert str(tmp_path) not in "".join(path.read_text() for path in out.iterdir() if path.suffix != ".safetensors")
    (weights,) = out.glob("*.safetensors")
    floats = {t.dtype for t in load_file(weights).values() if t.is_floating_point()}
    assert floats == {torch.bfloat16} and json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_table_above_is_about_every_format_there_is():
    assert set(OURS) <= set(formats())
