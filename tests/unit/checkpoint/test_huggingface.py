"""Exports to Hugging Face have equal logits. Models without an equivalent are rejected."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import describe_file
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.universal_writer import UniversalWriter
from megatron.checkpoint.huggingface import exporter
from megatron.checkpoint.huggingface.exporter import (
    DIGEST_FILE,
    format_differences,
)
from megatron.checkpoint.huggingface.family import FAMILIES, family_of
from megatron.commands import convert_checkpoint
from megatron.config import ModelConfig
from megatron.config.config import SETTINGS
from megatron.config.fields import flag, flag_of
from megatron.errors import UserError
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.support.conversion import write_hugging_face
from tests.support.layouts import EOD, SEQ, VOCAB, Row, config_of
from tests.unit.checkpoint.hugging_face_folder import (
    change_config,
    convert,
    hf_logits,
    megatron_logits,
    mistake,
)
from tests.unit.checkpoint.native_folder import change_run, flip_a_byte, random_wholes, write_native
from tests.unit.tokenizer.vocabularies import TEXT, train_gpt2_vocabulary

BLOOM, GPT2 = Row(positions="alibi"), Row(positions="absolute")
NORM = {"embed_layernorm": True}


def write(folder, row, model, **changes):
    config = config_of(row, model=model, **changes)
    return open_checkpoint(write_native(folder, config, random_wholes(config)))


@pytest.mark.parametrize("row, model", [(BLOOM, NORM), (GPT2, {})])
def test_the_exported_config_describes_the_run(row, model, tmp_path):
    checkpoint = write(tmp_path, row, model | {"hidden_dropout": 0.2, "attention_dropout": 0.3})
    write_hugging_face(checkpoint, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vocab_size"] == VOCAB and config["dtype"] == "float32"
    assert config["bos_token_id"] == config["eos_token_id"] == EOD
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == EOD
    if row is GPT2:
        assert (config["resid_pdrop"], config["embd_pdrop"], config["attn_pdrop"]) == (0.2, 0.2, 0.3)
        assert config["architectures"] == ["GPT2LMHeadModel"]
    else:
        assert (config["hidden_dropout"], config["attention_dropout"]) == (0.2, 0.3)
        assert config["architectures"] == ["BloomForCausalLM"] and config["seq_length"] == SEQ


@pytest.mark.parametrize(
    "trained, asked, written",
    [("bf16", None, torch.bfloat16), ("bf16", "fp32", torch.float32), ("fp32", "fp16", torch.float16)],
)
def test_weights_have_the_dtype_of_the_run_or_of_the_flag(trained, asked, written, tmp_path):
    config = config_of(Row(positions="alibi", precision=trained), model=NORM)
    wholes = random_wholes(config)
    write_hugging_face(open_checkpoint(write_native(tmp_path, config, wholes)), tmp_path / "hf", asked)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {written}
    name = "transformer.h.0.mlp.dense_h_to_4h.weight"
    # An export in fp32 has the optimizer's values, not the rounded values of the layer files.
    assert torch.equal(weights[name], wholes["3.mlp.dense_h_to_4h.weight"].to(written))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == written


def test_a_value_that_fp16_cannot_hold_is_refused(tmp_path):
    config = config_of(BLOOM, model=NORM)
    wholes = random_wholes(config)
    wholes["4.mlp.dense_h_to_4h.bias"][3] = 1e6
    checkpoint = open_checkpoint(write_native(tmp_path, config, wholes))
    with pytest.raises(UserError, match=r"--dtype fp16 cannot hold the values of 4\.mlp"):
        write_hugging_face(checkpoint, tmp_path / "hf", "fp16")


def test_several_files_hold_the_same_weights_as_one(tmp_path):
    checkpoint = write(tmp_path, GPT2, {})
    write_hugging_face(checkpoint, tmp_path / "one")
    write_hugging_face(checkpoint, tmp_path / "many", max_file_bytes=30_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and all(path.stat().st_size < 40_000 for path in files)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    many = {name: load_file(tmp_path / "many" / file)[name] for name, file in index["weight_map"].items()}
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert many.keys() == one.keys() and all(torch.equal(many[name], one[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in one.values())
    assert torch.equal(hf_logits(tmp_path / "many"), hf_logits(tmp_path / "one"))
    assert len({path.stat().st_mode for path in (tmp_path / "many").iterdir()}) == 1


@pytest.mark.parametrize(
    "row, model, named",
    [
        (Row(positions="rotary"), {"rotary_interleaved": True}, "--rotary-interleaved"),
        (GPT2, {"glu_activation": "swiglu"}, "--glu-activation swiglu"),
        (GPT2, {"mup": True}, "--mup"),
        (
            Row(positions="rotary"),
            {
                **{"normalization": "RMSNorm", "glu_activation": "swiglu", "disable_bias_linear": True},
                **{"window_size": 5, "window_pattern": ("W", "F"), "window_rotary_base": 500.0},
            },
            "with --window-rotary-base 500.0 .*cannot be written .*Ministral needs no --window-rotary-base",
        ),
        (
            BLOOM,
            {},
            "no --embed-layernorm.*: BLOOM needs --embed-layernorm; GPT-2 needs --position-embedding-type",
        ),
        (GPT2, NORM, "--position-embedding-type absolute and --embed-layernorm"),
        (GPT2, {"kv_channels": 16}, "--kv-channels 16.* GPT-2 needs --kv-channels 8"),
        (BLOOM, NORM | {"ffn_hidden_size": 64}, "--ffn-hidden-size 64"),
        (
            GPT2,
            {"apply_residual_connection_post_layernorm": True},
            "--apply-residual-connection-post-layernorm",
        ),
    ],
)
def test_a_model_without_hugging_face_form_is_refused_by_its_flag(row, model, named):
    with pytest.raises(UserError, match=named):
        family_of(config_of(row, model=model).model)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_something_about_every_field_with_a_derived_default(name):
    """The default of such a field is None in ModelConfig. A comparison with the default cannot find an
    unsupported value, so the family's table must contain the field."""
    family = FAMILIES.load(name)
    said = (
        {field for field, _ in family.fields} | set(family.megatron_constants) | set(family.megatron_derived)
    )
    said |= {field for pair in family.conversions for field in pair.megatron}
    model = dataclasses.replace(config_of(BLOOM).model, **family.megatron_constants)
    derived = {field.name for field in dataclasses.fields(ModelConfig) if flag_of(field).derived}
    assert {name for name in derived if getattr(model, name) is not None} <= said | model.unused_fields()
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert said | {field for field, _ in family.training_fields} <= fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterModelConfig(ModelConfig):
    """A ModelConfig with a field that no family has."""

    new_variant: bool = flag(False, help="a new variant")


