"""Published configs of widely used checkpoints, long lists shortened."""

from __future__ import annotations


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


LABELS = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
# keys for generation and training that every config of the first years has
FIRST_YEARS = {
    "_num_labels": 2, "bad_words_ids": None, "bos_token_id": 0, "decoder_start_token_id": None, "do_sample": False,
    "early_stopping": False, "eos_token_id": 0, "eos_token_ids": 0, "finetuning_task": None,
    "is_encoder_decoder": False, "length_penalty": 1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0,
    "num_beams": 1, "num_labels": 2, "num_return_sequences": 1, "output_attentions": False,
    "output_hidden_states": False, "output_past": True, "pad_token_id": 0, "prefix": None, "pruned_heads": {},
    "repetition_penalty": 1.0, "task_specific_params": None, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "torchscript": False, "use_bfloat16": False, "xla_device": None,
}  # fmt: skip
BERT = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
    "num_hidden_layers": 12, "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 30522,
}  # fmt: skip
POOLER = {
    "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
}  # fmt: skip
SUMMARY = {
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
}  # fmt: skip
GPT2 = SUMMARY | {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
LLAMA = {
    "_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
LATER = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 64, "mlp_bias": False}
BANDED = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
PAIR = {
    "_num_labels": 3, "activation_dropout": 0.0, "add_bias_logits": False, "add_final_layer_norm": False,
    "attention_dropout": 0.0, "bos_token_id": 0, "classif_dropout": 0.0, "classifier_dropout": 0.0,
    "decoder_layerdrop": 0.0, "dropout": 0.1, "encoder_layerdrop": 0.0, "eos_token_id": 2, "forced_eos_token_id": 2,
    "gradient_checkpointing": False, "init_std": 0.02, "is_encoder_decoder": True, "normalize_before": False,
    "num_beams": 4, "use_cache": True,
} | LABELS  # fmt: skip
BART = PAIR | {
    "activation_function": "gelu", "architectures": ["BartForConditionalGeneration"], "d_model": 1024,
    "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 12, "decoder_start_token_id": 2,
    "early_stopping": True, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 12,
    "forced_bos_token_id": 0, "length_penalty": 2.0, "max_length": 142, "max_position_embeddings": 1024,
    "min_length": 56, "model_type": "bart", "no_repeat_ngram_size": 3, "normalize_embedding": True,
    "num_hidden_layers": 12, "output_past": True, "pad_token_id": 1, "prefix": " ", "scale_embedding": False,
    "task_specific_params": {"summarization": {"num_beams": 4}}, "vocab_size": 50264,
}  # fmt: skip
T5 = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
    "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 8,
    "num_layers": 6, "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32, "vocab_size": 32128,
    "task_specific_params": {"summarization": {"num_beams": 4}},
}  # fmt: skip
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "x"}, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu",
    "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
