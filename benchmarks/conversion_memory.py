#!/usr/bin/env python3
"""Resident memory of tools/convert_huggingface.py on models with the layer sizes of Llama 70B.

    python benchmarks/conversion_memory.py --folder /scratch             2 and 4 layers: 35 GB of free disk
    python benchmarks/conversion_memory.py --folder /scratch --layers 80

For each depth: writes a model of Hugging Face with hidden size 8192, FFN 28672, 64 heads, 8 groups and
128,256 tokens as bf16 safetensors of about 5 GB each, converts it to a universal checkpoint, and that back.
The input is sparse files of zeros: they take no space on the disk and are read as any others. What is written
is real.

Printed is the largest resident memory of each conversion (VmHWM, as getrusage's ru_maxrss: with mapped file
pages), and the largest sampled anonymous and file-backed part of it. The page cache is not part of them.
A part of a model converts in the same memory as the whole one if the peak does not grow with the depth.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "convert_huggingface.py"
HIDDEN, FFN, HEADS, GROUPS, VOCAB = 8192, 28672, 64, 8, 128_256
HEAD_DIM = HIDDEN // HEADS
FILE_BYTES = 5 * 10**9
SAMPLE_S = 0.05
GB = 1e9

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def weights(layers: int) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, by Hugging Face's name."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        key_rows = GROUPS * HEAD_DIM
        of_layer = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (key_rows, HIDDEN),
            "self_attn.v_proj": (key_rows, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def num_bytes(shape: tuple[int, ...]) -> int:
    """In bf16."""
    size = 2
    for rows in shape:
        size *= rows
    return size


def write_model(folder: Path, layers: int) -> int:
    """Writes the folder; returns the bytes of its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in weights(layers).items():
        if files[-1] and sum(map(num_bytes, files[-1].values())) + num_bytes(shape) > FILE_BYTES:
            files.append({})
        files[-1][name] = shape
    weight_map = {}
    for number, content in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(content, file)
        header, end = {}, 0
        for name, shape in content.items():
            start, end = end, end + num_bytes(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    total = sum(map(num_bytes, weights(layers).values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


@dataclass
class Usage:
    """Of a finished process, in GB and seconds."""

    peak: float
    anonymous: float
    file_backed: float
    seconds: float


def convert(*flags: str) -> Usage:
    """Runs the tool, and samples its memory."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, str(TOOL), *flags], stdout=subprocess.DEVNULL)
    largest = {"VmHWM": 0, "RssAnon": 0, "RssFile": 0}
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        for name, _, value in (line.partition(":") for line in lines):
            if name in largest:
                largest[name] = max(largest[name], int(value.split()[0]) * 1024)
        time.sleep(SAMPLE_S)
    if process.wait():
        raise SystemExit(f"{TOOL.name} {' '.join(flags)} has failed")
    peak, anonymous, file_backed = (value / GB for value in largest.values())
    return Usage(peak, anonymous, file_backed, time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="for the files, which are deleted afterwards")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4], help="depths (default: 2 4)")
    arguments = parser.parse_args()
    print("| layers | direction | bf16 GB | peak GB | anonymous GB | file-backed GB | seconds |")
    print("|---|---|---|---|---|---|---|")
    for layers in arguments.layers:
        folder = Path(arguments.folder) / f"conversion-{layers}"
        try:
            size = write_model(folder / "theirs", layers) / GB
            there, back = str(folder / "theirs"), str(folder / "ours")
            to_universal = convert("--from", there, "--to", back, "--vocab-size", str(VOCAB))
            shutil.rmtree(there)
            to_hugging_face = convert("--from", back, "--to", str(folder / "again"), "--no-tokenizer")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for direction, used in (("import", to_universal), ("export", to_hugging_face)):
            print(
                f"| {layers} | {direction} | {size:.1f} | {used.peak:.2f} | {used.anonymous:.2f} | "
                f"{used.file_backed:.2f} | {used.seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