@pytest.mark.parametrize("row, model, title", [(BLOOM, NORM, "BLOOM"), (GPT2, {}, "GPT-2")])
def test_a_new_setting_of_the_model_is_refused_by_name(row, model, title, monkeypatch):
    (field,) = (entry for entry in dataclasses.fields(LaterModelConfig) if entry.name == "new_variant")
    one = dataclasses.replace(
        SETTINGS["model.num_layers"], field=field.name, flag=flag_of(field), default=False
    )
    monkeypatch.setitem(SETTINGS, one.name, one)  # makes it a field of ModelConfig
    settings = vars(config_of(row, model=model).model)
    assert family_of(LaterModelConfig(**settings))[1].title == title
    with pytest.raises(UserError, match=f"with --new-variant cannot .*: {title} needs no --new-variant"):
        family_of(LaterModelConfig(**settings, new_variant=True))


def test_differences_of_the_exported_model_are_reported():
    assert format_differences(config_of(GPT2)) == []
    (difference,) = format_differences(config_of(GPT2, data={"reset_attention_mask": True}))
    assert "one document at a time" in difference
    config = config_of(Row(precision="bf16"), precision={"fp32_residual_connection": True})
    assert "--fp32-residual-connection" in format_differences(config)[0]


@pytest.mark.parametrize(
    "layer, named",
    [
        ("05", "lacks 12 parameters, among them 5."),
        ("01", "lacks 2 parameters, among them tied_modules.embed"),
    ],
)
def test_a_missing_layer_is_named(layer, named, tmp_path):
    checkpoint = write(tmp_path, GPT2, {})
    (checkpoint.folder / f"layer_{layer}-model_00-model_states.pt").unlink()
    with pytest.raises(UserError, match=named):
        megatron_logits(checkpoint)
    with pytest.raises(UserError, match=f"layer_{layer}-model_00-model_states.pt cannot be read"):
        write_hugging_face(checkpoint, tmp_path / "hf")


