"""A small Hugging Face tokenizer with a chat template, and random chats."""

import json
import random
from pathlib import Path

TEXT = "hello world, what is the sum of two numbers? the user asks and the assistant answers in words. "
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_chat_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """Trains a tokenizer and saves it. Its end-of-document token ends a turn, as in Qwen's tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def random_chats(number: int, seed: int = 0) -> list[dict]:
    """Returns rows with 1 to 3 turns of 1 to 12 words."""
    choose = random.Random(seed)

    def words() -> str:
        return " ".join(choose.choices(TEXT.split(), k=choose.randint(1, 12)))

    rows = []
    for _ in range(number):
        messages = [{"role": "system", "content": words()}] if choose.random() < 0.3 else []
        for _ in range(choose.randint(1, 3)):
            messages += [{"role": role, "content": words()} for role in ("user", "assistant")]
        rows.append({"messages": messages})
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Writes the rows as jsonl. Returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
