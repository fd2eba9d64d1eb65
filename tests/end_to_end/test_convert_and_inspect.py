"""tools/convert_huggingface.py and tools/inspect_checkpoint.py on checkpoints that pretrain_gpt.py wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.reading import read_checkpoint
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT
from tools import convert_huggingface, generate, inspect_checkpoint

PROMPT = "def main(argv):\n    for argument in argv:"
VARIANTS = {
    "GPT2LMHeadModel": f"--pipeline-model-parallel-size 2 {' '.join(ABSOLUTE)}",
    "BloomForCausalLM": "--tensor-model-parallel-size 2 --zero-stage 1 --position-embedding-type alibi "
    "--embed-layernorm --bf16",
}


@pytest.mark.parametrize("architecture", VARIANTS)
def test_a_trained_model_is_the_same_for_hugging_face_and_is_described(
    architecture: str, corpus: Path, data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved, theirs = tmp_path / "saved", tmp_path / "theirs"
    flags = [*MODEL, *VARIANTS[architecture].split(), *NO_DROPOUT, *SHORT, *data]
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
    tokens = torch.tensor([ours.tokenize(PROMPT)])
    with torch.no_grad():
        expected = generate.load_model(read_checkpoint(saved))(tokens)
        logits = model.eval()(tokens).logits
    assert logits.std() > 0.1, "logits without spread would show nothing"
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    assert inspect_checkpoint.main([str(saved), "--json"]) == 0
    overview = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in overview["checkpoints"]] == ["global_step3", "global_step5"]
    assert overview["checkpoint"]["state"]["iteration"] == 5
    assert overview["checkpoint"]["problems"] == []
    assert sum(group["num_files"] for group in overview["checkpoint"]["files"]) == len(
        list((saved / "global_step5").iterdir())
    )
    assert inspect_checkpoint.main([str(saved / "global_step3"), str(saved)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["state.iteration", "3", "5"] in rows
    assert "tied_modules.embed.word_embeddings.weight" in [row[0] for row in rows if row]