def test_a_missing_tensor_rank_is_named(tmp_path):
    checkpoint = write(tmp_path, Row(tp=2), {})
    (checkpoint.folder / "layer_05-model_01-model_states.pt").unlink()
    with pytest.raises(UserError, match="the 1 files of layer 5 make 5.self_attention.query_key_value"):
        megatron_logits(checkpoint)


@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 3)])
def test_a_flipped_byte_is_found_during_an_export(precision, tp, dp, tmp_path):
    """Damages the layer files, or with --dtype fp32 the optimizer's files, which several ranks wrote."""
    row = Row(tp=tp, dp=dp, zero=1, precision="bf16")
    checkpoint = write(tmp_path, row, {})
    words = "layer files" if precision is None else "fp32 values"
    assert write_hugging_face(checkpoint, tmp_path / "whole", precision) == f"the digests of the {words}"
    pattern = "layer_05*" if precision is None else "zero_pp_rank_0_mp_rank_00_*"
    damaged = next(checkpoint.folder.glob(pattern))
    flip_a_byte(damaged)
    named = damaged.name if precision is None else r"[\w.]+"  # a parameter in the file
    with pytest.raises(UserError, match=f"{named} is damaged: its digest differs from that in run.json"):
        write_hugging_face(checkpoint, tmp_path / "hf", precision)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step5", "latest", "whole"}
    write_hugging_face(checkpoint, tmp_path / "not verified", precision, verify=False)


# --- the command ---


@pytest.mark.parametrize("row, model", [(BLOOM, NORM), (GPT2, {})])
def test_the_tokenizer_is_exported(row, model, tmp_path, capsys):
    """The tiny model's vocabulary is smaller than any byte-level vocabulary, so its flags name the tokenizer
    of a different model."""
    vocab, merges = train_gpt2_vocabulary(tmp_path)
    tokenizer = GPT2BPETokenizer(vocab, merges)
    config = config_of(row, model=model, data={"vocab_file": vocab, "merge_file": merges})
    path = write_native(tmp_path, config, random_wholes(config))
    assert "was trained with 101 tokens" in mistake(capsys, "--load", path, "--output", tmp_path / "hf")
    first_layer = path / "layer_01-model_00-model_states.pt"
    embedding = torch.load(first_layer)
    embedding["word_embeddings.weight"] = torch.randn(tokenizer.vocab_size, 32)
    torch.save(embedding, first_layer)
    change_run(path, lambda run: run["files"].update({first_layer.name: describe_file(first_layer)}))
    change_run(path, lambda run: run.update(vocab_size=tokenizer.vocab_size, eod=tokenizer.eod))
    convert("--load", path, "--output", tmp_path / "hf")
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert hf_tokenizer.eos_token_id == tokenizer.eod and len(hf_tokenizer) == tokenizer.vocab_size
    for text in [*TEXT[:4], "one<|endoftext|>two", "  spaces\n\n\ttabs "]:
        assert hf_tokenizer.encode(text, split_special_tokens=True) == tokenizer.tokenize(text)
        assert hf_tokenizer.decode(tokenizer.tokenize(text)) == text
    again = tmp_path / "from the HF tokenizer"
    convert("--load", path, "--output", again, "--tokenizer-name-or-path", tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(again).encode(TEXT[0]) == tokenizer.tokenize(TEXT[0])


def test_without_a_tokenizer_the_model_is_written_alone(tmp_path, capsys):
    checkpoint = write(tmp_path, GPT2, {})
    convert("--load", tmp_path, "--output", tmp_path / "hf")
    printed = capsys.readouterr()
    assert "no tokenizer is written" in printed.err
    assert "GPT2LMHeadModel in fp32, iteration 5 of" in printed.out
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "generation_config.json",
        "megatron.sha256",
        "model.safetensors",
    ]
    convert("--load", checkpoint.folder, "--output", tmp_path / "again", "--no-tokenizer")
    assert capsys.readouterr().err == ""
    flags = [
        "--from",
        checkpoint.folder,
        "--to",
        tmp_path / "bf16",
        "--format",
        "huggingface",
        "--no-tokenizer",
    ]
    convert_checkpoint.main([*map(str, flags), "--dtype", "bf16"])
    printed = capsys.readouterr()
    assert "GPT2LMHeadModel in bf16, iteration 5 of" in printed.out and printed.err == ""


