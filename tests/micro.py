"""Models of a few thousand random weights, for tests that need some model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    Idefics2Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from services.model.vision import ARCHITECTURES, IN_ROWS, ON_A_GRID
from tools.tiny_models import vision as tiny_vision

END = 1


def micro_model(*, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Builds a Qwen3 of two layers; its weights are large enough for uneven distributions.

    changes: values that replace those of its configuration.
    """
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(micro_config(**changes))


def micro_config(**changes: Any) -> Qwen3Config:
    """Returns the configuration of `micro_model`.

    changes: values that replace those of the configuration.
    """
    options = {
        "vocab_size": 13,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": END,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    return Qwen3Config(**(options | changes))


OTHER_VISION_MODELS = ("llava", "llava_next", "vipllava", "idefics2")
"""Models that read images and are not of `ARCHITECTURES`."""

VISION_MODELS = (*ARCHITECTURES, "pixtral", *OTHER_VISION_MODELS)
"""Models that `save_micro_vision_model` makes: `pixtral` is a LLaVA with Pixtral's tower."""

FAMILIES = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5", "glm46v": "glm4v"}
"""Architectures with the vision tower of another one."""


RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "initializer_range": 0.15,
}
"""Configuration of a recurrent layer before one of attention, as Qwen3.5 and Qwen3-Next have."""


def save_micro_vision_model(
    directory: Path, architecture: str = "qwen2_5_vl", *, seed: int = 0, head_size: int = 8
) -> Path:
    """Saves a model of random weights that reads images, with its processor.

    Its tokens are the characters of ASCII. An image of 112 x 112 pixels has 16 of them.

    head_size: dimension of an attention head; vLLM on CPUs takes multiples of 32 alone.
    """
    if architecture in ("vipllava", "idefics2"):
        return _save_micro_model_of_another_type(directory, architecture, seed)
    if architecture not in ON_A_GRID:
        return _save_micro_model_of_tiles(directory, architecture, seed, head_size)
    tokenizer = tiny_vision.build_tokenizer()
    tokenizer.save_pretrained(directory)
    processor_class: Any = Qwen2VLImageProcessorPil
    limits: dict[str, Any] = {"min_pixels": 28 * 28, "max_pixels": 224 * 224}
    if architecture.startswith("glm"):
        processor_class = Glm4vImageProcessorPil
        limits = {"size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 224 * 224}}
    processor_class(patch_size=14, merge_size=2, **limits).save_pretrained(directory)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 4 * head_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_size,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [head_size // 4, head_size // 8, head_size // 8],
            **({"mrope_interleaved": True} if architecture.startswith("qwen3") else {}),
            **({"partial_rotary_factor": 1.0} if architecture.startswith("qwen3_5") else {}),
        },
        "pad_token_id": 0,
        "eos_token_id": END,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    if architecture.endswith("moe"):
        text |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
    if architecture == "qwen3_5_moe":
        text |= {"shared_expert_intermediate_size": 24}
    if architecture.startswith("qwen3_5"):
        text |= RECURRENT
        text |= {"linear_key_head_dim": head_size, "linear_value_head_dim": head_size}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 14,
        "initializer_range": 0.1,
        **{
            "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 4 * head_size},
            "qwen2_5_vl": {
                "intermediate_size": 48,
                "out_hidden_size": 4 * head_size,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            "qwen3_vl": {
                "intermediate_size": 48,
                "out_hidden_size": 4 * head_size,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            },
            "qwen3_5": {
                "intermediate_size": 48,
                "out_hidden_size": 4 * head_size,
                "num_position_embeddings": 64,
            },
            "glm4v": {"intermediate_size": 48, "out_hidden_size": 4 * head_size, "image_size": 112},
        }[FAMILIES.get(architecture, architecture)],
    }
    tokens = {
        "image_token_id": tiny_vision.IMAGE,
        "video_token_id": tiny_vision.VIDEO,
        "vision_start_token_id": tiny_vision.VISION_START,
        "vision_end_token_id": tiny_vision.VISION_END,
    }
    config_class, model_class = {
        "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
        "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
        "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
        "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
        "glm4v": (Glm4vConfig, Glm4vForConditionalGeneration),
        "glm46v": (Glm46VConfig, Glm46VForConditionalGeneration),
        "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
        "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    }[architecture]
    config = config_class(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens
    )
    return _save_random_model(model_class, config, directory, seed)


TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "initializer_range": 0.1,
}
"""Configuration of a vision tower for tiles of 56 x 56 pixels."""


OF_LLAVA: dict[str, Any] = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "image_token": "<|image_pad|>",
    "num_additional_image_tokens": 1,
}
"""Arguments of the processors of LLaVA and of models like it."""