VIT = {
    "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0, "encoder_stride": 16,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768, "image_size": 224, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "model_type": "vit", "num_attention_heads": 12,
    "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True,
}  # fmt: skip
ALBERT = {
    "architectures": ["AlbertForMaskedLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 2,
    "classifier_dropout_prob": 0.1, "down_scale_factor": 1, "embedding_size": 128, "eos_token_id": 3, "gap_size": 0,
    "hidden_act": "gelu_new", "hidden_dropout_prob": 0, "inner_group_num": 1, "model_type": "albert",
    "net_structure_type": 0, "num_hidden_groups": 1, "num_memory_blocks": 0, "vocab_size": 30000,
}  # fmt: skip
DISTIL = {
    "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
    "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
    "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
}  # fmt: skip
GEMMA = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8,
    "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000.0, "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
PHI = {
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
    "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
    "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 51200,
}  # fmt: skip
LONGROPE = {"long_factor": [1.08] * 48, "short_factor": [1.0] * 48, "type": "longrope"}

PUBLISHED = {
    "gpt2": GPT2,
    "distilgpt2": GPT2 | LABELS | {"_num_labels": 1, "n_layer": 6},
    "gpt2-medium": GPT2 | {"n_special": 0, "predict_special_tokens": True, "n_embd": 1024, "n_head": 16, "n_layer": 24},
    "gpt2-large": GPT2 | {"n_embd": 1280, "n_head": 20, "n_layer": 36},
    "gpt2-xl": GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    "DialoGPT": GPT2 | {"task_specific_params": {"conversational": {"max_length": 1000}}},
    "bert-base-uncased": BERT
    | {"gradient_checkpointing": False, "position_embedding_type": "absolute", "use_cache": True},
    "bert-large-uncased": BERT
    | {"gradient_checkpointing": False, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
       "num_hidden_layers": 24, "position_embedding_type": "absolute", "use_cache": True},
    "bert-base-multilingual-cased": BERT | POOLER | {"vocab_size": 119547},
    "bert-base-chinese": BERT | POOLER | {"vocab_size": 21128},
    "kcbert-base": without(BERT, "layer_norm_eps", "pad_token_id") | POOLER,
    "bert-first-years": BERT | FIRST_YEARS | {"is_decoder": False},
    "bert-multilingual-sentiment": BERT | POOLER | LABELS
    | {"architectures": ["BertForSequenceClassification"], "_num_labels": 2},
    "all-MiniLM-L6-v2": BERT
    | {"architectures": ["BertModel"], "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6},
    "roberta-base": BERT
    | {"architectures": ["RobertaForMaskedLM"], "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-05,
       "max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1,
       "vocab_size": 50265},
    "albert-base-v2": BERT | ALBERT,
    "distilbert-base-uncased": DISTIL,
    "distilbert-sst-2": DISTIL | LABELS
    | {"architectures": ["DistilBertForSequenceClassification"], "finetuning_task": "sst-2", "output_past": True},
    "ernie-2.0-base-en": BERT
    | {"architectures": ["ErnieModel"], "model_type": "ernie", "type_vocab_size": 4, "layer_norm_eps": 1e-5},
    "ernie-3.0-base-zh": BERT
    | {"architectures": ["ErnieForMaskedLM"], "model_type": "ernie", "type_vocab_size": 4, "task_type_vocab_size": 3,
       "use_task_id": True, "max_position_embeddings": 2048, "vocab_size": 40000},
    "llama-7b": without(LLAMA, "num_key_value_heads", "rope_scaling")
    | {"max_position_embeddings": 2048, "max_sequence_length": 2048, "pad_token_id": 0, "rms_norm_eps": 1e-06},
    "Llama-2-7b-hf": LLAMA,
    "Meta-Llama-3-8B": LLAMA
    | {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
       "intermediate_size": 14336, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rope_theta": 500000.0,
       "torch_dtype": "bfloat16", "vocab_size": 128256},
    "TinyLlama-1.1B": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
    "Llama-3.2-1B": LLAMA | LATER
    | {"hidden_size": 2048, "num_key_value_heads": 8, "rope_scaling": BANDED, "rope_theta": 500000.0,
       "eos_token_id": [128001, 128008]},
    "SmolLM2-135M": LLAMA | LATER
    | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "is_llama_config": True,
       "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True,
       "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
    "Mistral-7B-v0.1": LLAMA
    | {"architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768,
       "model_type": "mistral", "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096},
    "Mistral-Nemo": LLAMA
    | {"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "head_dim": 128, "model_type": "mistral",
       "sliding_window": None},
    "Qwen1.5-0.5B": QWEN | {"seq_length": 32768},
    "Qwen2.5-0.5B": QWEN,
    "DeepSeek-R1-Distill-Qwen-1.5B": QWEN | {"use_mrope": False, "tie_word_embeddings": False},
    "Qwen3-0.6B": QWEN
    | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "max_window_layers": 28,
       "model_type": "qwen3", "rope_scaling": None, "sliding_window": None},
    "gemma-2b": GEMMA,
    "gemma-1.1-2b": GEMMA | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma-7b": GEMMA | {"hidden_activation": None},
    "phi-1": without(PHI, "num_key_value_heads")
    | {"partial_rotary_factor": 0.5},
    "phi-1_5": PHI | {"num_key_value_heads": None, "partial_rotary_factor": 0.5},
    "phi-2": PHI,
    "Phi-3-mini-4k": PHI3,
    "Phi-3-mini-128k": PHI3 | {"max_position_embeddings": 131072, "rope_scaling": LONGROPE, "sliding_window": 262144},
    "Phi-4-mini": PHI3
    | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "num_key_value_heads": 8,
       "max_position_embeddings": 131072, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
       "rope_scaling": {"long_factor": [1.0] * 36, "short_factor": [1.0] * 36, "type": "longrope"}},
    "gpt-j-6b": without(GPT2, "n_ctx")
    | {"architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
       "gradient_checkpointing": False, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None,
       "n_layer": 28, "n_positions": 2048, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True,
       "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "use_cache": True, "vocab_size": 50400},
    "pythia-70m": NEOX,
    "pythia-410m": NEOX
    | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24},
    "pythia-6.9b": NEOX
    | {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 32,
       "vocab_size": 50432},
    "gpt-neox-20b": NEOX
    | {"attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144,
       "intermediate_size": 24576, "num_attention_heads": 64, "num_hidden_layers": 44},
    "t5-small": T5,
    "flan-t5-base": T5
    | {"classifier_dropout": 0.0, "dense_act_fn": "gelu_new", "feed_forward_proj": "gated-gelu", "is_gated_act": True,
       "num_decoder_layers": 6, "relative_attention_max_distance": 128, "tie_word_embeddings": False,
       "use_cache": True},
    "bart-base": BART
    | {"activation_dropout": 0.1, "architectures": ["BartModel"], "attention_dropout": 0.1, "classif_dropout": 0.1,
       "d_model": 768, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072, "decoder_layers": 6,
       "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "encoder_layers": 6, "num_hidden_layers": 6,
       "vocab_size": 50265},
    "bart-large-cnn": BART
    | {"extra_pos_embeddings": 2, "force_bos_token_to_be_generated": True, "static_position_embeddings": False},
    "distilbart-cnn-12-6": BART
    | {"decoder_layers": 6, "extra_pos_embeddings": 2, "replacing_rate": 0, "save_step": 58,
       "static_position_embeddings": False, "student_decoder_layers": None, "student_encoder_layers": None},
    "opus-mt-en-de": PAIR
    | {"activation_function": "swish", "architectures": ["MarianMTModel"], "bad_words_ids": [[58100]], "d_model": 512,
       "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layers": 6, "decoder_start_token_id": 58100,
       "decoder_vocab_size": 58101, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "encoder_layers": 6,
       "eos_token_id": 0, "forced_eos_token_id": 0, "max_length": 512, "max_position_embeddings": 512,
       "model_type": "marian", "normalize_embedding": False, "num_beams": 6, "num_hidden_layers": 6,
       "pad_token_id": 58100, "scale_embedding": True, "share_encoder_decoder_embeddings": True,
       "static_position_embeddings": True, "vocab_size": 58101},
    "pegasus-xsum": PAIR
    | {"activation_dropout": 0.1, "activation_function": "relu", "add_final_layer_norm": True,
       "architectures": ["PegasusForConditionalGeneration"], "attention_dropout": 0.1, "d_model": 1024,
       "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 16, "decoder_start_token_id": 0,
       "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 16, "eos_token_id": 1,
       "extra_pos_embeddings": 1, "force_bos_token_to_be_generated": False, "forced_eos_token_id": 1,
       "length_penalty": 0.6, "max_length": 64, "max_position_embeddings": 512, "model_type": "pegasus",
       "normalize_before": True, "normalize_embedding": False, "num_beams": 8, "num_hidden_layers": 16,
       "pad_token_id": 0, "scale_embedding": True, "static_position_embeddings": True, "vocab_size": 96103},
    "EuroBERT-210m": LATER
    | {"architectures": ["EuroBertForMaskedLM"], "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
       "hidden_dropout": 0.0, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
       "is_causal": False, "mask_token_id": 128002, "max_position_embeddings": 8192, "model_type": "eurobert",
       "num_attention_heads": 12, "num_hidden_layers": 12, "num_key_value_heads": 12, "pad_token_id": 128001,
       "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 250000, "rope_type": "default"},
       "tie_word_embeddings": False, "vocab_size": 128256},
    "vit-base-patch16-224": VIT | LABELS,
    "vit-base-patch16-224-in21k": VIT | {"architectures": ["ViTModel"]},
    "vit-mae-base": without(VIT, "encoder_stride")
    | {"architectures": ["ViTMAEForPreTraining"], "decoder_hidden_size": 512, "decoder_intermediate_size": 2048,
       "decoder_num_attention_heads": 16, "decoder_num_hidden_layers": 8, "mask_ratio": 0.75, "model_type": "vit_mae",
       "norm_pix_loss": False},
}  # fmt: skip