def test_all_mistakes_in_the_flags_are_one_error(tmp_path):
    flags = ["--from", tmp_path, "--to", tmp_path / "hf", "--no-tokenizer", "--tokenizer-model", "x"]
    with pytest.raises(UserError) as caught:
        convert_checkpoint.run([*map(str, flags), "--format", "huggingface", "--workers", "2"])
    assert "--workers acts on all formats but huggingface" in str(caught.value)
    assert "--no-tokenizer contradicts the tokenizer's flags" in str(caught.value)


@pytest.mark.parametrize("change", ["bit", "setting", "missing", "hostile name"])
def test_an_exported_folder_has_digests_that_an_import_and_a_load_compare(change, tmp_path, capsys):
    write(tmp_path, GPT2, {})
    exported = tmp_path / "hf"
    convert("--load", tmp_path, "--output", exported)
    compared = subprocess.run(["sha256sum", "-c", DIGEST_FILE], cwd=exported, capture_output=True, text=True)
    assert compared.returncode == 0 and compared.stdout.count(": OK") == 3
    checkpoint = open_checkpoint(exported)
    reader = open_reader(checkpoint)
    names = reader.files_to_verify()
    assert len(names) == 3 and not any(reader.file_problem(name) for name in names)
    convert("--from", exported, "--to", tmp_path / "intact")
    damaged, words = "model.safetensors", "its digest differs from that in megatron.sha256"
    if change == "bit":
        content = bytearray((exported / damaged).read_bytes())
        content[-5] ^= 1
        (exported / damaged).write_bytes(content)
    elif change == "setting":
        damaged = "config.json"
        change_config(exported, layer_norm_epsilon=1e-6)
    elif change == "missing":
        damaged, words = "generation_config.json", "cannot be read"
        (exported / damaged).unlink()
    else:
        with open(exported / DIGEST_FILE, "a") as file:
            file.write(f"{'0' * 64}  ../../victim\n")
        damaged, words = DIGEST_FILE, "names a file '../../victim'"
    printed = mistake(capsys, "--from", exported, "--to", tmp_path / "new")
    assert damaged in printed and words in printed
    assert not (tmp_path / "new").exists()
    if change != "hostile name":
        assert words in str(reader.file_problem(damaged))


FOREIGN_DIGESTS = f"""# SHA-256 of all files
{"0" * 64}  ./model.safetensors
{"AB" * 32}  onnx/model.onnx
{"0" * 64}  ../not downloaded.bin
"""


def test_digests_of_another_program_are_ignored(tmp_path):
    write(tmp_path, GPT2, {})
    exported = tmp_path / "hf"
    convert("--load", tmp_path, "--output", exported)
    (exported / "SHA256SUMS").write_text(FOREIGN_DIGESTS)
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert set(open_reader(open_checkpoint(exported)).files_to_verify()) == names
    (exported / DIGEST_FILE).unlink()
    assert open_reader(open_checkpoint(exported)).files_to_verify() == []
    convert("--from", exported, "--to", tmp_path / "imported")


def test_all_files_have_digests_and_weights_are_read_as_soon_as_they_are_written(tmp_path, monkeypatch):
    hashed = []

    def describe_and_note(path):
        hashed.append(path.name)
        return describe_file(path)

    def write_tokenizer(_config, _flags, folder):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool.jinja").write_text("{}")

    monkeypatch.setattr(exporter, "describe_file", describe_and_note)
    monkeypatch.setattr(exporter, "write_tokenizer", write_tokenizer)
    exported = tmp_path / "hf"
    checkpoint = write(tmp_path, GPT2, {})
    write_hugging_face(checkpoint, exported, tokenizer=checkpoint.config.data, max_file_bytes=20_000)
    weights = sorted(path.name for path in exported.glob("*.safetensors"))
    assert len(weights) > 2 and hashed[: len(weights)] == [f"part-{i}" for i in range(len(weights))]
    assert not {*weights} & {*hashed}
    found = exporter.read_digests(exported)
    files = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    assert found.keys() == files - {DIGEST_FILE} and "additional_chat_templates/tool.jinja" in found
    exporter.check_digests(exported)


KILLED = """
import os, sys
from pathlib import Path
from megatron.checkpoint.conversion.shared_work import SharedWork
partial = Path(sys.argv[1])
with SharedWork(partial, is_exclusive=True):
    partial.mkdir()
    (partial / "part-0").write_text("half of the weights")
    os.kill(os.getpid(), 9)
"""


