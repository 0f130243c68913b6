"""Makes a Llama without weights: configuration, tokenizer, chat template.

    python make_model.py FOLDER
    python make_model.py --size 14b FOLDER

Run it in the environment of vLLM, which loads the folder with `--load-format dummy`. The tokenizer
is a byte-level BPE that is trained here, on the standard library's own text.
"""

import argparse
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

VOCABULARY = 2048
POSITIONS = 4096
TEXTS = ("argparse.py", "asyncio/base_events.py", "decimal.py", "_pydecimal.py", "typing.py")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# `tiny` is small enough for one core and large enough for all code paths; `14b` has the computation
# of Qwen2.5-14B for each token, except its vocabulary.
SIZES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "float32",
    },
    "14b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
    },
}
SPECIAL = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer. A few seconds."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    bpe.train([str(library / name) for name in TEXTS if (library / name).exists()], trainer)
    if bpe.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the tokenizer has {bpe.get_vocab_size()} entries, not {VOCABULARY}")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=POSITIONS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def config(size: str) -> LlamaConfig:
    """Describe the model."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
        **SIZES[size],
    )


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="(default tiny)")
    options = parser.parse_args()
    tokenizer().save_pretrained(options.folder)
    config(options.size).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
