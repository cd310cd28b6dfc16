"""llama.cpp, built from its source by `make test-llama-cpp`: its converter, and its EAGLE-3 drafting step by step.

Targets get a tokenizer of single characters, so that ids are known from a text. llama.cpp begins it with a space.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import sentencepiece

ROOT = Path(os.environ.get("LLAMA_CPP", Path(__file__).parents[2] / ".llama-cpp"))
SOURCE, PROGRAM = ROOT / "source", ROOT / "build" / "bin" / "llama-speculative-simple"
SPACE, FIRST = 3, 4  # ids from FIRST on are characters; below are <unk>, <s>, </s> and the mark of a space
DRAFT = re.compile(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+)")
ACCEPTED = re.compile(r"accepted (\d+)/\d+ draft tokens, the last target token is: \((\d+)\)")


def add_tokenizer(folder: Path, size: int) -> None:
    """Writes tokenizer.model, of `size` tokens, each a single character."""
    characters = [chr(0x4E00 + n) for n in range(size - FIRST)]
    (folder / "text.txt").write_text(" ".join(characters) + "\n", encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"), model_type="char", vocab_size=size,
        character_coverage=1.0, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}), encoding="utf-8")


def convert(folder: Path, file: Path, target: Path | None = None) -> Path:
    """llama.cpp's own converter, in fp32; target: the folder of the model that a head drafts for."""
    command = [sys.executable, SOURCE / "convert_hf_to_gguf.py", folder, "--outtype", "f32", "--outfile", file]
    if target:
        command += ["--target-model-dir", target]
    environment = os.environ | {"PYTHONPATH": str(SOURCE / "gguf-py")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return file


def decode(target: Path, draft: Path, tokenizer: Path, ids: list[int], k: int, new: int):
    """(the `new` tokens after `ids`, the steps up to there: each its k drafts and how many were accepted).

    ids: SPACE, then characters.
    """
    assert ids[0] == SPACE and min(ids[1:]) >= FIRST, ids
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    text = "".join(pieces.id_to_piece(i) for i in ids[1:])
    command = [
        PROGRAM, "-m", target, "-md", draft, "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(k), "-p", text,
        "-n", str(new + k + 2), "--temp", "0", "--top-k", "1", "-c", "512", "-t", "1", "-td", "1", "-fa", "off",
        "-ctk", "f32", "-ctv", "f32", "--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32", "-lv", "5",
    ]  # fmt: skip
    for _ in range(10):  # the end of its log is lost where it leaves before its thread has written all
        done = subprocess.run([str(c) for c in command], capture_output=True, check=False)
        log = (done.stdout + done.stderr).decode("utf-8", "replace")
        assert done.returncode == 0, log[-2000:]
        answer, steps = parsed(log, new)
        if len(answer) >= new:
            return answer[:new], steps
    raise AssertionError(f"{len(answer)} of {new} tokens stand in the log: {log[-2000:]}")


def parsed(log: str, new: int) -> tuple[list[int], list[tuple[list[int], int]]]:
    """(the tokens that a log tells of, the steps that begin within the first `new`)."""
    answer, steps, drafts = [], [], []
    for line in log.splitlines():
        if found := DRAFT.search(line):
            assert int(found[1]) == len(drafts), line
            drafts.append(int(found[2]))
        elif found := ACCEPTED.search(line):
            if len(answer) < new:
                steps.append((drafts, int(found[1])))
            answer += [*drafts[: int(found[1])], int(found[2])]
            drafts = []
    return answer, steps