def test_the_same_command_replaces_what_a_killed_export_left_and_nothing_else(tmp_path, capsys):
    write(tmp_path / "native", GPT2, {})
    output, left = tmp_path / "m", tmp_path / "m.partial"
    command = ["--load", tmp_path / "native", "--output", output]
    subprocess.run([sys.executable, "-c", KILLED, left])
    assert (left / "part-0").exists()
    convert(*command)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "native"]
    shutil.rmtree(output)
    # A folder of somebody else, and a folder that another process writes.
    left.mkdir()
    (left / "part-0").write_text("notes")
    assert f"{left} exists already" in mistake(capsys, *command)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, left], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    assert f"{left} is being written by another process" in mistake(capsys, *command)
    holder.kill()
    holder.wait()
    assert (left / "part-0").read_text() == "notes"


HOLDER = """
import sys, time
from pathlib import Path
from megatron.checkpoint.conversion.shared_work import SharedWork
with SharedWork(Path(sys.argv[1]), is_exclusive=True):
    print("locked", flush=True)
    time.sleep(3600)
"""


def test_an_import_that_has_failed_is_continued_by_the_same_command(tmp_path, monkeypatch, capsys):
    write(tmp_path / "native", GPT2, {})
    convert("--load", tmp_path / "native", "--output", tmp_path / "m")
    output, left = tmp_path / "m_universal", tmp_path / "m_universal.partial"
    command = ["--from-hugging-face", tmp_path / "m", "--output", output]
    left.mkdir()  # a folder of somebody else
    (left / "notes").touch()
    assert f"{left} is not an interrupted conversion" in mistake(capsys, *command)
    shutil.rmtree(left)
    write_parameter = UniversalWriter.write_parameter

    def fail_in_the_third(writer, *args):
        if len(list((left / "zero").glob("*"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_parameter(writer, *args)

    monkeypatch.setattr(UniversalWriter, "write_parameter", fail_in_the_third)
    assert "then the same command continues it" in mistake(capsys, *command)
    done = {path: path.stat().st_mtime_ns for path in (left / "zero").rglob("*.pt")}
    monkeypatch.undo()
    convert(*command)
    assert len(done) == 2 and not list(tmp_path.glob(f"{left.name}*"))
    assert all((output / path.relative_to(left)).stat().st_mtime_ns == when for path, when in done.items())
    convert(*command)
    assert "an earlier command has converted" in capsys.readouterr().out
    assert f"{output} exists already" in mistake(capsys, *command, "--vocab-size", "90")


@pytest.mark.parametrize("direction", ["export", "import"])
def test_a_conversion_ends_where_open_files_stay_in_their_folder(direction, tmp_path, monkeypatch):
    """NFS renames an open file instead of deleting it. Fails if a conversion tries forever to empty the
    folder of a killed conversion."""
    checkpoint = write(tmp_path / "native", GPT2, {})
    unlink = os.unlink

    def rename_if_open(path, *, dir_fd=None):
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(status, os.fstat(int(name))):
                    other = os.path.join(os.path.dirname(path), f".nfs{name}")
                    os.rename(path, other, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                    return
        unlink(path, dir_fd=dir_fd)

    output = tmp_path / "m"
    subprocess.run([sys.executable, "-c", KILLED, f"{output}.partial"])
    command = ["--load", checkpoint.folder, "--output", output]
    if direction == "import":
        convert(*command)
        output = tmp_path / "m_universal"
        command = ["--from", tmp_path / "m", "--to", output]
    monkeypatch.setattr(os, "unlink", rename_if_open)
    convert(*command)
    assert output.is_dir() and not list(output.rglob(".nfs*")) and not (output / "unfinished").exists()


def test_without_locks_a_conversion_works_and_a_killed_one_has_to_be_removed(tmp_path, monkeypatch, capsys):
    checkpoint = write(tmp_path / "native", GPT2, {})
    output = tmp_path / "m"

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    convert("--load", checkpoint.folder, "--output", output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "native"]
    shutil.rmtree(output)
    subprocess.run([sys.executable, "-c", KILLED, f"{output}.partial"])
    printed = mistake(capsys, "--load", checkpoint.folder, "--output", output)
    left = tmp_path / "m.partial"
    assert (
        f"{left}.locks exists already" in printed
        and f"remove {left.name}.locks and {left.name} if" in printed
    )
    assert (left / "part-0").exists()
    shutil.rmtree(left)
    (tmp_path / "m.partial.locks").unlink()
    convert("--load", checkpoint.folder, "--output", output)
