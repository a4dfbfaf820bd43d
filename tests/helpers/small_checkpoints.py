"""Tiny random checkpoints of every family, made and saved by Hugging Face transformers, and how ours are compared."""

from __future__ import annotations

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from manyheads.parts.embed import PatchesSpec

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *(f"word{i}" for i in range(56))]
VOCAB = {"vocab_size": 61}
BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
LONG = {"max_position_embeddings": 40}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PAIR = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
}  # fmt: skip
MARIAN = {"pad_token_id": 60, "eos_token_id": 0, "decoder_start_token_id": 60, "forced_eos_token_id": 0}


def make(name, config, **options):
    """A small model by its class; `options` replace the usual sizes."""
    return getattr(transformers, name)(make_config(config, **options))


def make_config(config, **options):
    """The config of a small model by its class."""
    usual = {
        "GPT2Config": VOCAB | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "bos_token_id": 1, "eos_token_id": 2},
        "GPTJConfig": VOCAB | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2},
        "DistilBertConfig": VOCAB | {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40},
        "T5Config": VOCAB
        | {"d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
           "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
        "BartConfig": VOCAB | PAIR | LONG,
        "MarianConfig": VOCAB | PAIR | LONG | MARIAN,
        "PegasusConfig": VOCAB | PAIR | LONG,
        "ViTConfig": BASE | {"image_size": 12, "patch_size": 4, "num_channels": 3},
        "ViTMAEConfig": BASE
        | {"image_size": 12, "patch_size": 4, "num_channels": 3, "decoder_hidden_size": 24, "decoder_num_hidden_layers": 2,
           "decoder_num_attention_heads": 2, "decoder_intermediate_size": 20},
    }.get(config, VOCAB | BASE | LONG)  # fmt: skip
    if config in ("BertConfig", "ErnieConfig", "AlbertConfig"):
        usual = usual | {"pad_token_id": 0}
    elif config in (
        "LlamaConfig",
        "MistralConfig",
        "Qwen2Config",
        "Qwen3Config",
        "GemmaConfig",
        "PhiConfig",
        "Phi3Config",
        "GPTNeoXConfig",
        "EuroBertConfig",
    ):
        usual = usual | ENDS
        if config != "GPTNeoXConfig":
            usual = usual | {"num_key_value_heads": 2}
    return getattr(transformers, config)(**usual | options)


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}
MIXED = ["full_attention", "sliding_attention", "full_attention"]

