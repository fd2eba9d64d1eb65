"""tools/convert_huggingface.py and tools/inspect_checkpoint.py on checkpoints that pretrain_gpt.py wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT
from tools import convert_huggingface, generate, inspect_checkpoint

PROMPT = "def main(argv):\n    for argument in"
VARIANTS = {
    "GPT2LMHeadModel": f"--pipeline-model-parallel-size 2 {' '.join(ABSOLUTE)}",
    "BloomForCausalLM": "--tensor-model-parallel-size 2 --zero-stage 1 --position-embedding-type alibi "
    "--embed-layernorm --bf16",
}


@pytest.mark.parametrize("architecture", VARIANTS)
def test_hugging_face_continues_a_prompt_as_generate_does(
    architecture: str, corpus: Path, data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved, theirs = tmp_path / "saved", tmp_path / "theirs"
    # Long enough a rate for the likeliest token to stand out: rounding must not decide.
    flags = [*MODEL, *VARIANTS[architecture].split(), *NO_DROPOUT, *SHORT, "--lr", "1e-2", *data]
    run = pretrain([*flags, "--save", str(saved), "--save-interval", "3"], processes=2)
    assert run.exit_code == 0, run.stderr

    convert_huggingface.main(["--load", str(saved), "--output", str(theirs)])
    precision = "bf16" if "--bf16" in flags else "fp32"
    assert f"{architecture} in {precision}, iteration 5 of {saved}/global_step5" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(theirs)
    ours = GPT2BPETokenizer(str(corpus / "vocab.json"), str(corpus / "merges.txt"))
    assert tokenizer.encode(PROMPT) == ours.tokenize(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    assert type(model).__name__ == architecture
    tokens = tokenizer(PROMPT, return_tensors="pt")
    continued = model.generate(**tokens, max_new_tokens=10, do_sample=False)
    generate.main(["--load", str(saved), "--prompt", PROMPT, "--greedy", "--max-new-tokens", "10"])
    text = tokenizer.decode(continued[0]).removesuffix("<|endoftext|>")
    assert capsys.readouterr().out == text + "\n"

    assert inspect_checkpoint.main([str(saved), "--json"]) == 0
    overview = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in overview["checkpoints"]] == ["global_step3", "global_step5"]
    assert overview["checkpoint"]["state"]["iteration"] == 5
    assert overview["checkpoint"]["problems"] == []
    assert sum(group["num_files"] for group in overview["checkpoint"]["files"]) == len(
        list((saved / "global_step5").iterdir())
    )
    assert inspect_checkpoint.main([str(saved / "global_step3"), str(saved)]) == 0
    printed = capsys.readouterr().out
    assert "state.iteration" in printed and "0 of" in printed