_OF_ALL = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "pad_token_id",
    "eos_token_id",
    "initializer_range",
)
"""Values that the configurations of other language models have in common with `micro_config`."""


def _save_micro_model_of_tiles(
    directory: Path, architecture: str, seed: int, head_size: int
) -> Path:
    """Saves a model whose images are tiles of 56 x 56 pixels, with 16 or 4 tokens for each, or have
    at most 112 x 112 pixels, with a token for 28 x 28 of them."""
    tokenizer = tiny_vision.build_tokenizer()
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    beside = {
        "internvl": ["<img>", "</img>"],
        # Places of tiles are text for Idefics3.
        "idefics3": ["<fake_token_around_image>"],
        "smolvlm": ["<fake_token_around_image>", "<global-img>", *rows],
        "gemma3": ["<start_of_image>", "<end_of_image>"],
        "gemma4": ["<|image>", "<image|>", "<|audio|>"],
        "mistral3": ["[IMG_BREAK]", "[IMG_END]"],
        "pixtral": ["[IMG_BREAK]", "[IMG_END]"],
    }
    tokenizer.add_tokens(beside.get(architecture, []), special_tokens=True)
    if architecture == "gemma3":
        tokenizer.chat_template = tiny_vision.CHAT_TEMPLATE.replace(
            "<|image_pad|>", "<start_of_image>"
        )
    if architecture == "internvl":  # vLLM needs the tokens and the processor by these names
        tokens = {"start_image_token": "<img>", "end_image_token": "</img>"}
        tokens |= {"context_image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
        tokenizer._set_model_specific_special_tokens(tokens)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "processor_config.json").write_text(
            json.dumps({"processor_class": "InternVLProcessor", "image_seq_length": 4})
        )
    tokenizer.save_pretrained(directory)
    text: Any = micro_config(
        vocab_size=len(tokenizer), max_position_embeddings=512, head_dim=head_size
    )
    vision = dict(TOWER)
    config: Any
    model_class: Any
    if architecture == "llava":
        size = {"height": 56, "width": 56}
        LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=size),
            tokenizer,
            **OF_LLAVA,
        ).save_pretrained(directory)
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**vision),
            text_config=text,
            image_token_index=tiny_vision.IMAGE,
        )
        model_class = LlavaForConditionalGeneration
    elif architecture == "llava_next":
        size = {"height": 56, "width": 56}
        pinpoints = [[56, 112], [112, 56], [112, 112]]
        LlavaNextProcessor(
            LlavaNextImageProcessorPil(
                size={"shortest_edge": 56}, crop_size=size, image_grid_pinpoints=pinpoints
            ),
            tokenizer,
            **OF_LLAVA,
        ).save_pretrained(directory)
        config = LlavaNextConfig(
            vision_config=CLIPVisionConfig(**vision),
            text_config=text,
            image_token_index=tiny_vision.IMAGE,
            image_grid_pinpoints=pinpoints,
            tie_word_embeddings=False,
        )
        model_class = LlavaNextForConditionalGeneration
    elif architecture in ("mistral3", "pixtral"):
        merged = 2 if architecture == "mistral3" else 1
        vision |= {"image_size": 112, "patch_size": 28 // merged}
        PixtralImageProcessorPil(
            size={"longest_edge": 112}, patch_size=28 // merged
        ).save_pretrained(directory)
        config_class, model_class, own = {
            "mistral3": (
                Mistral3Config,
                Mistral3ForConditionalGeneration,
                {"spatial_merge_size": merged, "vision_feature_layer": -1},
            ),
            "pixtral": (
                LlavaConfig,
                LlavaForConditionalGeneration,
                {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
            ),
        }[architecture]
        config = config_class(
            vision_config=PixtralVisionConfig(**vision),
            text_config=text,
            image_token_index=tiny_vision.IMAGE,
            tie_word_embeddings=False,
            **own,
        )
    elif architecture == "gemma3":
        size = {"height": 56, "width": 56}
        Gemma3ImageProcessorPil(size=size).save_pretrained(directory)
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3Config(
            vision_config=vision,
            text_config={
                **{name: value for name, value in text.to_dict().items() if name in _OF_ALL},
                "query_pre_attn_scalar": 8,
                "layer_types": layers,
                "sliding_window": 24,
            },
            mm_tokens_per_image=4,
            image_token_index=tiny_vision.IMAGE,
            boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
            eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
            tie_word_embeddings=False,
        )
        model_class = Gemma3ForConditionalGeneration
    elif architecture == "gemma4":
        Gemma4ImageProcessorPil(
            patch_size=14, max_soft_tokens=70, pooling_kernel_size=2
        ).save_pretrained(directory)
        # The last layer of images is seen by no text, so two layers come before it.
        layers = ["full_attention", "sliding_attention", "full_attention"]
        config = Gemma4Config(
            vision_config={
                **{name: value for name, value in vision.items() if name != "image_size"},
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 14,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            text_config={
                **{name: value for name, value in text.to_dict().items() if name in _OF_ALL},
                "num_hidden_layers": len(layers),
                "layer_types": layers,
                "sliding_window": 24,
                "global_head_dim": 16,
                "vocab_size_per_layer_input": len(tokenizer),
                "hidden_size_per_layer_input": 8,
                "final_logit_softcapping": 5.0,
                "use_bidirectional_attention": "vision",
                "tie_word_embeddings": False,
            },
            image_token_id=tiny_vision.IMAGE,
            video_token_id=tiny_vision.VIDEO,
            boi_token_id=tokenizer.convert_tokens_to_ids("<|image>"),
            eoi_token_id=tokenizer.convert_tokens_to_ids("<image|>"),
            audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
            tie_word_embeddings=False,
        )
        model_class = Gemma4ForConditionalGeneration
    elif architecture in IN_ROWS:
        processor_class: Any
        config_class, model_class, processor_class = {
            "idefics3": (
                Idefics3Config,
                Idefics3ForConditionalGeneration,
                Idefics3ImageProcessorPil,
            ),
            "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil),
        }[architecture]
        sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
        processor_class(**sizes).save_pretrained(directory)
        config = config_class(
            vision_config=vision,
            text_config=text,
            image_token_id=tiny_vision.IMAGE,
            scale_factor=2,
            tie_word_embeddings=False,
        )
    else:
        size = {"height": 56, "width": 56}
        GotOcr2ImageProcessorPil(size=size, max_patches=6).save_pretrained(directory)
        config = InternVLConfig(
            vision_config=InternVLVisionConfig(**vision),
            text_config=text,
            image_token_id=tiny_vision.IMAGE,
            image_seq_length=4,
            tie_word_embeddings=False,
        )
        model_class = InternVLForConditionalGeneration
    return _save_random_model(model_class, config, directory, seed)


def _save_micro_model_of_another_type(directory: Path, architecture: str, seed: int) -> Path:
    """Saves a model of tiles of 56 x 56 pixels, with the whole processor that transformers has."""
    tokenizer = tiny_vision.build_tokenizer()
    config: Any
    if architecture == "vipllava":
        size = {"height": 56, "width": 56}
        LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=size),
            tokenizer,
            **OF_LLAVA,
        ).save_pretrained(directory)
        config = VipLlavaConfig(
            vision_config=CLIPVisionConfig(**TOWER),
            text_config=micro_config(vocab_size=len(tokenizer), max_position_embeddings=512),
            image_token_index=tiny_vision.IMAGE,
            vision_feature_layers=[-1, -2],
            tie_word_embeddings=False,
        )
        return _save_random_model(VipLlavaForConditionalGeneration, config, directory, seed)
    tokenizer.chat_template = tiny_vision.CHAT_TEMPLATE.replace("<|image_pad|>", "<image>")
    marks = ["<fake_token_around_image>", "<end_of_utterance>", "<image>"]
    tokenizer.add_tokens(marks, special_tokens=True)
    sizes = {"shortest_edge": 28, "longest_edge": 56}
    Idefics2Processor(
        Idefics2ImageProcessorPil(size=sizes), tokenizer, image_seq_len=4
    ).save_pretrained(directory)
    text = micro_config(vocab_size=len(tokenizer), max_position_embeddings=512).to_dict()
    config = Idefics2Config(
        vision_config=TOWER,
        text_config=MistralConfig(**{name: text[name] for name in _OF_ALL}),
        perceiver_config={
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
            "hidden_size": 32,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    return _save_random_model(Idefics2ForConditionalGeneration, config, directory, seed)


def _save_random_model(model_class: Any, config: Any, directory: Path, seed: int) -> Path:
    """Saves a model of random weights, without touching the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        if isinstance(model, Gemma3ForConditionalGeneration):  # is initialised with zeros
            projector: Any = model.model.multi_modal_projector
            torch.nn.init.normal_(projector.mm_input_projection_weight, std=0.3)
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    return directory