CASES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "gpt2-relu-inner": ("GPT2LMHeadModel", "GPT2Config", {"activation_function": "relu", "n_inner": 40}),
    "gpt2-eps-unscaled": ("GPT2LMHeadModel", "GPT2Config", {"layer_norm_epsilon": 1e-2, "scale_attn_weights": False}),
    "gpt2-bare": ("GPT2Model", "GPT2Config", {}),
    "gpt2-classes": ("GPT2ForSequenceClassification", "GPT2Config", {"num_labels": 3, "pad_token_id": 0}),
    "bert": ("BertForMaskedLM", "BertConfig", {}),
    "bert-eps-relu-types": (
        "BertForMaskedLM",
        "BertConfig",
        {"layer_norm_eps": 1e-3, "hidden_act": "relu", "type_vocab_size": 3},
    ),
    "bert-bare": ("BertModel", "BertConfig", {}),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", {"num_labels": 3}),
    "bert-pretraining": ("BertForPreTraining", "BertConfig", {}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {}),
    "roberta-types": ("RobertaForMaskedLM", "RobertaConfig", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "roberta-bare": ("RobertaModel", "RobertaConfig", {}),
    "roberta-classes": ("RobertaForSequenceClassification", "RobertaConfig", {"num_labels": 4}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {"embedding_size": 16}),
    "albert-groups": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {"embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2},
    ),
    "albert-bare": ("AlbertModel", "AlbertConfig", {"embedding_size": 16}),
    "albert-classes": ("AlbertForSequenceClassification", "AlbertConfig", {"embedding_size": 16}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", {}),
    "distilbert-bare": ("DistilBertModel", "DistilBertConfig", {"activation": "relu"}),
    "distilbert-classes": ("DistilBertForSequenceClassification", "DistilBertConfig", {"num_labels": 5}),
    "ernie": ("ErnieForMaskedLM", "ErnieConfig", {}),
    "ernie-tasks": ("ErnieForMaskedLM", "ErnieConfig", {"use_task_id": True, "task_type_vocab_size": 4}),
    "ernie-classes": ("ErnieForSequenceClassification", "ErnieConfig", {}),
    "eurobert": ("EuroBertForMaskedLM", "EuroBertConfig", {}),
    "eurobert-biases-tied": (
        "EuroBertForMaskedLM",
        "EuroBertConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "eurobert-bare": ("EuroBertModel", "EuroBertConfig", {}),
    "eurobert-classes": ("EuroBertForSequenceClassification", "EuroBertConfig", {"num_labels": 3}),
    "eurobert-classes-mean": ("EuroBertForSequenceClassification", "EuroBertConfig", {"classifier_pooling": "mean"}),
    "eurobert-classes-first": ("EuroBertForSequenceClassification", "EuroBertConfig", {"classifier_pooling": "bos"}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama-multi-query-tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama-biases": ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "llama-theta": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama-linear": ("LlamaForCausalLM", "LlamaConfig", rope("linear", factor=3.0)),
    "llama-dynamic-below": ("LlamaForCausalLM", "LlamaConfig", rope("dynamic", factor=3.0)),
    "llama-dynamic-beyond": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"max_position_embeddings": 7} | rope("dynamic", factor=3.0),
    ),
    "llama-yarn": ("LlamaForCausalLM", "LlamaConfig", rope("yarn", factor=3.0, original_max_position_embeddings=10)),
    "llama-yarn-ratio": (
        "LlamaForCausalLM",
        "LlamaConfig",
        rope("yarn", factor=None, original_max_position_embeddings=10),
    ),
    "llama-yarn-options": (
        "LlamaForCausalLM",
        "LlamaConfig",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=10,
            beta_fast=2.0,
            beta_slow=0.5,
            attention_factor=1.3,
            truncate=False,
        ),
    ),
    "llama-llama3": (
        "LlamaForCausalLM",
        "LlamaConfig",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-longrope-short": (
        "LlamaForCausalLM",
        "LlamaConfig",
        rope("longrope", factor=3.0, original_max_position_embeddings=20, **LONGROPE),
    ),
    "llama-longrope-long": (
        "LlamaForCausalLM",
        "LlamaConfig",
        rope("longrope", factor=3.0, original_max_position_embeddings=10, **LONGROPE),
    ),
    "llama-longrope-ratio": (
        "LlamaForCausalLM",
        "LlamaConfig",
        rope("longrope", original_max_position_embeddings=10, **LONGROPE),
    ),
    "llama-bare": ("LlamaModel", "LlamaConfig", {}),
    "llama-classes": ("LlamaForSequenceClassification", "LlamaConfig", {"num_labels": 3}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"head_dim": 8, "sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", "MistralConfig", {"head_dim": 8, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen2-windows": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": MIXED},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8, "attention_bias": True}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 12, "num_key_value_heads": 1}),
    "gpt-j": ("GPTJForCausalLM", "GPTJConfig", {}),
    "gpt-j-classes": ("GPTJForSequenceClassification", "GPTJConfig", {"num_labels": 3, "pad_token_id": 0}),
    "gpt-j-whole": ("GPTJForCausalLM", "GPTJConfig", {"rotary_dim": 8, "n_inner": 40}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "gpt-neox-sequential": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"use_parallel_residual": False, "tie_word_embeddings": True, **rope("default", partial_rotary_factor=0.5)},
    ),
    "gpt-neox-classes": ("GPTNeoXForSequenceClassification", "GPTNeoXConfig", {"num_labels": 3}),
    "gpt-neox-unbiased": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"attention_bias": False, "hidden_act": "relu"}),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "phi-classes": ("PhiForSequenceClassification", "PhiConfig", {"num_labels": 3}),
    "phi-norms": (
        "PhiForCausalLM",
        "PhiConfig",
        {"qk_layernorm": True, "layer_norm_eps": 0.05, "num_key_value_heads": 4},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "phi3-window": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": 5, "tie_word_embeddings": True}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {}),
    "t5-unscaled": ("T5ForConditionalGeneration", "T5Config", {"tie_word_embeddings": False}),
    "t5-gated-untied": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {}),
    "bart-bare": ("BartModel", "BartConfig", {}),
    "bart-scaled-relu": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"scale_embedding": True, "activation_function": "relu"},
    ),
    "marian": ("MarianMTModel", "MarianConfig", {}),
    "marian-scaled-swish": ("MarianMTModel", "MarianConfig", {"scale_embedding": True, "activation_function": "swish"}),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", {}),
    "pegasus-scaled-relu": (
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        {"scale_embedding": True, "activation_function": "relu"},
    ),
    "pegasus-bare": ("PegasusModel", "PegasusConfig", {}),
    "vit": ("ViTForImageClassification", "ViTConfig", {}),
    "vit-unbiased": ("ViTForImageClassification", "ViTConfig", {"qkv_bias": False, "num_labels": 4}),
    "vit-bare": ("ViTModel", "ViTConfig", {"pooler_output_size": 32}),
    "vit-channels": ("ViTForImageClassification", "ViTConfig", {"num_channels": 6}),
    "vit-twelve": (
        "ViTForImageClassification",
        "ViTConfig",
        {"num_channels": 12, "image_size": 8},
    ),  # as many numbers as 3 of side 8
    "vit-mae": ("ViTMAEForPreTraining", "ViTMAEConfig", {}),
}


def perturbed(model, dtype=torch.float32):
    """The model with noise on every weight: biases and norms that have their initial values would hide mistakes."""
    torch.manual_seed(1)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "embed_positions" not in name:
            tensor.copy_(tensor + 0.1 * torch.randn_like(tensor))
    model.tie_weights()
    return model.to(dtype).eval()


def assert_close(ours, theirs, mask=None, tolerance=1e-4):
    """The same numbers, at the positions of the mask."""
    difference = (ours.float() - theirs.float()).abs()
    assert (difference if mask is None else difference[mask]).max() <= tolerance


def random_images(side=12, channels=3, batch=2):
    return torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(5))


def patches(images, side=4):
    channels = images.shape[1]
    return PatchesSpec(pixels=side * side * channels, channels=channels).patchify(images)


def folder_of(name, path, tokenizer=True, **options):
    """Saves a model and, next to it, a small tokenizer of whole words."""
    torch.manual_seed(1)
    architecture, config, more = CASES[name]
    perturbed(make(architecture, config, **more | options)).save_pretrained(path)
    if tokenizer:
        own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        own.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
        own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if name.startswith("bert"):
            own.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
            )
        own.enable_padding(length=20)
        own.save(str(path / "tokenizer.json"))
    return path
