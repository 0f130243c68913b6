"""Makes a PaddleOCR-VL without weights, with one image token for each patch of its image.

    python make_vision_model.py FOLDER

Run it in the environment of vLLM. Qwen's vision models count their tokens in the same way, but
their processors need torchvision, which that environment does not have.
"""

import argparse
import json
from pathlib import Path

import make_model
from transformers.models.paddleocr_vl import PaddleOCRVLConfig

MARKS = ["<|image_start|>", "<|image|>", "<|image_end|>", "<|video|>"]
PATCH_PIXELS, MERGED = 14, 2
# As many pixels as 1,024 tokens.
PIXELS_MAX = 1024 * (PATCH_PIXELS * MERGED) ** 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|image_start|><|image|><|image_end|>{% endif %}"
    "{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "processor_class": "PaddleOCRVLProcessor",
    "patch_size": PATCH_PIXELS,
    "merge_size": MERGED,
    "temporal_patch_size": 1,
    "size": {"shortest_edge": (PATCH_PIXELS * MERGED) ** 2, "longest_edge": PIXELS_MAX},
}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    make_model.SPECIAL += MARKS
    tokenizer = make_model.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    start, image, end, video = tokenizer.convert_tokens_to_ids(MARKS)
    rope = {"rope_type": "default", "type": "default", "mrope_section": [4, 6, 6]}
    config = PaddleOCRVLConfig(
        architectures=["PaddleOCRVLForConditionalGeneration"],
        text_config={
            **make_model.SIZES["tiny"],
            "vocab_size": make_model.VOCABULARY,
            "max_position_embeddings": make_model.POSITIONS,
            "head_dim": 32,
            "rope_parameters": {**rope, "rope_theta": 10_000.0},
            "bos_token_id": make_model.SPECIAL.index("<s>"),
            "eos_token_id": make_model.SPECIAL.index("</s>"),
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": PATCH_PIXELS,
            "spatial_merge_size": MERGED,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    names = {"image_token": "<|image|>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": names}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


if __name__ == "__main__":
    main()
